"""An adapter's files are PEFT's: what was written is read, a part of the matrices is enough, and all else is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file
from small_run import run, small_config

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.export import export
from bapo_jax.models import hf
from bapo_jax.models.adapters import MATRICES, SETTINGS, check_adapter, adapter_tensors, put_adapter, read_adapter, save_adapter
from bapo_jax.models.layers import Adapter
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.policies import PEFT, PUBLISHED, find_policy
from bapo_jax.weights.manifest import RefusedPolicy, read_manifest
from bapo_jax.weights.publish import publish


@pytest.fixture(scope='module')
def adapted(policy):
    """The policy with an adapter of all matrices, drawn at random."""
    config = dataclasses.replace(policy.config, adapter=Adapter(3, 6.0, 'all'))
    rng, params = np.random.default_rng(0), flatten_dict(policy.params)
    for path, shape in flatten_dict(hf.abstract_params(config)[1]).items():
        if path not in params:
            params[path] = rng.standard_normal(shape.shape).astype(np.float32)
    return policy._replace(config=config, params=unflatten_dict(params))


@pytest.fixture
def files(adapted, tmp_path):
    """The directory of its adapter, which names the policy's as its base."""
    folder = tmp_path / 'adapter'
    folder.mkdir()
    save_adapter(folder, adapted.config, adapter_tensors(adapted.config, adapted.params, 'float32'), str(adapted.path))
    return folder


@pytest.fixture
def here(make_policy, tmp_path):
    """The directory of a base, with a tokenizer."""
    base = shutil.copytree(make_policy(vocab_size=300).path, tmp_path / 'elsewhere')
    character_tokenizer().save_pretrained(base)
    return base


def same(got, want):
    got, want = flatten_dict(jax.device_get(got)), flatten_dict(want)
    assert got.keys() == want.keys()
    for path, array in got.items():
        np.testing.assert_array_equal(array, want[path], err_msg=str(path))


def state(folder, **fields):
    file = folder / SETTINGS
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_what_was_written_is_read_bit_for_bit_also_by_its_directory_alone(adapted, files):
    assert read_adapter(files) == (adapted.config.adapter, str(adapted.path))
    policy = find_policy(files)
    assert (policy.kind, policy.step, str(policy.base), policy.adapter) == (PEFT, 0, str(adapted.path), adapted.config.adapter)
    same(policy.params(adapted.config, adapted.path, make_mesh(1, 1, 1)), adapted.params)


def test_of_two_matrices_a_layer_the_others_are_zero(adapted, files):
    tensors = {n: t for n, t in load_file(files / MATRICES).items() if 'q_proj' in n or 'v_proj' in n}
    save_file(tensors, files / MATRICES)
    state(files, target_modules=['v_proj', 'q_proj'])
    there, _ = read_adapter(files)
    assert there == Adapter(3, 6.0, 'attention')
    config = dataclasses.replace(adapted.config, adapter=there)
    read = hf.load_params(adapted.path, config)
    put_adapter(read, files, config)
    layers, want = jax.device_get(read['layers']), adapted.params['layers']
    for name in 'qkvo':
        for x in 'ab':
            np.testing.assert_array_equal(layers[name][x], want[name][x] if name in 'qv' else np.zeros_like(want[name][x]))
    assert 'a' not in layers['gate']


@pytest.mark.parametrize('fields, message', [
    ({'use_dora': True}, 'use_dora=True is not supported; give a plain LoRA adapter'),
    ({'use_rslora': True}, 'use_rslora=True'), ({'bias': 'all'}, "bias='all'"), ({'modules_to_save': ['lm_head']}, 'modules_to_save='),
    ({'rank_pattern': {'q_proj': 8}}, 'rank_pattern='), ({'layers_to_transform': [0]}, 'layers_to_transform='),
    ({'init_lora_weights': 'pissa_niter_4'}, "init_lora_weights='pissa_niter_4'"), ({'peft_type': 'IA3'}, "peft_type='IA3'"),
    ({'r': 0}, 'r=0 and lora_alpha=6.0 must be positive'), ({'lora_alpha': None}, 'r=3 and lora_alpha=None must be positive'),
    ({'target_modules': ['q_proj', 'lm_head']}, r'target_modules=.* is not supported; give an adapter of some of down_proj, '),
    ({'target_modules': '.*q_proj'}, "target_modules='.*q_proj' is not supported"),
])  # fmt: skip
def test_what_does_more_than_to_add_a_product_is_refused(fields, message, files):
    state(files, **fields)
    with pytest.raises(ValueError, match=f'adapter_config.json: {message}'):
        read_adapter(files)


