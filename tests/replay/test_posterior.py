"""Hard prompts by their posterior: the formulas, who may be asked and in which order, pooling, and what a checkpoint keeps."""

import numpy as np
import pytest
from group_builders import assert_same_arrays, ids, make_group
from scipy import stats

from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.replay.continuations import Continuations
from bapo_jax.replay.posterior import Posterior, mean_log_ratio, mixed_probability, prior
from bapo_jax.replay.retries import Uniform


def no_rng():
    raise AssertionError('a posterior draws nothing')


def no_score(batch):
    raise AssertionError('nothing is to be pooled')


def seen(steps, pool_within=0.0, most=8, after=2):
    """A posterior and a buffer after these steps' fresh groups, given as {prompt id: right of 8}."""
    posterior, buffer = Posterior(most, 8, after, pool_within), ReplayBuffer(100, 100, 3, 1 / 8)
    for step, right in steps.items():
        groups = [make_group(i, k, step=step) for i, k in right.items()]
        buffer.add(groups, step)
        posterior.observe(groups, buffer)
    return posterior, buffer


def as_sampled(shift):
    """A score under which every token's log-prob is that of the behaviour policy, moved by `shift`."""
    return lambda batch: [[r.logp + np.float32(shift) for r in g.responses] for g in batch.groups]


@pytest.mark.parametrize('a, b, size', [(1.0, 1.0, 8), (0.15, 9.3, 8), (2.5, 0.4, 5), (1e-3, 4.0, 16)])
def test_mixed_probability_is_that_of_the_beta_binomial(a, b, size):
    counts = stats.betabinom(size, a, b)
    assert mixed_probability(np.array([a]), np.array([b]), size) == pytest.approx([1 - counts.pmf(0) - counts.pmf(size)], rel=1e-9)


@pytest.mark.parametrize('a, b', [(0.2, 1.5), (2.0, 3.0)])
def test_the_prior_is_found_again_from_counts(a, b):
    right = stats.betabinom(8, a, b).rvs(200_000, random_state=1)
    assert prior(np.full(len(right), 8.0), right.astype(float)) == pytest.approx((a, b), rel=0.03)


def test_a_prior_is_a_distribution_whatever_was_seen():
    for right in ([0.0] * 9, [8.0] * 9, [4.0] * 9, [0.0, 8.0], [3.0]):
        a, b = prior(np.full(len(right), 8.0), np.array(right))
        assert a > 0 and b > 0 and np.isfinite([a, b]).all()


def test_prompts_with_a_right_response_come_before_those_without():
    posterior, buffer = seen({1: {1: 0, 2: 1, 3: 0, 4: 1, 5: 4, 6: 8}})
    assert [begun.prompt.id for begun in posterior.choose(9, buffer, no_rng)] == [2, 4, 1, 3]
    posterior, buffer = seen({1: {1: 0, 2: 1, 3: 0, 4: 1, 5: 4}}, most=1)
    assert [begun.prompt.id for begun in posterior.choose(9, buffer, no_rng)] == [2]


def test_what_is_expected_is_the_sum_over_the_prompts_chosen():
    right = {1: 0, 2: 1, 3: 0, 4: 3, 5: 8, 6: 0}
    posterior, buffer = seen({1: right})
    asked = posterior.choose(9, buffer, no_rng)
    a, b = prior(np.full(6, 8.0), np.array([*right.values()], float))
    of_prompt = [1 - sum(stats.betabinom(8, a + right[begun.prompt.id], b + 8 - right[begun.prompt.id]).pmf([0, 8])) for begun in asked]
    assert len(asked) == 4 and posterior.metrics()['retries/expected_mixed'] == pytest.approx(sum(of_prompt))


def test_all_that_is_known_of_a_prompt_counts():
    # Both failed last; prompt 1 was half right in an earlier epoch, so its next group is the likelier to be mixed.
    posterior, buffer = seen({1: {1: 4, 2: 1, 3: 8, 4: 0}, 2: {1: 0, 2: 0}})
    assert [begun.prompt.id for begun in posterior.choose(9, buffer, no_rng)] == [1, 2, 4]


def test_a_prompt_is_asked_after_an_interval_and_retired_at_none_of_sixteen():
    posterior, buffer = seen({1: {1: 0}, 3: {2: 0}}, after=2)
    assert posterior.choose(2, buffer, no_rng) == []
    assert [begun.prompt.id for begun in posterior.choose(3, buffer, no_rng)] == [1]
    posterior.observe([make_group(1, 0, step=3)], buffer)  # 0 of 16 now
    assert [begun.prompt.id for begun in posterior.choose(9, buffer, no_rng)] == [2]
    posterior.observe([make_group(2, 1, step=9)], buffer)  # 1 of 16
    assert [begun.prompt.id for begun in posterior.choose(11, buffer, no_rng)] == [2]


