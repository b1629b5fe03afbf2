"""The factors of learner.trust against their papers' formulas, by brute force; and what the rows get of them."""

import jax
import numpy as np
import pytest
from group_builders import graded, make_group, right, with_logp
from hypothesis import given, strategies as st
from learners import learner_config

from bapo_jax.groups import Author, Response, Span, make_batch
from bapo_jax.learner.objective import objective_of
from bapo_jax.learner.packing import cut, pack
from bapo_jax.learner.trust import FACTORS, factors_of, second_moment_mask, stale_clip, success_clip

numbers = st.integers(-2000, 2000).map(lambda x: x / 1000)


@given(st.lists(st.tuples(numbers, st.sampled_from([-1.0, 0.0, 0.5])), max_size=12), st.sampled_from([1e-3, 0.04, 0.5]))
def test_second_moment_masks_the_fewest_of_the_largest(tokens, budget):
    """Of all the ways to leave out the largest ones, the first whose rest is within the budget on average, or empty."""
    log_ratio, advantage = np.array(tokens).reshape(-1, 2).T
    factor = second_moment_mask(log_ratio, advantage, budget)
    counted = [i for i, (d, a) in enumerate(tokens) if (a > 0 and d > 0) or (a < 0 and d < 0)]
    by_size = sorted(counted, key=lambda i: log_ratio[i] ** 2)
    for kept in range(len(by_size), -1, -1):
        if not kept or np.mean(log_ratio[by_size[:kept]] ** 2) <= budget:
            break
    assert set(factor) <= {0.0, 1.0} and factor[[i for i in range(len(tokens)) if i not in counted]].all()
    assert (factor == 0).sum() == len(counted) - kept
    largest_kept = max((log_ratio[i] ** 2 for i in counted if factor[i]), default=0.0)
    assert all(log_ratio[i] ** 2 >= largest_kept for i in counted if not factor[i])


def test_second_moment_by_hand():
    """Squares of .01, .04 and .16 that count: their mean is .07, that of the first two .025. The token at -1 does not count."""
    log_ratio = np.array([0.1, 0.4, -1.0, -0.2, 0.0])
    advantage = np.array([1.0, 2.0, 1.0, -1.0, 1.0])
    assert second_moment_mask(log_ratio, advantage, 0.04).tolist() == [1, 0, 1, 1, 1]
    assert second_moment_mask(log_ratio, advantage, 0.07 + 1e-9).tolist() == [1, 1, 1, 1, 1]
    assert second_moment_mask(log_ratio, advantage, 0.001).tolist() == [0, 0, 1, 0, 1]


@given(st.lists(numbers, max_size=30), st.floats(0.05, 0.95))
def test_the_stale_clip_is_narrower_beyond_the_quantile_on_the_side_that_has_moved(values, quantile):
    log_ratio = np.array(values)
    low, high = stale_clip(log_ratio, quantile)
    q = np.quantile(np.abs(log_ratio), quantile) if values else 0
    for d, l, h in zip(log_ratio, low, high, strict=True):  # noqa: E741
        want = q**2 / (q**2 + d**2) if abs(d) > q > 0 else 1
        assert (l, h) == pytest.approx((1, want) if d > 0 else (want, 1), rel=1e-12)
        assert l == h == 1 or min(l, h) <= 0.5  # it jumps to a half at the quantile


def test_the_stale_clip_by_hand():
    low, high = stale_clip(np.array([0.1, -0.1, 0.1, 0.3, -0.2, 0.0, 0.1]), 0.5)
    np.testing.assert_allclose((low, high), ([1, 1, 1, 1, 0.2, 1, 1], [1, 1, 1, 0.1, 1, 1, 1]), rtol=1e-12)
    np.testing.assert_array_equal(stale_clip(np.array([0.0, 0.0, 0.5]), 0.5), np.ones((2, 3)))  # q = 0


@pytest.mark.parametrize('k, G', [(k, G) for G in (2, 8) for k in range(G + 1)])
def test_the_clip_of_a_success_is_that_of_the_paper(k, G):
    """ε_high(k) = ε_low + (ε_max - ε_low) (G - k) / (G - 1) for right responses, ε_low for wrong ones; at most ε_max."""
    low, most = 0.2, 0.28
    wrong = np.full(2, min(1.0, (G - k) / (G - 1)))
    got = most * success_clip(np.array([0.5, -0.5]), wrong, low / most)
    np.testing.assert_allclose(got, [min(most, low + (most - low) * (G - k) / (G - 1)), low], rtol=1e-12)


def trusted(kind, **changes):
    return learner_config(trust__kind=kind, **changes).learner


