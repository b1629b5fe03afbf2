"""The jitted update on real groups of a tiny policy.

Tolerances, float32: metrics 1e-5; gradients 1e-5 of the largest entry of all; parameters after a step 1e-6 of the largest.
The gradient is read from Adam's first moment, which after one step is a tenth of it (it is never clipped here).
"""

import dataclasses

import jax
import numpy as np
import pytest
from group_builders import with_logp
from learners import (
    BARE,
    FULL,
    assert_close,
    assert_same_update,
    batch_of,
    gradient,
    largest,
    updated,
    with_responses,
    with_right,
)  # fmt: skip

from bapo_jax.groups import Verdict, make_batch
from bapo_jax.learner.credit import group_std
from bapo_jax.learner.policy import mismatch
from bapo_jax.learner.sums import Sums


@pytest.mark.slow
@pytest.mark.parametrize(
    'cut', [{'row_tokens': 46, 'slot_tokens': 10}, {'row_tokens': 38, 'slot_tokens': 16, 'micro_batch_rows': 3, 'anchor': 'proximal'}]
)
def test_a_prompt_computed_once_is_the_prompt_computed_for_every_response(cut, learner, policy, stale):
    """A slot for each response; or two slots to a row, in which responses lie end to end, some prompts in two rows. Policy is scored too."""
    plain = {'anchor': cut.get('anchor', 'behaviour')}
    assert_same_update(updated(learner(FULL, **cut), policy, batch_of(stale)), updated(learner(FULL, **plain), policy, batch_of(stale)), policy)


@pytest.mark.slow
@pytest.mark.parametrize('cut', [{'micro_batch_rows': 16}, {'row_tokens': 64, 'micro_batch_rows': 3}])
def test_micro_batches_and_packing_change_nothing(cut, learner, policy, stale):
    """Many micro-batches of two rows = one of sixteen = another row length; token mean over responses of unequal length."""
    assert len({len(r.tokens) for g in stale for r in g.responses}) > 4
    assert_same_update(
        updated(learner(FULL, **cut), policy, batch_of(stale)), updated(learner(FULL), policy, batch_of(stale)), policy
    )


def test_policy_loss_on_policy_by_hand(learner, policy, groups):
    """ρ = 1: the token mean is -Σ |y_i| A_i / Σ |y_i|, the entropy that of the policy, nothing is clipped, no KL to oneself."""
    _, metrics = updated(learner(BARE), policy, batch_of(groups[:3]))
    lengths = np.array([[len(r.tokens) for r in g.responses] for g in groups[:3]])
    advantages = np.concatenate([group_std(g.rewards)[None] for g in groups[:3]])
    assert metrics['actor/pg_loss'] == pytest.approx(-(lengths * advantages).sum() / lengths.sum(), abs=2e-5)
    assert metrics['actor/pg_clipfrac'] == metrics['actor/kl_loss'] == 0
    assert metrics['actor/ppo_kl'] == pytest.approx(0, abs=1e-5)
    assert metrics['actor/updates'] == 1
    assert 3.0 < metrics['actor/entropy'] < np.log(96)


def test_clip_fraction_total_variation_and_ratio_by_origin_by_hand(learner, policy, groups):
    """Log-probs off by log 2 either way: ρ = 2 is clipped where A > 0, ρ = 1/2 where A < 0; (1 - ρ)_+ is 0 and 1/2.

    Of X3 every second response is off: with a tokens at ρ = 2 and b at ρ = 1 the effective share is (2a + b)² / ((a + b) (4a + b)).
    """
    up, down = (
        with_responses([g], lambda r, s=s: with_logp(r, r.logp + np.float32(s * np.log(2))))[0]
        for g, s in zip(groups[:2], (-1, 1))
    )
    halved = [with_logp(r, r.logp - np.float32(np.log(2) * (i % 2))) for i, r in enumerate(groups[2].responses)]
    mixed = dataclasses.replace(groups[2], responses=tuple(halved))
    _, metrics = updated(learner(BARE), policy, make_batch((up, down, mixed), ('x1', 'x2', 'x3')))
    a, b = (sum(len(r.tokens) for r in mixed.responses[i::2]) for i in (1, 0))
    assert metrics['staleness/ratio/x3'] == pytest.approx((2 * a + b) / (a + b), abs=1e-4)
    assert metrics['staleness/ess/x3'] == pytest.approx((2 * a + b) ** 2 / ((a + b) * (4 * a + b)), abs=1e-4)
    assert metrics['staleness/ratio/x2'] == pytest.approx(0.5, abs=1e-4)
    assert metrics['staleness/ess/x2'] == pytest.approx(1, abs=1e-4)
    for origin, group, clipped, tv in (('x1', up, Verdict.CORRECT, 0), ('x2', down, Verdict.WRONG, 0.5)):
        lengths = np.array([len(r.tokens) for r in group.responses])
        held = np.array([v == clipped for v in group.verdicts])
        assert metrics[f'actor/pg_clipfrac/{origin}'] == pytest.approx((lengths * held).sum() / lengths.sum(), abs=1e-6)
        assert metrics[f'staleness/tv/{origin}'] == pytest.approx(tv, abs=1e-5)


