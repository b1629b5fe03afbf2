"""The learner: the order of work on a batch, which policies it scores, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from group_builders import graded, masked
from jax.sharding import AbstractMesh
from learners import (
    BARE,
    FULL,
    assert_same_update,
    batch_of,
    gradient,
    largest,
    learner_config,
    make_learner,
    unscored,
    updated,
    with_responses,
    with_right,
)  # fmt: skip
from tiny import STOP_TOKENS

from bapo_jax.cluster.mesh import MESH_AXES, make_mesh
from bapo_jax.groups import Batch, Group, make_batch
from bapo_jax.learner.credit import group_advantages
from bapo_jax.learner.build import choose_kernel
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.objective import PROXIMAL, ROLLOUT
from bapo_jax.learner.packing import cut
from bapo_jax.models import kernels
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits
from bapo_jax.run.state import copy_params


def test_the_order_of_groups_in_a_mini_batch_changes_nothing(learner, policy, stale):
    batch = batch_of(stale)
    backwards = batch.take(range(len(batch.groups))[::-1])
    assert_same_update(
        updated(learner(FULL), policy, backwards, seed=1), updated(learner(FULL), policy, batch, seed=0), policy
    )


def test_the_probe_scores_the_policy_as_servers_have_it(learner, policy, groups):
    config = learner_config(**BARE)
    config.model.path, config.rollout.max_prompt_tokens, config.rollout.dtype = str(policy.path), 6, 'bfloat16'
    ships_rounded, batch = Learner(config, policy.config, make_mesh(1, 1, 1), 'xla'), batch_of(groups)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), policy.params)
    behaviour, as_served = ships_rounded.logprobs(ROLLOUT, policy.params, batch)
    np.testing.assert_array_equal(as_served, learner(BARE).logprobs(ROLLOUT, rounded, batch)[1])
    _, exact = learner(BARE).logprobs(ROLLOUT, policy.params, batch)
    np.testing.assert_array_equal(ships_rounded.logprobs(PROXIMAL, policy.params, batch)[1], exact)
    assert np.abs(as_served - exact).max() > 1e-4 and len(behaviour) == len(exact)


def test_rows_have_no_more_sequences_than_the_kernel_takes(learner, groups, monkeypatch):
    def most():
        return max(part.layout.segment.max() for part in learner(FULL)._cut(batch_of(groups), np.arange(len(groups))))

    assert most() > 1
    monkeypatch.setitem(kernels.KERNELS, 'xla', kernels.KERNELS['xla']._replace(most_segments=1))
    assert most() == 1


@pytest.mark.parametrize('rows, refused', [(4 * 255, False), (4 * 256, True)])
def test_the_kernel_is_asked_for_the_rows_of_one_device(rows, refused, policy):
    """cuDNN counts 2^31 - 1 numbers: of 2^15 tokens with 2 heads of 128 on a device, 255 rows."""
    config = learner_config(row_tokens=2**15, micro_batch_rows=rows)
    config.model.attention = 'cudnn'
    model = dataclasses.replace(policy.config, dtype='bfloat16', num_heads=4, num_kv_heads=2, head_dim=128)
    mesh = AbstractMesh((2, 2, 2), MESH_AXES)
    if refused:
        with pytest.raises(ValueError, match='256 rows of 32768 tokens per device exceed; lower learner.micro_batch_rows to 255 per device'):
            choose_kernel(config, model, mesh, 'gpu')
    else:
        assert choose_kernel(config, model, mesh, 'gpu') == 'cudnn'


@pytest.mark.slow
def test_the_proximal_anchor_is_the_policy_at_the_steps_start_in_every_pass(learner, policy, groups):
    """One mini-batch, two passes: in the second the policy has moved away from the anchor."""
    _, metrics = updated(learner(BARE, anchor='proximal', passes_per_batch=2), policy, batch_of(groups[:3]))
    assert metrics['actor/updates'] == 2
    assert abs(metrics['actor/ppo_kl']) > 1e-4


@pytest.mark.slow
def test_the_reference_kl_uses_the_reference(learner, policy, groups):
    """Nothing to learn but closeness: no gradient at the reference itself, and the divergence from another one falls."""
    pull = learner(BARE, kl_target='reference', kl_coef=1.0)
    batch = batch_of(with_right(groups[:3], 0))
    _, at_home = updated(pull, policy, batch, policies={'reference': policy.params})
    assert at_home['actor/kl_loss'] == pytest.approx(0, abs=1e-6)
    assert at_home['actor/grad_norm'] < 1e-4
    other = jax.tree.map(lambda x: 1.1 * x, policy.params)
    state, away = updated(pull, policy, batch, policies={'reference': other})
    assert away['actor/kl_loss'] > 1e-2
    assert away['actor/grad_norm'] > 1e-2
    for _ in range(5):
        state, later = pull.update(state, batch, np.random.default_rng(0), {'reference': other})
    assert later['actor/kl_loss'] < 0.99 * away['actor/kl_loss']


def test_the_reference_kl_needs_a_reference(learner, policy, groups):
    with pytest.raises(ValueError, match="the role 'reference', and no such policy was given"):
        updated(learner(BARE, kl_target='reference', kl_coef=1.0), policy, batch_of(groups[:3]))


def test_a_batch_without_groups_changes_nothing(learner, policy):
    state, metrics = updated(learner(BARE), policy, make_batch([], []))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), policy.params)
    assert optax.tree.get(state.opt_state, 'mu') is not None and largest(gradient(state)) == 0
    assert not [name for name in metrics if name in ('actor/pg_loss', 'actor/grad_norm')]


def test_a_copy_survives_the_update_that_its_original_does_not(learner, policy, groups):
    state = learner(BARE).init(copy_params(policy.params))
    alpha = copy_params(state.params)
    donated = jax.tree.leaves(state.params)
    state, _ = learner(BARE).update(state, batch_of(groups[:3]), np.random.default_rng(0))
    assert all(x.is_deleted() for x in donated)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(alpha), policy.params)
    engine = JaxEngine(policy.graph, policy.config, STOP_TOKENS, Limits(32, 16))
    engine.load(alpha, 0)
    again = engine.generate([g.prompt for g in groups], 4, Sampling(1.0, 10), [Draw(0, 0, FRESH)] * len(groups))
    for group, responses in zip(groups, again, strict=True):
        assert isinstance(group, Group)
        for r, s in zip(group.responses, responses, strict=True):
            np.testing.assert_array_equal(r.tokens, s.tokens)


def test_the_learning_rate_reported_is_that_of_the_last_optimizer_step(policy, groups):
    learner = make_learner(policy, BARE, learning_rate=1e-3, schedule__kind='linear', schedule__decay_updates=4)
    _, metrics = updated(learner, policy, batch_of(groups))
    assert metrics['actor/updates'] == 2 and metrics['actor/lr'] == pytest.approx(1e-3 * (1 - 0.9 / 4))


def test_logprobs_are_those_of_the_policy_that_answered_in_the_order_of_the_batch(learner, policy, groups):
    served, trained = learner(BARE).logprobs('rollout', policy.params, batch_of(groups))
    np.testing.assert_array_equal(served, np.concatenate([r.logp for g in groups for r in g.responses]))
    assert trained.dtype == served.dtype == np.float32
    np.testing.assert_allclose(trained, served, rtol=0, atol=2e-5)  # they were sampled at temperature 1 from the same weights
    assert np.ptp(served) > 1


def test_scores_are_by_group_whatever_the_mini_batches(learner, policy, stale):
    batch, order = batch_of(stale), np.array([3, 0, 5, 1, 4, 2])
    config = learner_config(**BARE).learner
    scored = [learner(BARE).score('proximal', policy.params, cut(batch, o, config)) for o in (np.arange(6), order)]
    for group, a, b in zip(stale, *scored, strict=True):
        assert [len(x) for x in a] == [len(r.tokens) for r in group.responses]
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)


NAME = 'reference_at_1'  # at temperature 1


def test_what_the_reference_says_of_a_response_is_computed_once(learner, policy, groups, monkeypatch):
    """A replayed group keeps its first scores, those of its first batch bit for bit, and only what is new is scored."""
    pull = learner(BARE, kl_target='reference', kl_coef=1.0)
    asked, scoring = [], Learner.score
    monkeypatch.setattr(
        Learner, 'score',
        lambda self, role, params, parts: asked.append(sum(len(p.indices) for p in parts)) or scoring(self, role, params, parts),
    )  # fmt: skip
    batch, state = unscored(batch_of(groups)), pull.init(copy_params(policy.params))
    reference = {'reference': jax.tree.map(lambda x: 1.1 * x, policy.params)}

    def update(state, groups):
        return pull.update(state, batch_of(groups), np.random.default_rng(0), reference)[0]

    state = update(state, batch.groups[:4])
    kept = [r.scored[NAME] for g in batch.groups[:4] for r in g.responses]
    want = pull.score_batch('reference', reference['reference'], batch_of(batch.groups))
    asked.clear()
    state = update(state, batch.groups[1:])  # three of them for the second time
    assert asked == [2]
    update(state, batch.groups)
    assert asked == [2]
    first, *others = batch.groups[0].responses
    half = dataclasses.replace(batch.groups[0], responses=(dataclasses.replace(first, scored={}), *others))
    update(pull.init(copy_params(policy.params)), [half])  # one response is new: the others keep theirs
    assert asked == [2, 1] and half.responses[1].scored[NAME] is others[0].scored[NAME]
    assert all(a is r.scored[NAME] for a, r in zip(kept, [r for g in batch.groups[:4] for r in g.responses], strict=True))
    for group, of_group in zip(batch.groups, want, strict=True):
        for response, logp in zip(group.responses, of_group, strict=True):
            np.testing.assert_allclose(response.scored[NAME], logp, rtol=0, atol=2e-5)
            assert response.scored[NAME].base is None  # not a view that keeps a whole mini-batch


def test_a_reference_that_a_switch_replaces_is_asked_every_time(learner, policy, groups, monkeypatch):
    asked, scoring = [], Learner.score
    monkeypatch.setattr(Learner, 'score', lambda self, role, *rest: asked.append(role) or scoring(self, role, *rest))
    pull = learner(BARE, kl_target='reference', kl_coef=1.0, switch_step=5)
    batch, state = unscored(batch_of(groups[:3])), pull.init(copy_params(policy.params))
    for step in (5, 6):
        state, _ = pull.update(state, batch, np.random.default_rng(0), {'reference': policy.params}, step)
    assert asked == ['reference'] * 2 and not any(r.scored for g in batch.groups for r in g.responses)


@pytest.mark.slow
def test_every_policy_that_the_objective_reads_scores_the_batch_once_before_the_first_update(policy, groups, monkeypatch):
    events = []
    scoring, updating = Learner.score, Learner.update_policy
    monkeypatch.setattr(Learner, 'score', lambda self, role, *rest: events.append(role) or scoring(self, role, *rest))
    monkeypatch.setattr(Learner, 'update_policy', lambda self, *rest: events.append('updates') or updating(self, *rest))
    learner = make_learner(policy, BARE, anchor='decoupled', kl_target='reference', kl_coef=0.1, passes_per_batch=2)
    updated(learner, policy, batch_of(groups), policies={'reference': policy.params})
    assert events == ['proximal', 'reference', 'updates']
    events.clear()
    updated(make_learner(policy, BARE), policy, batch_of(groups))
    assert events == ['updates']  # the behaviour policy's log-probs are stored with the responses


def partly(groups):
    """(groups of whose responses every second token is not the policy's own, the same with other log-probs there)"""

    def with_others(logp):
        return with_responses(groups, lambda r: masked(r, np.arange(len(r.tokens)) % 2 == 0, logp(r)))

    return with_others(lambda r: None), with_others(lambda r: np.full(len(r.tokens), -50, np.float32))


@pytest.mark.parametrize('changes', [{}, {'anchor': 'decoupled', 'kl_target': 'behaviour', 'kl_coef': 0.1}])
def test_tokens_that_are_not_the_policys_own_teach_nothing(changes, learner, policy, stale):
    """Their log-probs do not matter, and the token mean counts the others alone."""
    plain, noisy = partly(stale[:3])
    (state, metrics), (want_state, want) = (updated(learner(BARE, **changes), policy, batch_of(gs)) for gs in (noisy, plain))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), jax.device_get(want_state.params))
    learned, wanted = ({n: v for n, v in row.items() if not n.startswith(('timing_s/', 'perf/'))} for row in (metrics, want))
    assert learned == wanted
    everything = updated(learner(BARE, **changes), policy, batch_of(stale[:3]))[1]
    assert abs(metrics['actor/pg_loss'] - everything['actor/pg_loss']) > 1e-4


