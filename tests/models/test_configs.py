"""A config.json is read as the installed transformers reads it, in every form that is around; what one reader would miss is refused."""

import json

import pytest
from transformers import AutoConfig

from bapo_jax.models import hf

QWEN2 = {
    'model_type': 'qwen2', 'vocab_size': 64, 'hidden_size': 256, 'intermediate_size': 48, 'num_hidden_layers': 2,
    'num_attention_heads': 32, 'num_key_value_heads': 2,
}  # fmt: skip
QWEN3 = {**QWEN2, 'model_type': 'qwen3', 'head_dim': 16}
LLAMA = {**QWEN2, 'model_type': 'llama'}
TOWER = {
    'depth': 2, 'hidden_size': 16, 'intermediate_size': 20, 'num_heads': 2, 'out_hidden_size': 256, 'patch_size': 4,
    'spatial_merge_size': 2, 'temporal_patch_size': 2, 'window_size': 16, 'fullatt_block_indexes': [1],
}  # fmt: skip
SEEING = {'model_type': 'qwen2_5_vl', 'image_token_id': 5, 'vision_config': TOWER}
SECTION = {'type': 'mrope', 'mrope_section': [1, 1, 2]}
PLAIN = {'rope_type': 'default', 'mrope_section': [1, 1, 2]}

# What a decoder states of its positions: transformers 4's form, transformers 5's, both at odds, and neither.
POSITIONS = {
    'top': {'rope_theta': 5e5},
    'parameters': {'rope_parameters': {'rope_type': 'default', 'rope_theta': 5e5}},
    'both': {'rope_theta': 1e4, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 5e5}},
    'top beside empty parameters': {'rope_theta': 5e5, 'rope_parameters': {'rope_type': 'default'}},
    'scaling goes before parameters': {
        'rope_theta': 5e5, 'rope_scaling': {'rope_type': 'default'}, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 7.0},
    },
    'scaling with a theta': {'rope_theta': 1e4, 'rope_scaling': {'type': 'default', 'rope_theta': 5e5}},
    'neither': {},
}  # fmt: skip
# As published: Llama 3.1's, what Qwen2.5's model card tells users to add, and the first kind there was.
TURNED = {
    'llama3': {'rope_theta': 5e5, 'max_position_embeddings': 131072, 'rope_scaling': {
        'factor': 8.0, 'high_freq_factor': 4.0, 'low_freq_factor': 1.0, 'original_max_position_embeddings': 8192, 'rope_type': 'llama3'}},
    'yarn': {'rope_theta': 1e6, 'max_position_embeddings': 131072, 'rope_scaling': {
        'factor': 4.0, 'original_max_position_embeddings': 32768, 'type': 'yarn'}},
    'linear': {'rope_theta': 1e4, 'rope_scaling': {'type': 'linear', 'factor': 4.0}},
}  # fmt: skip
OTHERS = {
    'all stated': {
        'rms_norm_eps': 1e-3, 'tie_word_embeddings': True, 'max_position_embeddings': 99, 'dtype': 'bfloat16', 'torch_dtype': 'float32',
        'layer_types': ['full_attention'] * 2, 'sliding_window': 8, 'use_sliding_window': False, 'max_window_layers': 1,
    },
    'none stated': {'num_key_value_heads': ...},
    'null where it may be': {'num_key_value_heads': None, 'rope_scaling': None, 'sliding_window': None, 'layer_types': None},
}  # fmt: skip


def configs():
    for model in (QWEN2, QWEN3, LLAMA):
        for name, fields in {**POSITIONS, **OTHERS, **TURNED}.items():
            yield pytest.param({**model, **fields}, id=f'{model["model_type"]}, {name}')
    positions = {
        'top': {'rope_theta': 5e5, 'rope_scaling': SECTION},
        'parameters': {'rope_parameters': {**PLAIN, 'rope_theta': 5e5}},
        'both': {'rope_theta': 1e4, 'rope_parameters': {**PLAIN, 'rope_theta': 5e5}},
        'scaling goes before parameters': {'rope_theta': 5e5, 'rope_scaling': SECTION, 'rope_parameters': {**PLAIN, 'rope_theta': 7.0}},
        'neither': {'rope_scaling': SECTION},
        **{name: {**fields, 'rope_scaling': SECTION} for name, fields in OTHERS.items()},
    }
    for name, fields in positions.items():
        decoder = {**{k: v for k, v in QWEN2.items() if k != 'model_type'}, **fields}
        yield pytest.param({**SEEING, **decoder}, id=f'qwen2_5_vl, {name}, flat')
        yield pytest.param({**SEEING, 'text_config': decoder}, id=f'qwen2_5_vl, {name}, nested')
    stray = {'hidden_size': 7, 'rope_theta': 9.0, 'num_key_value_heads': 1, 'rms_norm_eps': 0.5}
    yield pytest.param({**SEEING, **stray, 'text_config': {**decoder, 'rope_scaling': SECTION}}, id='qwen2_5_vl, strays at the top')


