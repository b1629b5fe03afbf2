"""Hugging Face directories in and out, bit for bit; and what is said of a directory that will not do."""

import dataclasses
import json
import math
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import QWEN3, QWEN3_5, QWEN3_MOE

from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.rotary import Rotation


@pytest.fixture
def directory(policy, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(policy.path, tmp_path / 'model')


def edit_config(directory, **fields):
    file = directory / 'config.json'
    config = json.loads(file.read_text())
    config.update(fields)
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(directory, edit):
    file = directory / 'model.safetensors'
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def shard(directory):
    """Cuts model.safetensors in two with an index, as transformers does with large models."""
    tensors = load_file(directory / 'model.safetensors')
    (directory / 'model.safetensors').unlink()
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f'model-0000{i}-of-00002.safetensors'
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))


def load(directory):
    return hf.load_params(directory, hf.read_config(directory))


def assert_same_tensors(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype == np.float32, name
        assert a[name].shape == b[name].shape, name
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize('family', [{}, QWEN3, QWEN3_MOE, QWEN3_5], ids=['Qwen2', 'Qwen3', 'Qwen3-MoE', 'Qwen3.5'])
@pytest.mark.parametrize('tied', [True, False])
@pytest.mark.parametrize('sharded', [False, True])
def test_import_and_export_are_the_identity_bit_for_bit(family, tied, sharded, make_policy, tmp_path):
    policy = make_policy(tie_word_embeddings=tied, **family)
    source = shutil.copytree(policy.path, tmp_path / 'source')
    tensors = load_file(source / 'model.safetensors')
    assert ('lm_head.weight' in tensors) is not tied
    assert ('model.layers.1.self_attn.q_norm.weight' in tensors) is bool(family)
    assert [t.name for t in hf.layout(policy.config)] == list(dict(hf.to_hf(policy.config, policy.params)))
    if sharded:
        shard(source)
    params = load(source)
    hf.save(tmp_path / 'out', hf.to_hf(policy.config, params), like=source)
    assert_same_tensors(load_file(tmp_path / 'out' / 'model.safetensors'), tensors)
    assert_same_tensors(dict(hf.to_hf(policy.config, load(tmp_path / 'out'))), tensors)


def test_transformers_loads_the_export_with_equal_logits(make_policy, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    policy = make_policy(tie_word_embeddings=False)
    hf.save(tmp_path / 'out', hf.to_hf(policy.config, policy.params), like=policy.path)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        a, b = (AutoModelForCausalLM.from_pretrained(p)(tokens).logits for p in (policy.path, tmp_path / 'out'))
    assert torch.equal(a, b)


def test_a_bfloat16_checkpoint_becomes_float32_of_the_same_values(directory):
    halves = {k: v.astype(ml_dtypes.bfloat16) for k, v in load_file(directory / 'model.safetensors').items()}
    save_file(halves, directory / 'model.safetensors')
    config = hf.read_config(directory)
    assert_same_tensors(dict(hf.to_hf(config, load(directory))), {k: v.astype(np.float32) for k, v in halves.items()})


def test_the_config_is_read(policy):
    assert policy.config == ModelConfig(
        model_type='qwen2', vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, rotation=Rotation(10_000.0), rms_norm_eps=1e-6, tie_embeddings=True, max_positions=32768, dtype='float32',
    )  # fmt: skip


def test_what_is_stated_counts_in_place_of_config_json_and_is_written_by_both_names_transformers_has(directory, policy, tmp_path):
    assert hf.overrides({'max_positions': 0, 'rope_theta': 0.0}) == hf.overrides({}) == {}
    stated = hf.overrides({'max_positions': 16384, 'rope_theta': 40_000.0})
    for change in ({}, {'rope_parameters': ..., 'rope_theta': 1e4}):
        edit_config(directory, **change)
        config = hf.read_config(directory, stated=stated)
        assert config == dataclasses.replace(policy.config, rotation=Rotation(40_000.0), max_positions=16384)
    hf.save(tmp_path / 'out', hf.to_hf(policy.config, policy.params), like=policy.path, stated=stated)
    assert hf.read_config(tmp_path / 'out') == config
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained(tmp_path / 'out')
    assert (read.rope_parameters['rope_theta'], read.max_position_embeddings) == (40_000.0, 16384)


# The decoder's fields as these models' config.json has them, and how many parameters their model cards' files hold.
PUBLISHED = {
    'DeepSeek-R1-Distill-Qwen-1.5B': (1_777_088_000, {
        'model_type': 'qwen2', 'hidden_act': 'silu', 'hidden_size': 1536, 'intermediate_size': 8960, 'num_attention_heads': 12,
        'num_hidden_layers': 28, 'num_key_value_heads': 2, 'rms_norm_eps': 1e-6, 'rope_theta': 10000, 'sliding_window': 4096,
        'max_window_layers': 21, 'use_sliding_window': False, 'tie_word_embeddings': False, 'vocab_size': 151936,
    }),
    'Qwen3-8B': (8_190_735_360, {
        'model_type': 'qwen3', 'attention_bias': False, 'head_dim': 128, 'hidden_act': 'silu', 'hidden_size': 4096,
        'intermediate_size': 12288, 'num_attention_heads': 32, 'num_hidden_layers': 36, 'num_key_value_heads': 8,
        'rms_norm_eps': 1e-6, 'rope_scaling': None, 'rope_theta': 1000000, 'sliding_window': None, 'max_window_layers': 36,
        'use_sliding_window': False, 'tie_word_embeddings': False, 'vocab_size': 151936,
    }),
    'Llama-3.2-1B': (1_235_814_400, {
        'model_type': 'llama', 'attention_bias': False, 'head_dim': 64, 'hidden_act': 'silu', 'hidden_size': 2048,
        'intermediate_size': 8192, 'max_position_embeddings': 131072, 'mlp_bias': False, 'num_attention_heads': 32,
        'num_hidden_layers': 16, 'num_key_value_heads': 8, 'pretraining_tp': 1, 'rms_norm_eps': 1e-5, 'rope_scaling': {
            'factor': 32.0, 'high_freq_factor': 4.0, 'low_freq_factor': 1.0, 'original_max_position_embeddings': 8192,
            'rope_type': 'llama3',
        }, 'rope_theta': 500000.0, 'tie_word_embeddings': True, 'vocab_size': 128256,
    }),
    'SmolLM2-135M': (134_515_008, {
        'model_type': 'llama', 'attention_bias': False, 'hidden_act': 'silu', 'hidden_size': 576, 'intermediate_size': 1536,
        'max_position_embeddings': 8192, 'mlp_bias': False, 'num_attention_heads': 9, 'num_hidden_layers': 30,
        'num_key_value_heads': 3, 'pretraining_tp': 1, 'rms_norm_eps': 1e-5, 'rope_interleaved': False, 'rope_scaling': None,
        'rope_theta': 100000, 'tie_word_embeddings': True, 'vocab_size': 49152,
    }),
}  # fmt: skip


@pytest.mark.parametrize('model', PUBLISHED)
def test_the_configs_of_the_papers_models_are_read_and_give_as_many_parameters(model, tmp_path):
    parameters, fields = PUBLISHED[model]
    (tmp_path / 'config.json').write_text(json.dumps(fields))
    config = hf.read_config(tmp_path)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(hf.abstract_params(config)[1])) == parameters
    assert config.head_dim == fields.get('head_dim', fields['hidden_size'] // fields['num_attention_heads'])
    assert config.rotation.rope_theta == fields['rope_theta']


def test_init_params_have_the_abstract_shapes_and_depend_on_the_seed(policy):
    shapes = hf.abstract_params(policy.config)[1]
    a, b, c = (hf.init_params(policy.config, seed) for seed in (0, 0, 1))
    jax.tree.map(lambda x, y, s: np.testing.assert_equal((x.shape, x.tobytes()), (s.shape, y.tobytes())), a, b, shapes)
    kernel, other = (np.asarray(p['layers']['q']['kernel']) for p in (a, c))
    assert (kernel != other).all() and (kernel[0] != kernel[1]).all()
    assert abs(kernel.std() - 0.02) < 0.002


def test_missing_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match='model.path=.*nowhere.*config.json'):
        hf.read_config(tmp_path / 'nowhere')


def test_missing_config(directory):
    (directory / 'config.json').unlink()
    with pytest.raises(FileNotFoundError, match='model.path=.*config.json'):
        hf.read_config(directory)


def test_a_config_that_is_no_json(directory):
    (directory / 'config.json').write_text('{"model_type": "qwen2",')
    with pytest.raises(ValueError, match='config.json: not valid JSON'):
        hf.read_config(directory)


@pytest.mark.parametrize(
    'fields, named',
    [
        ({'model_type': 'gemma3'}, "model_type='gemma3'"),
        ({'model_type': ...}, 'model_type=None'),
        ({'hidden_act': 'gelu'}, "hidden_act='gelu'"),
        ({'use_sliding_window': True, 'sliding_window': 128}, 'use_sliding_window=True'),
        ({'rope_scaling': {'rope_type': 'dynamic', 'factor': 4.0}}, 'rope_scaling=.*dynamic'),
        ({'rope_scaling': {'type': 'dynamic', 'factor': 4.0}}, 'rope_scaling=.*dynamic'),  # the older key
        ({'rope_parameters': {'rope_type': 'dynamic', 'factor': 4.0, 'rope_theta': 1e4}}, 'rope_parameters=.*dynamic'),
        ({'layer_types': ['full_attention', 'sliding_attention']}, "layer_types=.*supported: 'full_attention' in every layer"),
        ({'quantization_config': {'quant_method': 'fp8'}}, 'quantization_config=.*fp8'),
        ({**QWEN3, 'attention_bias': True}, 'attention_bias=True is not supported; supported: False'),
        ({'model_type': 'mixtral'}, "model_type='mixtral' is not supported; supported: qwen2, qwen3, qwen3_5_text, qwen3_moe, llama"),
        ({'model_type': 'qwen3', 'head_dim': ...}, "'head_dim' is missing"),
        ({'hidden_size': ...}, "'hidden_size' is missing"),
        ({'num_hidden_layers': ...}, "'num_hidden_layers' is missing"),
    ],
)
def test_what_the_decoder_leaves_out_is_refused_by_name(fields, named, directory):
    edit_config(directory, **fields)
    with pytest.raises(ValueError, match=f'config.json: .*{named}'):
        hf.read_config(directory)


def test_missing_weights(directory):
    (directory / 'model.safetensors').unlink()
    with pytest.raises(FileNotFoundError, match='model.path=.*model.safetensors'):
        load(directory)


def test_missing_shard(directory):
    shard(directory)
    (directory / 'model-00002-of-00002.safetensors').unlink()
    with pytest.raises(FileNotFoundError, match='model.path=.*model-00002-of-00002.safetensors'):
        load(directory)


@pytest.mark.parametrize('kept', [0, 4, 300, -1])
def test_truncated_weights(kept, directory):
    file = directory / 'model.safetensors'
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match='model.safetensors: cannot read tensor'):
        load(directory)


