"""The jitted update on real groups of a tiny policy.

Tolerances, float32: metrics 1e-5; gradients 1e-5 of the largest entry of all; parameters after a step 1e-6 of the largest.
The gradient is read from Adam's first moment, which after one step is a tenth of it (it is never clipped here).
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from tiny import STOP_TOKENS

from bapo_jax.checkpoint import copy_params
from bapo_jax.config import default_config
from bapo_jax.groups import Batch, Group, Verdict
from bapo_jax.learner.advantages import group_advantage
from bapo_jax.learner.update import Learner
from bapo_jax.parallel import make_mesh
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.jax_engine import JaxEngine

FULL = {
    'mini_batch_groups': 6, 'row_tokens': 32, 'logprob_chunk': 16, 'micro_batch_rows': 2, 'learning_rate': 1e-4, 'grad_clip': 1e3,
    'kl_coef': 0.1, 'entropy_coef': 0.01,
}  # fmt: skip
# The policy-gradient term alone.
BARE = {
    **FULL, 'mini_batch_groups': 3, 'micro_batch_rows': 8, 'kl_target': 'none', 'kl_coef': 0.0, 'entropy_coef': 0.0,
    'weight_decay': 0.0,
}  # fmt: skip


@functools.cache
def _learner(graph, changes):
    config = default_config().learner
    config.update(dict(changes))
    return Learner(graph, config, 1.0, make_mesh(1, 1, 1), 'xla')


@pytest.fixture(scope='module')
def learner(policy):
    """A function of a config and changes to it: that Learner, compiled once."""
    return lambda base, **changes: _learner(policy.graph, tuple({**base, **changes}.items()))


def batch_of(groups, sources=('x1', 'x2', 'x3')):
    return Batch(tuple(groups), tuple(sources[i % len(sources)] for i in range(len(groups))))


def with_responses(groups, change):
    """The groups with `change(response)` in place of every response."""
    return [dataclasses.replace(g, responses=tuple(map(change, g.responses))) for g in groups]


def with_right(groups, k):
    return [dataclasses.replace(g, verdicts=(Verdict.CORRECT,) * k + (Verdict.WRONG,) * (g.size - k)) for g in groups]


@pytest.fixture(scope='module')
def stale(groups):
    """The groups as if an older policy had sampled them: other log-probs, ratios on both sides of the trust region."""
    rng = np.random.default_rng(0)
    return with_responses(
        groups, lambda r: dataclasses.replace(r, logp=r.logp + rng.normal(0, 0.3, len(r.logp)).astype(np.float32))
    )


def update(learner, policy, batch, seed=0, reference=None, params=None):
    state = learner.init(copy_params(policy.params if params is None else params))
    return learner.update(state, batch, np.random.default_rng(seed), reference)


def gradient(state):
    return jax.device_get(optax.tree.get(state.opt_state, 'mu'))


def largest(tree):
    return max(float(np.abs(x).max()) for x in jax.tree.leaves(tree))


def assert_close(a, b, tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest(b)), a, b)


def assert_same_update(a, b, policy):
    (state, metrics), (want_state, want_metrics) = a, b
    assert_close(gradient(state), gradient(want_state), 1e-5)
    assert_close(jax.device_get(state.params), jax.device_get(want_state.params), 1e-6)
    moved = jax.tree.map(lambda x, y: x - y, jax.device_get(want_state.params), policy.params)
    assert largest(moved) > 5e-5  # the step was one
    assert_same_metrics(metrics, want_metrics)


def assert_same_metrics(a, b):
    assert a.keys() == b.keys()
    for name in (n for n in a if not n.startswith('timing_s/')):
        assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize('cut', [{'micro_batch_rows': 16}, {'row_tokens': 64, 'logprob_chunk': 64, 'micro_batch_rows': 3}])
def test_micro_batches_and_packing_change_nothing(cut, learner, policy, stale):
    """Many micro-batches of two rows = one of sixteen = another row length; token mean over responses of unequal length."""
    assert len({len(r.tokens) for g in stale for r in g.responses}) > 4
    assert_same_update(
        update(learner(FULL, **cut), policy, batch_of(stale)), update(learner(FULL), policy, batch_of(stale)), policy
    )


def test_the_order_of_groups_in_a_mini_batch_changes_nothing(learner, policy, stale):
    batch = batch_of(stale)
    backwards = Batch(batch.groups[::-1], batch.sources[::-1])
    assert_same_update(
        update(learner(FULL), policy, backwards, seed=1), update(learner(FULL), policy, batch, seed=0), policy
    )


def test_policy_loss_on_policy_by_hand(learner, policy, groups):
    """ρ = 1: the token mean is -Σ |y_i| A_i / Σ |y_i|, the entropy that of the policy, nothing is clipped, no KL to oneself."""
    _, metrics = update(learner(BARE), policy, batch_of(groups[:3]))
    lengths = np.array([[len(r.tokens) for r in g.responses] for g in groups[:3]])
    advantages = np.concatenate([group_advantage(g.rewards[None], 'group_std') for g in groups[:3]])
    assert metrics['actor/pg_loss'] == pytest.approx(-(lengths * advantages).sum() / lengths.sum(), abs=2e-5)
    assert metrics['actor/pg_clipfrac'] == metrics['actor/kl_loss'] == 0
    assert metrics['actor/ppo_kl'] == pytest.approx(0, abs=1e-5)
    assert metrics['actor/updates'] == 1
    assert 3.0 < metrics['actor/entropy'] < np.log(96)


def test_clip_fraction_total_variation_and_ratio_by_source_by_hand(learner, policy, groups):
    """Log-probs off by log 2 either way: ρ = 2 is clipped where A > 0, ρ = 1/2 where A < 0; (1 - ρ)_+ is 0 and 1/2.

    Of X3 every second response is off: of a tokens with ρ = 2 and b with ρ = 1 the effective share is (2a + b)² / ((a + b) (4a + b)).
    """
    up, down = (
        with_responses([g], lambda r, s=s: dataclasses.replace(r, logp=r.logp + np.float32(s * np.log(2))))[0]
        for g, s in zip(groups[:2], (-1, 1))
    )
    halved = [dataclasses.replace(r, logp=r.logp - np.float32(np.log(2) * (i % 2))) for i, r in enumerate(groups[2].responses)]
    mixed = dataclasses.replace(groups[2], responses=tuple(halved))
    _, metrics = update(learner(BARE), policy, Batch((up, down, mixed), ('x1', 'x2', 'x3')))
    a, b = (sum(len(r.tokens) for r in mixed.responses[i::2]) for i in (1, 0))
    assert metrics['staleness/ratio/x3'] == pytest.approx((2 * a + b) / (a + b), abs=1e-4)
    assert metrics['staleness/ess/x3'] == pytest.approx((2 * a + b) ** 2 / ((a + b) * (4 * a + b)), abs=1e-4)
    assert metrics['staleness/ratio/x2'] == pytest.approx(0.5, abs=1e-4) and metrics['staleness/ess/x2'] == pytest.approx(1, abs=1e-4)
    for source, group, clipped, tv in (('x1', up, Verdict.CORRECT, 0), ('x2', down, Verdict.WRONG, 0.5)):
        lengths = np.array([len(r.tokens) for r in group.responses])
        held = np.array([v == clipped for v in group.verdicts])
        assert metrics[f'actor/pg_clipfrac/{source}'] == pytest.approx((lengths * held).sum() / lengths.sum(), abs=1e-6)
        assert metrics[f'staleness/tv/{source}'] == pytest.approx(tv, abs=1e-5)


@pytest.mark.parametrize('right', [0, 4])
def test_a_batch_without_variance_leaves_every_parameter_as_it_is(right, learner, policy, stale):
    state, metrics = update(learner(BARE), policy, batch_of(with_right(stale, right)))
    assert metrics['actor/pg_loss'] == 0
    assert metrics['actor/grad_norm'] == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), policy.params)


def test_groups_without_variance_add_nothing_to_the_numerator(learner, policy, stale):
    """The denominator counts their tokens, so that loss and gradient shrink by the share of the others' tokens."""
    mixed = [stale[0], *with_right(stale[1:2], 0), *with_right(stale[2:3], 4)]
    tokens = [sum(len(r.tokens) for r in g.responses) for g in mixed]
    share = tokens[0] / sum(tokens)
    (state, metrics), (alone_state, alone) = (update(learner(BARE), policy, batch_of(gs)) for gs in (mixed, mixed[:1]))
    assert metrics['actor/pg_loss'] == pytest.approx(share * alone['actor/pg_loss'], rel=1e-5)
    assert_close(gradient(state), jax.tree.map(lambda x: share * x, gradient(alone_state)), 1e-5)


