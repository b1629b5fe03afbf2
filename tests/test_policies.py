"""A policy is found wherever it lies; what it says of itself. Its tensors and refusals: test_export.py and test_evaluate.py."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learners import BARE, make_learner

from bapo_jax.models import hf
from bapo_jax.parallel import make_mesh
from bapo_jax.policies import HUGGING_FACE, PUBLISHED, RUN, find_policy
from bapo_jax.rollout.publish import publish
from bapo_jax.run.checkpoint import Checkpoints, RunState, copy_params


@pytest.fixture(scope='module')
def stored(policy, tmp_path_factory):
    """(where each kind lies, θ): the run's α is another policy than its θ."""
    run = tmp_path_factory.mktemp('run')
    (run / 'config.json').write_text(json.dumps({'model': {'path': str(policy.path)}}))
    theta = jax.tree.map(lambda x: jnp.asarray(x * np.float32(1.5)), policy.params)
    checkpoints = Checkpoints(run / 'checkpoints', keep=1)
    checkpoints.save(RunState(make_learner(policy, BARE).init(theta), copy_params(policy.params), step=4), {'x': np.zeros(1)}, '')
    checkpoints.close()
    theta = jax.device_get(theta)
    return {RUN: run, PUBLISHED: publish(run / 'policy', 3, theta, policy.config, 'float32'), HUGGING_FACE: policy.path}, theta


@pytest.mark.parametrize('kind, step, of_run', [(RUN, 4, True), (PUBLISHED, 3, True), (HUGGING_FACE, 0, False)])
def test_each_kind_is_found_and_read_as_theta(kind, step, of_run, stored, policy):
    directories, theta = stored
    found = find_policy(directories[kind])
    assert (found.kind, found.step, found.base) == (kind, step, policy.path)
    assert (found.run_config is not None) == of_run
    found.check(policy.config)
    want = theta if of_run else policy.params
    params = found.params(policy.config, make_mesh(1, 1, 1))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), want)
    tensors, expected = dict(found.tensors(policy.config)), dict(hf.to_hf(policy.config, want))
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(tensors[name], tensor, err_msg=name)


def test_where_nothing_lies_it_says_what_could(tmp_path):
    with pytest.raises(FileNotFoundError, match='give a run, a published policy or a Hugging Face directory'):
        find_policy(tmp_path / 'nowhere')
    (tmp_path / 'checkpoints').mkdir()
    with pytest.raises(FileNotFoundError, match='checkpoints holds no complete checkpoint'):
        find_policy(tmp_path)