def test_weights_in_a_dtype_that_float32_does_not_hold(directory):
    name = 'model.layers.0.mlp.up_proj.weight'
    edit_tensors(directory, lambda tensors: tensors.update({name: tensors[name].astype(np.float64)}))
    with pytest.raises(ValueError, match=f'model.safetensors: {name} is stored as F64; supported: F32, BF16, F16'):
        load(directory)


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_weights_that_are_not_finite(value, directory):
    name = 'model.layers.1.mlp.up_proj.weight'

    def spoil(tensors):
        tensors[name][3, 5] = value

    edit_tensors(directory, spoil)
    with pytest.raises(hf.DamagedWeights, match=f'tensor {name} has a value that is not finite'):
        load(directory)


@pytest.mark.parametrize('text', ['{"weight_map": ', '{"metadata": {}}', '[]', '7', '{"weight_map": 7}', '{"weight_map": ["a"]}'])
def test_an_index_that_is_none(text, directory):
    (directory / 'model.safetensors').unlink()
    (directory / 'model.safetensors.index.json').write_text(text)
    with pytest.raises(ValueError, match='model.safetensors.index.json: not a safetensors index'):
        load(directory)


def test_a_file_that_lacks_a_tensor_its_index_promises(directory):
    shard(directory)
    file = directory / 'model-00002-of-00002.safetensors'
    tensors = load_file(file)
    save_file({name: a for name, a in tensors.items() if name != 'model.norm.weight'}, file)
    assert 'model.norm.weight' in tensors
    with pytest.raises(ValueError, match=f'{file.name}: cannot read tensor .model.norm.weight'):
        load(directory)


