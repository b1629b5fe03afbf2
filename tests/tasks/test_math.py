r"""The math task: prompts as each model reads them, verdicts through the pool, and the promises on real cases."""

import gzip
import json
import logging
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
from transformers import AutoTokenizer

from bapo_jax.groups import Verdict, sampled
from bapo_jax.rollout.collect import judge
from bapo_jax.rollout.engine import FRESH, Draw
from bapo_jax.tasks import encode_prompts, get_task
from bapo_jax.tasks.mathematics import task
from bapo_jax.tasks.mathematics.answers import MAX_LENGTH
from benchmarks.host import mutate_golds

SHARED = Path(__file__).resolve().parents[3] / 'shared' / 'data'
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason='the shared data directory is absent')

TRUTH = {'problem': 'What is $2+3$?', 'answers': ['5']}
CORRECT, WRONG, UNPARSEABLE, INFRA_ERROR = Verdict


# ---- prompts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def qwen3(tmp_path_factory):
    if not SHARED.is_dir():
        pytest.skip('the shared data directory is absent')
    folder = tmp_path_factory.mktemp('tokenizer')
    (folder / 'tokenizer.json').write_bytes(gzip.decompress((SHARED / 'tokenizer_qwen3' / 'tokenizer.json.gz').read_bytes()))
    (folder / 'tokenizer_config.json').write_bytes((SHARED / 'tokenizer_qwen3' / 'tokenizer_config.json').read_bytes())
    return AutoTokenizer.from_pretrained(folder)


USER = "<|im_start|>user\nWhat is $2+3$? Let's think step by step and output the final answer within \\boxed{}.<|im_end|>\n"
TOOL = (
    ' You can run Python: end a message with a ```python block, and you get what it prints. sympy and numpy are installed.'
    ' Each run begins anew.<|im_end|>\n'
)
SYSTEM = '<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n'
RENDERED = {
    'qwen3': (USER + '<|im_start|>assistant\n', False),
    'qwen3_no_thinking': (USER + '<|im_start|>assistant\n<think>\n\n</think>\n\n', False),
    'qwen2.5_math': (SYSTEM + '<|im_start|>user\nWhat is $2+3$?<|im_end|>\n<|im_start|>assistant\n', False),
    'chat': (USER + '<|im_start|>assistant\n', False),
    'r1': (USER + '<|im_start|>assistant\n<think>\n', True),
    'python': (USER.replace('<|im_end|>\n', TOOL) + '<|im_start|>assistant\n', False),
    'as_is': ('<|im_start|>user\nWhat is $2+3$?<|im_end|>\n<|im_start|>assistant\n', False),
}


@pytest.mark.parametrize('template', task.TEMPLATES)
def test_prompts_with_the_qwen3_tokenizer(qwen3, template):
    text, thinking = RENDERED[template]
    assert task.prompt_text(TRUTH, template, qwen3) == text
    [prompt] = encode_prompts('math', [TRUTH], qwen3, template=template, first_id=7)
    assert qwen3.decode(prompt.tokens) == text
    demands = {'boxed': template != 'as_is', 'thinking': thinking}
    assert (prompt.id, prompt.task, prompt.ground_truth) == (7, 'math', {**TRUTH, **demands})
    if '<think>' in text:  # one token each, as the model was trained
        assert qwen3.convert_tokens_to_ids('<think>') in prompt.tokens


class Tokenizer:
    """A chat template like R1's, in its first version or the one that opens <think> itself."""

    def __init__(self, opens):
        self.chat_template, self._end = 'messages', '<Assistant>' + '<think>\n' * opens

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt is True and tokenize is False
        return ''.join(f'<{m["role"]}>{m["content"]}' for m in messages) + self._end


@pytest.mark.parametrize('opens', [True, False])
def test_r1_thinks_once_whoever_opens_it(opens):
    text = task.prompt_text(TRUTH, 'r1', Tokenizer(opens))
    assert text.endswith('within \\boxed{}.<Assistant><think>\n') and text.count('<think>') == 1


