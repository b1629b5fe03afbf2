"""The verifier agrees with every known case and cannot be fooled, crashed or slowed; prompts and worked solutions are right."""

import functools
import gzip
import json
import logging
import re
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bapo_jax import tasks
from bapo_jax.groups import Verdict
from bapo_jax.tasks import PARTS, TASKS, encode_prompts, get_task, leave_out_long, refuse_long
from bapo_jax.tasks.countdown.problems import generate
from bapo_jax.tasks.countdown import task as cd

SHARED = Path(__file__).resolve().parents[3] / 'shared' / 'data'
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason='the shared data directory is absent')

TRUTH = {'numbers': [44, 19, 35], 'target': 98}
HARD = {'numbers': [30, 59, 24, 6], 'target': 95}


def rows(name):
    with gzip.open(SHARED / name, 'rt', encoding='utf-8') as file:
        return [json.loads(line) for line in file]


def judge(expression, numbers, target):
    return cd.verify(f'<answer>{expression}</answer>', {'numbers': numbers, 'target': target})[0]


# ---- known cases ------------------------------------------------------------------------------------------------------


@needs_shared
def test_agrees_with_every_shared_case():
    cases = rows('countdown_cases.jsonl.gz')
    assert len(cases) == 96
    wrong = []
    for case in cases:
        verdict, answer = cd.verify(case['response'], {'numbers': case['numbers'], 'target': case['target']})
        # reward 0 there means that no tag was found, 0.1 that one was
        if (verdict == Verdict.CORRECT) != case['expected_correct'] or (answer is None) != (case['expected_reward'] == 0):
            wrong.append((case['id'], verdict, answer))
    assert wrong == []


@needs_shared
def test_accepts_the_solutions_of_the_shared_problems():
    for row in rows('countdown_synth_cd4_test_200.jsonl.gz'):
        assert judge(row['solution'], row['nums'], row['target']) == Verdict.CORRECT, row


@pytest.mark.parametrize(
    ('expression', 'numbers', 'target'),
    [
        ('2+3*4', [2, 3, 4], 14),
        ('(2+3)*4', [2, 3, 4], 20),
        ('8-4-2', [8, 4, 2], 2),
        ('8-(4-2)', [8, 4, 2], 6),
        ('16/4/2', [16, 4, 2], 2),
        ('16/(4/2)', [16, 4, 2], 8),
        ('16/4*2', [16, 4, 2], 8),
        ('-2+5', [2, 5], 3),
        ('5*-2', [2, 5], -10),
        ('5---2', [2, 5], 3),
        ('-(2-5)', [2, 5], 3),
        ('+5+2', [2, 5], 7),
        ('7*(3+3/7)', [7, 7, 3, 3], 24),  # 24 only in exact arithmetic
        ('8/(3-8/3)', [8, 8, 3, 3], 24),
        ('\t44 +\t19+35 ', [44, 19, 35], 98),
        ('0+5', [0, 5], 5),
    ],
)
def test_arithmetic(expression, numbers, target):
    assert judge(expression, numbers, target) == Verdict.CORRECT
    assert judge(expression, numbers, target + 1) == Verdict.WRONG


@pytest.mark.parametrize(
    'expression', ['44+19', '44+19+35+35', '44+19+19+35', '98', '44+54', '441935', '44-19+35', '1/0', '44/(35-35)*19']
)
def test_expressions_that_use_other_numbers_or_miss_the_target_are_wrong(expression):
    assert judge(expression, **TRUTH) == Verdict.WRONG


def test_division_by_zero_is_wrong():
    assert judge('3/(5-5)', [3, 5, 5], 3) == Verdict.WRONG


