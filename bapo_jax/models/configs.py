"""Reads the shape of a model from a Hugging Face config.json, and names the fields as there.

Qwen2.5-VL's decoder is described at the file's top level before transformers 5, and under `text_config`
since. Every value is that of transformers' own config object, because a rollout server reads the file through
it. That object also decides which of two places takes precedence, and the default of an absent field.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bapo_jax.models.config_fields import (
    DTYPE_FIELDS,
    ROPE_FIELDS,
    malformed,
    quoted,
    turns,
    unsupported,
)
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.delta import DeltaShape
from bapo_jax.models.experts import Routing
from bapo_jax.models.families import FAMILIES, Family
from bapo_jax.models.rotary import read_rotation
from bapo_jax.models.vision.patches import VisionConfig


def overrides(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the model's config.json that a run's config (section `model`) overrides.

    The names are those of config.json. Qwen2.5-Math was made for 4,096 positions. To train it on longer
    sequences, people use rope_theta 40,000 and 16,384 positions.
    """
    stated: dict[str, Any] = {}
    if model.get('max_positions'):
        stated['max_position_embeddings'] = model['max_positions']
    if model.get('rope_theta'):
        theta = model['rope_theta']  # under the names of transformers 4 and 5
        stated |= {'rope_theta': theta, 'rope_parameters': {'rope_type': 'default', 'rope_theta': theta}}
    return stated


def read_config(
    path: str | Path, dtype: str = 'float32', stated: Mapping[str, Any] = MappingProxyType({})
) -> ModelConfig:
    """Reads the decoder's shape from `path/config.json`; fields `stated` (see `overrides`) take precedence.

    Raises FileNotFoundError if the directory or the file is missing. Raises ValueError, naming the field, if
    the file requires something that `Decoder` does not support, or a value does not describe a model.
    """
    file = Path(path) / 'config.json'
    if not file.is_file():
        raise FileNotFoundError(
            f'model.path={str(path)!r}: no config.json there; give a Hugging Face model directory'
        )
    try:
        c = json.loads(file.read_text('utf-8'))
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{file}: not valid JSON ({str(e)[:200]}); fetch the model directory again') from e
    if isinstance(c, dict) and c.get('model_type') == 'qwen3_5':
        raise ValueError(
            f"{file}: model_type='qwen3_5' has a vision tower, which is not supported. Write its text part "
            'with transformers, and its tokenizer beside it: Qwen3_5ForCausalLM.from_pretrained(MODEL)'
            '.save_pretrained(TEXT, save_original_format=False); then set model.path=TEXT'
        )
    if not isinstance(c, dict) or c.get('model_type') not in tuple(FAMILIES):
        found = c.get('model_type') if isinstance(c, dict) else None
        raise ValueError(
            f'{file}: model_type={quoted(found)} is not supported; supported: {", ".join(FAMILIES)}'
        )
    family = FAMILIES[c['model_type']]

    def refuse(messages: list[str]) -> None:
        if messages:
            raise ValueError(f'{file}: {"; ".join(messages)}')

    refuse(malformed(c))
    refuse(malformed(c.get('text_config') or {}))
    stretched = [
        (field, rope)
        for field in ROPE_FIELDS
        if not turns(rope := _flat(c).get(field) or {}, ('default', 'mrope'), family.hybrid)
    ]
    if stretched and 'rope_theta' in stated:
        raise ValueError(
            f'{file}: {stretched[0][0]}={quoted(stretched[0][1])} would be lost with model.rope_theta; set '
            'model.rope_theta=0'
        )
    c = with_stated(c, stated)
    stands = {field: value for field, value in _flat(c).items() if value is not None}
    refuse(malformed(stands))
    refuse([message for field in ROPE_FIELDS for message in malformed(stands.get(field) or {})])
    refuse(unsupported(stands, family))
    if missing := [field for field in _needed(family) if field not in stands]:
        raise ValueError(f'{file}: the field {missing[0]!r} is missing; fetch the model directory again')
    whole = _as_transformers_reads(c, file)
    decoder = whole.text_config if family.vision else whole
    refuse([
        f'{field}={quoted(found)} is not supported; supported: {value}'
        for field, value in family.only if (found := getattr(decoder, field)) != value
    ])  # fmt: skip
    rope = decoder.rope_parameters
    try:
        rotation = read_rotation(rope)
    except ValueError as e:
        raise ValueError(f'{file}: {e}') from e
    positions = max(decoder.max_position_embeddings, rotation.positions)
    if family.vision and not rope.get('mrope_section'):
        raise ValueError(f"{file}: the field 'mrope_section' is missing; fetch the model directory again")
    width = decoder.hidden_size // decoder.num_attention_heads
    config = ModelConfig(
        model_type=c['model_type'],
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.moe_intermediate_size if family.experts else decoder.intermediate_size,
        num_layers=decoder.num_hidden_layers,
        num_heads=decoder.num_attention_heads,
        num_kv_heads=decoder.num_key_value_heads,
        head_dim=getattr(decoder, 'head_dim', None) or width,
        rotation=rotation,
        rms_norm_eps=float(decoder.rms_norm_eps),
        tie_embeddings=bool(whole.tie_word_embeddings),
        max_positions=decoder.max_position_embeddings if 'max_position_embeddings' in stated else positions,
        mrope_section=tuple(rope['mrope_section']) if family.vision else (),
        routing=(
            Routing(decoder.num_experts, decoder.num_experts_per_tok, decoder.norm_topk_prob)
            if family.experts
            else None
        ),
        delta=_delta(decoder, file) if family.hybrid else None,
        vision=_vision(whole) if family.vision else None,
        dtype=dtype,
    )
    d = config.delta
    if d and (d.value_heads % d.key_heads or int(config.head_dim * rotation.partial_rotary_factor) % 2):
        raise ValueError(
            f'{file}: linear_num_value_heads={d.value_heads} must be a multiple of '
            f'linear_num_key_heads={d.key_heads}, and head_dim · partial_rotary_factor='
            f'{config.head_dim * rotation.partial_rotary_factor:g} even; fetch the model directory again'
        )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2 or not config.head_dim:
        raise ValueError(
            f'{file}: num_attention_heads={config.num_heads} must be a multiple of '
            f'num_key_value_heads={config.num_kv_heads}, '
            f'and head_dim={config.head_dim} must be even and positive; fetch the model directory again'
        )
    if family.vision and sum(config.mrope_section) != config.head_dim // 2:
        section = list(config.mrope_section)
        raise ValueError(
            f'{file}: mrope_section={section} must add up to half of head_dim, {config.head_dim // 2}; fetch '
            'it again'
        )
    return config