def test_kl_and_effective_sample_size_of_the_mismatch_are_those_of_two_explicit_distributions():
    engine, trainer = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    # Tokens in exactly the proportions that the engine draws them in: sample means are then expectations.
    gap = np.log(trainer / engine)[np.repeat([0, 1, 2], [2, 1, 1])]
    first = {
        'tokens': 4, 'gap': np.abs(gap).sum(), 'k3': (np.exp(gap) - 1 - gap).sum(), 'ratio': np.exp(gap).sum(),
        'squared_ratio': np.exp(2 * gap).sum(),
    }  # fmt: skip
    x1 = {name: np.array([x, 9, 9, 9]) for name, x in first.items()}
    m = mismatch(Sums(by_origin=x1, largest={'gap': np.array([np.abs(gap).max(), 9, 9, 9])}))
    assert m['mismatch/kl'] == pytest.approx(np.sum(engine * np.log(engine / trainer)), rel=1e-12)
    assert m['mismatch/ess'] == pytest.approx(1 / np.sum(engine * (trainer / engine) ** 2), rel=1e-12)
    assert m['mismatch/logprob_abs_mean'] == pytest.approx(0.75 * np.log(2), rel=1e-12)
    assert m['mismatch/logprob_abs_max'] == pytest.approx(np.log(2), rel=1e-12)
    assert mismatch(Sums(by_origin={name: np.zeros(4) for name in first})) == {}


def test_the_mismatch_is_that_of_x1_in_the_first_mini_batch_where_the_policy_itself_answered(learner, policy, groups):
    """Log-probs off by log 2: r = 2. Groups of X2 and of later mini-batches do not count, nor does a step after a sync."""
    first = np.random.default_rng(0).permutation(len(groups))[:3]  # the groups of the first mini-batch
    off = with_responses(groups, lambda r: with_logp(r, r.logp - np.float32(np.log(2))))
    of = [off[i] if i == first[0] else g for i, g in enumerate(groups)]
    batch = make_batch(of, ['x2' if i in first[1:] else 'x1' for i in range(len(of))])
    _, metrics = updated(learner(BARE), policy, batch)
    assert metrics['actor/updates'] == 2
    assert metrics['mismatch/logprob_abs_mean'] == pytest.approx(np.log(2), abs=1e-4)
    assert metrics['mismatch/logprob_abs_max'] == pytest.approx(np.log(2), abs=1e-4)
    assert metrics['mismatch/kl'] == pytest.approx(1 - np.log(2), abs=1e-4)
    assert metrics['mismatch/ess'] == pytest.approx(1, abs=1e-4)
    a_learner = learner(BARE)
    _, later = a_learner.update(a_learner.init(policy.params), batch, np.random.default_rng(0), step=2)
    assert not any(name.startswith('mismatch') for name in later)


@pytest.mark.parametrize('right', [0, 4])
def test_a_batch_without_variance_leaves_every_parameter_as_it_is(right, learner, policy, stale):
    state, metrics = updated(learner(BARE), policy, batch_of(with_right(stale, right)))
    assert metrics['actor/pg_loss'] == 0
    assert metrics['actor/grad_norm'] == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), policy.params)


def test_groups_without_variance_add_nothing_to_the_numerator(learner, policy, stale):
    """The denominator counts their tokens, so that loss and gradient shrink by the share of the others' tokens."""
    mixed = [stale[0], *with_right(stale[1:2], 0), *with_right(stale[2:3], 4)]
    tokens = [sum(len(r.tokens) for r in g.responses) for g in mixed]
    share = tokens[0] / sum(tokens)
    (state, metrics), (alone_state, alone) = (updated(learner(BARE), policy, batch_of(gs)) for gs in (mixed, mixed[:1]))
    assert metrics['actor/pg_loss'] == pytest.approx(share * alone['actor/pg_loss'], rel=1e-5)
    assert_close(gradient(state), jax.tree.map(lambda x: share * x, gradient(alone_state)), 1e-5)