@pytest.mark.parametrize(
    ('expression', 'numbers', 'target'),
    [
        ('2**3', [2, 3], 8),
        ('2* *3', [2, 3], 8),
        ('7//2', [7, 2], 3),
        ('7/ /2', [7, 2], 3),
        ('3.5*2', [3, 5, 2], 7),
        ('3.*5', [3, 5], 15),
        ('.5*2', [5, 2], 1),
        ('7%4', [7, 4], 3),
        ('6^3', [6, 3], 5),
        ('1e3', [1, 3], 1000),
        ('0x10', [0, 10], 16),
        ('1_0+5', [10, 5], 15),
        ('010+5', [10, 5], 15),
        ('2 3+5', [2, 3, 5], 28),
        ('2(3)', [2, 3], 6),
        ('(2)(3)', [2, 3], 6),
        ('2,3', [2, 3], 5),
        ('2+3=5', [2, 3], 5),
        ('2+3 # 5', [2, 3], 5),
        ('2×3', [2, 3], 6),
        ('6÷3', [6, 3], 2),
        ('6−3', [6, 3], 3),
        ('٢+٣', [2, 3], 5),
        ('2²+3', [2, 3], 7),
        ('2+3\x00', [2, 3], 5),
        ('2\xa0+3', [2, 3], 5),
        ('\\boxed{2+3}', [2, 3], 5),
        ("__import__('os').getpid()", [2, 3], 5),
        ('(lambda:2+3)()', [2, 3], 5),
        ('max(2,3)+2', [2, 3], 5),
        ('(2+3', [2, 3], 5),
        ('2+3)', [2, 3], 5),
        ('2+', [2], 2),
        ('*2', [2], 2),
        ('()', [2], 2),
        ('end', [2], 2),
        ('2 end', [2], 2),
        ('', [2], 2),
        ('9' * 400 + '*0+5', [5, 0], 5),
    ],
)
def test_what_is_not_plain_arithmetic_is_no_answer(expression, numbers, target):
    assert judge(expression, numbers, target) == Verdict.UNPARSEABLE


# ---- where the answer is looked for -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('response', 'answer'),
    [
        ('no tag', None),
        ('', None),
        ('<answer>1', None),
        ('1</answer>', None),
        ('</answer>1<answer>', None),
        ('<ANSWER>1</ANSWER>', None),
        ('<answer> 1 </answer> and more', '1'),
        ('<answer>1</answer><answer>2</answer>', '2'),
        ('<answer>1</answer><answer>2', '1'),
        ('<answer>1<answer>2</answer>', '1<answer>2'),  # as the public regex has it
        ('<answer>1</answer>\n<answer>2</answer>', '2'),
        ('<answer>1</answer>\nso it is 1.', None),
        ('<answer>1\n</answer>', None),
        ('<answer>1</answer>\n', '1'),
        ('<answer>1</answer> \r\n\n', '1'),
        ('<answer>1</answer>Assistant: <answer>2</answer>', '2'),
        ('<answer>1</answer>Assistant: 2', None),
        ('a\nAssistant: b\n<answer>3</answer>', '3'),
    ],
)
def test_the_answer_is_the_last_closed_tag_of_the_last_line(response, answer):
    assert cd.find_answer(response) == answer
    verdict, found = cd.verify(response, TRUTH)
    assert found == answer and verdict != Verdict.CORRECT


# ---- any text whatever ------------------------------------------------------------------------------------------------

HOSTILE = {
    'unclosed tags': '<answer>' * 200_000,
    'unclosed tags, one closed': '<answer>' * 200_000 + '</answer>',
    'closing tags': '</answer>' * 200_000,
    'closed tags': '<answer>1</answer>' * 100_000,
    'parentheses': f'<answer>{"(" * 100_000}1{")" * 100_000}</answer>',
    'as many parentheses as fit': f'<answer>{"(" * 499}1{")" * 499}</answer>',
    'signs': f'<answer>{"-" * 100_000}44</answer>',
    'as many signs as fit': f'<answer>{"-" * 990}44</answer>',
    'long sum': f'<answer>{"1+" * 100_000}1</answer>',
    'powers': '<answer>9**9**9**9**9</answer>',
    'huge number': f'<answer>{"9" * 100_000}</answer>',
    'huge products': f'<answer>{"*".join(["999999999999999999"] * 50)}</answer>',
    'line breaks': '\n' * 1_000_000,
    'spaces': f'<answer>{" " * 1_000_000}</answer>',
    'spaces in a sum': f'<answer>44{" " * 100_000}+19</answer>',
}


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_text_is_judged_at_once(name):
    start = time.perf_counter()
    verdict, _ = cd.verify(HOSTILE[name], TRUTH)
    assert time.perf_counter() - start < 2  # a quadratic scan takes far longer, a power tower does not end
    assert verdict in (Verdict.WRONG, Verdict.UNPARSEABLE)


def test_sixty_parentheses_are_fine():
    assert judge('(' * 60 + '44+19+35' + ')' * 60, **TRUTH) == Verdict.CORRECT


