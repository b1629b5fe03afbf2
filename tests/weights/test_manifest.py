"""A published policy that is incomplete, damaged or of another model is refused by name."""

import json
import shutil
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from mutations import mutants
from tiny import QWEN3
from tiny_vl import make_vl  # noqa: F401  (a fixture)

from bapo_jax.models import hf
from bapo_jax.rollout.vllm.worker import check_tensors
from bapo_jax.weights.manifest import MANIFEST, WEIGHTS, RefusedPolicy, check_architecture, check_bytes, read_manifest, read_tensors
from bapo_jax.weights.publish import publish


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
    manifest = read_manifest(path)
    check_bytes(path, manifest)
    return dict(read_tensors(path, manifest))


def test_equal_weights_have_equal_checksums_and_others_have_not(policy, published, tmp_path):
    again = publish(tmp_path / 'again', 13, policy.params, policy.config, 'float32')
    assert read_manifest(again).checksum == read_manifest(published).checksum
    moved = {**policy.params, 'norm': {'scale': policy.params['norm']['scale'] * np.float32(1.0001)}}
    other = publish(tmp_path / 'other', 13, moved, policy.config, 'float32')
    assert read_manifest(other).checksum != read_manifest(published).checksum


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(RefusedPolicy, match='nowhere.*is missing, so no complete policy'):
        read(tmp_path / 'nowhere')


def edit(published, change):
    path = published / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda m: m['tensors']['model.norm.weight'].update(shape=[7]), r'weight has shape \(7,\), but its parts .0. of \(32,\) do not'),
        (lambda m: m['tensors']['model.norm.weight']['crc32'].update({'1': 5}), r'its parts .0, 1. of .32,. do not fill it'),
        (lambda m: m['tensors']['model.norm.weight'].update(shape=[7], part=[7]), r'0 has 128 bytes, but the manifest says 28'),
        (lambda m: m['tensors']['model.norm.weight'].update(dtype='bfloat16'), r'128 bytes, but the manifest says 64 .* in bfloat16'),
        (lambda m: m['tensors']['model.norm.weight']['crc32'].update({'0': 1}), r'weight/0 is damaged: the checksum of model\.norm\.weight'),
        (lambda m: m['tensors'].update({'model.extra': m['tensors']['model.norm.weight']}), r'model\.extra/0 cannot be read'),
        (lambda m: m.update(format=0), 'not a manifest of format'),
        (lambda m: m.pop('version'), r'manifest\.json: version is missing or not of type int; continue the run'),
        (lambda m: m.update(version=True), 'version is missing or not of type int'),
        (lambda m: m.update(tensors=[]), 'tensors is missing or not of type dict'),
        (lambda m: m.update(model=None), 'model is missing or not of type dict'),
        (lambda m: m['model'].pop('tie_word_embeddings'), r'model\.tie_word_embeddings is missing or not of type bool'),
        (lambda m: m['tensors'].update({'model.extra': None}), r'model\.extra is not a dict'),
        (lambda m: m['tensors'].update({'../etc': m['tensors']['model.norm.weight']}), r"'\.\./etc' is not a valid tensor name"),
        (lambda m: m['tensors'].update({'/etc': m['tensors']['model.norm.weight']}), "'/etc' is not a valid tensor name"),
        (lambda m: m['tensors']['model.norm.weight'].update(shape=None), r'model\.norm\.weight has the invalid shape None'),
        (lambda m: m['tensors']['model.norm.weight'].update(shape=[-32]), r'has the invalid shape \[-32\]'),
        (lambda m: m['tensors']['model.norm.weight'].update(part=32), 'has parts of the invalid shape 32'),
        (lambda m: m['tensors']['model.norm.weight'].update(dtype='object'), "dtype 'object' instead of float32 or bfloat16"),
        (lambda m: m['tensors']['model.norm.weight'].update(crc32={'0': '1'}), 'has no valid checksums'),
        # A tensor of 10^12 numbers: in as many parts, in one, and in two.
        (lambda m: m['tensors']['model.norm.weight'].update(shape=[10**12], part=[1]), r"its parts '0' of \(1,\) do not fill it"),
        (lambda m: m['tensors']['model.norm.weight'].update(shape=[10**12], part=[10**12]), 'the manifest says 4000000000000'),
        (
            lambda m: m['tensors']['model.norm.weight'].update(shape=[2, 10**12], part=[1, 10**12], crc32={'0.0': 0, '1.0': 0}),
            r'norm\.weight/0\.0 cannot be read',
        ),
    ],
)
def test_what_does_not_fit_its_manifest_is_refused_by_name(change, message, published):
    edit(published, change)
    with pytest.raises(RefusedPolicy, match=message):
        read(published)


