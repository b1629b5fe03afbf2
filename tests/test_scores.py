"""Scores: pass@k and maj@n against enumeration, the interval on a known distribution, and what a failed verifier does to each."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from group_builders import judged_group
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_jax.groups import Verdict
from bapo_jax.scores import Question, bootstrap_interval, interval, ks, majority, pass_at_k, question, summary, wilson_interval

RIGHT, WRONG, NONE, BROKEN = Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE, Verdict.INFRA_ERROR


def q(*verdicts, answers=None, lengths=None, truncated=None):
    n = len(verdicts)
    return Question(verdicts, tuple(answers or (None,) * n), tuple(lengths or (1,) * n), tuple(truncated or (False,) * n))


@pytest.mark.parametrize('n', range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        responses = [True] * c + [False] * (n - c)
        share = np.mean([any(subset) for subset in itertools.combinations(responses, k)])
        assert pass_at_k(np.array([n]), np.array([c]), k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_the_formula_where_binomials_are_large():
    n, c = np.array([256, 256, 256, 256]), np.array([0, 1, 100, 256])
    for k in (1, 32, 156, 157, 256):
        exact = [1 - math.comb(256 - int(x), k) / math.comb(256, k) for x in c]
        np.testing.assert_allclose(pass_at_k(n, c, k), exact, rtol=1e-12)


def test_pass_at_k_is_unbiased():
    """Over all outcomes of n = 5 responses that are correct with chance p, its mean is 1 - (1 - p)^k."""
    p, n = 0.3, 5
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in range(1, n + 1):
        mean = np.dot(chance, pass_at_k(np.full(n + 1, n), np.arange(n + 1), k))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_k_goes_in_powers_of_two_up_to_n_and_n_itself():
    assert (ks(1), ks(8), ks(12), ks(32)) == ([1], [1, 2, 4, 8], [1, 2, 4, 8, 12], [1, 2, 4, 8, 16, 32])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from('abcd-'), min_size=1, max_size=9), st.sets(st.sampled_from('abcd')))
def test_the_majority_is_the_mean_over_every_way_to_resolve_the_tie(responses, correct):
    answers = [None if r == '-' else r for r in responses]
    verdicts = [NONE if a is None else RIGHT if a in correct else WRONG for a in answers]
    counts = {a: answers.count(a) for a in set(answers) - {None}}
    winners = [a for a in counts if all(counts[a] >= other for other in counts.values())]
    expected = np.mean([a in correct for a in winners]) if winners else 0
    assert majority(verdicts, answers) == pytest.approx(expected, abs=1e-12)


def test_a_tie_is_resolved_without_favour_whichever_answer_came_first():
    verdicts, answers = [RIGHT, WRONG, WRONG, RIGHT, WRONG], ['1', '2', '2', '1', '3']
    assert majority(verdicts, answers) == majority(verdicts[::-1], answers[::-1]) == 0.5


def test_what_is_not_parsed_or_not_judged_does_not_vote():
    assert majority([NONE, NONE, RIGHT], ['x', 'x', '1']) == 1  # a text that is no answer may be given for reading
    assert majority([BROKEN, BROKEN, RIGHT], ['2', '2', '1']) == 1
    assert majority([NONE, NONE], [None, None]) == 0
    assert np.isnan(majority([BROKEN, BROKEN], [None, '1']))


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """400 benchmarks of 100 questions whose difficulties are Beta(1, 1), 8 samples each: 95 % of intervals hold the mean 1/2.

    The coverage is binomial with deviation 1.1 % around a little less than 95 %, for the percentile bootstrap is a little narrow.
    """
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        low, high = bootstrap_interval(rng.binomial(8, rng.random(100)) / 8)
        held += low <= 0.5 <= high
    assert 0.91 <= held / 400 <= 0.98


def test_the_interval_is_that_of_the_normal_limit_and_the_same_every_time():
    values = np.random.default_rng(1).random(500)
    low, high = bootstrap_interval(values)
    half = 1.96 * values.std() / math.sqrt(500)
    assert (low, high) == bootstrap_interval(values.copy())
    np.testing.assert_allclose([low, high], [values.mean() - half, values.mean() + half], atol=0.03 * half)


@pytest.mark.parametrize('right', [0, 3, 20])
def test_the_interval_of_problems_that_all_score_the_same_is_wilsons(right):
    """Resampling them would show no width: its ends solve (p - share)² = z² p (1 - p) / n."""
    low, high = interval(np.full(20, right / 20), np.arange(20))
    assert (low, high) == wilson_interval(right / 20, 20) and high - low > 0.15
    for end in {low, high} - {0.0, 1.0}:
        assert (end - right / 20) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / 20, rel=1e-5)
    assert summary([q(WRONG, WRONG)] * 20, votes=False)['interval'] == list(wilson_interval(0.0, 20))


def test_copies_of_a_problem_make_no_interval_narrower():
    """AIME's 30 problems 32 times each, one sample a row, are 30 problems of 32 samples."""
    rng = np.random.default_rng(0)
    correct = rng.binomial(32, rng.random(30))
    once = [q(*[RIGHT] * c, *[WRONG] * (32 - c)) for c in correct]
    rows = [q(v) for copy in range(32) for v in (of.verdicts[copy] for of in once)]
    copies = summary(rows, votes=False, problems=list(range(30)) * 32)
    assert copies['interval'] == pytest.approx(summary(once, votes=False)['interval'], abs=1e-12)
    assert (copies['mean'], copies['problems'], copies['questions']) == (pytest.approx(correct.mean() / 32), 30, 960)
    wide, narrow = (np.ptp(s['interval']) for s in (copies, summary(rows, votes=False)))
    assert wide > 2.5 * narrow
    assert 'problems' not in summary(once, votes=False)