def test_a_template_that_cannot_be_rendered_is_refused():
    with pytest.raises(ValueError, match=r"task\.template is 'tinyzero'; choose one of r1, qwen3"):
        task.prompt_text(TRUTH, 'tinyzero', Tokenizer(False))
    with pytest.raises(ValueError, match='no chat template'):
        task.prompt_text(TRUTH, 'chat', object())
    for template in ('qwen3', 'qwen3_no_thinking'):
        with pytest.raises(ValueError, match='has no enable_thinking'):
            task.prompt_text(TRUTH, template, Tokenizer(False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('response', 'judged'),
    [
        ('<think>\nIs it \\boxed{5}?\n</think>\n\nIt is \\boxed{6}.<|im_end|>', (WRONG, '6')),
        ('<think>\nIs it \\boxed{6}?\n</think>\n\nIt is \\boxed{5}.<|im_end|>', (CORRECT, '5')),
        ('<think>\nIt is \\boxed{5}.\n', (UNPARSEABLE, None)),  # cut while it thinks
    ],
)
def test_what_the_qwen3_tokenizer_makes_of_a_response_keeps_the_thinking_apart(qwen3, response, judged):
    [prompt] = encode_prompts('math', [TRUTH], qwen3, template='qwen3')
    tokens = np.array(qwen3.encode(response, add_special_tokens=False), np.int32)
    answer = sampled(tokens, np.zeros(len(tokens), np.float32), 'stop', 0)
    texts = []

    def seen(rows, budget_s):
        texts.extend(text for _, text, _, _ in rows)
        return [(CORRECT, 1.0, None)] * len(rows)

    [group] = judge(qwen3, [prompt], [(answer,)], [Draw(0, 1, FRESH)], None)
    assert (group.verdicts[0], group.answers[0]) == judged
    judge(qwen3, [prompt], [(answer,)], [Draw(0, 1, FRESH)], seen)
    assert texts == [response.removesuffix('<|im_end|>')]


# ---- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ('response', 'truth', 'verdict', 'answer'),
    [
        (r'\boxed{5}', TRUTH, CORRECT, '5'),
        (r'\boxed{6}', TRUTH, WRONG, '6'),
        (r'\boxed{^}', TRUTH, UNPARSEABLE, '^'),
        (r'\boxed{5', TRUTH, UNPARSEABLE, None),
        (r'<think>\boxed{5}</think> So there.', TRUTH, UNPARSEABLE, None),
        (r'<think>\boxed{6}</think> \boxed{5}', TRUTH, CORRECT, '5'),
        ('It is 5.', TRUTH, CORRECT, '5'),
        ('It is 5.', '5', CORRECT, '5'),
        ('It is 5.', {**TRUTH, 'boxed': True}, UNPARSEABLE, None),
        (r'The final answer is $5$.', {**TRUTH, 'boxed': True}, UNPARSEABLE, None),
        (r'It is 5, or \boxed{5', '5', UNPARSEABLE, None),
        (r'\boxed{5}', {**TRUTH, 'thinking': True}, UNPARSEABLE, None),
        (r'</think>\boxed{5}', {**TRUTH, 'thinking': True, 'boxed': True}, CORRECT, '5'),
        (r'\boxed{x+1}', ['5', '1+x'], CORRECT, 'x+1'),
        (r'\boxed{' + '😀' * MAX_LENGTH + '}', ['x+1', '😀' * 3900], UNPARSEABLE, '😀' * MAX_LENGTH),  # 95 kB, were it escaped
        ('\\boxed{\ud800}', 'x+1', UNPARSEABLE, '\ud800'),
        (r'\boxed{' + '9' * 310 + '+1}', '1' + '0' * 310, CORRECT, '9' * 310 + '+1'),
        (r'\boxed{' + '9' * 310 + '+2}', '1' + '0' * 310, WRONG, '9' * 310 + '+2'),
        (r'\boxed{x+1}', '', INFRA_ERROR, 'x+1'),
        (r'\boxed{x+1}', r'\frac{', INFRA_ERROR, 'x+1'),
        (r'\boxed{x+1}', 'x+' * MAX_LENGTH, INFRA_ERROR, 'x+1'),
        ('\\boxed{' + 'x+' * MAX_LENGTH + 'x}', 'x', UNPARSEABLE, 'x+' * MAX_LENGTH + 'x'),
        ('', '5', UNPARSEABLE, None),
        ('', TRUTH, UNPARSEABLE, None),
        ('\ud800 \x00', '5', UNPARSEABLE, None),
    ],
)
def test_verdicts(response, truth, verdict, answer):
    assert task.verify(response, truth) == (verdict, answer)