@pytest.mark.parametrize('place', ['../{}', '/{}', 'deeper/{}', './{}', '..', '', 7, None, ['{}']])
def test_an_index_names_files_beside_it_alone(place, directory):
    """Whatever lies elsewhere is none of the model's, though it be sound."""
    shard(directory)
    index, shards = directory / 'model.safetensors.index.json', sorted(directory.glob('model-*'))
    for elsewhere in (directory.parent, directory / 'deeper'):
        elsewhere.mkdir(exist_ok=True)
        shutil.copy(shards[0], elsewhere)
    content = json.loads(index.read_text())
    moved = place.format(shards[0].name) if isinstance(place, str) else place
    moved = f'{directory}/{shards[0].name}' if place == '/{}' else moved
    content['weight_map'] = {k: moved if v == shards[0].name else v for k, v in content['weight_map'].items()}
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match='index.json: .* must be in a file beside the index'):
        load(directory)


def test_shards_may_be_links_as_in_the_hubs_cache(directory, policy):
    shard(directory)
    blobs = directory.parent / 'blobs'
    blobs.mkdir()
    for file in [*directory.glob('model-*'), directory / 'model.safetensors.index.json']:
        (directory / file.name).rename(blobs / file.name)
        file.symlink_to(f'../blobs/{file.name}')
    assert_same_tensors(dict(hf.to_hf(policy.config, load(directory))), load_file(policy.path / 'model.safetensors'))