def test_what_plain_adapters_state_too_is_read(adapted, files):
    state(files, use_rslora=False, modules_to_save=None, rank_pattern={}, layers_to_transform=None, revision=None, lora_dropout=0.1)
    assert read_adapter(files)[0] == adapted.config.adapter


@pytest.mark.parametrize('change, message', [
    (lambda t: t.pop(next(n for n in t if 'layers.1.' in n)), r'layers\.1\..* is missing; it must be \(\d+, \d+\) of finite numbers'),
    (lambda t: [t.pop(n) for n in list(t) if 'lora_B' in n], r'layers\.0\..*lora_B\.weight is missing; it must be'),
    (lambda t: t.clear(), r'layers\.0\..*lora_A\.weight is missing; .*: fetch the adapter again'),
    (lambda t: t.update({n: x[:1] for n, x in t.items() if 'lora_A' in n}), r'is \(1, \d+\), or not finite'),
    (lambda t: t.update({n: x * np.nan for n, x in t.items()}), 'or not finite'),
    (lambda t: t.update({'base_model.model.lm_head.lora_A.weight': np.zeros((3, 8), np.float32)}), '1 tensors are of no layer of the base'),
])  # fmt: skip
def test_matrices_of_another_base_are_refused_by_name(change, message, adapted, files):
    tensors = load_file(files / MATRICES)
    change(tensors)
    save_file(tensors, files / MATRICES)
    params = hf.load_params(adapted.path, adapted.config)
    with pytest.raises(ValueError, match=message):
        put_adapter(params, files, adapted.config)


def test_a_damaged_file_is_named(adapted, files):
    (files / MATRICES).write_bytes(b'\x00' * 9)
    with pytest.raises(ValueError, match=r'adapter_model\.safetensors cannot be read .*fetch the adapter again'):
        put_adapter(hf.load_params(adapted.path, adapted.config), files, adapted.config)
    (files / SETTINGS).write_text('[')
    with pytest.raises(ValueError, match=r'adapter_config\.json: not a JSON object'):
        find_policy(files)


def test_a_base_that_is_not_here_is_asked_for(files, tmp_path):
    state(files, base_model_name_or_path='/nowhere/base')
    with pytest.raises(FileNotFoundError, match=r"base_model_name_or_path='/nowhere/base' in its adapter_config\.json .* give --base"):
        export(files, tmp_path / 'merged')


def test_an_adapter_is_published_alone_and_found_again_and_a_damaged_one_is_refused(adapted, tmp_path):
    path = publish(tmp_path, 7, adapted.params, adapted.config, 'float32', base=str(adapted.path))
    manifest = read_manifest(path)
    assert set(manifest.files) == {SETTINGS, MATRICES} and manifest.tensors == ()
    whole = publish(tmp_path / 'whole', 7, adapted.params, dataclasses.replace(adapted.config, adapter=None), 'float32')
    assert sum(f.stat().st_size for f in path.iterdir()) < sum(f.stat().st_size for f in whole.rglob('*') if f.is_file())
    policy = find_policy(path)
    assert (policy.kind, policy.step, policy.adapter) == (PUBLISHED, 7, adapted.config.adapter)
    same(policy.params(adapted.config, adapted.path, make_mesh(1, 1, 1)), adapted.params)
    with (path / MATRICES).open('r+b') as file:
        file.seek(-1, 2)
        file.write(b'\x7f')
    with pytest.raises(RefusedPolicy, match='is damaged: the checksum of adapter_model.safetensors differs'):
        policy.params(adapted.config, adapted.path, make_mesh(1, 1, 1))