def test_an_infrastructure_error_is_no_evidence():
    posterior, buffer = seen({1: {1: 0}})
    before = posterior.state()
    posterior.observe([make_group(1, 0, step=4, infra=True)], buffer)
    assert_same_arrays(posterior.state(), before)


@pytest.mark.parametrize('shift, pooled', [(0.0, True), (0.04, True), (-0.04, True), (0.06, False), (-0.06, False)])
def test_an_earlier_group_joins_while_the_policy_has_moved_little(shift, pooled):
    posterior, buffer = seen({1: {1: 1, 2: 0}}, pool_within=0.05)
    posterior.choose(4, buffer, no_rng)
    again = [make_group(1, 0, step=4), make_group(2, 0, step=4)]
    groups = posterior.pooled(again, as_sampled(shift))
    assert posterior.metrics()['retries/pooled'] == 2 * pooled
    if pooled:
        assert [(g.correct, g.size, g.step) for g in groups] == [(1, 16, 4), (0, 16, 4)]
        earlier = make_group(1, 1, step=1).responses
        assert [r.logp.tobytes() for r in groups[0].responses] == [r.logp.tobytes() for r in (*earlier, *again[0].responses)]
        # A resumed run has copies of its own, too: what scores the buffer's responses does not score these.
        assert not any(r is e or r.scored is e.scored for r, e in zip(groups[0].responses, earlier, strict=False))
    else:
        assert groups == again


def test_groups_are_kept_for_pooling_while_their_prompts_are_hard():
    posterior, buffer = seen({1: {1: 0, 2: 1}, 2: {1: 4}}, pool_within=0.05)
    assert posterior.state()['count'].tolist() == [1]  # of prompt 2; prompt 1 is hard no more
    posterior, _ = seen({1: {1: 0, 2: 1}})
    assert posterior.state()['count'].tolist() == [0]


def test_nothing_is_scored_where_nothing_may_be_pooled():
    posterior, buffer = seen({1: {1: 0}})
    posterior.choose(4, buffer, no_rng)
    again = [make_group(1, 0, step=4)]
    assert posterior.pooled(again, no_score) == again
    posterior, buffer = seen({1: {1: 0}}, pool_within=0.05)
    posterior.choose(4, buffer, no_rng)
    broken = [make_group(1, 0, step=4, infra=True)]
    assert posterior.pooled(broken, no_score) == broken


def test_the_log_ratio_is_of_trained_tokens_alone():
    group = make_group(1, 1)
    assert mean_log_ratio(group, [r.logp - np.float32(0.25) for r in group.responses]) == pytest.approx(0.25, rel=1e-5)


def test_a_restored_posterior_goes_on_as_the_saved_one():
    posterior, buffer = seen({1: {1: 0, 2: 1, 5: 4}, 2: {3: 0}, 3: {4: 1}}, pool_within=0.05)
    restored = Posterior(8, 8, 2, 0.05)
    restored.restore({name: array.copy() for name, array in posterior.state().items()})
    assert_same_arrays(restored.state(), posterior.state())
    asked = posterior.choose(5, buffer, no_rng)
    assert [begun.prompt.id for begun in restored.choose(5, buffer, no_rng)] == [begun.prompt.id for begun in asked]
    again = [make_group(begun.prompt.id, 0, step=5) for begun in asked]
    assert ids(restored.pooled(again, as_sampled(0.01))) == ids(posterior.pooled(again, as_sampled(0.01)))
    assert restored.metrics() == posterior.metrics()


@pytest.mark.parametrize('other', [Uniform(8), Continuations(8, 48, None)])
def test_after_another_choice_nothing_is_known_and_nothing_asked(other):
    _, buffer = seen({1: {1: 0}})
    other.observe([make_group(1, 4)], buffer)
    posterior = Posterior(8, 8, 2, 0.0)
    posterior.restore(other.state())
    assert posterior.choose(9, buffer, no_rng) == []


def test_after_a_posterior_continuations_begin_anew():
    posterior, _ = seen({1: {1: 0, 2: 4}}, pool_within=0.05)
    continuations = Continuations(8, 48, None)
    before = continuations.state()
    continuations.restore(posterior.state())
    assert_same_arrays(continuations.state(), before)