PIECES = ['<answer>', '</answer>', 'Assistant:', '\n', '44', '19', '35', '98', *'+-*/() .\\x٤', '**', '\ud800']


@settings(max_examples=200, deadline=2000)
@given(st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=60).map(''.join)), st.booleans())
def test_no_text_raises(text, tagged):
    verdict, answer = cd.verify(f'<answer>{text}</answer>' if tagged else text, TRUTH)
    assert verdict in (Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE)
    assert answer is None or isinstance(answer, str)
    if verdict == Verdict.CORRECT:  # by luck, or by hypothesis: then it must hold each number once, and nothing else
        assert sorted(re.findall('[0-9]+', answer)) == ['19', '35', '44'] and set(answer) <= set('0123456789+-*/() \t')


@st.composite
def expressions(draw):
    """(numbers, a fully parenthesised expression of them, its value or None where it divides by zero)."""
    numbers = draw(st.lists(st.integers(0, 99), min_size=1, max_size=6))
    terms = [(str(n), Fraction(n)) for n in draw(st.permutations(numbers))]
    while len(terms) > 1:
        (left, a), (right, b) = terms.pop(draw(st.integers(0, len(terms) - 1))), terms.pop()
        operator = draw(st.sampled_from('+-*/'))
        if a is None or b is None or (operator == '/' and b == 0):
            value = None
        else:
            value = {'+': a + b, '-': a - b, '*': a * b, '/': a / (b or 1)}[operator]
        sign = draw(st.sampled_from(['', '', '-']))
        blank = draw(st.sampled_from(['', ' ', '\t']))
        terms.append((f'{sign}({left}{blank}{operator}{blank}{right})', -value if sign and value is not None else value))
    return numbers, *terms[0]


@settings(max_examples=200, deadline=2000)
@given(expressions(), st.data())
def test_expressions_are_judged_by_their_value_and_numbers(case, data):
    numbers, text, value = case
    if value is None or value.denominator != 1 or abs(value) >= 10**18:
        assert judge(text, numbers, 7 if value is None or abs(value) >= 10**18 else value.__floor__()) == Verdict.WRONG
        return
    target = int(value)
    assert judge(text, numbers, target) == Verdict.CORRECT
    assert judge(text, list(reversed(numbers)), target) == Verdict.CORRECT
    assert judge(text, numbers, target - 1) == Verdict.WRONG
    i = data.draw(st.integers(0, len(numbers) - 1))
    changed = [*numbers[:i], numbers[i] + 1, *numbers[i + 1 :]]
    assert judge(text, changed, target) == Verdict.WRONG  # a number that was not given
    assert judge(f'{text}+0', numbers, target) == Verdict.WRONG  # one more than was given
    assert judge(text, [*numbers, 5], target) == Verdict.WRONG  # one left out
    assert judge(f'{text}*1', [*numbers, 1], target) == Verdict.CORRECT


@pytest.mark.parametrize(
    ('truth', 'field'),
    [
        ([1, 2], 'ground_truth'),
        ({'target': 3}, 'ground_truth.numbers'),
        ({'numbers': [1, 2]}, 'ground_truth.target'),
        ({'numbers': '1 2', 'target': 3}, 'ground_truth.numbers'),
        ({'numbers': [], 'target': 3}, 'ground_truth.numbers'),
        ({'numbers': [1, 2.0], 'target': 3}, 'ground_truth.numbers'),
        ({'numbers': [1, True], 'target': 3}, 'ground_truth.numbers'),
        ({'numbers': [1, -2], 'target': 3}, 'ground_truth.numbers'),
        ({'numbers': [1, 10**30], 'target': 3}, 'ground_truth.numbers'),
        ({'numbers': [1, 2], 'target': '3'}, 'ground_truth.target'),
        ({'numbers': [1, 2], 'target': True}, 'ground_truth.target'),
        ({'numbers': [1, 2], 'target': float('nan')}, 'ground_truth.target'),
    ],
)
def test_a_malformed_ground_truth_is_an_error_that_names_the_field(truth, field):
    with pytest.raises(ValueError, match=field):
        cd.verify('<answer>1+2</answer>', truth)