@pytest.mark.parametrize('text', ['{', '[' * 10**5, '1' * 5000, '', '\xff'], ids=['cut', 'deep', 'long', 'empty', 'no UTF-8'])
def test_a_manifest_that_is_no_json_is_refused(text, published):
    (published / MANIFEST).write_text(text, 'latin-1')
    with pytest.raises(RefusedPolicy, match=r'manifest\.json cannot be read'):
        read(published)


def test_a_manifest_that_is_longer_than_any_is_not_read(published):
    with (published / MANIFEST).open('r+b') as f:
        f.truncate(2**40)  # takes no room on the disk
    with pytest.raises(RefusedPolicy, match=f'it has {2**40} bytes, more than any manifest'):
        read(published)


def test_a_manifest_whose_fields_are_other_ones_is_read_or_refused_but_nothing_else(published, policy):
    for _, said in mutants(json.loads((published / MANIFEST).read_text()), 250):
        (published / MANIFEST).write_text(json.dumps(said))
        try:
            manifest = read_manifest(published)
            check_architecture(manifest, SimpleNamespace(**hf.architecture(policy.config)))
            check_tensors(manifest, str(policy.path))
            check_bytes(published, manifest)
        except RefusedPolicy as e:
            assert len(str(e).encode()) < 20_000  # it can be encoded
            continue
        for tensor, (name, array) in zip(manifest.tensors, read_tensors(published, manifest), strict=True):
            assert (tensor.name, tensor.shape) == (name, array.shape)


def a_file(published):
    """The largest: of more than one block."""
    return max((published / WEIGHTS).rglob('*'), key=lambda f: f.stat().st_size * f.is_file())


def test_truncated_data_are_refused(published):
    file = a_file(published)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(RefusedPolicy, match=f'{file} has {file.stat().st_size} bytes, but the manifest says'):
        read(published)


def test_data_with_more_at_their_end_are_refused(published):
    file = a_file(published)
    file.write_bytes(file.read_bytes() + b'more')
    with pytest.raises(RefusedPolicy, match=f'{file} has {file.stat().st_size} bytes, but the manifest says'):
        read(published)


def test_a_flipped_bit_is_found_wherever_it_is(published, monkeypatch):
    monkeypatch.setattr('bapo_jax.weights.manifest._BLOCK', 1000)  # many blocks a file, the last not full
    sound, file = a_file(published).read_bytes(), a_file(published)
    read(published)
    for byte in (0, 999, 1000, len(sound) - 1):
        file.write_bytes(sound[:byte] + bytes([sound[byte] ^ 4]) + sound[byte + 1 :])
        with pytest.raises(RefusedPolicy, match=f'{file} is damaged: the checksum of {file.parent.name}'):
            read(published)


def test_a_file_that_is_gone_is_refused(published):
    (published / WEIGHTS / 'model.norm.weight' / '0').unlink()
    with pytest.raises(RefusedPolicy, match=r'model\.norm\.weight/0 cannot be read \(No such file'):
        read(published)


def test_a_file_that_goes_after_the_check_is_named(published):
    manifest = read_manifest(published)
    check_bytes(published, manifest)
    (published / WEIGHTS / 'model.norm.weight' / '0').unlink()
    with pytest.raises(RefusedPolicy, match=r'model\.norm\.weight/0 cannot be read .* it was there when it was checked'):
        list(read_tensors(published, manifest))


