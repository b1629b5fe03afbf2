"""A published policy comes back as it was. An incomplete one is written again, a complete one is not. Only pinned versions stay."""

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from http_stub import HttpStub

from bapo_jax.models import hf
from bapo_jax.rollout.vllm.client import VllmEngine
from bapo_jax.weights.manifest import (
    MANIFEST,
    WEIGHTS,
    RefusedPolicy,
    check_bytes,
    published_versions,
    read_manifest,
    read_tensors,
)  # fmt: skip
from bapo_jax.weights.publish import publish, remove_unneeded


@pytest.fixture(scope='module')
def policy(make_policy):
    return make_policy(tie_word_embeddings=False)


@pytest.fixture
def published(policy, tmp_path):
    return publish(tmp_path, 12, policy.params, policy.config, 'float32')


def read(path):
    manifest = read_manifest(path)
    check_bytes(path, manifest)
    return list(read_tensors(path, manifest))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_what_is_read_is_what_was_published(dtype, policy, tmp_path):
    path = publish(tmp_path, 3, policy.params, policy.config, dtype)
    assert path == tmp_path / '000003' and read_manifest(path).version == 3
    want = dict(hf.to_hf(policy.config, policy.params))
    got = dict(read(path))
    assert got.keys() == want.keys()
    for name, array in got.items():
        np.testing.assert_array_equal(array, want[name].astype({'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}[dtype]))


def test_orbax_reads_the_tensors(published, policy):
    want = dict(hf.to_hf(policy.config, policy.params))
    as_numpy = dict.fromkeys(want, ocp.RestoreArgs(restore_type=np.ndarray))
    got = ocp.PyTreeCheckpointer().restore(published / WEIGHTS, restore_args=as_numpy)
    assert got.keys() == want.keys()
    for name, array in got.items():
        np.testing.assert_array_equal(array, want[name])


def test_tensors_come_layer_by_layer(published, policy):
    names = [name for name, _ in read(published)]
    layers = [int(name.split('.')[2]) for name in names if '.layers.' in name]
    assert layers == sorted(layers) and len(set(layers)) == policy.config.num_layers
    assert names[0] == 'model.embed_tokens.weight' and set(names[-2:]) == {'model.norm.weight', 'lm_head.weight'}


def test_without_its_manifest_a_policy_is_not_there_and_is_published_again(policy, published, tmp_path):
    (published / MANIFEST).unlink()
    assert list(published_versions(tmp_path)) == []
    with pytest.raises(RefusedPolicy, match=r'manifest\.json is missing, so no complete policy'):
        read(published)
    (published / 'left over').write_text('')
    publish(tmp_path, 12, policy.params, policy.config, 'float32')
    assert len(read(published)) == len(hf.layout(policy.config))
    assert not (published / 'left over').exists()


def files(directory):
    """What tells that a file was written again."""
    return {file: (file.stat().st_mtime_ns, file.stat().st_ino) for file in directory.rglob('*')}


def test_a_version_that_is_complete_is_not_written_again(policy, published, tmp_path):
    before = files(tmp_path)
    assert publish(tmp_path, 12, policy.params, policy.config, 'float32') == published
    assert files(tmp_path) == before


def test_an_evaluation_between_two_syncs_writes_each_policy_once(policy, tmp_path):
    """The engine goes α → θ → α, and to the same θ again where hard prompts follow the evaluation."""

    def answer(path, headers, body):
        if path != '/collective_rpc':
            return 200, {'success': True, 'data': [{'max_model_len': 512}]}
        manifest = read_manifest(body['kwargs']['path'])
        return 200, {'results': [{'version': manifest.version, 'checksum': manifest.checksum}]}

    server = HttpStub(answer)
    engine = VllmEngine(
        [server.url], tmp_path, policy.config, token='a token', dtype='float32', stop_tokens=(3,), concurrency=1, deadline_s=20.0
    )
    written = []
    for version in (4, 6, 4, 6, 4):
        engine.load(policy.params, version)
        written.append(files(tmp_path))
    engine.close()
    server.stop()
    assert written[0].items() <= written[1].items() and written[1] == written[2] == written[3] == written[4]


def test_leftovers_of_an_interrupted_run_go(policy, published, tmp_path):
    (published / MANIFEST).unlink()
    remove_unneeded(tmp_path, ())
    assert not published.exists()


def test_only_pinned_versions_stay(policy, tmp_path):
    for version in (1, 2, 3):
        publish(tmp_path, version, policy.params, policy.config, 'float32')
    remove_unneeded(tmp_path, {1, 3})
    assert [version for version, _ in published_versions(tmp_path)] == [1, 3]
    assert not (tmp_path / '000002').exists()