# ---- worked solutions -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=2000)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(2,), (3,), (4,), (5,)]))
def test_a_worked_solution_verifies_and_its_steps_are_true(seed, sizes):
    [truth] = generate(1, seed=seed, sizes=sizes)
    text = cd.worked_solution(truth, np.random.default_rng(seed))
    assert cd.verify(text, truth)[0] == Verdict.CORRECT
    assert '\n' not in text
    available = list(truth['numbers'])
    steps = text.partition('<answer>')[0].split(' ')
    assert len(steps) == len(available) - 1
    for step in steps:
        a, operator, b, c = re.fullmatch(r'(\d+)([-+*/])(\d+)=(\d+)', step).groups()
        a, b, c = int(a), int(b), int(c)
        available.remove(a)
        available.remove(b)
        available.append(c)
        assert {'+': a + b == c, '-': a - b == c, '*': a * b == c, '/': b != 0 and a == b * c}[operator], step
    assert available == [truth['target']]


def test_sums_are_drawn_more_often_than_products():
    rng = np.random.default_rng(0)
    text = ' '.join(cd.worked_solution({'numbers': [2, 2, 5], 'target': 9}, rng).split('<')[0] for _ in range(200))
    assert text.count('+') > 10 * text.count('*') > 0  # 2+2=4 5+4=9 or 5+2=7 7+2=9, but also 2*2=4 5+4=9


def test_worked_solutions_are_random_reproducible_and_many():
    only = '30-24=6 6*6=36 59+36=95<answer>59+6*(30-24)</answer>'  # there is no other
    assert cd.worked_solution(HARD, np.random.default_rng(0)) == only
    easy = {'numbers': [2, 3, 4, 5], 'target': 10}
    texts = [cd.worked_solution(easy, np.random.default_rng(seed)) for seed in range(50)]
    assert len(set(texts)) > 10
    assert texts[:5] == [cd.worked_solution(easy, np.random.default_rng(seed)) for seed in range(5)]


def test_worked_solutions_have_no_needless_parentheses():
    checked = 0
    for seed, truth in enumerate(generate(300, seed=5, sizes=(3,))):
        text = cd.worked_solution(truth, np.random.default_rng(seed))
        answer = cd.find_answer(text)
        if '(' not in answer or {'0', '1'} & set(re.findall(r'\d+', text)):
            continue  # with 0 and 1 about, other parentheses can happen to give the same value
        assert judge(answer.replace('(', '').replace(')', ''), **truth) == Verdict.WRONG, answer
        checked += 1
    assert checked > 50


def test_no_worked_solution_where_there_is_none():
    for truth in ({'numbers': [1, 1], 'target': 50}, {'numbers': [7], 'target': 8}, {'numbers': [1, 2], 'target': -1},
                  {'numbers': [5, 7], 'target': 7}):  # fmt: skip
        with pytest.raises(ValueError, match='no solution'):
            cd.worked_solution(truth, np.random.default_rng(0))
    assert cd.worked_solution({'numbers': [7], 'target': 7}, np.random.default_rng(0)) == '<answer>7</answer>'


# ---- prompts ----------------------------------------------------------------------------------------------------------


class CharacterTokenizer:
    """One token a character; its chat template is a pair of brackets."""

    chat_template = '[{}]'

    def __call__(self, texts, add_special_tokens, return_attention_mask):
        assert add_special_tokens is False
        return {'input_ids': [[ord(c) for c in text] for text in texts]}

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt is True and tokenize is False
        assert [m['role'] for m in messages] == ['user']
        return f'[{messages[0]["content"]}]'


def test_prompt_texts():
    tokenizer = CharacterTokenizer()
    raw = cd.prompt_text(HARD, 'tinyzero', tokenizer)
    assert raw.startswith('A conversation between User and Assistant. The user asks')
    assert '\nUser: Using the numbers [30, 59, 24, 6], create an equation that equals 95. You can use' in raw
    assert raw.endswith('for example <answer> (1 + 2) / 3 </answer>.\nAssistant: Let me solve this step by step.\n<think>')
    assert cd.prompt_text(HARD, 'tinyzero_chat', tokenizer) == f'[{raw}]'
    assert cd.prompt_text(HARD, 'compact', tokenizer) == '30 59 24 6=95\n'


def test_prompt_errors():
    with pytest.raises(ValueError, match=r"task\.template is 'nope'.*tinyzero, tinyzero_chat, chat, examples, calculator, compact"):
        cd.prompt_text(HARD, 'nope', CharacterTokenizer())
    with pytest.raises(ValueError, match='no chat template'):
        cd.prompt_text(HARD, 'tinyzero_chat', object())
    with pytest.raises(ValueError, match='ground_truth.target'):
        cd.prompt_text({'numbers': [1]}, 'compact', None)