def test_problems_with_more_copies_weigh_more_in_every_resample():
    values, problems = np.array([1.0, 0, 0, 0, 1, 1]), np.array([7, 7, 7, 3, 2, 2])
    sums, counts = np.array([2.0, 0, 1]), np.array([2, 1, 3])
    drawn = np.random.default_rng(0).integers(3, size=(10_000, 3), dtype=np.int32)
    expected = np.quantile(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), [0.025, 0.975])
    assert interval(values, problems) == pytest.approx(tuple(expected), abs=1e-12)


def test_a_summary_says_what_it_says():
    rows = [
        q(RIGHT, RIGHT, WRONG, NONE, answers=['1', '1', '2', None], lengths=[4, 5, 6, 9], truncated=[False, False, False, True]),
        q(*[WRONG] * 4, answers=['5'] * 4, lengths=[2] * 4),
        q(WRONG, WRONG, WRONG, RIGHT, answers=['1', '2', '3', '4'], lengths=[2] * 4),
    ]
    s = summary(rows, votes=True)
    assert (s['mean'], s['pass'], s['correct'], s['samples'], s['questions']) == (0.25, 2 / 3, [2, 0, 1], 4, 3)
    assert s['pass_at_k'] == pytest.approx({'1': 0.25, '2': (5 / 6 + 0 + 1 / 2) / 3, '4': 2 / 3})
    assert s['maj'] == pytest.approx((1 + 0 + 0.25) / 3)
    assert (s['truncated'], s['length'], s['unparseable'], s['infra_errors']) == (1 / 12, (24 + 8 + 8) / 12, 1, 0)
    assert s['interval'] == list(bootstrap_interval(np.array([0.5, 0, 0.25])))
    assert s['pass_interval'] == list(bootstrap_interval(np.array([1.0, 0, 1])))
    assert s['maj_interval'] == list(bootstrap_interval(np.array([1, 0, 0.25])))
    assert 'maj' not in summary(rows, votes=False)


def test_a_response_that_could_not_be_judged_is_no_wrong_one():
    s = summary([q(RIGHT, BROKEN, answers=['1', None]), q(WRONG, WRONG, answers=['3', '3']), q(BROKEN, BROKEN)], votes=True)
    assert (s['mean'], s['maj'], s['pass_at_k'], s['infra_errors']) == (0.5, 0.5, {'1': 0.5, '2': 0.0}, 3)
    s = summary([q(BROKEN, BROKEN)], votes=True)
    assert (s['mean'], s['interval'], s['pass'], s['maj']) == (None, None, None, None)


def test_a_question_is_read_off_its_group():
    group = dataclasses.replace(judged_group(1, [RIGHT, WRONG, NONE], np.random.default_rng(0)), answers=('1', '2', None))
    x = question(group)
    assert (x.verdicts, x.answers) == ((RIGHT, WRONG, NONE), ('1', '2', None))
    assert x.lengths == tuple(len(r.tokens) for r in group.responses)
    assert x.truncated == tuple(r.finish == 'length' for r in group.responses)