def test_a_tensor_in_two_files_is_refused(directory):
    """transformers takes the one in the last file, whatever the index says."""
    shard(directory)
    first, second = (directory / f'model-0000{i}-of-00002.safetensors' for i in (1, 2))
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: load_file(first)[name] + 1}, second)
    with pytest.raises(ValueError, match=f'{second.name}: {name} is also in {first.name}'):
        load(directory)


def test_one_file_goes_before_an_index_as_in_transformers(directory, policy):
    """Somebody exported into a directory that held shards; transformers reads the new file, and so do we."""
    from transformers import AutoModelForCausalLM

    newest = {name: 2 * array for name, array in load_file(directory / 'model.safetensors').items()}
    shard(directory)
    save_file(newest, directory / 'model.safetensors', metadata={'format': 'pt'})
    assert_same_tensors(dict(hf.to_hf(policy.config, load(directory))), newest)
    theirs = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(np.array_equal(theirs[name].numpy(), array) for name, array in newest.items())


@pytest.mark.parametrize('differs', [False, True])
def test_a_head_beside_an_embedding_that_it_is_tied_to(differs, directory):
    """transformers does not tie them where they differ, vLLM does; equal ones are what some trainers write."""

    def add_head(tensors):
        tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()
        tensors['lm_head.weight'][-1, -1] += differs

    edit_tensors(directory, add_head)
    config = hf.read_config(directory)
    if not differs:
        return hf.check_weights(directory, config)
    with pytest.raises(ValueError, match='model.safetensors: lm_head.weight differs .* config.json ties them'):
        hf.check_weights(directory, config)


