"""Directories of Qwen2.5-VL in and out: both layouts of config.json, the published shapes, and what is said of one that will not do."""

import dataclasses
import functools
import json
import shutil

import jax
import pytest
from jax.sharding import AbstractMesh
from tiny_vl import GRIDS, SHAPES, make_vl, pixels_of, prompt_of, torch_inputs, torch_model  # noqa: F401  (a fixture)

from bapo_jax.cluster.mesh import MESH_AXES
from bapo_jax.dry_run.memory import matrix_sizes
from bapo_jax.models import hf
from bapo_jax.models.rotary import Rotation
from bapo_jax.models.sharding import parameter_sharding


def flat(config):
    """A config.json as Qwen wrote it, of one that transformers 5 writes."""
    config, text = dict(config), dict(config['text_config'])
    rope, vision = text.pop('rope_parameters'), dict(config.pop('vision_config'))
    vision['in_chans'] = vision.pop('in_channels')
    vision.pop('rope_parameters'), vision.pop('model_type'), config.pop('text_config'), text.pop('model_type')
    scaling = {'type': 'mrope', 'mrope_section': rope['mrope_section']}
    return {**text, **config, 'vision_config': vision, 'rope_theta': rope['rope_theta'], 'rope_scaling': scaling}


@pytest.mark.parametrize('layout', ['nested', 'flat'])
@pytest.mark.parametrize('shape', SHAPES)
def test_an_export_is_the_same_model_to_hugging_face(shape, layout, make_vl, tmp_path):
    import torch

    policy = make_vl(shape)
    model = shutil.copytree(policy.path, tmp_path / 'model')
    if layout == 'flat':
        (model / 'config.json').write_text(json.dumps(flat(json.loads((model / 'config.json').read_text()))))
    for name in ('preprocessor_config.json', 'video_preprocessor_config.json', 'chat_template.json'):
        (model / name).write_text(f'{{"{name}": 1}}')
    assert hf.read_config(model) == policy.config
    hf.save(tmp_path / 'out', hf.to_hf(policy.config, hf.load_params(model, policy.config)), like=model)
    for file in model.glob('*.json'):
        base, written = (json.loads((path / file.name).read_text()) for path in (model, tmp_path / 'out'))
        if layout == 'nested' and file.name == 'config.json':
            base['text_config']['rope_theta'] = 10_000.0  # for transformers 4
        assert written == base
    inputs = torch_inputs(prompt_of(GRIDS[2]), GRIDS[2], pixels_of(GRIDS[2]))
    with torch.no_grad():
        a, b = (torch_model(path)(**inputs).logits for path in (policy.path, tmp_path / 'out'))
    assert torch.equal(a, b)


@pytest.mark.parametrize('layout', ['nested', 'flat'])
def test_what_is_stated_keeps_the_sections_of_positions(layout, make_vl, tmp_path):
    from transformers import AutoConfig

    policy, stated = make_vl(), hf.overrides({'max_positions': 1024, 'rope_theta': 40_000.0})
    model = shutil.copytree(policy.path, tmp_path / 'model')
    if layout == 'flat':
        (model / 'config.json').write_text(json.dumps(flat(json.loads((model / 'config.json').read_text()))))
    config = hf.read_config(model, stated=stated)
    assert config == dataclasses.replace(policy.config, rotation=Rotation(40_000.0), max_positions=1024)
    hf.save(tmp_path / 'out', hf.to_hf(policy.config, policy.params), like=model, stated=stated)
    assert hf.read_config(tmp_path / 'out') == config
    read = AutoConfig.from_pretrained(tmp_path / 'out').text_config
    assert (read.rope_parameters['rope_theta'], read.rope_parameters['mrope_section']) == (40_000.0, [2, 3, 3])
    assert read.max_position_embeddings == 1024


def test_the_architecture_is_named_as_in_transformers_config_object(make_vl):
    from transformers import AutoConfig

    for shape in SHAPES:
        served = AutoConfig.from_pretrained(make_vl(shape).path)
        for name, value in hf.architecture(make_vl(shape).config).items():
            assert functools.reduce(getattr, name.split('.'), served) == value, name


