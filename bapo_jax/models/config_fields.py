"""What a config.json may state: fields of the right kind, and values that `Decoder` supports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bapo_jax.models.families import Family
from bapo_jax.models.vision.patches import VisionConfig

ROPE_FIELDS = ('rope_parameters', 'rope_scaling')
DTYPE_FIELDS = ('dtype', 'torch_dtype')  # the names in transformers 5 and before
_SECTIONS = ('text_config', 'vision_config', *ROPE_FIELDS)
_OF_VISION = [
    field.name
    for field in dataclasses.fields(VisionConfig)
    if field.type == 'int' and field.name != 'image_token'
]
_SIZES = (
    'vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads',
    'num_key_value_heads', 'head_dim',
    'moe_intermediate_size', 'num_experts', 'num_local_experts', 'num_experts_per_tok',
    'linear_num_key_heads', 'linear_num_value_heads', 'linear_key_head_dim', 'linear_value_head_dim',
    'linear_conv_kernel_dim', 'full_attention_interval',
    *(f'vision_config.{name}' for name in (*_OF_VISION, 'in_chans')),
)  # fmt: skip


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**31


_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_SECTIONS, lambda v: isinstance(v, dict), 'an object'),
    (_SIZES, lambda v: _is_count(v, 1), 'an integer of at least 1'),
    (('max_position_embeddings', 'image_token_id'), _is_count, 'an integer of at least 0'),
    (('rope_theta', 'rms_norm_eps'), lambda v: type(v) in (int, float) and 0 < v < 1e30, 'a positive number'),
    (('tie_word_embeddings', 'use_sliding_window', 'attention_bias', 'mlp_bias', 'norm_topk_prob',
      'attn_output_gate'),
     lambda v: type(v) is bool, 'true or false'),
    (('partial_rotary_factor',), lambda v: type(v) in (int, float) and 0 < v <= 1, 'a number in (0, 1]'),
    (DTYPE_FIELDS, lambda v: isinstance(v, str), 'the name of a dtype'),
    (('layer_types',), lambda v: isinstance(v, list) and all(isinstance(t, str) for t in v),
     'a list of names'),
    (('mrope_section', 'vision_config.fullatt_block_indexes'),
     lambda v: isinstance(v, list) and all(map(_is_count, v)), 'a list of integers of at least 0'),
)  # fmt: skip


def quoted(value: Any) -> str:
    """Returns the start of a value, for a message."""
    return repr(value)[:100]


def malformed(c: Mapping[str, Any]) -> list[str]:
    """Returns one message for each field whose value is of the wrong kind. null counts as absent."""
    return [
        f'{field}={quoted(c[field])} must be {kind}'
        for fields, fits, kind in _KINDS
        for field in fields
        if c.get(field) is not None and not fits(c[field])
    ]


def unsupported(c: dict[str, Any], family: Family) -> list[str]:
    """Returns one message for each field of a flat config that `Decoder` does not support."""
    has_vision, vision_act, features = (
        family.vision,
        'vision_config.hidden_act',
        'vision_config.out_hidden_size',
    )
    turning = f'rope_type {" or ".join(map(repr, family.rotations))}' + ' of whole heads' * (
        not family.hybrid
    )
    kinds = {'full_attention', 'linear_attention'} if family.hybrid else {'full_attention'}
    width = c.get('hidden_size', 0) // c.get('num_attention_heads', 1)
    supported = (
        ('hidden_act', c.get('hidden_act', 'silu') == 'silu', "'silu'"),
        ('use_sliding_window', not c.get('use_sliding_window'), 'False'),
        (
            'layer_types',
            set(c.get('layer_types') or ()) <= kinds,
            ' or '.join(map(repr, sorted(kinds))) + ' in every layer',
        ),
        (
            'head_dim',
            not has_vision or c.get('head_dim') in (None, width),
            'hidden_size / num_attention_heads',
        ),
        *(
            (field, turns(c.get(field) or {}, family.rotations, family.hybrid), turning)
            for field in ROPE_FIELDS
        ),
        ('partial_rotary_factor', family.hybrid or c.get('partial_rotary_factor') in (None, 1), '1'),
        ('attn_output_gate', c.get('attn_output_gate') in (None, family.hybrid), f'{family.hybrid}'),
        ('dual_chunk_attention_config', not c.get('dual_chunk_attention_config'), 'null'),
        ('per_layer_config', not c.get('per_layer_config'), 'null, for identical layers'),
        (
            'transformers_weights',
            not c.get('transformers_weights'),
            'weights in model.safetensors, or as its index says',
        ),
        (vision_act, c.get(vision_act, 'silu') == 'silu', "'silu'"),
        (
            features,
            not has_vision or c.get(features) in (None, c.get('hidden_size')),
            'the width of the decoder, hidden_size',
        ),
        (
            'num_experts_per_tok',
            c.get('num_experts_per_tok', 0) <= c.get('num_experts', 2**31),
            'at most num_experts',
        ),
        (
            'num_local_experts',
            c.get('num_local_experts') in (None, c.get('num_experts')),
            'the number of num_experts, whose other name it is',
        ),
        ('quantization_config', not c.get('quantization_config'), 'weights that are not quantised'),
    )
    return [
        f'{field}={quoted(c[field])} is not supported; supported: {values}'
        for field, fine, values in supported
        if not fine
    ]


def turns(rope: Mapping[str, Any], kinds: Sequence[str], partly: bool) -> bool:
    """Returns whether the rotation is of one of the `kinds`, without contradiction, and of whole heads.

    vLLM can rotate part of a head; transformers cannot, unless the family does so (`partly`).
    """
    stated = {str(rope[name]) for name in ('rope_type', 'type') if rope.get(name)}
    once = len(stated - {'mrope'}) <= 1  # mrope is the default kind with sections
    return (
        stated <= {*kinds}
        and once
        and (partly or rope.get('partial_rotary_factor') in (None, 1))
        and not rope.get('rope_dim')
    )