@pytest.mark.slow
def test_behaviour_and_proximal_anchor_agree_where_alpha_is_the_policy(learner, policy, groups):
    """Two optimizer steps: for the second, the anchor is still the policy before the first."""
    a, b = (update(learner(BARE, anchor=anchor), policy, batch_of(groups)) for anchor in ('proximal', 'behaviour'))
    assert_close(jax.device_get(a[0].params), jax.device_get(b[0].params), 1e-5)
    assert a[1]['actor/updates'] == 2
    for name in ('actor/pg_loss', 'actor/grad_norm', 'actor/entropy'):
        assert a[1][name] == pytest.approx(b[1][name], rel=1e-4, abs=1e-5), name
    assert abs(a[1]['actor/ppo_kl']) > 1e-4
    assert a[1]['actor/ppo_kl'] == pytest.approx(b[1]['actor/ppo_kl'], abs=1e-5)


@pytest.mark.slow
def test_the_proximal_anchor_is_the_policy_at_the_steps_start_in_every_pass(learner, policy, groups):
    """One mini-batch, two passes: in the second the policy has moved away from the anchor."""
    _, metrics = update(learner(BARE, anchor='proximal', passes_per_batch=2), policy, batch_of(groups[:3]))
    assert metrics['actor/updates'] == 2
    assert abs(metrics['actor/ppo_kl']) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize('factor, weight', [(1.0, 1.0), (1.5, 1.5), (0.25, 0.25), (4.0, 2.0)])
