r"""Geometry with diagrams: a question with images, and an answer in \boxed{} that equals an accepted one.

A ground truth is {'problem': str, 'answers': [str, ...], 'images': [reference, ...]}; `open_image` opens a
reference. The prompt has one <|image_pad|> for each image; the model's side repeats it according to the
image's grid. `with_demands` adds

    form        the answer form that the question, asked as it is, demands instead of a box (demands.py)
    thinking    whether the prompt opens <think>, so that the answer follows </think>

`verify` also takes an accepted answer or a list of them, as in `python -m bapo_jax.grade geometry`.

The reward is 1 for a correct answer and 0 otherwise, as in the paper. verl's reward, which also rewards form,
is --config.task.reward=bapo_jax.tasks.geometry.task:accuracy_and_format.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from bapo_jax.groups import Verdict
from bapo_jax.tasks.demands import demanded, stated
from bapo_jax.tasks.geometry.answers import accepted_statement, is_no_value, stated_quantity, statement
from bapo_jax.tasks.geometry.problems import BENCHMARKS, PLACEHOLDER, SUFFIX, VISION_TOKENS, open_image
from bapo_jax.tasks.geometry import problems as geometry_problems
from bapo_jax.tasks.mathematics import task as mathematics
from bapo_jax.tasks.mathematics.text import after_thinking
from bapo_jax.tasks.turns import refuse_markers

__all__ = [
    'BENCHMARKS',
    'TEMPLATES',
    'accuracy_and_format',
    'benchmark',
    'check_ground_truth',
    'open_image',
    'prompt_text',
    'training_problems',
    'verify',
    'verify_all',
    'with_demands',
]

VOTES = True  # equal answers agree, so maj@n is meaningful

TEMPLATES = {
    'paper': f"{{problem}}{SUFFIX} In the tokenizer's chat template, if it has one.",
    'plain': '{problem} Put the final answer in \\boxed{}. Without a chat template, for small policies.',
    'as_is': "The question unchanged, in the tokenizer's chat template, if it has one. "
    'Answers are judged in the form it asks for.',
}
_PLAIN = ' Put the final answer in \\boxed{}.\n'
_VISION = ''.join(VISION_TOKENS)


def training_problems(source: str, *, limit: int, seed: int) -> list[dict]:
    """Returns the `geometry_problems.training_problems` whose accepted answers can be read.

    A warning counts and names the others. Raises ValueError if none can be read.
    """
    problems = geometry_problems.training_problems(source, limit=limit, seed=seed)
    return mathematics.readable(problems, [_compared(problem) for problem in problems], source)


def benchmark(name: str) -> list[dict]:
    """Returns `geometry_problems.benchmark`. A warning names problems with unreadable accepted answers."""
    problems = geometry_problems.benchmark(name)
    mathematics.report_unreadable(
        problems, [_compared(problem) for problem in problems], name, mathematics.KEPT
    )
    return problems


def _compared(problem: dict) -> list[str]:
    """Returns the accepted answers for mathematics' judge; a number replaces names, compared here."""
    return [
        '0' if accepted_statement(answer) else stated_quantity(answer, named=False).value
        for answer in _accepted(problem)
    ]