def test_encode_prompts():
    prompts = encode_prompts('countdown', [TRUTH, HARD], CharacterTokenizer(), template='compact', first_id=7)
    assert [p.id for p in prompts] == [7, 8]
    assert [p.task for p in prompts] == ['countdown'] * 2
    assert [p.ground_truth for p in prompts] == [TRUTH, HARD]
    assert ''.join(map(chr, prompts[1].tokens)) == '30 59 24 6=95\n'
    assert prompts[1].tokens.dtype == np.int32 and prompts[1].tokens.shape == (14,)


@pytest.mark.slow
def test_many_questions_are_shared_out_among_processes_and_stay_in_order(monkeypatch):
    problems = cd.training_problems('generated', limit=25, seed=3)
    encode = functools.partial(encode_prompts, 'countdown', problems, CharacterTokenizer(), template='compact', first_id=7)
    alone = encode()
    monkeypatch.setattr(tasks, '_CHUNK', 10)
    for one, shared in zip(alone, encode(), strict=True):
        assert (one.id, one.task, one.ground_truth) == (shared.id, shared.task, shared.ground_truth)
        np.testing.assert_array_equal(one.tokens, shared.tokens)


def test_training_leaves_long_prompts_out_and_counts_them_and_the_others_keep_their_ids(caplog):
    short, long = {'numbers': [3, 5], 'target': 8}, {'numbers': [30, 59, 24, 60], 'target': 95}
    prompts = encode_prompts('countdown', [long, short, HARD, short, TRUTH], CharacterTokenizer(), template='compact')
    assert [len(p.tokens) for p in prompts] == [15, 6, 14, 6, 12]
    with caplog.at_level(logging.WARNING):
        assert leave_out_long(prompts, 15) == prompts
        assert caplog.text == ''
        assert leave_out_long(prompts, 13) == [prompts[1], prompts[3], prompts[4]]
    assert '2 of 5 prompts are longer than rollout.max_prompt_tokens=13 and are left out; raise it to keep them (the longest has 15 tokens)' in caplog.text
    assert [p.id for p in leave_out_long(prompts, 13)] == [1, 3, 4]
    with pytest.raises(ValueError, match=r'all 5 prompts are longer than rollout\.max_prompt_tokens=5 \(the shortest has 6 tokens\); raise it'):
        leave_out_long(prompts, 5)


def test_a_benchmark_with_a_prompt_that_is_too_long_is_refused_not_cut():
    prompts = encode_prompts('countdown', [TRUTH, HARD], CharacterTokenizer(), template='compact', first_id=7)
    assert refuse_long(prompts, 14, 'cd34') == prompts
    with pytest.raises(ValueError, match=r'cd34, problem 2 of 2: the prompt has 14 tokens, but evaluate\.max_prompt_tokens is 13'):
        refuse_long(prompts, 13, 'cd34')


@needs_shared
def test_prompts_with_the_qwen3_tokenizer(tmp_path):
    transformers = pytest.importorskip('transformers')
    source = SHARED / 'tokenizer_qwen3'
    (tmp_path / 'tokenizer.json').write_bytes(gzip.decompress((source / 'tokenizer.json.gz').read_bytes()))
    (tmp_path / 'tokenizer_config.json').write_bytes((source / 'tokenizer_config.json').read_bytes())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for template in cd.TEMPLATES:
        [prompt] = encode_prompts('countdown', [HARD], tokenizer, template=template)
        assert tokenizer.decode(prompt.tokens) == cd.prompt_text(HARD, template, tokenizer)
    chat = cd.prompt_text(HARD, 'tinyzero_chat', tokenizer)
    raw = cd.prompt_text(HARD, 'tinyzero', tokenizer)
    assert chat.startswith(f'<|im_start|>user\n{raw}<|im_end|>\n<|im_start|>assistant\n')


def test_every_task_has_the_whole_interface():
    for name in TASKS:
        task = get_task(name)
        for part in PARTS:
            assert hasattr(task, part), (name, part)
    with pytest.raises(ValueError, match=r"task\.name is 'chess'.*countdown"):
        get_task('chess')
