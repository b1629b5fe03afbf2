"""Reads the shape of a model from a Hugging Face config.json, and names it as there.

Qwen2.5-VL's decoder stands at the file's top before transformers 5, and under `text_config` since.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bapo_jax.models.patches import VisionConfig
from bapo_jax.models.qwen import ModelConfig

MODEL_TYPES = ('qwen2', 'qwen3', 'qwen2_5_vl')


def overrides(model: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's config (its section `model`) states in place of fields of the model's config.json, named as there.

    Qwen2.5-Math was made for 4,096 positions. People train it on more with rope_theta 40,000 and 16,384 positions.
    """
    stated: dict[str, Any] = {}
    if model.get('max_positions'):
        stated['max_position_embeddings'] = model['max_positions']
    if model.get('rope_theta'):
        # By the names of transformers 4 and 5.
        stated |= {'rope_theta': model['rope_theta'], 'rope_parameters': {'rope_type': 'default', 'rope_theta': model['rope_theta']}}
    return stated


def read_config(path: str | Path, dtype: str = 'float32', stated: Mapping[str, Any] = MappingProxyType({})) -> ModelConfig:
    """Reads the decoder's shape from `path/config.json`; what is `stated` (`overrides`) counts in its place.

    Raises FileNotFoundError where the directory or the file is missing. Raises ValueError, naming the field, where the file asks
    for something that `Qwen` leaves out, or a value is none from which a model can be made.
    """
    file = Path(path) / 'config.json'
    if not file.is_file():
        raise FileNotFoundError(f'model.path={str(path)!r}: no config.json there; give a Hugging Face model directory')
    try:
        c = json.loads(file.read_text('utf-8'))
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{file}: not valid JSON ({str(e)[:200]}); fetch the model directory again') from e
    if not isinstance(c, dict) or c.get('model_type') not in MODEL_TYPES:
        found = c.get('model_type') if isinstance(c, dict) else None
        raise ValueError(f'{file}: model_type={_short(found)} is not supported; supported: {", ".join(MODEL_TYPES)}')

    def refuse(messages: list[str]) -> None:
        if messages:
            raise ValueError(f'{file}: {"; ".join(messages)}')

    refuse(_malformed(c))
    refuse(_malformed(c.get('text_config') or {}))
    c = {field: value for field, value in _flat(with_stated(c, stated)).items() if value is not None}
    rope = c.get('rope_scaling', {}) | c.get('rope_parameters', {})  # transformers 4 and 5
    rope = {field: value for field, value in rope.items() if value is not None}
    refuse(_malformed(c) + _malformed(rope))
    refuse(_unsupported(c))
    has_vision = c['model_type'] == 'qwen2_5_vl'
    try:
        # Qwen3 must state its head size; Qwen2's default is width / heads.
        head_dim = c['head_dim'] if c['model_type'] == 'qwen3' else c.get('head_dim')
        config = ModelConfig(
            model_type=c['model_type'],
            vocab_size=c['vocab_size'],
            hidden_size=c['hidden_size'],
            intermediate_size=c['intermediate_size'],
            num_layers=c['num_hidden_layers'],
            num_heads=c['num_attention_heads'],
            num_kv_heads=c.get('num_key_value_heads') or c['num_attention_heads'],
            head_dim=head_dim or c['hidden_size'] // c['num_attention_heads'],
            rope_theta=float(c.get('rope_theta') or rope.get('rope_theta', 10_000.0)),
            rms_norm_eps=float(c.get('rms_norm_eps', 1e-6)),
            tie_embeddings=bool(c.get('tie_word_embeddings', False)),
            max_positions=c.get('max_position_embeddings') or 0,
            mrope_section=tuple(rope['mrope_section']) if has_vision else (),
            vision=_vision(c) if has_vision else None,
            dtype=dtype,
        )
    except KeyError as e:
        raise ValueError(f'{file}: the field {e.args[0]!r} is missing; fetch the model directory again') from e
    if config.num_heads % config.num_kv_heads or config.head_dim % 2 or not config.head_dim:
        raise ValueError(
            f'{file}: {config.num_heads} heads of {config.head_dim} numbers and {config.num_kv_heads} heads of keys make no model; '
            'num_key_value_heads divides num_attention_heads, and head_dim is even'
        )
    if has_vision and sum(config.mrope_section) != config.head_dim // 2:
        section = list(config.mrope_section)
        raise ValueError(f'{file}: mrope_section={section} must add up to half of head_dim, {config.head_dim // 2}; fetch it again')
    return config


