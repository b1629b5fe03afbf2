"""learner.adam.on_host: Adam's moments are in host memory between updates, and no number differs."""

import jax
import numpy as np
import optax
import pytest
from learners import BARE, batch_of, learner_config, unscored

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.learner.learner import Learner
from bapo_jax.run.opening import open_run
from bapo_jax.run.state import copy_params


def configured(policy, on_host, **changes):
    config = learner_config(**BARE | changes)
    config.model.path, config.learner.adam.on_host = str(policy.path), on_host
    return config


def learner_of(policy, config):
    config.rollout.max_prompt_tokens = 6
    return Learner(config, policy.config, make_mesh(1, 1, 1), 'xla')


def kinds(opt_state):
    """The kinds of memory that the moments are in."""
    moments = [optax.tree.get(opt_state, name) for name in ('mu', 'nu')]
    return {x.sharding.memory_kind for x in jax.tree.leaves(moments)}


def step(learner, state, groups, seed=0):
    return learner.update(state, unscored(batch_of(groups)), np.random.default_rng(seed))


@pytest.mark.parametrize('reset_every', [0, 2])
def test_updates_are_those_with_moments_on_the_device_bit_for_bit(policy, groups, reset_every):
    states = []
    for on_host in (True, False):
        learner = learner_of(policy, configured(policy, on_host, reset_every=reset_every))
        state = learner.init(copy_params(policy.params))
        wanted = {'pinned_host' if on_host else 'device'}
        assert kinds(state.opt_state) == wanted
        for number in (1, 2, 3):
            state, measured = learner.update(state, unscored(batch_of(groups)), np.random.default_rng(number), step=number)
            assert kinds(state.opt_state) == wanted and measured['actor/updates'] > 0
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state.trained)} == {'device'}
        states.append(jax.device_get(state))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_a_checkpoint_of_one_kind_of_memory_goes_on_in_the_other(policy, groups, tmp_path):
    runs = {on_host: (config := configured(policy, on_host), learner_of(policy, config)) for on_host in (True, False)}
    config, learner = runs[True]
    state, _, checkpoints = open_run(learner, config, tmp_path)
    state.theta, _ = step(learner, state.theta, groups)
    state.trained()
    checkpoints.save(state, {'empty': np.zeros(1)}, 'selector')
    checkpoints.close()
    want, _ = step(learner, state.theta, groups, seed=1)
    for on_host, (config, learner) in runs.items():
        again, _, checkpoints = open_run(learner, config, tmp_path)
        checkpoints.close()
        assert kinds(again.theta.opt_state) == {'pinned_host' if on_host else 'device'}
        got, _ = step(learner, again.theta, groups, seed=1)
        jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (got, want)))