def prompt_text(ground_truth: dict, template: str, tokenizer: Any) -> str:
    """Returns the prompt text, with <|vision_start|><|image_pad|><|vision_end|> for each image."""
    check_ground_truth(ground_truth)
    if template not in TEMPLATES:
        raise ValueError(f'task.template is {template!r}; choose one of {", ".join(TEMPLATES)}')
    problem, images = ground_truth['problem'], ground_truth.get('images', [])
    if problem.count(PLACEHOLDER) != len(images):
        raise ValueError(
            f'ground_truth.problem has {problem.count(PLACEHOLDER)} {PLACEHOLDER} but {len(images)} images; '
            'write one for each'
        )
    before = ground_truth.get('before', ())
    refuse_markers(tokenizer, problem, *(message['content'] for message in before))
    chat = [*before, {'role': 'user', 'content': problem.replace(PLACEHOLDER, _VISION)}]
    if template != 'as_is':
        mathematics.refuse_other_demand(chat, template)
    question, has_chat = chat[-1]['content'], bool(getattr(tokenizer, 'chat_template', None))
    if len(chat) > 1 and (template == 'plain' or not has_chat):
        raise ValueError(
            f'task.template={template!r}: a row has several messages, which need a chat template; set '
            'model.path to a chat model, '
            "and task.template to 'paper' or 'as_is'"
        )
    if template == 'plain':
        return mathematics.without_request(question, SUFFIX) + _PLAIN
    if template == 'paper':
        question = mathematics.without_request(question, SUFFIX) + SUFFIX
    if not has_chat:
        return question
    messages = [*chat[:-1], {'role': 'user', 'content': question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def with_demands(ground_truth: dict, text: str) -> dict:
    """Returns the ground truth with 'thinking', and 'form' if the prompt `text` demands other than a box."""
    form = demanded(text)
    return {
        **ground_truth,
        **({'form': form} if form not in ('', 'box') else {}),
        'thinking': text.rstrip().endswith('<think>'),
    }


def check_ground_truth(ground_truth: object) -> None:
    """Raises ValueError, naming the field, if it cannot judge an answer, or its images are not references."""
    mathematics.check_ground_truth(ground_truth)
    images = ground_truth.get('images', []) if isinstance(ground_truth, dict) else []
    fields = {'file', 'sha256', 'width', 'height'}
    if not isinstance(images, list) or not all(isinstance(i, dict) and fields <= i.keys() for i in images):
        raise ValueError(
            'ground_truth.images must be a list of references with file, sha256, width and height, got '
            f'{repr(images)[:100]}'
        )


def verify(response: str, ground_truth: Any) -> tuple[Verdict, str | None]:
    """Returns `verify_all` of one response."""
    return verify_all([response], [ground_truth])[0]


def verify_all(
    responses: Sequence[str], ground_truths: Sequence[Any], budget_s: float = inf
) -> list[tuple[Verdict, str | None]]:
    r"""Returns each response's verdict and its answer without name, degrees and unit; None if there is none.

    The answer is the last \boxed{} after the thinking, or the text in the ground truth's 'form'. Names and
    their relations are compared here, everything else by `mathematics.verify_all`, with its verdicts and time
    limits. Units count only if both the answer and the accepted one have a unit.
    """
    for ground_truth in ground_truths:
        check_ground_truth(ground_truth)
    verdicts: list[tuple[Verdict, str | None]] = []
    rows, boxes, truths = [], [], []  # for mathematics' judge
    for row, (response, ground_truth) in enumerate(zip(responses, ground_truths, strict=True)):
        terms = ground_truth if isinstance(ground_truth, dict) else {}
        text = after_thinking(response, opened=terms.get('thinking', False))
        box = stated(text, terms.get('form', 'box')) if text is not None else None
        if box is None:
            verdicts.append((Verdict.UNPARSEABLE, None))
            continue
        accepted = _accepted(ground_truth)
        golds = [
            stated_quantity(answer, named=False) for answer in accepted if accepted_statement(answer) is None
        ]
        equations = any('=' in gold.value for gold in golds)
        value, unit = stated_quantity(box, named=not equations)
        verdicts.append((Verdict.WRONG, value))
        if any(names is not None and names == statement(box) for names in map(accepted_statement, accepted)):
            verdicts[row] = Verdict.CORRECT, value
            continue
        comparable = [gold.value for gold in golds if not (unit and gold.unit and unit != gold.unit)]
        if comparable and (equations or not is_no_value(value)):
            rows.append(row)
            boxes.append(f'\\boxed{{{value}}}')
            truths.append({'answers': comparable, 'boxed': True})
    for row, verdict in zip(rows, mathematics.verify_all(boxes, truths, budget_s), strict=True):
        verdicts[row] = verdict
    return verdicts


def accuracy_and_format(data_source: str, response: str, ground_truth: Any, extra: dict) -> dict:
    r"""Returns verl's reward: 0.9 for a correct answer, 0.1 for the form <think>...</think>...\boxed{...}.

    `custom_reward` describes the interface. The verdict judges only the answer.
    """
    verdict, answer = verify(response, ground_truth)
    if verdict == Verdict.INFRA_ERROR:
        raise RuntimeError('the verifier failed on this answer')
    correct = verdict == Verdict.CORRECT
    opened = isinstance(ground_truth, dict) and ground_truth.get('thinking', False)
    return {
        'score': 0.9 * correct + 0.1 * has_form('<think>' * opened + response),
        'correct': correct,
        'pred': answer,
    }


def has_form(response: str) -> bool:
    r"""Whether the whole response has the form <think>...</think>...\boxed{...}... . Takes linear time."""
    closed = response.find('</think>') if response.startswith('<think>') else -1
    box = response.find('\\boxed{', closed) if closed >= 0 else -1
    return box >= 0 and '}' in response[box:]


def _accepted(ground_truth: Any) -> list[str]:
    answers = ground_truth['answers'] if isinstance(ground_truth, dict) else ground_truth
    return [answers] if isinstance(answers, str) else answers