def test_decoupled_is_proximal_times_the_weight_cut_at_the_cap(factor, weight, learner, policy, groups):
    """π_prox / α = `factor` on every token; the cap is 2."""
    older = with_responses(groups[:3], lambda r: dataclasses.replace(r, logp=r.logp - np.float32(np.log(factor))))
    state, metrics = update(learner(BARE, anchor='decoupled', importance_cap=2.0), policy, batch_of(older))
    want_state, want = update(learner(BARE, anchor='proximal'), policy, batch_of(older))
    assert metrics['actor/pg_loss'] == pytest.approx(weight * want['actor/pg_loss'], rel=1e-4)
    assert_close(gradient(state), jax.tree.map(lambda x: weight * x, gradient(want_state)), 2e-5)


@pytest.mark.slow
def test_the_reference_kl_uses_the_reference(learner, policy, groups):
    """Nothing to learn but closeness: no gradient at the reference itself, and the divergence from another one falls."""
    pull = learner(BARE, kl_target='reference', kl_coef=1.0)
    batch = batch_of(with_right(groups[:3], 0))
    _, at_home = update(pull, policy, batch, reference=policy.params)
    assert at_home['actor/kl_loss'] == pytest.approx(0, abs=1e-6)
    assert at_home['actor/grad_norm'] < 1e-4
    other = jax.tree.map(lambda x: 1.1 * x, policy.params)
    state, away = update(pull, policy, batch, reference=other)
    assert away['actor/kl_loss'] > 1e-2
    assert away['actor/grad_norm'] > 1e-2
    for _ in range(5):
        state, later = pull.update(state, batch, np.random.default_rng(0), other)
    assert later['actor/kl_loss'] < 0.99 * away['actor/kl_loss']


def test_the_reference_kl_needs_a_reference(learner, policy, groups):
    with pytest.raises((ValueError, TypeError)):
        update(learner(BARE, kl_target='reference', kl_coef=1.0), policy, batch_of(groups[:3]), reference=None)


@pytest.mark.slow
def test_the_entropy_coefficient_raises_the_entropy(learner, policy, groups):
    flat = learner(BARE, entropy_coef=0.1)
    batch = batch_of(with_right(groups[:3], 0))
    state, first = update(flat, policy, batch)
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
            for row, (r, a) in enumerate(zip(g.responses, group_advantage(g.rewards[None], 'group_std')[0])):
                n = len(g.prompt.tokens)
                total += a * float(logp[row, n : n + len(r.tokens)].sum())
        return total

    state, _ = update(learner(BARE), policy, batch_of(groups))
    assert preference(state.params) > preference(policy.params) + 1e-2


def test_a_batch_without_groups_changes_nothing(learner, policy):
    state, metrics = update(learner(BARE), policy, Batch((), ()))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), policy.params)
    assert optax.tree.get(state.opt_state, 'mu') is not None and largest(gradient(state)) == 0
    assert not [name for name in metrics if name in ('actor/pg_loss', 'actor/grad_norm')]


def test_a_gradient_that_is_not_finite_is_an_error(learner, policy, groups):
    params = jax.tree.map(np.copy, policy.params)
    params['norm']['scale'][0] = np.nan
    with pytest.raises(FloatingPointError, match='gradient.*not finite.*learner.learning_rate'):
        update(learner(BARE), policy, batch_of(groups[:3]), params=params)


def test_a_copy_survives_the_update_that_its_original_does_not(learner, policy, groups):
    state = learner(BARE).init(copy_params(policy.params))
    alpha = copy_params(state.params)
    donated = jax.tree.leaves(state.params)
    state, _ = learner(BARE).update(state, batch_of(groups[:3]), np.random.default_rng(0))
    assert all(x.is_deleted() for x in donated)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(alpha), policy.params)
    engine = JaxEngine(policy.graph, STOP_TOKENS, rows=32)
    engine.load(alpha, 0)
    again = engine.generate([g.prompt for g in groups], 4, Sampling(1.0, 10), [Draw(0, 0, FRESH)] * len(groups))
    for group, responses in zip(groups, again, strict=True):
        assert isinstance(group, Group)
        for r, s in zip(group.responses, responses, strict=True):
            np.testing.assert_array_equal(r.tokens, s.tokens)


def test_warm_up_and_the_learning_rate_reported(policy):
    config = default_config().learner
    config.update({**BARE, 'learning_rate': 1e-3, 'warmup_updates': 4})
    rate = Learner(policy.graph, config, 1.0, make_mesh(1, 1, 1), 'xla').learning_rate
    np.testing.assert_allclose([rate(i) for i in (0, 2, 4, 100)], [0, 5e-4, 1e-3, 1e-3], rtol=1e-6)