@pytest.mark.parametrize('sharded', [False, True])
@pytest.mark.parametrize('name', ['model.layers.2.mlp.up_proj.weight', 'model.layers.0.self_attn.q_norm.weight', 'score.weight'])
def test_a_tensor_that_the_model_does_not_have_is_refused(name, sharded, directory):
    """A config.json of fewer layers than the files: the model would answer with what is left of it."""
    edit_tensors(directory, lambda tensors: tensors.update({'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, np.float32)}))
    hf.check_weights(directory, hf.read_config(directory))  # of old files; nobody reads it
    edit_tensors(directory, lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    if sharded:
        shard(directory)
    with pytest.raises(ValueError, match=f"1 tensors do not belong to the model that config.json describes, the first is '{name}'"):
        hf.check_weights(directory, hf.read_config(directory))


@pytest.mark.parametrize('model, files', [({'head_dim': 16}, QWEN3), (QWEN3, {'head_dim': 16})])
def test_a_config_of_one_family_beside_the_weights_of_the_other(model, files, tiny_hf, tmp_path):
    directory = shutil.copytree(tiny_hf(**files), tmp_path / 'model')
    shutil.copy(tiny_hf(**model) / 'config.json', directory)
    with pytest.raises(ValueError, match=r'cannot read tensor .model\.layers\.0\.self_attn\.(q_proj\.bias|q_norm)'):
        load(directory)


def test_missing_tensor(directory):
    edit_tensors(directory, lambda tensors: tensors.pop('model.layers.1.self_attn.k_proj.bias'))
    with pytest.raises(ValueError, match=r'model.safetensors: .*model\.layers\.1\.self_attn\.k_proj\.bias'):
        load(directory)


def test_missing_tensor_of_an_index(directory):
    edit_tensors(directory, lambda tensors: tensors.pop('model.norm.weight'))
    shard(directory)
    with pytest.raises(ValueError, match=r'model.safetensors.index.json: .*model\.norm\.weight'):
        load(directory)


def test_an_untied_config_wants_a_head(directory):
    edit_config(directory, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r'model.safetensors: .*lm_head\.weight'):
        load(directory)


@pytest.mark.parametrize(
    'name, spoiled',
    [
        ('model.norm.weight', [0]),
        ('model.layers.{}.mlp.up_proj.weight', [0, 1]),
        ('model.layers.{}.mlp.up_proj.weight', [1]),
    ],
)
def test_wrong_shape(name, spoiled, directory):
    names = [name.format(i) for i in spoiled]
    edit_tensors(directory, lambda tensors: tensors.update({n: tensors[n][:-1].copy() for n in names}))
    with pytest.raises(ValueError, match=f'{directory.name}.*{names[-1] if len(names) == 1 else name.format(0)}'):
        load(directory)


@pytest.mark.parametrize('sharded', [False, True])
def test_save_refuses_a_used_directory(sharded, policy, directory):
    """A sharded one too: two readers would read two models."""
    if sharded:
        shard(directory)
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    with pytest.raises(FileExistsError, match=f'{directory.name} already holds'):
        hf.save(directory, hf.to_hf(policy.config, policy.params), like=policy.path)
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == before


def test_save_carries_config_and_tokenizer_along(policy, directory, tmp_path):
    (directory / 'tokenizer.json').write_text('{}')
    (directory / 'README.md').write_text('not of the model')
    hf.save(tmp_path / 'out', hf.to_hf(policy.config, policy.params), like=directory)
    base, written = (json.loads((path / 'config.json').read_text()) for path in (directory, tmp_path / 'out'))
    assert written == {**base, 'rope_theta': 10_000.0}  # for transformers 4
    assert (tmp_path / 'out' / 'tokenizer.json').read_text() == '{}'
    assert not (tmp_path / 'out' / 'README.md').exists()