def with_stated(config: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with what is `stated` (`overrides`) in place of its decoder's fields; the sections of its positions stay."""
    decoder = config.get('text_config') or config
    kept = {k: v for k, v in (decoder.get('rope_parameters') or {}).items() if k == 'mrope_section'}
    decoder = {**decoder, **stated, **({'rope_parameters': stated['rope_parameters'] | kept} if 'rope_parameters' in stated else {})}
    return {**config, 'text_config': decoder} if config.get('text_config') else decoder


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with the decoder's fields at its top, and the vision tower's there by dotted names."""
    decoder = config.get('text_config') or {}
    return {
        **config, **decoder, **{f'vision_config.{field}': value for field, value in (config.get('vision_config') or {}).items()},
        'model_type': config['model_type'],
        'tie_word_embeddings': config.get('tie_word_embeddings') or decoder.get('tie_word_embeddings'),
    }  # fmt: skip


def _vision(c: dict[str, Any]) -> VisionConfig:
    """Of a flat config. Raises KeyError where a field is missing."""
    named = [field.name for field in dataclasses.fields(VisionConfig) if field.name not in ('in_channels', 'image_token')]
    fields = {name: c[f'vision_config.{name}'] for name in named}
    fields['fullatt_block_indexes'] = tuple(fields['fullatt_block_indexes'])
    in_channels = c.get('vision_config.in_channels') or c.get('vision_config.in_chans', 3)  # transformers 5, and what Qwen wrote
    return VisionConfig(**fields, in_channels=in_channels, image_token=c['image_token_id'])


_SECTIONS = ('text_config', 'vision_config', 'rope_parameters', 'rope_scaling')
_OF_VISION = [field.name for field in dataclasses.fields(VisionConfig) if field.type == 'int' and field.name != 'image_token']
_SIZES = (
    'vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads', 'num_key_value_heads', 'head_dim',
    *(f'vision_config.{name}' for name in (*_OF_VISION, 'in_chans')),
)  # fmt: skip


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**31


_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_SECTIONS, lambda v: isinstance(v, dict), 'an object'),
    (_SIZES, lambda v: _is_count(v, 1), 'a whole number from 1 on'),
    (('max_position_embeddings', 'image_token_id'), _is_count, 'a whole number from 0 on'),
    (('rope_theta', 'rms_norm_eps'), lambda v: type(v) in (int, float) and 0 < v < 1e30, 'a positive number'),
    (('tie_word_embeddings', 'use_sliding_window', 'attention_bias'), lambda v: type(v) is bool, 'true or false'),
    (('layer_types',), lambda v: isinstance(v, list) and all(isinstance(t, str) for t in v), 'a list of names'),
    (
        ('mrope_section', 'vision_config.fullatt_block_indexes'),
        lambda v: isinstance(v, list) and all(map(_is_count, v)),
        'a list of whole numbers',
    ),
)  # fmt: skip


def _short(value: Any) -> str:
    return repr(value)[:100]


def _malformed(c: Mapping[str, Any]) -> list[str]:
    """One message for each field whose value is of another kind. null is as good as no field."""
    return [
        f'{field}={_short(c[field])} must be {kind}'
        for fields, fits, kind in _KINDS for field in fields if c.get(field) is not None and not fits(c[field])
    ]  # fmt: skip


def _unsupported(c: dict[str, Any]) -> list[str]:
    """One message for each field of a flat config that asks for something `Qwen` leaves out."""
    rope_types = {
        field: rope.get('rope_type', rope.get('type', 'default'))
        for field in ('rope_parameters', 'rope_scaling')
        if (rope := c.get(field))
    }
    has_vision, vision_act, features = c['model_type'] == 'qwen2_5_vl', 'vision_config.hidden_act', 'vision_config.out_hidden_size'
    supported = (
        ('hidden_act', c.get('hidden_act', 'silu') == 'silu', "'silu'"),
        ('use_sliding_window', not c.get('use_sliding_window'), 'False'),
        ('layer_types', set(c.get('layer_types') or ()) <= {'full_attention'}, "'full_attention' in every layer"),
        ('attention_bias', c['model_type'] != 'qwen3' or not c.get('attention_bias'), 'False'),  # Qwen2 does not read it
        *(
            (field, rope_type == 'default' or has_vision and rope_type == 'mrope', "rope_type 'default'")
            for field, rope_type in rope_types.items()
        ),
        (vision_act, c.get(vision_act, 'silu') == 'silu', "'silu'"),
        (features, not has_vision or c.get(features) in (None, c.get('hidden_size')), 'the width of the decoder, hidden_size'),
        ('quantization_config', not c.get('quantization_config'), 'weights that are not quantised'),
    )
    return [f'{field}={_short(c[field])} is not supported; supported: {values}' for field, fine, values in supported if not fine]


def architecture(config: ModelConfig) -> dict[str, Any]:
    """The fields, named as in transformers' config object, that tell this model from another."""
    decoder = {
        'vocab_size': config.vocab_size,
        'hidden_size': config.hidden_size,
        'intermediate_size': config.intermediate_size,
        'num_hidden_layers': config.num_layers,
        'num_attention_heads': config.num_heads,
        'num_key_value_heads': config.num_kv_heads,
        'head_dim': config.head_dim,
    }
    whole = {'model_type': config.model_type, 'tie_word_embeddings': config.tie_embeddings}
    if not config.vision:
        return {**whole, **decoder}
    vision = dataclasses.asdict(config.vision)
    whole['image_token_id'] = vision.pop('image_token')
    vision['fullatt_block_indexes'] = list(vision['fullatt_block_indexes'])  # as JSON has it
    del decoder['head_dim']  # not in that object: width / heads
    of_parts = {'text_config': decoder, 'vision_config': vision}
    return whole | {f'{part}.{name}': value for part, fields in of_parts.items() for name, value in fields.items()}


def stored_dtype(path: str | Path) -> str | None:
    """The dtype that config.json states for the weights: 'bfloat16', 'float32', …; None where it states none."""
    config = json.loads((Path(path) / 'config.json').read_text('utf-8'))
    return config.get('dtype') or config.get('torch_dtype')  # transformers 5 and before
