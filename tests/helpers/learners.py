"""Learners of the tiny policies, what they are given, and how two of their updates are compared."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from group_builders import graded, right, with_logp

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.config import default_config
from bapo_jax.groups import make_batch, unscored as unscored_group
from bapo_jax.learner.learner import Learner
from bapo_jax.run.state import copy_params

FULL = {
    'mini_batch_groups': 6, 'row_tokens': 32, 'micro_batch_rows': 2, 'learning_rate': 1e-4, 'grad_clip': 1e3,
    'kl_coef': 0.1, 'entropy_coef': 0.01,
}  # fmt: skip
# The policy-gradient term alone.
BARE = {
    **FULL, 'mini_batch_groups': 3, 'micro_batch_rows': 8, 'kl_target': 'none', 'kl_coef': 0.0, 'entropy_coef': 0.0,
    'weight_decay': 0.0,
}  # fmt: skip


def learner_config(**changes):
    """The default config with these fields of its learner."""
    config = default_config()
    config.learner.update_from_flattened_dict({name.replace('__', '.'): value for name, value in changes.items()})
    return config


def make_learner(policy, base, **changes):
    """The Learner of a config and changes to it, on one device; compiled once."""
    return _learner(policy.config, str(policy.path), tuple({**base, **changes}.items()))


@functools.cache
def _learner(model, path, fields):
    fields = dict(fields)
    prompt_tokens = fields.pop('max_prompt_tokens', 6)
    config = learner_config(**fields)
    config.model.path, config.rollout.max_prompt_tokens = path, prompt_tokens
    return Learner(config, model, make_mesh(1, 1, 1), 'xla')


def batch_of(groups, origins=('x1', 'x2', 'x3')):
    return make_batch(groups, [origins[i % len(origins)] for i in range(len(groups))])


def with_responses(groups, change):
    """The groups with `change(response)` in place of every response."""
    return [dataclasses.replace(g, responses=tuple(map(change, g.responses))) for g in groups]


def with_right(groups, k):
    """The groups with their first k responses correct."""
    return [graded(g.prompt, g.responses, right(k, g.size), g.step) for g in groups]


def make_stale(groups):
    """The groups as if an older policy had sampled them: other log-probs, ratios on both sides of the trust region."""
    rng = np.random.default_rng(0)
    return with_responses(
        groups, lambda r: with_logp(r, r.logp + rng.normal(0, 0.3, len(r.logp)).astype(np.float32))
    )


def unscored(batch):
    """The batch as if no policy had scored it yet: tests share groups, and give them references of their own."""
    return dataclasses.replace(batch, groups=tuple(map(unscored_group, batch.groups)))


def updated(learner, policy, batch, seed=0, policies=None, params=None):
    """(state, metrics) after one update of the policy, or of `params`, on the batch as if it were new."""
    state = learner.init(copy_params(policy.params if params is None else params))
    return learner.update(state, unscored(batch), np.random.default_rng(seed), policies)


def gradient(state):
    """A tenth of it: Adam's first moment after one step without clipping."""
    return jax.device_get(optax.tree.get(state.opt_state, 'mu'))


def largest(tree):
    return max(float(np.abs(x).max()) for x in jax.tree.leaves(tree))


def assert_close(a, b, tolerance):
    """Within `tolerance` of the largest entry of all of `b`."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest(b)), a, b)


def assert_same_metrics(a, b):
    assert a.keys() == b.keys()
    for name in (n for n in a if not n.startswith(('timing_s/', 'perf/'))):
        assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-5), name


def assert_same_update(a, b, policy):
    (state, metrics), (want_state, want_metrics) = a, b
    assert_close(gradient(state), gradient(want_state), 1e-5)
    assert_close(jax.device_get(state.params), jax.device_get(want_state.params), 1e-6)
    moved = jax.tree.map(lambda x, y: x - y, jax.device_get(want_state.params), policy.params)
    assert largest(moved) > 5e-5  # the step was one
    assert_same_metrics(metrics, want_metrics)