@pytest.mark.slow
def test_many_at_once_are_judged_as_one_by_one_and_in_order():
    responses = [f'\\boxed{{{a}}}' for a in ('x+1', '5', '1+x', 'x-1', '^', 'x+1')] + ['so 1 + x', '1 + x']
    truths = [['7', 'x+1'], '5', 'x+1', 'x+1', '5', 'x+2', {'answers': '1+x', 'boxed': True}, '5']
    together = task.verify_all(responses, truths)
    assert together == [task.verify(r, t) for r, t in zip(responses, truths, strict=True)]
    assert [v for v, _ in together[:7]] == [CORRECT, CORRECT, CORRECT, WRONG, UNPARSEABLE, WRONG, UNPARSEABLE]
    assert task.verify_all([], []) == []
    with pytest.raises(ValueError):
        task.verify_all(['a'], [])


# a power tower that no static check sees, sympy's own heaviness, and a number that fills the memory
HEAVY = [r'2^{3^{100000000}}-1', r'\sin(2^{3^{100000000}})', r'(((99999!)!)-1)!', r'\binom{10^{9}}{10^{8}}-1']


@pytest.mark.slow
def test_a_heavy_answer_costs_its_processor_time_is_wrong_and_harms_no_other(monkeypatch):
    pool = task._pool()
    monkeypatch.setattr(pool, 'cpu_s', 2.0)
    started = time.monotonic()
    verdicts = task.verify_all([f'\\boxed{{{a}}}' for a in (*HEAVY, 'x+1', '1+x')], ['1'] * len(HEAVY) + ['x+1', 'x+1'])
    assert time.monotonic() - started < 90  # 2 s and the start of a worker each; without a deadline, for ever
    assert [v for v, _ in verdicts] == [WRONG] * len(HEAVY) + [CORRECT] * 2


@pytest.mark.slow
def test_a_heavy_gold_is_no_responses_fault(monkeypatch):
    monkeypatch.setattr(task._pool(), 'cpu_s', 2.0)
    assert task.verify(r'\boxed{x+1}', r'2^{3^{100000000}}-1') == (INFRA_ERROR, 'x+1')


def test_a_worker_that_dies_is_an_infrastructure_error(monkeypatch):
    class Dying:
        def run(self, requests, budget_s):
            return ['failed'] * len(requests)

    monkeypatch.setattr(task, '_pool', Dying)
    assert task.verify_all([r'\boxed{x}', r'\boxed{5}'], ['y', '5']) == [(INFRA_ERROR, 'x'), (CORRECT, '5')]


