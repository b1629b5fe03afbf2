"""The parameters of the decoder and of its vision tower, one row each.

Everything that needs a fact of a parameter reads this table: checkpoints in and out and publishing (hf.py), sharding (parallel.py),
the server's check of a published policy (rollout/worker.py) and the memory model (dry_run.py).

A new parameter is one row here and one attribute of a module in decoder.py or vision.py. This file imports no JAX, since the server's
process may lack it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Parameter(NamedTuple):
    """One parameter of the tree; where it exists in every layer or vision block, these are stacked on its first axis."""

    path: tuple[str, ...]  # in the tree of parameters
    name: str  # Hugging Face's; '{}' stands for the layer's number; '': in no file, so it begins at 0 and is never written
    axes: tuple[str | None, ...]  # logical axis of each dimension (a field of parallel.ShardingRules); None: never split
    transposed: bool = False  # Hugging Face stores [out, in] where the tree has [in, out]
    needs: str = ''  # property of ModelConfig that a model with this parameter has; '': every model has the parameter

    @property
    def per_layer(self) -> bool:
        return self.axes[0] == 'layers'


EMBEDDING = Parameter(('embedding', 'embedding'), 'model.embed_tokens.weight', ('vocab', 'embed'))
HEAD = Parameter(('head', 'kernel'), 'lm_head.weight', ('embed', 'vocab'), transposed=True, needs='untied_head')

_ATTENTION, _MLP = 'model.layers.{}.self_attn.', 'model.layers.{}.mlp.'

# In the order in which tensors are read, written and published: a layer's together, which keeps the reader's memory small.
PARAMETERS = (
    EMBEDDING,
    Parameter(('layers', 'attention_norm', 'scale'), 'model.layers.{}.input_layernorm.weight', ('layers', None)),
    Parameter(('layers', 'q', 'kernel'), _ATTENTION + 'q_proj.weight', ('layers', 'embed', 'heads'), transposed=True),
    Parameter(('layers', 'k', 'kernel'), _ATTENTION + 'k_proj.weight', ('layers', 'embed', 'heads'), transposed=True),
    Parameter(('layers', 'v', 'kernel'), _ATTENTION + 'v_proj.weight', ('layers', 'embed', 'heads'), transposed=True),
    Parameter(('layers', 'o', 'kernel'), _ATTENTION + 'o_proj.weight', ('layers', 'heads', 'embed'), transposed=True),
    Parameter(('layers', 'mlp_norm', 'scale'), 'model.layers.{}.post_attention_layernorm.weight', ('layers', None)),
    Parameter(('layers', 'gate', 'kernel'), _MLP + 'gate_proj.weight', ('layers', 'embed', 'mlp'), transposed=True),
    Parameter(('layers', 'up', 'kernel'), _MLP + 'up_proj.weight', ('layers', 'embed', 'mlp'), transposed=True),
    Parameter(('layers', 'down', 'kernel'), _MLP + 'down_proj.weight', ('layers', 'mlp', 'embed'), transposed=True),
    Parameter(('layers', 'q', 'bias'), _ATTENTION + 'q_proj.bias', ('layers', 'heads'), needs='qkv_bias'),
    Parameter(('layers', 'k', 'bias'), _ATTENTION + 'k_proj.bias', ('layers', 'heads'), needs='qkv_bias'),
    Parameter(('layers', 'v', 'bias'), _ATTENTION + 'v_proj.bias', ('layers', 'heads'), needs='qkv_bias'),
    Parameter(('layers', 'q_norm', 'scale'), _ATTENTION + 'q_norm.weight', ('layers', None), needs='qk_norm'),
    Parameter(('layers', 'k_norm', 'scale'), _ATTENTION + 'k_norm.weight', ('layers', None), needs='qk_norm'),
    Parameter(('norm', 'scale'), 'model.norm.weight', (None,)),
    HEAD,
    # A critic's, in place of the head. No policy has one, so no exported or published policy knows of it.
    Parameter(('value', 'kernel'), '', ('embed', None), needs='value_head'),
)

_BLOCK, _VISION, _MERGER = 'visual.blocks.{}.', ('vision', 'blocks'), 'visual.merger.'

# The vision tower's, published behind the decoder's. They are split over 'fsdp' alone: 'tensor' holds copies, since the tower has a
# tenth of the parameters.
VISION_PARAMETERS = tuple(
    row._replace(needs='vision')
    for row in (
        # As in the file, [out, channel, time, height, width].
        Parameter(('vision', 'patches', 'kernel'), 'visual.patch_embed.proj.weight', ('embed', None, None, None, None)),
        Parameter((*_VISION, 'attention_norm', 'scale'), _BLOCK + 'norm1.weight', ('layers', None)),
        Parameter((*_VISION, 'qkv', 'kernel'), _BLOCK + 'attn.qkv.weight', ('layers', 'embed', None), transposed=True),
        Parameter((*_VISION, 'o', 'kernel'), _BLOCK + 'attn.proj.weight', ('layers', None, 'embed'), transposed=True),
        Parameter((*_VISION, 'mlp_norm', 'scale'), _BLOCK + 'norm2.weight', ('layers', None)),
        Parameter((*_VISION, 'gate', 'kernel'), _BLOCK + 'mlp.gate_proj.weight', ('layers', 'embed', None), transposed=True),
        Parameter((*_VISION, 'up', 'kernel'), _BLOCK + 'mlp.up_proj.weight', ('layers', 'embed', None), transposed=True),
        Parameter((*_VISION, 'down', 'kernel'), _BLOCK + 'mlp.down_proj.weight', ('layers', None, 'embed'), transposed=True),
        Parameter((*_VISION, 'qkv', 'bias'), _BLOCK + 'attn.qkv.bias', ('layers', None)),
        Parameter((*_VISION, 'o', 'bias'), _BLOCK + 'attn.proj.bias', ('layers', None)),
        Parameter((*_VISION, 'gate', 'bias'), _BLOCK + 'mlp.gate_proj.bias', ('layers', None)),
        Parameter((*_VISION, 'up', 'bias'), _BLOCK + 'mlp.up_proj.bias', ('layers', None)),
        Parameter((*_VISION, 'down', 'bias'), _BLOCK + 'mlp.down_proj.bias', ('layers', None)),
        Parameter(('vision', 'merge_norm', 'scale'), _MERGER + 'ln_q.weight', (None,)),
        Parameter(('vision', 'merge_in', 'kernel'), _MERGER + 'mlp.0.weight', ('embed', None), transposed=True),
        Parameter(('vision', 'merge_in', 'bias'), _MERGER + 'mlp.0.bias', (None,)),
        Parameter(('vision', 'merge_out', 'kernel'), _MERGER + 'mlp.2.weight', (None, 'embed'), transposed=True),
        Parameter(('vision', 'merge_out', 'bias'), _MERGER + 'mlp.2.bias', (None,)),
    )
)


def is_rounded(path: Sequence[Any]) -> bool:
    """Whether the model computes with the parameter at `path` (JAX's keys) in its own dtype; the scales of norms stay float32."""
    return path[-1].key != 'scale'
