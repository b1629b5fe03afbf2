"""A user's reward function is checked before the run, and what it cannot judge is nobody's wrong answer."""

import logging
import math
from fractions import Fraction

import numpy as np
import pytest
from bapo_jax.groups import Verdict
from bapo_jax.tasks.custom_reward import BadReward, find_reward, judge_one

MODULE = """
def exact(data_source, response, ground_truth, extra):
    return float(response == ground_truth)

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {'score': 1, 'pred': solution_str}

def three(response, ground_truth, extra):
    return 1.0

def anything(*arguments):
    return arguments == ('aime', 'r', ['g'], {'step': 3})

number = 5
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    (tmp_path / 'rewards_for_this_test.py').write_text(MODULE)
    (tmp_path / 'broken_for_this_test.py').write_text('1 / 0')
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_is_found_and_gets_all_four_arguments(modules):
    exact = find_reward('rewards_for_this_test:exact')
    assert judge_one(exact, 'aime', '5', '5', {}) == (Verdict.CORRECT, 1.0, None)
    assert judge_one(exact, 'aime', '6', '5', {}) == (Verdict.WRONG, 0.0, None)
    assert judge_one(find_reward('rewards_for_this_test:anything'), 'aime', 'r', ['g'], {'step': 3}) == (Verdict.CORRECT, 1.0, None)
    assert judge_one(find_reward('rewards_for_this_test:verl'), 'aime', 'r', 'g', {}) == (Verdict.CORRECT, 1.0, 'r')


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('rewards_for_this_test', "expected 'module:function'"),
        (':exact', "expected 'module:function'"),
        ('rewards_for_this_test:', "expected 'module:function'"),
        ('no_such_module_here:f', 'importing no_such_module_here failed .ModuleNotFoundError'),
        ('broken_for_this_test:f', 'importing broken_for_this_test failed .ZeroDivisionError'),
        ('rewards_for_this_test:missing', 'has no function missing'),
        ('rewards_for_this_test:number', 'has no function number'),
        ('rewards_for_this_test:three', r'must take \(data_source, response, ground_truth, extra\).*too many positional'),
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


@pytest.mark.parametrize('score', [0, 0.0, False, np.int64(0), {'score': 0, 'acc': 1}])
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

    with pytest.raises(BadReward, match='strange .task.reward. returned .*expected a finite number, or a dict'):
        judge_one(strange, 'd', 'r', 'g', {})


def test_an_exception_is_an_infrastructure_error_without_a_reward_and_is_logged(caplog):
    def fails(*_):
        raise KeyError('no such field')

    with caplog.at_level(logging.ERROR):
        verdict, reward, answer = judge_one(fails, 'd', 'response', 'g', {})
    assert verdict == Verdict.INFRA_ERROR and math.isnan(reward) and answer is None
    assert 'fails failed on a response of 8 characters' in caplog.text and 'no such field' in caplog.text
