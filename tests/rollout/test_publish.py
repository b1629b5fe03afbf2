"""A published policy comes back as it was; an incomplete one is published again; only pinned versions stay."""

import ml_dtypes
import numpy as np
import pytest

from bapo_jax.models import hf
from bapo_jax.rollout.publish import publish, remove_unneeded
from bapo_jax.rollout.published import MANIFEST, RefusedPolicy, published_versions, read_manifest, read_tensors


@pytest.fixture(scope='module')
def policy(make_policy):
    return make_policy(tie_word_embeddings=False)


@pytest.fixture
def published(policy, tmp_path):
    return publish(tmp_path, 12, policy.params, policy.config, 'float32')


def read(path):
    return read_tensors(path, read_manifest(path))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_what_is_read_is_what_was_published(dtype, policy, tmp_path):
    path = publish(tmp_path, 3, policy.params, policy.config, dtype)
    assert path == tmp_path / '000003' and read_manifest(path).version == 3
    want = dict(hf.to_hf(policy.config, policy.params))
    got = dict(read(path))
    assert got.keys() == want.keys()
    for name, array in got.items():
        np.testing.assert_array_equal(array, want[name].astype({'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}[dtype]))


def test_tensors_come_layer_by_layer(published, policy):
    names = [name for name, _ in read(published)]
    layers = [int(name.split('.')[2]) for name in names if '.layers.' in name]
    assert layers == sorted(layers) and len(set(layers)) == policy.config.num_layers
    assert names[0] == 'model.embed_tokens.weight' and set(names[-2:]) == {'model.norm.weight', 'lm_head.weight'}


def test_without_its_manifest_a_policy_is_not_there_and_is_published_again(policy, published, tmp_path):
    (published / MANIFEST).unlink()
    assert list(published_versions(tmp_path)) == []
    with pytest.raises(RefusedPolicy, match=r'manifest\.json is missing.*not complete'):
        read(published)
    (published / 'left over').write_text('')
    publish(tmp_path, 12, policy.params, policy.config, 'float32')
    assert len(read(published)) == len(hf.layout(policy.config))
    assert not (published / 'left over').exists()


def test_only_pinned_versions_stay(policy, tmp_path):
    for version in (1, 2, 3):
        publish(tmp_path, version, policy.params, policy.config, 'float32')
    remove_unneeded(tmp_path, {1, 3})
    assert [version for version, _ in published_versions(tmp_path)] == [1, 3]
    assert not (tmp_path / '000002').exists()