def batch_and_scores(seed=0):
    """Three groups of four, 1, 2 and 4 right, with log-probs under π_prox and an advantage of a half or minus a half."""
    rng = np.random.default_rng(seed)
    groups = []
    for i, k in enumerate((1, 2, 4)):
        g = make_group(i, k, G=4)
        responses = [with_logp(r, rng.normal(-1, 0.3, len(r.tokens)).astype(np.float32)) for r in g.responses]
        groups.append(graded(g.prompt, responses, right(k, 4)))
    proximal = [[r.logp + rng.normal(0, 0.3, len(r.logp)).astype(np.float32) for r in g.responses] for g in groups]
    advantage = [
        [np.full(len(r.tokens), 0.5 if j < g.correct else -0.5, np.float32) for j, r in enumerate(g.responses)] for g in groups
    ]
    return make_batch(groups, ['x1'] * 3), advantage, proximal


def flat(by_group):
    return np.concatenate([x for of_group in by_group for x in of_group])


def test_factors_are_those_of_all_the_mini_batchs_tokens_in_their_places():
    batch, advantage, proximal = batch_and_scores()
    gap = flat(proximal).astype(float) - flat([[r.logp for r in g.responses] for g in batch.groups])
    moment = factors_of(trusted('second_moment'), batch, advantage, proximal)
    np.testing.assert_array_equal(flat(moment['advantage']), second_moment_mask(gap, flat(advantage), 0.04))
    assert 0 < flat(moment['advantage']).mean() < 1
    stale = factors_of(trusted('staleness', trust__quantile=0.7), batch, advantage, proximal)
    np.testing.assert_array_equal((flat(stale['low']), flat(stale['high'])), np.float32(stale_clip(gap, 0.7)))
    success = factors_of(trusted('success', clip_low=0.1, clip_high=0.2), batch, advantage, None)
    for g, of_group in zip(batch.groups, success['high'], strict=True):
        for j, factor in enumerate(of_group):
            np.testing.assert_allclose(factor, 0.5 + 0.5 * (4 - g.correct) / 3 if j < g.correct else 0.5, rtol=1e-6)
    assert factors_of(trusted('fixed'), batch, advantage, None) == {}


def test_at_the_level_of_responses_all_tokens_have_its_mean_log_ratio():
    batch, advantage, proximal = batch_and_scores()
    stale = factors_of(trusted('staleness', ratio_level='sequence', trust__quantile=0.5), batch, advantage, proximal)
    means = [[(p - r.logp).mean(dtype=float) for p, r in zip(x, g.responses)] for x, g in zip(proximal, batch.groups)]
    lengths = [len(r.tokens) for g in batch.groups for r in g.responses]
    want = stale_clip(np.repeat(np.ravel(means), lengths), 0.5)
    np.testing.assert_allclose((flat(stale['low']), flat(stale['high'])), want, rtol=1e-5)
    assert (flat(stale['high']) < 1).any() and all(np.ptp(x) == 0 for of_group in stale['high'] for x in of_group)


@pytest.mark.parametrize('kind', FACTORS)
def test_others_tokens_neither_count_nor_have_a_factor(kind):
    """A trace in place of a response, however far the policy is from it: its factors are 1, and all others' are what they would be alone."""
    batch, advantage, proximal = batch_and_scores()
    kept = factors_of(trusted(kind), batch, advantage, proximal)
    g = batch.groups[0]
    tokens = np.arange(5, dtype=np.int32)
    trace = Response((Span(tokens, np.full(5, -9, np.float32), Author.TRACE),), 'stop')
    with_trace = graded(g.prompt, (*g.responses, trace), (*g.verdicts, g.verdicts[-1]))
    proximal[0].append(np.zeros(5, np.float32))
    advantage[0].append(np.full(5, 3, np.float32))
    mixed = make_batch([with_trace, *batch.groups[1:]], ['x1'] * 3)
    got = factors_of(trusted(kind), mixed, advantage, proximal)
    assert got.keys() == kept.keys() == set(FACTORS[kind])
    for name, factor in got.items():
        assert factor[0].pop().tolist() == [1] * 5
        if kind != 'success':  # the group's share of wrong responses is another
            np.testing.assert_array_equal(flat(factor), flat(kept[name]))


@pytest.mark.parametrize('kind', FACTORS)
def test_other_hosts_rows_are_of_the_shape_of_packed_ones(kind):
    batch, advantage, proximal = batch_and_scores()
    learner = trusted(kind, anchor='behaviour', kl_target='none', mini_batch_groups=3, row_tokens=64)
    objective = objective_of(learner)
    assert objective.roles == (('proximal',) if kind in ('second_moment', 'staleness') else ())
    [part] = cut(batch, np.arange(3), learner)
    zeros = [[np.zeros(len(r.tokens)) for r in g.responses] for g in batch.groups]
    factors = factors_of(learner, batch, advantage, proximal)
    rows = pack(part, ('x1',), advantage, {'rl': zeros}, {role: proximal for role in objective.roles}, factors)
    blank = objective.blank_rows(rows.origin.shape)
    assert jax.tree.structure(blank) == jax.tree.structure(rows)
    assert [x.dtype for x in jax.tree.leaves(blank)] == [x.dtype for x in jax.tree.leaves(rows)]
    for factor in rows.factors.values():
        assert ((factor > 0) <= (rows.sequences.response > 0)).all()
