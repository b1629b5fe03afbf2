"""Prompts that failed are asked again at the lags that are stated, counted, and forgotten."""

import numpy as np
import pytest
from group_builders import make_group

from bapo_jax.replay.failures import LAGS, Failures, measured

PROMPTS = [make_group(i, 0).prompt for i in range(100)]


def fresh(step, wrong=3):
    """Eight groups of a step, the first `wrong` of them failed; ids differ from step to step."""
    return [make_group((8 * step + i) % 100, 0 if i < wrong else 2, G=4, step=step) for i in range(8)]


def after(steps, asked=8, every=5, **kwargs):
    failures = Failures(PROMPTS, asked, every)
    for step in range(1, steps + 1):
        failures.observe(step, fresh(step, **kwargs))
    return failures


@pytest.mark.parametrize('step, lags', [(5, [1]), (10, [1, 5]), (25, [1, 5, 20]), (65, [1, 5, 20, 60]), (100, [1, 5, 20, 60])])
def test_every_lag_has_its_share_of_what_failed_so_many_steps_ago(step, lags):
    chosen = after(step - 1).choose(step, np.random.default_rng(0))
    assert [again.lag for again in chosen] == [lag for lag in lags for _ in range(2)]
    for again in chosen:
        assert again.prompt.id in [g.prompt.id for g in fresh(step - again.lag)[:3]]
    assert len({(again.prompt.id, again.lag) for again in chosen}) == len(chosen)


def test_a_prompt_that_failed_twice_is_asked_once():
    """At two epochs' border, say. Its draws would be the same, and so its answers."""
    failures = Failures(PROMPTS, 16, 5)
    for step, numbers in ((5, (1, 2, 3)), (9, (3, 4))):
        failures.observe(step, [make_group(i, 0) for i in numbers])
    chosen = failures.choose(10, np.random.default_rng(0))
    assert {(again.prompt.id, again.lag) for again in chosen} == {(1, 5), (2, 5), (3, 1), (4, 1)}


def test_it_is_due_at_its_period_and_never_without_prompts():
    failures = after(9)
    assert [step for step in range(1, 70) if failures.choose(step, np.random.default_rng(0))] == [5, 10, 25, 65]
    nothing = after(9, asked=0)
    assert nothing.choose(10, np.random.default_rng(0)) == [] and nothing.state() == {}


def test_a_draw_is_uniform_over_the_failed_prompts():
    failures = after(4, asked=4)
    drawn = [failures.choose(5, np.random.default_rng(seed))[0].prompt.id for seed in range(600)]
    counts = np.unique(drawn, return_counts=True)[1]
    assert len(counts) == 3 and counts.min() > 150  # 200 each


def test_groups_with_an_infrastructure_error_have_not_failed_and_do_not_count():
    failures = Failures(PROMPTS, 4, 1)
    failures.observe(1, [make_group(7, 0, infra=True)])
    assert failures.choose(2, np.random.default_rng(0)) == []
    failures.observe(2, [make_group(1, 0), make_group(2, 0)])
    asked = [again._replace(lag=1) for again in after(4).choose(5, np.random.default_rng(0))]
    groups = [make_group(asked[0].prompt.id, 2, G=4), make_group(asked[1].prompt.id, 1, G=4, infra=True)]
    counts = measured(asked, groups)
    assert (counts['failed_again/asked/1'], counts['failed_again/mixed/1']) == (1, 1)
    assert counts['failed_again/asked/60'] == 0 and len(counts) == 2 * len(LAGS)


@pytest.mark.parametrize('correct, mixed', [(0, 0), (1, 1), (3, 1), (4, 0)])
def test_all_right_and_all_wrong_are_not_mixed(correct, mixed):
    [again, _] = after(4).choose(5, np.random.default_rng(0))
    assert measured([again], [make_group(again.prompt.id, correct, G=4)])['failed_again/mixed/1'] == mixed


def test_a_checkpoint_has_all_that_may_still_be_asked():
    failures, again = after(80), Failures(PROMPTS, 8, 5)
    state = failures.state()
    assert state['failures'][:-1].min(axis=0)[0] == 80 - max(LAGS) + 1
    again.restore({'other': np.zeros(3), **state})
    for step in (85, 100, 140):
        assert again.choose(step, np.random.default_rng(step)) == failures.choose(step, np.random.default_rng(step))
    none_failed = Failures(PROMPTS, 8, 5).state()
    assert all(array.size for array in none_failed.values())  # array stores dislike empty arrays
    again.restore(none_failed)
    assert again.choose(85, np.random.default_rng(0)) == []
    again.restore({})
    assert again.choose(85, np.random.default_rng(0)) == []