def written(path, config):
    def stated(part):
        return {k: stated(v) if isinstance(v, dict) else v for k, v in part.items() if v is not ...}

    path.mkdir(exist_ok=True)
    (path / 'config.json').write_text(json.dumps(stated(config)))
    return path


@pytest.mark.parametrize('config', list(configs()))
def test_every_field_is_as_transformers_reads_it(config, tmp_path):
    ours = hf.read_config(written(tmp_path / 'model', config))
    whole = AutoConfig.from_pretrained(tmp_path / 'model')
    theirs = whole.get_text_config()
    width = theirs.hidden_size // theirs.num_attention_heads
    assert (ours.model_type, ours.tie_embeddings) == (whole.model_type, whole.tie_word_embeddings)
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size) == (
        theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size,
    )  # fmt: skip
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads) == (
        theirs.num_hidden_layers, theirs.num_attention_heads, theirs.num_key_value_heads,
    )  # fmt: skip
    assert (ours.head_dim, ours.rms_norm_eps) == (getattr(theirs, 'head_dim', width), theirs.rms_norm_eps)
    assert (ours.rotation.rope_theta, ours.max_positions) == (theirs.rope_parameters['rope_theta'], theirs.max_position_embeddings)
    assert ours.rotation.rope_type == theirs.rope_parameters['rope_type']
    assert list(ours.mrope_section) == (theirs.rope_parameters['mrope_section'] if ours.vision else [])
    assert {*(getattr(theirs, 'layer_types', None) or ['full_attention'])} == {'full_attention'}
    assert ours.model_type == 'llama' or theirs.sliding_window is None  # Llama has none
    if ours.vision:
        assert ours.vision.image_token == whole.image_token_id
        for name, value in vars(ours.vision).items():
            assert name == 'image_token' or value == getattr(whole.vision_config, name) or list(value) == TOWER[name]
    assert str(whole.dtype).removeprefix('torch.') == str(hf.stored_dtype(tmp_path / 'model'))


@pytest.mark.parametrize('name', POSITIONS)
def test_the_value_that_counts_is_no_accident(name, tmp_path):
    """So that the test above compares what differs."""
    theta = {'neither': 1e4}.get(name, 5e5)
    assert hf.read_config(written(tmp_path / 'model', {**QWEN2, **POSITIONS[name]})).rotation.rope_theta == theta


@pytest.mark.parametrize('theta', [0.0, 4e4])
@pytest.mark.parametrize('config', list(configs()))
def test_an_export_is_read_alike_by_transformers_4_and_5(config, theta, tmp_path):
    if theta and config.get('rope_scaling') in [fields['rope_scaling'] for fields in TURNED.values()]:
        return  # refused, as the next test says
    model, stated = written(tmp_path / 'model', config), hf.overrides({'rope_theta': theta})
    want = hf.read_config(model, stated=stated)
    hf.save(tmp_path / 'out', iter(()), like=model, stated=stated, dtype='bfloat16')
    assert hf.read_config(tmp_path / 'out') == want and (not theta or want.rotation.rope_theta == theta)
    left = json.loads((tmp_path / 'out' / 'config.json').read_text())
    decoder = left.get('text_config') or left
    default = 1e6 if want.vision else 1e4  # of both versions, where nothing is stated
    assert decoder.get('rope_theta', default) == want.rotation.rope_theta
    dtypes = {part[name] for part in (left, decoder) for name in ('dtype', 'torch_dtype') if name in part}
    assert dtypes == {'bfloat16'}