def test_a_run_may_start_from_an_adapter_of_its_own_settings_alone(adapted, files):
    model = {'path': str(adapted.path), 'dtype': 'float32', 'adapter': {'rank': 3, 'alpha': 6.0, 'targets': 'all', 'start': str(files)}}
    check_adapter(model)
    with pytest.raises(ValueError, match=r'has other settings; set model\.adapter\.rank=3, model\.adapter\.alpha=6\.0, model\.adapter\.targets=all'):
        check_adapter({**model, 'adapter': {**model['adapter'], 'rank': 4}})
    with pytest.raises(ValueError, match=r'model\.adapter\.start=.* has no adapter_config\.json; give a directory'):
        check_adapter({**model, 'adapter': {**model['adapter'], 'start': str(adapted.path)}})
    save_file({}, files / MATRICES)
    with pytest.raises(ValueError, match=r'adapter_model\.safetensors: .* is missing'):
        check_adapter(model)


def test_tensors_that_the_settings_do_not_target_are_refused(adapted, files):
    """PEFT would not read them."""
    state(files, target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj', 'up_proj', 'down_proj'])
    with pytest.raises(ValueError, match=r'tensors are of no layer of the base that target_modules of .* names, the first is .*gate_proj'):
        put_adapter(hf.load_params(adapted.path, adapted.config), files, adapted.config)


@pytest.mark.parametrize(('pushed', 'base'), [('', 'elsewhere'), ('me/mine', 'base')])
def test_an_exported_adapter_names_its_base_by_a_path_only_if_it_stays_here(pushed, base, here, files, tmp_path):
    state(files, base_model_name_or_path='/of/another/base')
    export(files, tmp_path / 'out', base=here, adapter=True, name=pushed)
    assert {file.name for file in (tmp_path / 'out').iterdir()} == {'README.md', SETTINGS, MATRICES}
    assert read_adapter(tmp_path / 'out')[1] == (base if pushed else str(here))
    card = (tmp_path / 'out' / 'README.md').read_text()
    assert f"AutoModelForCausalLM.from_pretrained('base')\nmodel = PeftModel.from_pretrained(base, {pushed or 'out'!r})" in card
    assert str(tmp_path) not in card


def test_an_exported_adapter_names_a_base_that_its_files_did_not(here, files, tmp_path):
    state(files, base_model_name_or_path=None)
    export(files, tmp_path / 'out', base=here, adapter=True)
    assert read_adapter(tmp_path / 'out')[1] == str(here)
    assert "tokenizer = AutoTokenizer.from_pretrained('elsewhere')" in (tmp_path / 'out' / 'README.md').read_text()


def test_a_base_of_the_hub_is_named_with_its_revision(here, files, tmp_path):
    state(files, base_model_name_or_path='owner/tiny', revision='c0ffee')
    export(files, tmp_path / 'out', base=here, adapter=True)
    stated = json.loads((tmp_path / 'out' / SETTINGS).read_text())
    assert (stated['base_model_name_or_path'], stated['revision']) == ('owner/tiny', 'c0ffee')
    assert find_policy(tmp_path / 'out').base == Path('owner/tiny@c0ffee')


@pytest.mark.slow
def test_a_run_starts_where_the_adapter_of_another_ended(benchmark, tmp_path):
    fields = {'model__adapter__rank': 4, 'steps': 1}
    run(small_config('grpo', benchmark, **fields, learner__learning_rate=1e-2), tmp_path / 'first')
    export(tmp_path / 'first', tmp_path / 'ended', dtype='float32', adapter=True)
    for of in ('first', 'ended'):  # the run, and its adapter's directory
        export(tmp_path / of, tmp_path / f'merged_{of}')
    merged = [load_file(tmp_path / f'merged_{of}' / 'model.safetensors') for of in ('first', 'ended')]
    assert merged[0].keys() == merged[1].keys() and all((merged[0][name] == merged[1][name]).all() for name in merged[0])
    again = {'model__adapter__start': str(tmp_path / 'ended'), 'learner__learning_rate': 1e-12}
    run(small_config('grpo', benchmark, **fields, **again), tmp_path / 'second')
    export(tmp_path / 'second', tmp_path / 'there', dtype='float32', adapter=True)
    ended, there = (load_file(tmp_path / of / MATRICES) for of in ('ended', 'there'))
    assert ended.keys() == there.keys() and all(np.abs(ended[name]).max() > 1e-3 for name in ended)
    for name, array in there.items():
        np.testing.assert_allclose(array, ended[name], rtol=0, atol=1e-9, err_msg=name)
