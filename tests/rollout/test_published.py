"""A published policy that is incomplete, damaged or of another model is refused by name."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import QWEN3

from bapo_jax.models import hf
from bapo_jax.rollout.publish import publish
from bapo_jax.rollout.published import MANIFEST, WEIGHTS, RefusedPolicy, check_model, read_manifest, read_tensors


@pytest.fixture(scope='module')
def policy(make_policy):
    return make_policy(tie_word_embeddings=False)


@pytest.fixture(scope='module')
def original(policy, tmp_path_factory):
    return publish(tmp_path_factory.mktemp('policy'), 12, policy.params, policy.config, 'float32')


@pytest.fixture
def published(original, tmp_path):
    return shutil.copytree(original, tmp_path / original.name)


def read(path):
    return read_tensors(path, read_manifest(path))


def test_equal_weights_have_equal_checksums_and_others_have_not(policy, published, tmp_path):
    again = publish(tmp_path / 'again', 13, policy.params, policy.config, 'float32')
    assert read_manifest(again).checksum == read_manifest(published).checksum
    moved = {**policy.params, 'norm': {'scale': policy.params['norm']['scale'] * np.float32(1.0001)}}
    other = publish(tmp_path / 'other', 13, moved, policy.config, 'float32')
    assert read_manifest(other).checksum != read_manifest(published).checksum


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(RefusedPolicy, match='nowhere.*no policy was published there'):
        read(tmp_path / 'nowhere')


def edit(published, change):
    path = published / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda m: m['tensors']['model.norm.weight'].update(shape=[7]), r'norm\.weight is float32 \(\d+,\), the manifest says'),
        (lambda m: m['tensors']['model.norm.weight'].update(dtype='bfloat16'), r'model\.norm\.weight is float32'),
        (lambda m: m['tensors']['model.norm.weight'].update(crc32=1), r'checksum of model\.norm\.weight'),
        (lambda m: m['tensors'].update({'model.extra': m['tensors']['model.norm.weight']}), r'model\.extra cannot be read'),
        (lambda m: m.update(format=0), 'not a manifest of format'),
        (lambda m: m.pop('version'), "lacks 'version'"),
    ],
)
def test_what_does_not_fit_its_manifest_is_refused_by_name(change, message, published):
    edit(published, change)
    with pytest.raises(RefusedPolicy, match=message):
        read(published)


def test_a_manifest_that_is_no_json_is_refused(published):
    (published / MANIFEST).write_text('{')
    with pytest.raises(RefusedPolicy, match='cannot be read'):
        read(published)


def test_truncated_data_are_refused(published):
    largest = max((published / WEIGHTS).rglob('*'), key=lambda f: f.stat().st_size * f.is_file())
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(RefusedPolicy, match=f'tensor {largest.parent.name} cannot be read'):
        read(published)


def test_a_file_that_is_gone_is_refused(published):
    # An array store takes a missing file for an array of zeros.
    next((published / WEIGHTS / 'model.norm.weight').glob('[0-9]*')).unlink()
    with pytest.raises(RefusedPolicy, match=r'checksum of model\.norm\.weight'):
        read(published)


def test_a_policy_of_another_model_is_refused_with_what_differs(published, policy):
    sizes = hf.architecture(policy.config)
    check_model(read_manifest(published), SimpleNamespace(**sizes))
    with pytest.raises(RefusedPolicy, match=f'hidden_size {sizes["hidden_size"]} .the server has 999'):
        check_model(read_manifest(published), SimpleNamespace(**{**sizes, 'hidden_size': 999}))


@pytest.mark.parametrize('fields', [{}, {'head_dim': 16}, QWEN3], ids=['Qwen2', 'Qwen2, wide heads', 'Qwen3'])
def test_a_server_knows_its_own_model_by_its_hugging_face_config(fields, make_policy, tmp_path):
    from transformers import AutoConfig

    policy = make_policy(**fields)
    manifest = read_manifest(publish(tmp_path, 1, policy.params, policy.config, 'float32'))
    check_model(manifest, AutoConfig.from_pretrained(policy.path))


@pytest.mark.parametrize(
    'served, message',
    [
        ({'head_dim': 16}, "model_type 'qwen3' .the server has 'qwen2'"),
        ({**QWEN3, 'head_dim': 32}, 'head_dim 16 .the server has 32'),
    ],
)
def test_a_server_of_another_family_or_head_size_refuses(served, message, make_policy, tiny_hf, tmp_path):
    from transformers import AutoConfig

    policy = make_policy(**QWEN3)
    manifest = read_manifest(publish(tmp_path, 1, policy.params, policy.config, 'float32'))
    with pytest.raises(RefusedPolicy, match=message):
        check_model(manifest, AutoConfig.from_pretrained(tiny_hf(**served)))
