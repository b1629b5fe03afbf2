"""The critic: its values, its loss and its step on real groups of a tiny policy, and what the policy makes of its advantages.

Tolerances, float32: values 1e-5; gradients 1e-5 of the largest entry of all; parameters after a step 1e-6 of the largest.
A gradient is read from Adam's first moment, which after one step is a tenth of it (it is never clipped here).
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from group_builders import masked
from learners import assert_close, batch_of, gradient, largest

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.config import default_config
from bapo_jax.groups import make_batch
from bapo_jax.learner import credit
from bapo_jax.learner.critic import CRITIC, pack_targets, token_values, value_loss, value_metrics
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.logprobs import Compute, hidden_states
from bapo_jax.learner.mini_batch import Sequences
from bapo_jax.learner.packing import cut
from bapo_jax.learner.sums import means
from bapo_jax.models import hf
from bapo_jax.run.state import copy_params

PPO = {
    'advantage': 'gae', 'anchor': 'behaviour', 'kl_target': 'none', 'entropy_coef': 0.0, 'weight_decay': 0.0,
    'mini_batch_groups': 6, 'row_tokens': 32, 'micro_batch_rows': 2, 'learning_rate': 1e-4, 'grad_clip': 1e3,
}  # fmt: skip


def make_learner(policy, critic=None, **changes):
    config = default_config()
    config.model.path = str(policy.path)
    config.learner.update({**PPO, **changes})
    config.critic.update({'learning_rate': 1e-3, **(critic or {})})
    return Learner(config, policy.config, make_mesh(1, 1, 1), 'xla')


ALONE = {'warmup_steps': 1}  # the first step is the critic's alone


@pytest.fixture(scope='module')
def learner(policy):
    return make_learner(policy)


@pytest.fixture(scope='module')
def alone(policy):
    return make_learner(policy, ALONE)


def partly(groups):
    """The groups with a loss mask on every second response: its first token, and the last where there are three, another wrote."""

    def mask(i, r):
        own = np.ones(len(r.tokens), bool)
        own[0], own[2:][-1:] = len(own) == 1, False
        return masked(r, own) if i % 2 else r

    return [dataclasses.replace(g, responses=tuple(mask(i, r) for i, r in enumerate(g.responses))) for g in groups]


def updated(learner, policy, batch, step=1, head=None):
    """(state, metrics) after one update; `head` are other weights of the value head."""
    state = learner.init(copy_params(policy.params))
    if head is not None:
        state = with_head(state, head)
    return learner.update(state, batch, np.random.default_rng(0), None, step)


def with_head(state, head):
    params = {**copy_params(state.critic.params), 'value': {'kernel': jax.numpy.asarray(head)}}
    return state._replace(critic=state.critic._replace(trained=params))


@pytest.fixture(scope='module')
def head(policy):
    """Weights that give values of order 1."""
    return np.random.default_rng(3).normal(0, 0.1, (policy.config.hidden_size, 1)).astype(np.float32)


@functools.partial(jax.jit, static_argnames='graph')
def hidden(graph, params, tokens, position):
    """[1, T, D]; what follows the sequence does not matter to it."""
    sequences = Sequences(tokens, *[jax.numpy.ones_like(position)] * 3)._replace(position=position)
    return hidden_states(nnx.merge(graph, params), sequences)[0]


def states_before_tokens(policy, sequence):
    """Hidden states [T, D] of a critic that starts from the policy; row t is the state before token t, from 1 on."""
    position = np.arange(32, dtype=np.int32)[None]
    tokens = np.zeros_like(position)
    tokens[0, : len(sequence)] = sequence
    states = np.asarray(hidden(policy.graph, policy.params, tokens, position)[0], np.float64)
    return np.concatenate([np.zeros_like(states[:1]), states])[: len(sequence)]


def by_response(policy, groups, head):
    """Values of each response's tokens, one sequence at a time."""
    return [
        [
            (states_before_tokens(policy, np.concatenate([g.prompt.tokens, r.tokens])) @ head)[len(g.prompt.tokens) :, 0]
            for r in g.responses
        ]
        for g in groups
    ]


def flat(by_group):
    return np.concatenate([x for of_group in by_group for x in of_group])


