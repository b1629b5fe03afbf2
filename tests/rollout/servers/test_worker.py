"""The worker's side of a policy hand-over, with a stand-in for vLLM's worker class. Real servers: test_real_server.py."""

import json
import shutil
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from bapo_jax.models import hf
from bapo_jax.models.parameters import HEAD
from bapo_jax.rollout.vllm.worker import PolicyLoader, as_torch, check_tensors, checkpoint_shapes
from bapo_jax.weights.manifest import MANIFEST, WEIGHTS, RefusedPolicy, read_manifest, read_tensors
from bapo_jax.weights.publish import publish


class Worker(PolicyLoader):
    """Holds what vLLM's worker has of a model, and the weights that it was given."""

    def __init__(self, directory, rank=0, of=1):
        self.model_config = SimpleNamespace(hf_config=AutoConfig.from_pretrained(directory), model=str(directory))
        self.rank, self.parallel_config, self.model_runner = rank, SimpleNamespace(world_size=of), 'a model'
        self.weights = {}

    def reload_weights(self, weights_iterator):
        self.weights = {name: tensor.clone() for name, tensor in weights_iterator}


@pytest.fixture(scope='module')
def policy(make_policy):
    return make_policy(tie_word_embeddings=False)


@pytest.fixture
def published(policy, tmp_path):
    return publish(tmp_path, 12, policy.params, policy.config, 'bfloat16')


def test_a_sound_policy_is_checked_loaded_and_named(policy, published):
    worker = Worker(policy.path)
    sound = {'version': 12, 'checksum': read_manifest(published).checksum}
    assert worker.check_policy(str(published)) == sound and worker.weights == {}
    assert worker.load_policy(str(published)) == sound
    want = dict(hf.to_hf(policy.config, policy.params))
    assert list(worker.weights) == list(want)
    for name, array in want.items():
        assert torch.equal(worker.weights[name], torch.tensor(array).to(torch.bfloat16)), name


def test_a_worker_tells_whether_it_still_holds_the_policy_that_its_server_is_named_by(policy, published, tmp_path):
    """Two trainers may load at once, and both have the number 12."""
    other = publish(tmp_path / 'other', 12, policy.params, policy.config, 'float32')
    worker, name = Worker(policy.path), read_manifest(other).name
    worker.load_policy(str(published))
    assert worker.confirm_policy(str(published)) == {'version': 12, 'checksum': read_manifest(published).checksum}
    worker.load_policy(str(other))
    assert worker.confirm_policy(str(published))['refused'].startswith(f'it now holds {name}. Another trainer has loaded')
    (published / MANIFEST).unlink()
    assert 'manifest.json is missing' in worker.confirm_policy(str(published))['refused']


def test_a_load_holds_one_tensor_at_a_time(policy, published, monkeypatch):
    seen, alive = [], []

    def watched(path, manifest):
        for name, array in read_tensors(path, manifest):
            alive.append(sum(reference() is not None for reference in seen))
            seen.append(weakref.ref(array))
            yield name, array

    monkeypatch.setattr('bapo_jax.rollout.vllm.worker.read_tensors', watched)
    worker = Worker(policy.path)
    worker.load_policy(str(published))
    assert max(alive) <= 1 and len(alive) == len(worker.weights) > 1


def test_a_refused_policy_is_a_reply_and_changes_nothing(policy, published):
    worker = Worker(policy.path)
    manifest = json.loads((published / MANIFEST).read_text())
    manifest['tensors']['model.norm.weight']['crc32']['0'] += 1
    (published / MANIFEST).write_text(json.dumps(manifest))
    assert 'checksum of model.norm.weight' in worker.check_policy(str(published))['refused']
    for nonsense in ('null', '[' * 10**5, json.dumps({**manifest, 'tensors': {'a': {'shape': [10**12], 'part': [1]}}})):
        (published / MANIFEST).write_text(nonsense)
        assert 'manifest.json' in worker.check_policy(str(published))['refused']
    (published / MANIFEST).unlink()
    assert 'manifest.json is missing' in worker.check_policy(str(published))['refused']
    assert worker.weights == {} and worker.model_runner == 'a model'


def test_of_a_servers_workers_one_finds_the_fault(policy, published):
    (published / WEIGHTS / 'model.norm.weight' / '0').unlink()
    replies = [Worker(policy.path, rank, 2).check_policy(str(published)) for rank in range(2)]
    [refused] = [reply['refused'] for reply in replies if 'refused' in reply]
    assert 'model.norm.weight/0 cannot be read' in refused


def test_a_load_that_fails_half_way_is_reported_and_leaves_no_model_to_serve(policy, published):
    worker = Worker(policy.path)
    assert 'refused' not in worker.check_policy(str(published))
    (published / WEIGHTS / 'model.norm.weight' / '0').unlink()
    assert 'RefusedPolicy: ' in (reason := worker.load_policy(str(published))['broken'])
    assert 'model.norm.weight/0 cannot be read' in reason and worker.model_runner is None


def test_a_servers_checkpoint_with_other_tensors_or_shapes_is_refused_by_name(policy, published, tmp_path):
    manifest, directory = read_manifest(published), shutil.copytree(policy.path, tmp_path / 'model')
    check_tensors(manifest, str(directory))
    tensors = load_file(directory / 'model.safetensors')
    save_file({**tensors, 'model.norm.weight': np.ones(7, np.float32)}, directory / 'model.safetensors')
    with pytest.raises(RefusedPolicy, match=r'model\.norm\.weight has shape \(32,\), but \(7,\) in '):
        check_tensors(manifest, str(directory))
    save_file({name: a for name, a in tensors.items() if name != 'model.norm.weight'}, directory / 'model.safetensors')
    with pytest.raises(RefusedPolicy, match=r"unknown \['model\.norm\.weight'\]"):
        check_tensors(manifest, str(directory))


def test_a_tied_policy_fits_a_checkpoint_that_repeats_the_embedding_as_its_head(make_policy, tmp_path):
    policy = make_policy()
    manifest = read_manifest(publish(tmp_path, 1, policy.params, policy.config, 'float32'))
    tensors = load_file(policy.path / 'model.safetensors')
    save_file({**tensors, HEAD.name: tensors['model.embed_tokens.weight']}, tmp_path / 'model.safetensors')
    check_tensors(manifest, str(tmp_path))


def test_shapes_are_read_from_every_file(tmp_path):
    save_file({'a': np.ones((2, 3), np.float32)}, tmp_path / '1.safetensors', metadata={'format': 'pt'})
    save_file({'b': np.ones(4, np.float32)}, tmp_path / '2.safetensors')
    assert checkpoint_shapes(tmp_path) == {'a': (2, 3), 'b': (4,)}


@pytest.mark.parametrize('dtype, of_torch', [(np.float32, torch.float32), (ml_dtypes.bfloat16, torch.bfloat16)])
def test_torch_gets_the_same_numbers(dtype, of_torch):
    array = np.array([[1.5, -2.0], [0.25, 3e38]], dtype)
    tensor = as_torch(array)
    assert tensor.dtype == of_torch
    np.testing.assert_array_equal(tensor.float().numpy(), array.astype(np.float32))
