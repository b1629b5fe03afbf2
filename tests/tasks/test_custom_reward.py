"""A user's reward function is checked before the run, and what it cannot judge is nobody's wrong answer."""

import ast
import json
import math
import os
from fractions import Fraction

import numpy as np
import pytest

from bapo_jax import config
from bapo_jax.groups import Verdict
from bapo_jax.machine import events
from bapo_jax.tasks import get_task
from bapo_jax.tasks.custom_reward import BadReward, find_reward, judge_one, rewards_of

MODULE = """
import os, sys, time

def exact(data_source, response, ground_truth, extra):
    return float(response == ground_truth)

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {'score': 1, 'pred': solution_str}

def three(response, ground_truth, extra):
    return 1.0

def anything(*arguments):
    return arguments == ('aime', 'r', ['g'], {'step': 3})

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert not kwargs and isinstance(ground_truth, str)  # verl's own functions begin with ground_truth.strip() and the like
    right = solution_str.split('####')[-1].strip() == ground_truth.strip()
    return {'score': 1.0 if right else -1.0, 'acc': right, 'pred': repr((data_source, sorted(extra_info.items())))}

def by_keyword(*, solution_str, ground_truth, data_source=None, extra_info=None):
    return {'score': 0.5, 'pred': repr((data_source, ground_truth, extra_info))}

def gsm8k(solution_str, ground_truth, method='strict', format_score=0., score=1.):
    return {'score': score, 'pred': repr((solution_str, ground_truth, method, format_score))}

def turned(extra_info, ground_truth, solution_str):
    return {'score': 1.0, 'pred': repr((extra_info, ground_truth, solution_str))}

def other_order(response, data_source, ground_truth, extra):
    return 1.0

def more(solution_str, ground_truth, rubric):
    return 1.0

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

number = 5

def odd_jobs(data_source, response, ground_truth, extra):
    if response == 'exit': sys.exit(0)
    if response == 'raise': raise KeyError('no such field')
    if response == 'hang': time.sleep(600)
    if response == 'read': sys.stdin.read()
    if response == 'bad': return 'good'
    print('seen', file=sys.stdout)
    return {'score': len(response), 'correct': os.environ['KEY_FOR_THIS_TEST'] == 'k', 'pred': str((os.getpid(), ground_truth, extra))}

def talk(data_source, response, ground_truth, extra):
    for stream in (sys.stdout, sys.stderr): print('x' * 100_000, file=stream, flush=True)
    return 1

def meet(data_source, response, ground_truth, extra):
    open(os.path.join(ground_truth['place'], response), 'w').close()
    while len(os.listdir(ground_truth['place'])) < 3: time.sleep(0.01)
    return 1
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    (tmp_path / 'rewards_for_this_test.py').write_text(MODULE)
    (tmp_path / 'broken_for_this_test.py').write_text('1 / 0')
    (tmp_path / 'exits_for_this_test.py').write_text('import sys\nsys.exit(3)')
    (tmp_path / 'cut_for_this_test.py').write_text('def f(')
    (tmp_path / 'lacking_for_this_test.py').write_text('import no_such_package_here')
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_is_found_and_gets_all_four_arguments(modules):
    exact = find_reward('rewards_for_this_test:exact')
    assert judge_one(exact, 'aime', '5', '5', {}) == (Verdict.CORRECT, 1.0, None)
    assert judge_one(exact, 'aime', '6', '5', {}) == (Verdict.WRONG, 0.0, None)
    assert judge_one(find_reward('rewards_for_this_test:anything'), 'aime', 'r', ['g'], {'step': 3}) == (Verdict.CORRECT, 1.0, None)
    assert judge_one(find_reward('rewards_for_this_test:verl'), 'aime', 'r', 'g', {}) == (Verdict.CORRECT, 1.0, 'r')


def test_a_function_with_some_of_verls_names_gets_those(modules):
    judged = judge_one(find_reward('rewards_for_this_test:gsm8k'), 'math', '#### 5', {'answers': ['5']}, {'tokens': 1})
    assert judged == (Verdict.CORRECT, 1.0, repr(('#### 5', '5', 'strict', 0.0)))
    judged = judge_one(find_reward('rewards_for_this_test:turned'), 'math', 'r', {'answers': ['5']}, {'tokens': 1})
    assert judged == (Verdict.CORRECT, 1.0, repr(({'tokens': 1}, '5', 'r')))


ROW = {
    'data_source': 'openai/gsm8k', 'prompt': [{'role': 'user', 'content': 'What is 1+1? The final answer after "####".'}],
    'reward_model': {'style': 'rule', 'ground_truth': '2'}, 'extra_info': {'split': 'train', 'index': 7, 'tokens': 'kept'},
}  # fmt: skip


@pytest.mark.parametrize('task, template', [('math', 'as_is'), ('questions', 'chat')])
def test_a_function_of_verl_runs_unchanged_and_is_told_what_the_row_says(modules, tmp_path, task, template):
    (tmp_path / 'verl.jsonl').write_text(json.dumps(ROW) + '\n')
    [truth] = get_task(task).training_problems(str(tmp_path / 'verl.jsonl'), limit=0, seed=0)
    extra = {'prompt_id': 3, 'tokens': 5, 'finish': 'stop'}
    told = "('openai/gsm8k', [('finish', 'stop'), ('index', 7), ('prompt_id', 3), ('split', 'train'), ('tokens', 'kept')])"
    function = find_reward('rewards_for_this_test:compute_score')
    assert judge_one(function, task, 'so #### 2', truth, extra) == (Verdict.CORRECT, 1.0, told)
    assert judge_one(function, task, 'so #### 3', truth, extra) == (Verdict.WRONG, -1.0, told)


@pytest.mark.parametrize('truth, answer', [
    ({'problem': 'p', 'answers': ['2']}, '2'), ({'problem': 'p', 'answers': ['2', 'two']}, ['2', 'two']),
    ({'question': 'q', 'answer': '2'}, '2'), ({'question': 'q', 'answer': '2', 'row': 5}, '2'),
    ({'numbers': [1, 2], 'target': 3}, {'numbers': [1, 2], 'target': 3}),
    ({'problem': 'p', 'answers': ['2'], 'row': {'ground_truth': '["2"]'}}, '["2"]'),
])  # fmt: skip
def test_of_other_rows_a_function_of_verl_gets_the_accepted_answer(modules, truth, answer):
    judged = judge_one(find_reward('rewards_for_this_test:by_keyword'), 'math', 'r', truth, {'tokens': 1})
    assert judged == (Verdict.WRONG, 0.5, repr(('math', answer, {'tokens': 1})))


@pytest.mark.parametrize(
    'score, acc, verdict', [(1.0, True, 0), (-1.0, False, 1), (0, 1, 0), (0.9, 1.0, 0), (1, 0, 1), (1, 0.5, 1)]
)
def test_acc_says_what_is_correct_as_in_verl(score, acc, verdict):
    assert judged({'score': score, 'acc': acc}) == (Verdict(verdict), score, None)


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('rewards_for_this_test:later', 'is an async function; wrap it in one that returns the reward'),
        ('rewards_for_this_test', "expected 'module:function'"),
        (':exact', "expected 'module:function'"),
        ('rewards_for_this_test:', "expected 'module:function'"),
        ('no_such_module_here:f', 'importing no_such_module_here failed .ModuleNotFoundError.*run in its directory, or add that to PYTHONPATH'),
        ('broken_for_this_test:f', r'importing broken_for_this_test failed .ZeroDivisionError: .*; fix .*broken_for_this_test\.py, line 1'),
        ('rewards_for_this_test:missing', 'has no function missing'),
        ('rewards_for_this_test:number', 'has no function number'),
        ('rewards_for_this_test:three', r'must take four arguments \(data_source, response, ground_truth, extra\).*too many positional'),
        ('rewards_for_this_test:more', r'must take .* by name .* including solution_str\. .*\(too many positional'),
        ('rewards_for_this_test:other_order', r'must take .* It is defined with \(response, .*\(response is in another position\)'),
        ('exits_for_this_test:f', r'importing exits_for_this_test failed .SystemExit: 3.; fix .*exits_for_this_test\.py, line 2'),
        ('cut_for_this_test:f', r'importing cut_for_this_test failed .SyntaxError: .*cut_for_this_test\.py, line 1.*; fix the module'),
        ('lacking_for_this_test:f', r'No module named .no_such_package_here.*; install it, or add its directory to PYTHONPATH'),
    ],
)
def test_what_is_no_reward_function_is_refused_at_once(modules, name, message):
    with pytest.raises(ValueError, match=message):
        find_reward(name)


def judged(outcome):
    return judge_one(lambda *_: outcome, 'd', 'r', 'g', {})


@pytest.mark.parametrize('score', [1, 1.0, True, np.float32(1), np.array(1.0), {'score': 1.0}])
def test_one_is_correct(score):
    assert judged(score) == (Verdict.CORRECT, 1.0, None)


@pytest.mark.parametrize('score', [0, 0.0, False, np.int64(0), {'score': 0, 'acc': 0}])
def test_zero_is_wrong(score):
    assert judged(score) == (Verdict.WRONG, 0.0, None)


@pytest.mark.parametrize('score', [0.5, 0.1, 1 - 2**-53, 2, -1, -0.25, np.float16(0.5), Fraction(1, 2), 1e38])
def test_any_other_finite_number_is_credit_for_a_wrong_answer(score):
    for outcome in (score, {'score': score}):
        verdict, reward, _ = judged(outcome)
        assert verdict == Verdict.WRONG and reward == float(score) and type(reward) is float


@pytest.mark.parametrize('score', [1, 0, 0.5, -3.0])
@pytest.mark.parametrize('true, false', [(True, False), (np.bool_(True), np.bool_(False))])
def test_correct_decides_the_verdict_whatever_the_score(score, true, false):
    assert judged({'score': score, 'correct': true, 'pred': '7'}) == (Verdict.CORRECT, score, '7')
    assert judged({'score': score, 'correct': false, 'pred': 7}) == (Verdict.WRONG, score, None)


@pytest.mark.parametrize(
    'outcome',
    [
        float('nan'), float('inf'), -np.inf, 1e39, 10**400, None, '1', b'1', {}, [1], [0.5, 0.5], np.zeros(2), 1j,
        {'score': '1'}, {'score': float('nan')}, {'score': None, 'correct': True}, {'acc': 1}, {'correct': True},
        {'score': 1, 'correct': 1}, {'score': 1, 'correct': None}, {'score': 0.5, 'correct': 'yes'},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_finite_number_is_refused_by_name(outcome):
    def strange(*_):
        return outcome

    with pytest.raises(BadReward, match='strange .task.reward. returned .*return a finite number, or a dict'):
        judge_one(strange, 'd', 'r', 'g', {})


@pytest.fixture
def rewards(modules, monkeypatch):
    """A function that gives what judges by a function of the module, in two processes."""
    made = []
    monkeypatch.setenv('KEY_FOR_THIS_TEST', 'k')

    def make(name, deadline_s=60.0):
        task = config.section_defaults('task')
        task.update(reward=f'rewards_for_this_test:{name}', judging={'reward_s': deadline_s, 'workers': 2})
        made.append(rewards_of(task))
        return made[-1]

    yield make
    for judge in made:
        judge.args[1].close()


def rows(*responses, truth='g'):
    return [('d', response, truth, {'tokens': 1}) for response in responses]


@pytest.mark.slow
def test_the_function_runs_in_other_processes_with_the_trainers_environment(rewards):
    judge, answers = rewards('odd_jobs'), ['long' * 50_000, 'é\ud800', 'read']
    outcomes = judge(rows(*answers, truth={'a': [1, 'é']}), 60.0)
    assert [(verdict, reward) for verdict, reward, _ in outcomes] == [(Verdict.CORRECT, len(a)) for a in answers]
    for _, _, pred in outcomes:
        pid, truth, extra = ast.literal_eval(pred)
        assert pid != os.getpid() and (truth, extra) == ({'a': [1, 'é']}, {'tokens': 1})


@pytest.mark.slow
def test_responses_are_judged_at_the_same_time(rewards, tmp_path):
    """Each call waits for the others, so one after the other would never end."""
    place = tmp_path / 'place'
    place.mkdir()
    (place / 'one').touch()
    assert rewards('meet')(rows('two', 'three', truth={'place': str(place)}), 60.0) == [(Verdict.CORRECT, 1.0, None)] * 2


@pytest.mark.slow
def test_what_the_function_fails_on_is_no_reward_and_is_told(rewards, tmp_path):
    """An exception, sys.exit, and a call that does not end."""
    with events.recorded(tmp_path):
        outcomes = rewards('odd_jobs', deadline_s=2.0)(rows('a', 'exit', 'raise', 'hang', 'b'), 60.0)
    told = [json.loads(line) for line in (tmp_path / events.EVENTS_FILE).read_text().splitlines()]
    assert [verdict for verdict, _, _ in outcomes] == [Verdict.CORRECT, *[Verdict.INFRA_ERROR] * 3, Verdict.CORRECT]
    assert all(math.isnan(reward) and answer is None for _, reward, answer in outcomes[1:4])
    assert [(e['event'], e.get('failed'), e.get('late')) for e in told] == [('verifier failed', None, 1), ('reward failed', 2, None)]
    assert 'rewards_for_this_test:odd_jobs failed on 2 of 5 responses' in told[1]['message']
    assert "KeyError: 'no such field'" in told[1]['message'] or 'SystemExit: 0' in told[1]['message']


@pytest.mark.slow
def test_what_is_no_reward_ends_the_run(rewards):
    with pytest.raises(BadReward, match="odd_jobs .task.reward. returned 'good'; return a finite number"):
        rewards('odd_jobs')(rows('a', 'bad'), 60.0)


def test_without_a_function_the_tasks_verifier_judges():
    assert rewards_of(config.section_defaults('task')) is None


@pytest.mark.slow
@pytest.mark.parametrize('reader_lives', [False, True])
def test_a_function_that_prints_judges_also_where_nobody_reads(rewards, reader_lives):
    """As behind `train … 2>&1 | head`, or where the reader reads no more."""
    (reading, writing), before = os.pipe(), os.dup(2)
    if not reader_lives:
        os.close(reading)
    os.dup2(writing, 2)
    try:
        assert rewards('talk')(rows('a', 'b'), 60.0) == [(Verdict.CORRECT, 1.0, None)] * 2
    finally:
        os.dup2(before, 2)
        for descriptor in (writing, before, *([reading] if reader_lives else [])):
            os.close(descriptor)