# ---- values


def test_the_critic_that_a_run_begins_with_is_the_policys_files(alone, policy):
    critic = alone.init(copy_params(policy.params)).critic.params
    assert not critic.pop('value')['kernel'].any()
    jax.tree.map(np.testing.assert_array_equal, critic, {k: v for k, v in policy.params.items() if k != 'head'})


@pytest.mark.slow
def test_a_critic_is_the_decoder_of_its_files_with_a_value_head_of_zero_in_place_of_the_head(make_policy, tiny_hf):
    for tied in (True, False):
        policy = make_policy(tie_word_embeddings=tied)
        model = dataclasses.replace(policy.config, value_head=True)
        params = jax.device_get(hf.load_params(policy.path, model))
        assert params.pop('value')['kernel'].tolist() == [[0.0]] * model.hidden_size
        jax.tree.map(np.testing.assert_array_equal, params, {k: v for k, v in policy.params.items() if k != 'head'})
        # What is written of it is a decoder: files and servers never hear of the value.
        assert not [name for name, _ in hf.to_hf(model, {**params, 'value': None}) if 'value' in name]
        assert jax.tree.structure(hf.init_params(model, 0)) == jax.tree.structure(hf.abstract_params(model)[1])


@pytest.mark.slow
def test_packed_values_are_those_of_the_state_before_each_token(alone, policy, groups, head):
    state, order = with_head(alone.init(copy_params(policy.params)), head), np.array([3, 0, 5, 1, 4, 2])
    scored = alone.score(CRITIC, state.critic.params, cut(batch_of(groups), order, alone._config))
    want = by_response(policy, groups, head)
    for of_group, of_group_want in zip(scored, want, strict=True):
        for value, value_want in zip(of_group, of_group_want, strict=True):
            assert value.dtype == np.float32
            np.testing.assert_allclose(value, value_want, rtol=0, atol=1e-5)
    assert flat(want).std() > 0.1


def test_a_value_knows_nothing_of_its_own_token_and_those_after(policy, head):
    model = dataclasses.replace(policy.config, value_head=True)
    critic = nnx.merge(hf.abstract_params(model)[0], {**policy.params, 'value': {'kernel': head}})
    tokens = np.arange(20, 32, dtype=np.int32)[None]
    changed = np.where(np.arange(12) < 7, tokens, tokens + 1)
    position, segment = np.arange(12, dtype=np.int32)[None], np.ones((1, 12), np.int32)
    a, b = (np.asarray(token_values(critic, Sequences(t, segment, position, position)))[0] for t in (tokens, changed))
    assert a.dtype == np.float32 and a[0] == 0
    np.testing.assert_allclose(a[:8], b[:8], rtol=0, atol=1e-6)
    assert abs(a[8] - b[8]) > 1e-4


def test_values_stay_float32_where_products_run_in_bfloat16(make_policy, head):
    policy = make_policy('bfloat16')
    critic = nnx.merge(
        hf.abstract_params(dataclasses.replace(policy.config, value_head=True))[0], {**policy.params, 'value': {'kernel': head}}
    )
    tokens = np.arange(20, 32, dtype=np.int32)[None]
    position = np.arange(12, dtype=np.int32)[None]
    value = token_values(critic, Sequences(tokens, np.ones_like(tokens), position, position), Compute(remat='full'))
    assert value.dtype == np.float32
    exact = value[0, 1:] * 2.0**8  # bfloat16 has 8 bits: such values would be multiples of small powers of two
    assert len(np.unique(np.asarray(value))) == 12 and (np.asarray(exact) != np.round(np.asarray(exact))).any()


# ---- the loss


@pytest.mark.parametrize(
    'value, old, target, loss',
    [
        (1.0, 0.8, 0.0, 0.5),  # within ½ of the old value: ½ (V - R)²
        (1.0, 0.0, 0.0, 0.5),  # too far up and wrong: the loss of V itself is the larger, and pulls it back
        (1.0, 0.0, 1.0, 0.125),  # right, but too far for one step: that of the clipped ½, and no gradient
        (-1.0, 0.0, -2.0, 1.125),  # on its way, but too far: ½ (-½ + 2)²
        (0.4, 0.0, 1.0, 0.18),
    ],
)
def test_value_loss_by_hand(value, old, target, loss):
    value, old, target = (np.full((1, 1), x, np.float32) for x in (value, old, target))
    assert float(value_loss(value, old, target, 0.5)[0, 0]) == pytest.approx(loss, abs=1e-6)