@pytest.mark.parametrize(
    ('truth', 'message'),
    [
        ({'problem': 'a'}, r'ground_truth\.answers is missing'),
        ({'answers': []}, r'ground_truth\.answers must be'),
        ({'answers': [5]}, r'ground_truth\.answers must be'),
        ({'answers': '5', 'boxed': 1}, r'ground_truth\.boxed must be'),
        ({'answers': '5', 'thinking': 'no'}, r'ground_truth\.thinking must be'),
        (5, 'ground_truth must be a string or a non-empty list'),
        (None, 'ground_truth must be'),
        ([], 'ground_truth must be'),
        (['5', None], 'ground_truth must be'),
    ],
)
def test_a_malformed_ground_truth_is_an_error_that_names_the_field(truth, message):
    with pytest.raises(ValueError, match=message):
        task.verify(r'\boxed{5}', truth)


# ---- real cases -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def judged():
    """Each grading case with the verdict and answer it got."""
    if not SHARED.is_dir():
        pytest.skip('the shared data directory is absent')
    with gzip.open(SHARED / 'grader_cases.jsonl.gz', 'rt', encoding='utf-8') as file:
        cases = [json.loads(line) for line in file]
    responses = [c['pred'] if c['form'] == 'response' else f'\\boxed{{{c["pred"]}}}' for c in cases]
    return list(zip(cases, task.verify_all(responses, [c['gold'] for c in cases]), strict=True))


# Rows on which no one rule can be right: the same pair is expected both ways under other options of math-verify (mv-182, mv-245),
# needs its two-decimals option (mv-128), or is expected equal because math-verify misreads it: 1 - 1/e and 1 + 1/e (mv-255).
# Three want 1,22 to be 1.22, where a comma separates a list: else the list 2,3 would be 2.3.
BEYOND_ONE_RULE = {'mv-006', 'mv-007', 'mv-008', 'mv-128', 'mv-182', 'mv-245', 'mv-255'}


@pytest.mark.slow
def test_agrees_with_all_cases_on_which_conventions_do_not_differ(judged):
    plain = [(c, verdict) for c, (verdict, _) in judged if c['convention'] is None]
    differ = {c['id'] for c, verdict in plain if (verdict == CORRECT) != c['expected']}
    assert len(plain) == 424
    assert differ == BEYOND_ONE_RULE  # 98.35 %


@pytest.mark.slow
def test_nothing_adversarial_is_correct(judged):
    hostile = [(c['id'], verdict) for c, (verdict, _) in judged if {'adversarial', 'hedging', 'malformed'} & set(c['categories'])]
    expected = {c['id']: c['expected'] for c, _ in judged}
    assert len(hostile) > 40
    assert [(name, verdict) for name, verdict in hostile if verdict == CORRECT and not expected[name]] == []


@pytest.mark.slow
def test_only_a_gold_that_cannot_be_read_is_an_infrastructure_error(judged):
    golds = {c['gold'] for c, (verdict, _) in judged if verdict == INFRA_ERROR}
    assert golds == {'', r'-5,1]\cup[3,9]', r'\begin{cases} a+b=0.5\\ a-b=1.732\end{cases}', r'\frac{3\sqrt{}{3}}{2}'}


@pytest.mark.slow
@needs_shared
def test_every_benchmark_answer_is_correct_by_itself(monkeypatch):
    monkeypatch.setenv('BAPO_DATA', str(SHARED))
    problems = [p for name in task.BENCHMARKS for p in task.math_problems.benchmark(name)]
    assert len(problems) == 30 + 83 + 500 + 272 + 675
    rows = [(f'</think> It is $\\boxed{{{a}}}$.', {**p, 'boxed': True, 'thinking': True}) for p in problems for a in p['answers']]
    verdicts = task.verify_all(*zip(*rows, strict=True))
    assert [row for row, (verdict, _) in zip(rows, verdicts, strict=True) if verdict != CORRECT] == []


@pytest.mark.slow
@needs_shared
def test_benchmark_answers_differ_from_another_and_all_but_one_can_be_read(monkeypatch):
    monkeypatch.setenv('BAPO_DATA', str(SHARED))
    problems = [p for name in task.BENCHMARKS for p in task.math_problems.benchmark(name)]
    unreadable = task.unreadable_answers([p['answers'] for p in problems])
    assert [problems[row]['answers'] for row in unreadable] == [['t(0,4]']]
    some = Random(0).sample([p for p in problems if p['answers'] != ['t(0,4]']], 200)
    assert {v for v, _ in task.verify_all([r'\boxed{\frac{x+17}{19y}}'] * len(some), some)} == {WRONG}


