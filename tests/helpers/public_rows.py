r"""One row in the shape of each public data set, in words and numbers of our own, and how its authors ask and judge.

docs/reference/tasks.md has a table of them, which `table` makes; tests/tasks/test_shapes.py holds both.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

from PIL import Image

BOXED = " Let's think step by step and output the final answer within \\boxed{}."
GEO = (
    ' You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The reasoning '
    'process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}.'
)
HASHED = ' Let\'s think step by step and output the final answer after "####".'
LINE = (
    'Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without '
    'quotes) where $Answer is the answer to the problem.\n\n{}\n\nRemember to put your answer on its own line after "Answer:".'
)
TAGS = 'Think within <reasoning> </reasoning> tags, then write the number alone in <answer> </answer> tags.'
VISION = '<|vision_start|><|image_pad|><|vision_end|>'

Q = 'A box holds 6 pens, and there are 7 boxes. How many pens are there?'  # 42
SOLUTION = 'Seven boxes of six pens make $7 \\cdot 6$, which is $\\boxed{42}$.'


class Shape(NamedTuple):
    """A data set's row and what becomes of it. The answer is 42."""

    name: str
    row: Any
    task: str = 'math'
    template: str = 'chat'
    chat: tuple = (('user', Q + BOXED),)  # what the policy is asked, by role
    right: str = 'That makes \\boxed{42}.'
    wrong: str = 'That makes \\boxed{43}.'
    judged: str = '`\\boxed{}`'
    note: str = ''


class Refused(NamedTuple):
    """A shape that no task reads, what is said of it, and what to do."""

    name: str
    row: Any
    message: str
    remedy: str


def user(text: str) -> list[dict]:
    return [{'role': 'user', 'content': text}]


def verl(source: str, prompt: list, truth: Any, **extra: Any) -> dict:
    model = {'style': 'rule', 'ground_truth': truth}
    return {'data_source': source, 'prompt': prompt, 'ability': 'math', 'reward_model': model, 'extra_info': {'index': 0, **extra}}


def picture() -> dict:
    data = io.BytesIO()
    Image.new('RGB', (32, 32), 'white').save(data, 'PNG')
    return {'bytes': data.getvalue(), 'path': None}


_as_is = {'template': 'as_is'}
_box = {'chat': (('user', Q + BOXED),), **_as_is}
_line = {'right': 'So there are 42.\n\nAnswer: 42', 'wrong': 'So \\boxed{42}.\nAnswer: $43$', 'judged': '`Answer:`', **_as_is}
_last = {'task': 'questions', 'right': 'Well.\n42', 'wrong': '42\nOr 43', 'judged': 'the last line'}
_block = {'right': '<answer>\n42\n</answer>', 'wrong': '42 <answer>43</answer>', 'judged': '`<answer>`'}
_system = (('system', TAGS), ('user', Q))