def test_the_gradient_of_the_value_loss_is_its_slope():
    """Central differences in float64 by hand; drawn values lie on a kink with probability 0, and none of these is near one."""
    rng = np.random.default_rng(0)
    value, old, target = rng.normal(0, 1, (3, 200))

    def loss(v):
        clipped = np.clip(v, old - 0.5, old + 0.5)
        return 0.5 * np.maximum((v - target) ** 2, (clipped - target) ** 2)

    h = 1e-6
    slope = (loss(value + h) - loss(value - h)) / (2 * h)
    arrays = [x.astype(np.float32)[None] for x in (value, old, target)]
    np.testing.assert_allclose(value_loss(*arrays, 0.5)[0], loss(value), rtol=1e-4, atol=1e-6)
    got = jax.grad(lambda v: value_loss(v, *arrays[1:], 0.5).sum())(arrays[0])[0]
    np.testing.assert_allclose(got, slope, rtol=0, atol=1e-4)
    assert (slope == 0).sum() > 10  # held back by the clip


@pytest.mark.slow
def test_the_steps_loss_and_gradient_by_hand(alone, policy, groups, head):
    """γ = λ = 1: R is the reward. The loss is the mean of ½ (V - R)² over trained tokens, the head's gradient that of (V - R) h."""
    groups = partly(groups)
    state, metrics = updated(alone, policy, batch_of(groups), head=head)
    loss, slope, tokens = 0.0, 0.0, 0
    for g in groups:
        for r, reward in zip(g.responses, g.rewards, strict=True):
            states = states_before_tokens(policy, np.concatenate([g.prompt.tokens, r.tokens]))[len(g.prompt.tokens) :][r.trained_on]
            error = (states @ head)[:, 0] - reward
            loss, slope, tokens = loss + 0.5 * (error**2).sum(), slope + error @ states, tokens + len(error)
    assert metrics['critic/value_loss'] == pytest.approx(loss / tokens, rel=1e-5)
    np.testing.assert_allclose(gradient(state.critic)['value']['kernel'][:, 0], 0.1 * slope / tokens, rtol=0, atol=1e-6)
    assert metrics['critic/grad_norm'] == pytest.approx(10 * float(optax.tree.norm(gradient(state.critic))), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('cut_', [{'micro_batch_rows': 16}, {'row_tokens': 64, 'micro_batch_rows': 3}])
def test_micro_batches_and_packing_change_nothing(cut_, alone, policy, groups, head):
    batch = batch_of(partly(groups))
    (a, of_a), (b, of_b) = (updated(x, policy, batch, head=head) for x in (make_learner(policy, ALONE, **cut_), alone))
    assert_close(gradient(a.critic), gradient(b.critic), 1e-5)
    assert_close(jax.device_get(a.critic.params), jax.device_get(b.critic.params), 1e-6)
    for name in (n for n in of_b if not n.startswith(('timing_s/', 'perf/'))):
        assert of_a[name] == pytest.approx(of_b[name], rel=1e-5, abs=1e-5), name


@pytest.mark.slow
def test_the_interval_is_around_the_value_before_the_first_of_the_updates(alone, policy, groups):
    """All rewards are 1 and all values go up: in the second pass every one is above a tiny interval, which holds its gradient."""
    correct = [dataclasses.replace(g, rewards=np.ones(g.size, np.float32)) for g in groups]
    _, once = updated(alone, policy, batch_of(correct))
    _, twice = updated(make_learner(policy, {**ALONE, 'value_clip': 1e-6}, passes_per_batch=2), policy, batch_of(correct))
    assert twice['critic/grad_norm'] == pytest.approx(once['critic/grad_norm'] / 2, rel=1e-5)
    assert twice['critic/value_loss'] == pytest.approx(0.5, abs=1e-5)  # ½ (0 - 1)², twice


@pytest.mark.slow
def test_it_learns_on_recorded_rollouts(alone, policy, groups):
    state, losses = alone.init(copy_params(policy.params)), []
    for _ in range(30):
        state, metrics = alone.update(state, batch_of(groups), np.random.default_rng(0))
        losses.append(metrics['critic/value_loss'])
    assert losses[-1] < 0.7 * losses[0]
    assert metrics['critic/explained_variance'] > 0.2


# ---- metrics


def test_explained_variance_by_hand():
    values, returns = [[np.array([0.5, 0.0])], [np.array([1.0, 9.0])]], [[np.array([1.0, 1.0])], [np.array([0.0, 5.0])]]
    trained = [[np.array([True, True])], [np.array([True, False])]]
    # R - V = ½, 1, -1: mean 1/6, variance (9/4)/3 - 1/36 = 26/36; R = 1, 1, 0: variance 2/9
    assert value_metrics(values, returns, trained) == {
        'critic/value_mean': pytest.approx(0.5), 'critic/explained_variance': pytest.approx(1 - (26 / 36) / (2 / 9)),
    }  # fmt: skip
    assert value_metrics(returns, returns, trained)['critic/explained_variance'] == 1
    constant = [[np.ones(2)], [np.ones(2)]]
    assert value_metrics(values, constant, trained) == {'critic/value_mean': pytest.approx(0.5)}
    assert value_metrics([], [], []) == {}


# ---- the policy beside it


@pytest.mark.slow
def test_values_of_zero_and_no_whitening_is_the_surrogate_with_the_reward_as_advantage(learner, policy, groups, monkeypatch):
    monkeypatch.setattr(credit, 'whitened', lambda advantage, trained: advantage)
    state, metrics = updated(learner, policy, batch_of(groups))
    lengths = np.array([len(r.tokens) for g in groups for r in g.responses])
    rewards = np.concatenate([g.rewards for g in groups])
    assert metrics['actor/pg_loss'] == pytest.approx(-(lengths * rewards).sum() / lengths.sum(), abs=2e-5)
    plain = make_learner(policy, advantage='group_std')
    monkeypatch.setattr(
        credit, 'advantages',
        lambda batch, kind: [[np.full(len(r.tokens), x, np.float32) for r, x in zip(g.responses, g.rewards)] for g in batch.groups],
    )  # fmt: skip
    want, want_metrics = updated(plain, policy, batch_of(groups))
    assert want.critic is None
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), jax.device_get(want.params))
    assert all(metrics[name] == value for name, value in want_metrics.items() if not name.startswith(('timing_s/', 'perf/')))