@pytest.mark.slow
@needs_shared
def test_a_changed_gold_is_wrong_and_a_restyled_one_right(monkeypatch):
    monkeypatch.setenv('BAPO_DATA', str(SHARED))
    problems = [p for name in task.BENCHMARKS for p in Random(name).sample(task.math_problems.benchmark(name), 20)]
    tried = mutate_golds.try_all(problems, seed=7)
    assert {mutant.kind for mutant, _ in tried} == {*mutate_golds.CHANGED, *mutate_golds.RESTYLED}
    assert [(mutant, verdict) for mutant, verdict in tried if not mutate_golds.as_it_must(mutant, verdict)] == []


# ---- golds at load ----------------------------------------------------------------------------------------------------


def write(path, answers):
    path.write_text(''.join(json.dumps({'problem': f'Question {i}?', 'answer': a}) + '\n' for i, a in enumerate(answers, 1)))
    return str(path)


@pytest.mark.slow
def test_training_leaves_out_what_it_cannot_judge_and_says_so(tmp_path, caplog):
    answers = ['5', r'\frac{', r'\begin{pmatrix}1\\2\end{pmatrix}', [r'\sqrt{', 'x^2'], 'Evelyn', 't(0,4]', r'1\pm\sqrt{2}', r'\frac{']
    with caplog.at_level(logging.WARNING):
        problems = task.training_problems(write(tmp_path / 'a.jsonl', answers), limit=0, seed=0)
    assert [p['problem'] for p in problems] == [f'Question {i}?' for i in (1, 3, 4, 5, 7)]
    [message] = caplog.messages
    assert 'a.jsonl: 3 of 8 problems have no accepted answer that can be parsed, and are left out of training' in message
    assert r'problem 2: \frac{; problem 6: t(0,4]; problem 8: \frac{' in message
    with pytest.raises(ValueError, match=r'b\.jsonl: none of its 1 answers can be parsed \(the first is \\frac'):
        task.training_problems(write(tmp_path / 'b.jsonl', [r'\frac{']), limit=0, seed=0)


@pytest.mark.slow
def test_a_benchmark_keeps_what_it_cannot_judge_and_names_it(tmp_path, caplog):
    answers = ['5', *['}{'] * 12]
    with caplog.at_level(logging.WARNING):
        assert len(task.benchmark(write(tmp_path / 'a.jsonl', answers))) == 13
    [message] = caplog.messages
    assert '12 of 13 problems have no accepted answer that can be parsed, and are kept' in message
    assert message.endswith('; problem 11: }{; and problems 12, 13')


def test_a_trial_that_the_machine_ends_leaves_no_problem_out(monkeypatch):
    class Busy:
        def run(self, requests):
            return ['overran', 'failed', False][: len(requests)]

    monkeypatch.setattr(task, '_pool', Busy)
    assert task.unreadable_answers([['a^{b}'], ['5'], ['c^{d}'], ['e^{f}'], ['e^{f}', '5'], ['e^{f}']]) == [3, 5]


@pytest.mark.slow
@needs_shared
def test_what_counts_as_plain_can_be_read(monkeypatch):
    monkeypatch.setenv('BAPO_DATA', str(SHARED))
    golds = {a for name in task.BENCHMARKS for p in task.math_problems.benchmark(name) for a in p['answers']}
    plain = Random(0).sample(sorted(filter(task.is_plain, golds)), 300)
    assert all(task._pool().run([{'gold': gold} for gold in plain]))


def test_the_task_is_found_by_name():
    assert get_task('math') is task