SHAPES = (
    Shape('verl: GSM8K', verl('openai/gsm8k', user(Q + HASHED), '42', split='train', answer='6*7=42\n#### 42', question=Q),
          chat=(('user', Q + HASHED),), right='6 times 7 is 42.\n#### 42', wrong='\\boxed{42}, so\n#### 43', judged='`####`',
          **_as_is),
    Shape('verl: MATH', verl('DigitalLearningGmbH/MATH-lighteval', user(Q + BOXED), '42', split='train'), **_box),
    Shape('verl: DAPO-Math-17k', verl('math_dapo', user(LINE.format(Q)), '42'), chat=(('user', LINE.format(Q)),), **_line,
          note='its copies are one problem'),
    Shape('verl: AIME-2024 (32 copies)', verl('aime_2024', user(LINE.format(Q)), '042', raw_problem=Q),
          chat=(('user', LINE.format(Q)),), **_line, note='its copies are one problem'),
    Shape('verl: Geometry3K', verl('hiyouga/geometry3k', user('<image>Find x.' + GEO), '42') | {'images': [picture()]}, 'geometry',
          chat=(('user', VISION + 'Find x.' + GEO),), **_as_is),
    Shape('verl: puzzles, code and the like', verl('puzzles', [{'role': 'system', 'content': TAGS}, *user(Q)], '42'), 'questions',
          chat=_system, **_block, note='or `task.reward=my_rewards:compute_score`'),
    Shape('Skywork-OR1-RL-Data', verl('train-math-numinamath1.5', user(Q), '["42"]', model_difficulty={'a_7b': 4})),
    Shape('DAPO-Math-17k-Processed', verl('math_dapo', Q, '42') | {'solution': '42', 'source_prompt': user(LINE.format(Q))}),
    Shape('slime: dapo-math-17k', {'prompt': user(LINE.format(Q).replace('$Answer (', '\\boxed{$Answer} (')), 'label': '42'},
          chat=(('user', LINE.format(Q).replace('$Answer (', '\\boxed{$Answer} (')),),
          **{**_line, 'right': 'Answer: \\boxed{42}'}),
    Shape('TRL: prompt and solution', {'prompt': Q, 'solution': '$42$'}, right='\\boxed{42}', wrong='\\boxed{43}'),
    Shape('TRL: prompt and answer', {'prompt': Q + BOXED, 'answer': '42'}, **_box),
    Shape('TRL: a chat as prompt', {'prompt': [{'role': 'system', 'content': TAGS}, *user(Q)], 'answer': '42'}, chat=_system,
          **_block, **_as_is),
    Shape('GSM8K', {'question': Q, 'answer': 'He has 6*7=<<6*7=42>>42 pens.\n#### 42'}),
    Shape('GSM8K on one line', {'question': Q, 'answer': 'He has 6*7=42 pens. #### 42'}),
    Shape('MATH', {'problem': Q, 'level': 'Level 1', 'type': 'Prealgebra', 'solution': SOLUTION}),
    Shape('MATH-500', {'problem': Q, 'solution': SOLUTION, 'answer': '42', 'subject': 'Prealgebra', 'level': 1, 'unique_id': 'a'}),
    Shape('DeepScaleR-Preview', {'problem': Q, 'answer': '42', 'solution': SOLUTION}),
    Shape('NuminaMath-CoT', {'source': 'orca_math', 'problem': Q, 'solution': SOLUTION,
                             'messages': [*user(Q), {'role': 'assistant', 'content': SOLUTION}]}),
    Shape('NuminaMath-TIR', {'problem': Q, 'solution': '```python\nprint(6 * 7)\n```\n```output\n42\n```\n' + SOLUTION,
                             'messages': [*user(Q), {'role': 'assistant', 'content': SOLUTION}]}),
    Shape('NuminaMath-1.5', {'problem': Q, 'solution': SOLUTION, 'answer': '42', 'problem_type': 'Algebra', 'question_type':
                             'math-word-problem', 'problem_is_valid': 'Yes', 'source': 'cn_k12', 'synthetic': False},
          note='rows whose answer is `proof` or `notfound` are left out'),
    Shape('OpenR1-Math-220k', {'problem': Q, 'solution': SOLUTION, 'answer': '42', 'generations': ['<think>…</think> \\boxed{41}'],
                               'correctness_math_verify': [False], 'messages': user(Q)}, note='as NuminaMath-1.5'),
    Shape('Big-Math-RL-Verified', {'problem': Q, 'answer': '42', 'source': 'gsm8k', 'domain': ['Arithmetic'],
                                   'llama8b_solve_rate': 0.9}),
    Shape('Polaris-Dataset-53K', {'difficulty': '3/8', 'problem': Q, 'answer': '42'}),
    Shape('DeepMath-103K', {'question': Q, 'final_answer': '42', 'difficulty': 2.0, 'topic': 'Sums', 'r1_solution_1': 'Six…'}),
    Shape('OpenMathInstruct-2', {'problem': Q, 'generated_solution': SOLUTION, 'expected_answer': '42', 'problem_source': 'gsm8k'}),
    Shape('MetaMathQA', {'query': Q, 'response': 'Six times seven.\n#### 42\nThe answer is: 42', 'type': 'GSM_Rephrased',
                         'original_question': Q}),
    Shape('Open-Reasoner-Zero, its JSON', [{'from': 'human', 'value': Q}, {'from': 'assistant', 'ground_truth': {'value': '42'}}]),
    Shape('Open-Reasoner-Zero, of the hub', {'0': {'from': 'human', 'value': Q},
                                             '1': {'from': 'assistant', 'ground_truth': {'value': '42'}}}),
    Shape('AIME (HuggingFaceH4, AI-MO, OpenCompass)', {'id': 60, 'problem': Q, 'solution': SOLUTION, 'answer': '042', 'year': '1'}),
    Shape('AIME (Maxwell-Jia)', {'ID': '2024-I-1', 'Problem': Q, 'Solution': SOLUTION, 'Answer': 42}),
    Shape('RLVR (AI2)', {'messages': user(Q), 'ground_truth': ['42'], 'dataset': 'math'}),
    Shape('chats in `messages` (OpenAI)', {'messages': [{'role': 'system', 'content': 'Be brief.'}, *user(Q), {'role': 'assistant',
                                           'content': SOLUTION}]}, chat=(('system', 'Be brief.'), ('user', Q + BOXED))),
    Shape('chats in `conversations` (ShareGPT, OpenThoughts)',
          {'system': 'Return your final response within \\boxed{}.',
           'conversations': [{'from': 'human', 'value': Q}, {'from': 'gpt', 'value': SOLUTION}]},
          chat=(('system', 'Return your final response within \\boxed{}.'), ('user', Q)), **_as_is),
    Shape('Geometry3K', {'images': [picture()], 'problem': '<image>Find x.', 'answer': '42'}, 'geometry', 'paper',
          chat=(('user', VISION + 'Find x.' + GEO),)),
    Shape('Countdown-Tasks-3to4', {'target': 42, 'nums': [6, 7, 1]}, 'countdown', 'tinyzero_chat', (), '<answer>6 * 7 * 1</answer>',
          '<answer>6 * 7 + 1</answer>', '`<answer>`, by value'),
    Shape("reasoning-gym's export", {'question': Q, 'answer': '42', 'metadata': {'source_dataset': 'boxes', 'source_index': 3}},
          chat=(('user', Q),), **_last, note='its own scorer as `task.reward`'),
)  # fmt: skip