@pytest.mark.parametrize(
    'section, change, message',
    [
        ('vision_config', {'hidden_act': 'gelu'}, "vision_config.hidden_act='gelu' is not supported"),
        ('vision_config', {'out_hidden_size': 48}, 'vision_config.out_hidden_size=48 is not supported'),
        ('vision_config', {'window_size': ...}, "'vision_config.window_size' is missing"),
        ('text_config', {'rope_parameters': {'rope_type': 'yarn'}}, 'rope_parameters='),
        ('text_config', {'rope_parameters': {'rope_type': 'default'}}, "'mrope_section' is missing"),
        ('text_config', {'hidden_act': 'gelu'}, "hidden_act='gelu'"),
    ],
)
def test_a_config_that_asks_for_more_is_refused(section, change, message, make_vl, tmp_path):
    config = json.loads((make_vl().path / 'config.json').read_text())
    config[section] = {k: v for k, v in (config[section] | change).items() if v is not ...}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        hf.read_config(tmp_path)


# As Qwen published them, and how many parameters their files hold.
QWEN = {
    'model_type': 'qwen2_5_vl', 'hidden_act': 'silu', 'image_token_id': 151655, 'rms_norm_eps': 1e-6, 'rope_theta': 1e6,
    'rope_scaling': {'type': 'mrope', 'mrope_section': [16, 24, 24]}, 'max_position_embeddings': 128000, 'use_sliding_window': False,
}  # fmt: skip
TOWER = {
    'depth': 32, 'hidden_act': 'silu', 'hidden_size': 1280, 'intermediate_size': 3420, 'num_heads': 16, 'in_chans': 3,
    'patch_size': 14, 'spatial_merge_size': 2, 'spatial_patch_size': 14, 'window_size': 112, 'tokens_per_second': 2,
    'temporal_patch_size': 2, 'fullatt_block_indexes': [7, 15, 23, 31],
}  # fmt: skip
PUBLISHED = {
    'Qwen2.5-VL-3B-Instruct': (3_754_622_976, {
        'hidden_size': 2048, 'intermediate_size': 11008, 'num_hidden_layers': 36, 'num_attention_heads': 16,
        'num_key_value_heads': 2, 'vocab_size': 151936, 'tie_word_embeddings': True,
    }),
    'Qwen2.5-VL-7B-Instruct': (8_292_166_656, {
        'hidden_size': 3584, 'intermediate_size': 18944, 'num_hidden_layers': 28, 'num_attention_heads': 28,
        'num_key_value_heads': 4, 'vocab_size': 152064, 'tie_word_embeddings': False,
    }),
}  # fmt: skip


@pytest.mark.parametrize('model', PUBLISHED)
def test_the_published_configs_are_read_and_give_as_many_parameters(model, tmp_path):
    import torch
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    parameters, fields = PUBLISHED[model]
    vision = {'vision_config': {**TOWER, 'out_hidden_size': fields['hidden_size']}}
    (tmp_path / 'config.json').write_text(json.dumps({**QWEN, **fields, **vision}))
    config = hf.read_config(tmp_path)
    shapes = hf.abstract_params(config)[1]
    assert sum(x.size for x in jax.tree.leaves(shapes)) == parameters
    assert (config.head_dim, config.mrope_section, config.vision.window_slots, config.vision.head_dim) == (128, (16, 24, 24), 64, 80)
    mesh = AbstractMesh((1, 16, 1), MESH_AXES)
    sharding = parameter_sharding(mesh, shapes)['vision']['blocks']['gate']['kernel']
    assert sharding.shard_shape(shapes['vision']['blocks']['gate']['kernel'].shape) == (32, 80, 3420)
    assert matrix_sizes(config) == matrix_sizes(dataclasses.replace(config, vision=None))
    with torch.device('meta'):
        theirs = Qwen2_5_VLForConditionalGeneration(AutoConfig.from_pretrained(tmp_path))
    assert sum(p.numel() for p in theirs.parameters()) == parameters
    names = {n.replace('model.language_model.', 'model.').replace('model.visual.', 'visual.') for n, _ in theirs.named_parameters()}
    assert {tensor.name for tensor in hf.layout(config)} == names