def test_masked_tokens_count_neither_in_the_loss_nor_in_its_denominator(learner, policy, groups):
    """ρ = 1: the token mean is -Σ n_i A_i / Σ n_i over the n_i tokens of response i that are trained on."""
    plain, _ = partly(groups[:3])
    _, metrics = updated(learner(BARE), policy, batch_of(plain))
    lengths = np.array([[r.trained_on.sum() for r in g.responses] for g in plain])
    advantage = np.stack(group_advantages(batch_of(plain), 'group_std'))
    assert (lengths < [[len(r.tokens) for r in g.responses] for g in plain]).any()
    assert metrics['actor/pg_loss'] == pytest.approx(-(lengths * advantage).sum() / lengths.sum(), abs=2e-5)
    assert 3.0 < metrics['actor/entropy'] < np.log(96)


def test_rewards_and_normalisation_groups_reach_the_update(learner, policy, groups):
    """ρ = 1, so the loss is the token mean of -A: of fractions, and of two groups that are normalised together."""
    shaped = [graded(g.prompt, g.responses, g.verdicts, rewards=[1, 0.5, 0.25, 0]) for g in groups[:3]]
    together = Batch(tuple(groups[:3]), ('x1',) * 3, tuple(np.full(4, i, np.int32) for i in (9, 9, 2)))
    lengths = np.array([[len(r.tokens) for r in g.responses] for g in groups[:3]])
    losses = []
    for batch in (batch_of(shaped), together, batch_of(groups[:3])):
        _, metrics = updated(learner(BARE), policy, batch)
        want = -(lengths * np.stack(group_advantages(batch, 'group_std'))).sum() / lengths.sum()
        assert metrics['actor/pg_loss'] == pytest.approx(want, abs=2e-5)
        losses.append(want)
    assert np.abs(np.diff(losses)).min() > 1e-3


def test_the_shapes_are_those_of_the_state_that_is_trained(learner, policy):
    state, shapes = learner(BARE).init(copy_params(policy.params)), learner(BARE).shapes()
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    for array, shape in zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (shape.shape, shape.dtype, shape.sharding)


def test_theta_0_is_read_from_the_models_files(learner, policy):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(learner(BARE).read_initial()), policy.params)
