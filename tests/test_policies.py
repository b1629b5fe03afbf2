"""A policy in files: which kind a directory is, whose weights are read, and what is no policy."""

import json

import jax
import numpy as np
import pytest
from stored_runs import make_run

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.models import hf
from bapo_jax.policies import HUGGING_FACE, PUBLISHED, RUN, find_policy
from bapo_jax.weights.publish import publish


@pytest.fixture(scope='module')
def stored(make_policy, tmp_path_factory):
    """(the base, a run that started from it, its newest θ, which it also published)"""
    base = make_policy(vocab_size=300)
    return base, *make_run(base, tmp_path_factory.mktemp('stored'))


def same(read, want):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(read), want)


@pytest.mark.parametrize(('place', 'kind'), [('.', RUN), ('policy/000007', PUBLISHED)])
def test_a_run_is_theta_of_its_newest_checkpoint_and_so_is_what_it_published(stored, place, kind):
    base, run, theta = stored
    policy = find_policy(run / place)
    assert (policy.kind, policy.step, policy.run_config) == (kind, 7, json.loads((run / 'config.json').read_text()))
    assert hf.read_config(policy.base) == base.config
    policy.check(base.config)
    same(policy.params(base.config, base.path, make_mesh(1, 1, 1)), theta)
    same(dict(policy.tensors(base.config, base.path)), dict(hf.to_hf(base.config, theta)))


def test_a_hugging_face_directory_is_a_policy_that_no_run_trained_and_its_own_base(stored):
    base, *_ = stored
    policy = find_policy(base.path)
    assert (policy.kind, policy.step, policy.run_config, policy.base) == (HUGGING_FACE, 0, None, base.path)
    same(policy.params(base.config, base.path, make_mesh(1, 1, 1)), base.params)


def test_a_policy_published_in_bfloat16_is_read_as_what_was_published(policy, tmp_path):
    published = find_policy(publish(tmp_path, 7, policy.params, policy.config, 'bfloat16'))
    assert (published.kind, published.step, published.run_config, published.base) == (PUBLISHED, 7, None, None)
    params = published.params(policy.config, policy.path, make_mesh(1, 1, 1))
    tensors, read = (dict(hf.to_hf(policy.config, p)) for p in (policy.params, params))
    for name, tensor in tensors.items():
        np.testing.assert_allclose(read[name], tensor, rtol=2**-8)
    assert any((read[name] != tensors[name]).any() for name in tensors)


def test_what_is_no_policy_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match='is not a directory; give a run, a published policy, a Hugging Face'):
        find_policy(tmp_path / 'none')
    (tmp_path / 'checkpoints').mkdir()
    with pytest.raises(FileNotFoundError, match='checkpoints holds no complete checkpoint'):
        find_policy(tmp_path)


def test_where_nothing_lies_it_says_what_could(tmp_path):
    with pytest.raises(FileNotFoundError, match='give a run, a published policy, a Hugging Face directory or an adapter'):
        find_policy(tmp_path / 'nowhere')
    (tmp_path / 'checkpoints').mkdir()
    with pytest.raises(FileNotFoundError, match='checkpoints holds no complete checkpoint'):
        find_policy(tmp_path)