@pytest.mark.slow
def test_behaviour_and_proximal_anchor_agree_where_alpha_is_the_policy(learner, policy, groups):
    """Two optimizer steps: for the second, the anchor is still the policy before the first."""
    a, b = (updated(learner(BARE, anchor=anchor), policy, batch_of(groups)) for anchor in ('proximal', 'behaviour'))
    assert_close(jax.device_get(a[0].params), jax.device_get(b[0].params), 1e-5)
    assert a[1]['actor/updates'] == 2
    for name in ('actor/pg_loss', 'actor/grad_norm', 'actor/entropy'):
        assert a[1][name] == pytest.approx(b[1][name], rel=1e-4, abs=1e-5), name
    assert abs(a[1]['actor/ppo_kl']) > 1e-4
    assert a[1]['actor/ppo_kl'] == pytest.approx(b[1]['actor/ppo_kl'], abs=1e-5)


@pytest.mark.parametrize('factor, weight', [(1.0, 1.0), (1.5, 1.5), (0.25, 0.25), (4.0, 2.0)])
def test_decoupled_is_proximal_times_the_weight_cut_at_the_cap(factor, weight, learner, policy, groups):
    """π_prox / α = `factor` on every token; the cap is 2."""
    older = with_responses(groups[:3], lambda r: with_logp(r, r.logp - np.float32(np.log(factor))))
    state, metrics = updated(learner(BARE, anchor='decoupled', importance_cap=2.0), policy, batch_of(older))
    want_state, want = updated(learner(BARE, anchor='proximal'), policy, batch_of(older))
    assert metrics['actor/pg_loss'] == pytest.approx(weight * want['actor/pg_loss'], rel=1e-4)
    assert_close(gradient(state), jax.tree.map(lambda x: weight * x, gradient(want_state)), 2e-5)


@pytest.mark.slow
def test_the_entropy_coefficient_raises_the_entropy(learner, policy, groups):
    flat = learner(BARE, entropy_coef=0.1)
    batch = batch_of(with_right(groups[:3], 0))
    state, first = updated(flat, policy, batch)
    for _ in range(3):
        state, later = flat.update(state, batch, np.random.default_rng(0))
    assert later['actor/entropy'] > first['actor/entropy'] + 1e-3


def test_a_step_makes_right_answers_likelier(learner, policy, groups, score):
    """The sign of it all: after some steps, the log-prob of correct responses has risen against that of wrong ones."""

    def preference(params):
        total = 0.0
        for g in groups:
            tokens, segment = (np.zeros((4, 16), np.int32) for _ in range(2))
            for row, r in enumerate(g.responses):
                sequence = np.concatenate([g.prompt.tokens, r.tokens])
                tokens[row, : len(sequence)], segment[row, : len(sequence)] = sequence, 1
            logp, _ = score(params, tokens, segment, np.tile(np.arange(16, dtype=np.int32), (4, 1)), 1.0)
            for row, (r, a) in enumerate(zip(g.responses, group_std(g.rewards.astype(np.float64)))):
                n = len(g.prompt.tokens)
                total += a * float(logp[row, n : n + len(r.tokens)].sum())
        return total

    state, _ = updated(learner(BARE), policy, batch_of(groups))
    assert preference(state.params) > preference(policy.params) + 1e-2


def test_an_update_without_a_finite_gradient_is_skipped_and_counted(learner, policy, groups):
    """θ, both moments and the number of updates stay; the next batch is trained on as if nothing had been."""
    groups = groups[:3]
    spoilt = dataclasses.replace(groups[1], responses=tuple(
        with_logp(r, np.full_like(r.logp, np.nan)) for r in groups[1].responses
    ))  # fmt: skip
    one_each = learner(BARE, mini_batch_groups=1, mini_batches='released')
    state, metrics = updated(one_each, policy, batch_of([groups[0], spoilt, groups[2]]))
    assert (metrics['actor/updates'], metrics['actor/skipped_updates']) == (2, 1)
    assert all(np.isfinite(x) for x in metrics.values())
    want, _ = updated(one_each, policy, batch_of([groups[0], groups[2]]))
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (state, want)))


def test_where_every_update_is_skipped_nothing_changes(learner, policy, groups):
    params = jax.tree.map(np.copy, policy.params)
    params['norm']['scale'][0] = np.nan
    state, metrics = updated(learner(BARE), policy, batch_of(groups[:3]), params=params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)
    assert largest(gradient(state)) == 0 and metrics['actor/updates'] == 0 and metrics['actor/skipped_updates'] == 1
