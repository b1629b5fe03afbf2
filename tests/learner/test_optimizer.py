"""The optimizer: its learning rates by hand, AdamW from its formula, and the defaults are plain clipped AdamW, bit for bit."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from learners import BARE, learner_config, make_learner

from bapo_jax.learner.optimizer import clipped_adamw, learning_rate_of, without_moments
from bapo_jax.run.state import copy_params

RATE = 1e-3


def learner_of(**changes):
    return learner_config(**{'learning_rate': RATE, **changes}).learner


def trained(optimizer, steps=12):
    """Parameters and optimizer state after each of some steps on random gradients, large and small ones."""
    rng = np.random.default_rng(0)
    params = {'a': rng.normal(size=(3, 5)).astype(np.float32), 'b': rng.normal(size=7).astype(np.float32)}

    @jax.jit
    def step(params, state, gradient):
        with jax.numpy_dtype_promotion('standard'):
            updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state, states = optimizer.init(params), []
    for i in range(steps):
        gradient = jax.tree.map(lambda x: (10.0 ** (i % 3 - 2) * rng.normal(size=x.shape)).astype(np.float32), params)
        params, state = step(params, state, gradient)
        states.append(jax.device_get((params, state)))
    return states


@pytest.mark.parametrize('warmup', [0, 4])
def test_the_defaults_are_clipped_adamw_at_a_constant_rate_after_warm_up_bit_for_bit(warmup):
    learner = learner_of(schedule__warmup_updates=warmup)
    rate = optax.linear_schedule(0.0, RATE, warmup) if warmup else optax.constant_schedule(RATE)
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))
    got, want = trained(clipped_adamw(learning_rate_of(learner), learner)), trained(plain)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    'fields, shares',
    [
        ({'schedule__kind': 'constant'}, {0: 1, 99: 1}),
        ({'schedule__kind': 'constant', 'schedule__warmup_updates': 4}, {0: 0, 1: 0.25, 4: 1, 99: 1}),
        ({'schedule__kind': 'linear'}, {0: 1, 2: 0.775, 4: 0.55, 8: 0.1, 9: 0.1, 99: 0.1}),
        ({'schedule__kind': 'linear', 'schedule__warmup_updates': 4}, {0: 0, 2: 0.5, 4: 1, 6: 0.775, 8: 0.55, 12: 0.1, 13: 0.1, 99: 0.1}),
        ({'schedule__kind': 'cosine'}, {0: 1, 2: 0.55 + 0.45 * math.sqrt(0.5), 4: 0.55, 8: 0.1, 9: 0.1, 99: 0.1}),
        ({'schedule__kind': 'cosine', 'schedule__warmup_updates': 4}, {0: 0, 3: 0.75, 4: 1, 8: 0.55, 12: 0.1, 13: 0.1, 99: 0.1}),
    ],
)
def test_the_learning_rate_at_the_start_the_end_of_warm_up_the_middle_the_end_and_after(fields, shares):
    rate = learning_rate_of(learner_of(**{'schedule__decay_updates': 8, **fields}))
    # As the metric reads it, and as the compiled step does.
    np.testing.assert_allclose([rate(i) for i in shares], RATE * np.array(list(shares.values())), rtol=1e-6, atol=1e-10)
    counts = np.array(list(shares), np.int32)
    with jax.numpy_dtype_promotion('standard'):
        traced = [jax.jit(rate)(i) for i in counts]
    np.testing.assert_allclose(traced, RATE * np.array(list(shares.values())), rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_adamw_from_its_formula_on_gradients_of_one_sign(dtype):
    """Without weight decay and clipping. Rounding m at every step changes a sum of terms of one sign by at most 2^-8 a rounding."""
    learner = learner_of(
        adam__b1=0.8, adam__b2=0.9, adam__eps=1e-3, weight_decay=0.0, grad_clip=1e9, adam__first_moment_dtype=dtype,
        schedule__kind='linear', schedule__decay_updates=4,
    )  # fmt: skip
    optimizer, rng = clipped_adamw(learning_rate_of(learner), learner), np.random.default_rng(0)
    params = np.zeros(50, np.float32)
    state, m, v, want = optimizer.init(params), np.zeros(50), np.zeros(50), np.zeros(50)
    for t in range(1, 5):
        gradient = rng.uniform(0.01, 1.0, 50).astype(np.float32)
        with jax.numpy_dtype_promotion('standard'):
            updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient.astype(np.float64) ** 2
        want -= RATE * (1 - 0.9 * (t - 1) / 4) * (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)
    np.testing.assert_allclose(params, want, rtol=1e-5 if dtype == 'float32' else 4 * 2**-8)
    moments = [np.asarray(optax.tree.get(state, name)) for name in ('mu', 'nu')]
    assert [x.dtype for x in moments] == [ml_dtypes.bfloat16 if dtype == 'bfloat16' else np.float32, np.float32]
    for moment, formula in zip(moments, (m, v), strict=True):
        np.testing.assert_allclose(moment.astype(np.float64), formula, rtol=4 * 2**-8)


def test_a_state_with_a_rounded_first_moment_has_the_shapes_it_is_restored_by(policy):
    learner = make_learner(policy, BARE, adam__first_moment_dtype='bfloat16')
    state, shapes = learner.init(copy_params(policy.params)), learner.shapes()
    for array, shape in zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (shape.shape, shape.dtype, shape.sharding)
    for name, dtype in (('mu', jnp.bfloat16), ('nu', jnp.float32)):
        assert {x.dtype for x in jax.tree.leaves(optax.tree.get(state.opt_state, name))} == {jnp.dtype(dtype)}


def test_a_vision_tower_learns_at_its_own_rate():
    params = {name: {'kernel': jnp.linspace(-1, 1, 6).reshape(2, 3)} for name in ('layers', 'vision')}
    gradient = jax.tree.map(lambda x: 0.1 + x**2, params)
    learner = learner_config(vision_rate=0.25).learner
    plain, slower = (clipped_adamw(1e-2, learner, vision) for vision in (False, True))
    with jax.numpy_dtype_promotion('standard'):
        a, b = (o.update(gradient, o.init(params), params)[0] for o in (plain, slower))
    np.testing.assert_array_equal(b['layers']['kernel'], a['layers']['kernel'])
    np.testing.assert_allclose(b['vision']['kernel'], 0.25 * a['vision']['kernel'], rtol=1e-6)


def test_adam_begins_anew_and_the_schedule_goes_on(policy):
    """The next update is that of a new optimizer at the rate that is due. Shapes and shardings stay, and the old moments go."""
    learner = learner_config(schedule__kind='linear', schedule__decay_updates=10, learning_rate=0.1, weight_decay=0.0).learner
    rate = learning_rate_of(learner)
    optimizer, params = clipped_adamw(rate, learner), {'x': jnp.linspace(1.0, 2.0, 6)}
    gradients, state = [{'x': jnp.full(6, g)} for g in (0.1, -0.2, 0.05)], optimizer.init(params)
    with jax.numpy_dtype_promotion('standard'):
        for gradient in gradients[:2]:
            _, state = optimizer.update(gradient, state, params)
        moved, anew = optax.tree.get(state, 'mu')['x'].any(), without_moments(state)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding), anew, state))
        got, _ = optimizer.update(gradients[2], anew, params)
        first, _ = clipped_adamw(1.0, learner).update(gradients[2], clipped_adamw(1.0, learner).init(params), params)
    np.testing.assert_allclose(got['x'], float(rate(2)) * first['x'], rtol=1e-6)
    assert moved and not optax.tree.get(anew, 'mu')['x'].any()
    assert all(optax.tree.get(state, name)['x'].is_deleted() for name in ('mu', 'nu'))


@pytest.mark.parametrize('every, reset_at', [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_the_learner_resets_as_often_as_it_says(policy, groups, monkeypatch, every, reset_at):
    from bapo_jax.learner import learner as module

    seen = []
    monkeypatch.setattr(module, 'without_moments', lambda state: seen.append(step) or state)
    learner = make_learner(policy, BARE, reset_every=every)
    state = learner.init(copy_params(policy.params))
    for step in (1, 2, 3, 4):
        state, _ = learner.update_policy(state, [], step)
    assert seen == reset_at