@pytest.mark.slow
def test_only_the_critic_learns_while_it_warms_up(alone, policy, groups):
    state = alone.init(copy_params(policy.params))
    before = jax.device_get(state.critic.params)
    state, metrics = alone.update(state, batch_of(groups), np.random.default_rng(0), None, 1)
    assert not [name for name in metrics if name.startswith('actor/')] and metrics['critic/value_loss'] > 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), policy.params)
    assert largest(jax.tree.map(lambda x, y: x - y, jax.device_get(state.critic.params), before)) > 0
    state, metrics = alone.update(state, batch_of(groups), np.random.default_rng(0), None, 2)
    assert metrics['actor/grad_norm'] > 0
    assert largest(jax.tree.map(lambda x, y: x - y, jax.device_get(state.params), policy.params)) > 0


@pytest.mark.slow
def test_a_batch_without_groups_changes_nothing(learner, policy):
    state, metrics = updated(learner, policy, make_batch([], []))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), policy.params)
    assert largest(gradient(state.critic)) == 0
    assert not [name for name in metrics if name.startswith('critic/')]


@pytest.mark.slow
def test_an_update_without_a_finite_gradient_is_skipped_and_counted(alone, policy, groups):
    state = alone.init(copy_params(policy.params)).critic
    before = jax.device_get(state)
    [part] = cut(batch_of(groups), np.arange(len(groups)), alone._config)
    nan = [[np.full(len(r.tokens), np.nan, np.float32) for r in g.responses] for g in groups]
    state, updates = alone.critic.train(state, [part.mini_batch(pack_targets(part, nan, nan))])
    assert means(updates, 'critic') == {'critic/skipped_updates': 1}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