def _as_transformers_reads(c: dict[str, Any], file: Path) -> Any:
    """Returns the config object of the installed transformers. Raises ValueError if it rejects the file."""
    from transformers import AutoConfig  # takes seconds to import

    try:
        return AutoConfig.for_model(**copy.deepcopy(c))  # it modifies its arguments
    except Exception as e:  # its validators raise many kinds of errors
        why = ' '.join(str(e).split())[:200]
        raise ValueError(
            f'{file}: transformers does not read it ({why}); fetch the model directory again'
        ) from e


def with_stated(config: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with decoder fields replaced by `stated` (`overrides`).

    What the rotation turns is kept: `mrope_section`, `partial_rotary_factor`.
    """
    nested = config.get('text_config') is not None
    decoder = {**(config['text_config'] if nested else config), **stated}
    if 'rope_parameters' in stated:
        before = (config['text_config'] if nested else config).get('rope_parameters') or {}
        decoder['rope_parameters'] = stated['rope_parameters'] | {
            k: v
            for k, v in before.items()
            if k in ('mrope_section', 'mrope_interleaved', 'partial_rotary_factor')
        }
        if decoder.get('rope_scaling'):  # takes precedence over rope_parameters
            decoder['rope_scaling'] = {**decoder['rope_scaling'], 'rope_theta': stated['rope_theta']}
    return {**config, 'text_config': decoder} if nested else decoder


def for_all_readers(config: dict[str, Any], dtype: str, file: Path) -> dict[str, Any]:
    """Returns a config.json, for weights in `dtype`, that transformers 4 and 5 read alike.

    Version 4 looks for rope_theta at the decoder's top level, version 5 first in its rope_parameters. Only
    version 5 knows num_experts as num_local_experts, and writes it so.
    Precedence is as in `read_config`. Errors name `file`.
    """
    config = copy.deepcopy(config)
    read, decoder = _as_transformers_reads(config, file), config.get('text_config') or config
    stating = [decoder[field] for field in ROPE_FIELDS if (decoder.get(field) or {}).get('rope_theta')]
    for part in [decoder, *stating] if stating else []:
        part['rope_theta'] = getattr(read, 'text_config', read).rope_parameters['rope_theta']
    if 'num_local_experts' in decoder:
        decoder.setdefault('num_experts', decoder['num_local_experts'])
    config.setdefault('dtype' if 'dtype' in config else 'torch_dtype', dtype)
    for part in filter(None, (config, config.get('text_config'), config.get('vision_config'))):
        part.update((name, dtype) for name in DTYPE_FIELDS if name in part)
    return config


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json's fields, the decoder's at top level and the vision tower's by dotted names.

    The number of experts is under num_experts, by whatever name the file states it.
    """
    decoder = config if config.get('text_config') is None else config['text_config']
    experts = decoder.get('num_local_experts')
    return {
        **({} if experts is None else {'num_experts': experts}),
        **{k: v for k, v in config.items() if decoder is config or k not in (*_NEEDED, *ROPE_FIELDS)},
        **decoder,
        **{f'vision_config.{field}': value for field, value in (config.get('vision_config') or {}).items()},
        'model_type': config['model_type'],
    }


def _needed(family: Family) -> tuple[str, ...]:
    """Returns the fields that a file must state.

    transformers has a default for each, but that is the value of some published model.
    """
    if not family.vision:
        return (*_NEEDED, *family.needs)
    of_vision = [
        field.name
        for field in dataclasses.fields(VisionConfig)
        if field.name not in ('in_channels', 'image_token')
    ]
    return (*_NEEDED, 'image_token_id', *(f'vision_config.{name}' for name in of_vision))


def _delta(decoder: Any, file: Path) -> DeltaShape:
    """Returns the DeltaShape of transformers' config object; raises as `read_config` does."""
    kinds = list(decoder.layer_types)
    period = kinds.index('full_attention') + 1 if 'full_attention' in kinds else len(kinds) + 1
    shape = DeltaShape(
        period,
        decoder.linear_num_key_heads,
        decoder.linear_num_value_heads,
        decoder.linear_key_head_dim,
        decoder.linear_value_head_dim,
        decoder.linear_conv_kernel_dim,
    )
    if period == 1 or kinds != shape.kinds(len(kinds)):
        raise ValueError(
            f'{file}: layer_types={quoted(kinds)} is not supported; supported: layers of linear_attention '
            'and one of full_attention after each so many, the last layer included'
        )
    return shape


def _vision(whole: Any) -> VisionConfig:
    """Returns the VisionConfig of transformers' config object."""
    names = [field.name for field in dataclasses.fields(VisionConfig) if field.name != 'image_token']
    fields = {name: getattr(whole.vision_config, name) for name in names}
    fields['fullatt_block_indexes'] = tuple(fields['fullatt_block_indexes'])
    return VisionConfig(**fields, image_token=whole.image_token_id)


_NEEDED = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads')


def architecture(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields that distinguish this model from others, named as in transformers' config object."""
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
    if config.routing:
        decoder |= {
            'moe_intermediate_size': decoder.pop('intermediate_size'),
            'num_experts': config.routing.experts,
            'num_experts_per_tok': config.routing.chosen,
            'norm_topk_prob': config.routing.normalised,
        }
    if d := config.delta:
        decoder |= {
            'linear_num_key_heads': d.key_heads,
            'linear_num_value_heads': d.value_heads,
            'linear_key_head_dim': d.key_dim,
            'linear_value_head_dim': d.value_dim,
            'linear_conv_kernel_dim': d.conv,
            'layer_types': d.kinds(config.num_layers),
        }
    if not config.vision:
        return {**whole, **decoder}
    vision = dataclasses.asdict(config.vision)
    whole['image_token_id'] = vision.pop('image_token')
    vision['fullatt_block_indexes'] = list(vision['fullatt_block_indexes'])  # as in JSON
    del decoder['head_dim']  # not in that object, which implies it: width / heads
    of_parts = {'text_config': decoder, 'vision_config': vision}
    return whole | {
        f'{part}.{name}': value for part, fields in of_parts.items() for name, value in fields.items()
    }


def stored_dtype(path: str | Path) -> str | None:
    """Returns the weights' dtype in config.json ('bfloat16', 'float32', …), or None if it states no dtype."""
    config = json.loads((Path(path) / 'config.json').read_text('utf-8'))
    return config.get('dtype') or config.get('torch_dtype')  # in transformers 5 and before