def cut(published, name, part):
    """Rewrites a tensor in parts of that shape, as devices that split it write it."""
    manifest = json.loads((published / MANIFEST).read_text())
    whole = read(published)[name]
    (published / WEIGHTS / name / '0.0').unlink()
    checksums = {}
    for i, j in np.ndindex(whole.shape[0] // part[0], whole.shape[1] // part[1]):
        block = whole[i * part[0] : (i + 1) * part[0], j * part[1] : (j + 1) * part[1]].tobytes()
        (published / WEIGHTS / name / f'{i}.{j}').write_bytes(block)
        checksums[f'{i}.{j}'] = zlib.crc32(block)
    manifest['tensors'][name].update(part=part, crc32=checksums)
    (published / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize('part', [(48, 16), (4, 32), (96, 2)], ids=['blocks', 'rows', 'columns'])
def test_a_tensor_in_parts_is_the_whole_one_and_each_part_is_checked(part, published):
    name = 'model.embed_tokens.weight'
    before = {tensor: np.array(array) for tensor, array in read(published).items()}
    cut(published, name, part)
    after = read(published)
    assert list(after) == list(before)
    for tensor, array in after.items():
        np.testing.assert_array_equal(array, before[tensor], err_msg=tensor)
    last = max((published / WEIGHTS / name).glob('[0-9]*'), key=lambda file: [int(i) for i in file.name.split('.')])
    last.write_bytes(bytes(last.stat().st_size))
    with pytest.raises(RefusedPolicy, match=f'{last} is damaged: the checksum'):
        read(published)


@pytest.mark.parametrize('workers', [1, 3])
def test_workers_share_the_files_out_and_one_of_them_finds_a_fault(workers, published):
    manifest = read_manifest(published)
    for tensor in manifest.tensors:
        for part in tensor.crc32:
            file = published / WEIGHTS / tensor.name / part
            sound, refused = file.read_bytes(), []
            file.write_bytes(bytes(len(sound)))
            for worker in range(workers):
                try:
                    check_bytes(published, manifest, worker, workers)
                except RefusedPolicy as e:
                    refused.append(str(e))
            file.write_bytes(sound)
            assert len(refused) == 1 and f'the checksum of {tensor.name}' in refused[0]


def test_what_is_written_to_a_tensor_stays_out_of_its_file(published):
    read(published)['model.norm.weight'][:] = 0
    assert read(published)['model.norm.weight'].any()


def test_a_policy_of_another_model_is_refused_with_what_differs(published, policy):
    sizes = hf.architecture(policy.config)
    check_architecture(read_manifest(published), SimpleNamespace(**sizes))
    with pytest.raises(RefusedPolicy, match=f'hidden_size {sizes["hidden_size"]} .the server has 999'):
        check_architecture(read_manifest(published), SimpleNamespace(**{**sizes, 'hidden_size': 999}))


@pytest.mark.parametrize('fields', [{}, {'head_dim': 16}, QWEN3], ids=['Qwen2', 'Qwen2, wide heads', 'Qwen3'])
def test_a_server_knows_its_own_model_by_its_hugging_face_config(fields, make_policy, tmp_path):
    from transformers import AutoConfig

    policy = make_policy(**fields)
    manifest = read_manifest(publish(tmp_path, 1, policy.params, policy.config, 'float32'))
    check_architecture(manifest, AutoConfig.from_pretrained(policy.path))


def test_a_server_knows_a_model_with_a_vision_tower_by_its_parts(make_vl, tmp_path):
    from transformers import AutoConfig

    policy = make_vl()
    manifest = read_manifest(publish(tmp_path, 1, policy.params, policy.config, 'float32'))
    served = AutoConfig.from_pretrained(policy.path)
    check_architecture(manifest, served)
    served.vision_config.depth += 1
    with pytest.raises(RefusedPolicy, match='vision_config.depth 3 .the server has 4'):
        check_architecture(manifest, served)


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
        check_architecture(manifest, AutoConfig.from_pretrained(tiny_hf(**served)))
