"""The decoder families, one row each: what distinguishes them, and what their config.json leaves out.

A family whose layers are those of decoder.py needs only a row here, as docs/reference/models.md shows.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Family(NamedTuple):
    """Decoders of one `model_type`. All have RMS norms, rotary queries and keys, and a gated SiLU MLP.

    If `experts`, each layer has routed ones in place of the MLP (models/experts.py). If `hybrid`, most layers
    have linear attention in place of attention (models/delta.py). The others gate what attention returns and
    turn part of each head, and the factors of norms are 1 + scale.
    """

    qkv_bias: bool = False  # queries, keys and values have a bias
    qk_norm: bool = False  # each head's queries and keys are normalised
    needs: tuple[str, ...] = ()  # fields that a config.json must state, besides those that every family needs
    rotations: tuple[str, ...] = ('default', 'linear', 'llama3', 'yarn')  # transformers' rope types
    only: tuple[tuple[str, Any], ...] = ()  # transformers config fields, and their only supported value
    experts: bool = False
    hybrid: bool = False
    vision: bool = False  # the decoder has three positions per token, and a vision tower


FAMILIES = {
    'qwen2': Family(qkv_bias=True),
    'qwen3': Family(qk_norm=True, needs=('head_dim',), only=(('attention_bias', False),)),
    'qwen3_5_text': Family(
        qk_norm=True,
        needs=(
            'head_dim',
            'linear_num_key_heads',
            'linear_num_value_heads',
            'linear_key_head_dim',
            'linear_value_head_dim',
            'linear_conv_kernel_dim',
        ),
        rotations=('default',),
        only=(('attention_bias', False),),
        hybrid=True,
    ),
    'qwen3_moe': Family(
        qk_norm=True,
        needs=('head_dim', 'moe_intermediate_size', 'num_experts', 'num_experts_per_tok', 'norm_topk_prob'),
        only=(('attention_bias', False), ('decoder_sparse_step', 1), ('mlp_only_layers', [])),
        experts=True,
    ),
    'llama': Family(only=(('attention_bias', False), ('mlp_bias', False))),
    'qwen2_5_vl': Family(qkv_bias=True, rotations=('default', 'mrope'), vision=True),
}