@pytest.mark.parametrize('name', TURNED)
def test_a_stated_theta_does_not_drop_a_rotation(name, tmp_path):
    model = written(tmp_path / 'model', {**QWEN2, **TURNED[name]})
    read = hf.read_config(model, stated=hf.overrides({'max_positions': 77}))
    assert (read.rotation.rope_type, read.max_positions) == (name, 77)
    assert hf.read_config(model).max_positions == {'linear': 32768}.get(name, 131072)
    with pytest.raises(ValueError, match='config.json: rope_scaling=.* would be lost with model.rope_theta; set model.rope_theta=0'):
        hf.read_config(model, stated=hf.overrides({'rope_theta': 5e5}))


def test_an_export_of_a_file_that_all_read_alike_is_that_file(tmp_path):
    model = written(tmp_path / 'model', {**QWEN2, 'rope_theta': 5e5, 'torch_dtype': 'float32'})
    hf.save(tmp_path / 'out', iter(()), like=model)
    assert (tmp_path / 'out' / 'config.json').read_bytes() == (model / 'config.json').read_bytes()


@pytest.mark.parametrize('fields, named', [
    ({'rope_parameters': {'rope_type': 'default', 'partial_rotary_factor': 0.5}}, 'rope_parameters='),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5'),
    ({'rope_parameters': {'rope_type': 'default', 'rope_dim': 4}}, 'rope_parameters='),
    ({'rope_scaling': {'rope_type': 'default', 'type': 'yarn'}}, 'rope_scaling='),
    ({'rope_parameters': {'full_attention': {'rope_type': 'default', 'rope_theta': 5.0}}}, 'rope_parameters='),
    ({'rope_parameters': {'rope_type': None, 'rope_theta': 5.0}}, 'rope_parameters='),
    ({'rope_theta': None}, 'rope_parameters='),
    ({'dual_chunk_attention_config': {'chunk_size': 8}}, 'dual_chunk_attention_config='),
    ({'per_layer_config': {'0': {'head_dim': 4}}}, 'per_layer_config='),
    ({'transformers_weights': 'other.safetensors'}, "transformers_weights='other.safetensors'"),
    ({'layer_types': ['full_attention'] * 3}, 'transformers does not read it'),
    ({'torch_dtype': ['float32']}, 'torch_dtype='),
    ({**SEEING, 'rope_scaling': SECTION, 'head_dim': 16}, 'head_dim=16'),
    ({**LLAMA, 'attention_bias': True}, 'attention_bias=True is not supported; supported: False'),
    ({**LLAMA, 'mlp_bias': True}, 'mlp_bias=True is not supported; supported: False'),
    ({'rope_scaling': {'rope_type': 'dynamic', 'factor': 2.0}}, "rope_scaling=.* supported: rope_type 'default' or 'linear' or"),
    ({'rope_scaling': {'rope_type': 'longrope', 'factor': 2.0}}, 'rope_scaling='),
    ({**SEEING, 'rope_scaling': {**SECTION, 'type': 'yarn', 'factor': 2.0}}, "rope_scaling=.*rope_type 'default' or 'mrope' of whole heads"),
    ({'rope_scaling': {'rope_type': 'yarn'}}, "transformers does not read it .*'rope_type'='yarn': {'factor'}"),
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': None}}, "rope_parameters: rope_type 'yarn' needs factor"),
    ({'rope_scaling': {'rope_type': 'linear', 'factor': '4'}}, "rope_parameters: factor=4 must be a positive number"),
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0, 'truncate': 1}}, 'rope_parameters: truncate=1 must be true or false'),
    ({'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0, 'alpha': 1.0}}, "rope_parameters: alpha=1.0 is not supported with rope_type 'yarn'"),
    ({'rope_scaling': {**TURNED['llama3']['rope_scaling'], 'low_freq_factor': 4.0}}, 'low_freq_factor must be below high_freq_factor'),
    ({**SEEING, 'text_config': {}, 'vision_config': {**TOWER, 'out_hidden_size': None}}, "'vocab_size' is missing"),
    ({**SEEING, 'text_config': {**QWEN2, 'rope_scaling': {'type': 'mrope'}}}, "'mrope_section' is missing"),
])  # fmt: skip
def test_what_one_reader_would_take_otherwise_is_refused(fields, named, tmp_path):
    with pytest.raises(ValueError, match=f'config.json: .*{named}'):
        hf.read_config(written(tmp_path / 'model', {**QWEN2, **fields}))