REFUSED = (
    Refused('Orca-Math and others whose answer is prose',
            {'question': Q, 'answer': 'There are seven boxes on the shelf. Each of them holds six pens. To find how many pens there '
             'are in all, multiply the number of boxes by the number of pens. So there are 42.'},
            'none of its 1 rows has an answer; .* whose worked solutions mark the result',
            'write the result into a column `answer`'),
    Refused('MMLU and others with `choices`', {'question': Q, 'choices': ['42', '43'], 'answer': 0},
            "multiple-choice questions with a column 'choices' are not supported; write the choices into the question",
            'write the choices into the question, the letter of the right one as `answer`'),
    Refused('Alpaca: `instruction`, `input`, `output`', {'instruction': Q, 'input': '', 'output': '42'},
            "column 'problem' is missing; the row has instruction, input, output; rename or add it", 'rename the columns'),
    Refused('preferences: `chosen`, `rejected`', {'chosen': user(Q), 'rejected': user(Q)},
            "column 'problem' is missing; the row has chosen, rejected", 'they have no answer to judge by'),
)  # fmt: skip


def table() -> str:
    """The table of docs/reference/tasks.md."""
    lines = ['| data set | columns read | `task.name` and `task.template` | judged |', '|---|---|---|---|']
    for shape in SHAPES:
        note = f'; {shape.note}' if shape.note else ''
        lines.append(f'| {shape.name} | {_columns(shape.row)} | `{shape.task}`, `{shape.template}` | {shape.judged}{note} |')
    lines += ['', '| refused | what to do |', '|---|---|']
    lines += [f'| {refused.name} | {refused.remedy} |' for refused in REFUSED]
    return '\n'.join(lines) + '\n'


def _columns(row: Any) -> str:
    if isinstance(row, list):
        return 'a list of two messages'
    return ', '.join(f'`{name}`' for name in row if name.casefold() in _SHOWN)


_SHOWN = frozenset(
    'problem question query prompt messages conversations system answer final_answer expected_answer ground_truth label solution '
    'response generated_solution reward_model images target nums 0 1'.split()
)
