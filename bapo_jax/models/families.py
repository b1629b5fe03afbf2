"""The families of decoders, one row each: what tells one from another, and what each leaves out of its config.json.

A family whose layers are those of decoder.py is one row here. docs/adding_a_model.md adds one.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Family(NamedTuple):
    """Decoders of one `model_type`. All normalise by RMS, rotate queries and keys, and have a gated SiLU unit."""

    qkv_bias: bool = False  # queries, keys and values have a bias
    qk_norm: bool = False  # each head's queries and keys are normalised
    needs: tuple[str, ...] = ()  # fields that a config.json must state, beside those that every family needs
    rotations: tuple[str, ...] = ('default', 'linear', 'llama3', 'yarn')  # kinds of rotary.py, by the names of transformers
    only: tuple[tuple[str, Any], ...] = ()  # fields of transformers' config object, and the only value that decoder.py can have
    vision: bool = False  # the decoder has three positions a token, and a vision tower


FAMILIES = {
    'qwen2': Family(qkv_bias=True),
    'qwen3': Family(qk_norm=True, needs=('head_dim',), only=(('attention_bias', False),)),
    'llama': Family(only=(('attention_bias', False), ('mlp_bias', False))),
    'qwen2_5_vl': Family(qkv_bias=True, rotations=('default', 'mrope'), vision=True),
}
