"""The parameters of the Qwen decoder, one row each.

Everything that needs a fact of a parameter reads this table: checkpoints in and out and publishing (hf.py), sharding (parallel.py),
the server's check of a published policy (rollout/worker.py) and the memory model (dry_run.py).

A new parameter is one row here and one attribute of a module in qwen.py. This file imports no JAX, since the server's process may
lack it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Parameter(NamedTuple):
    """One parameter of the tree; where it exists in every layer, the layers are stacked on its first axis."""

    path: tuple[str, ...]  # in the tree of parameters
    name: str  # Hugging Face's; '{}' stands for the layer's number; '': in no file, so it begins at 0 and is never written
    axes: tuple[str | None, ...]  # logical axis of each dimension (a field of parallel.ShardingRules); None: never split
    transposed: bool = False  # Hugging Face stores [out, in] where the tree has [in, out]
    needs: str = ''  # property of ModelConfig that a model with this parameter has; '': every model has the parameter

    @property
    def per_layer(self) -> bool:
        return self.axes[0] == 'layers'


HEAD = Parameter(('head', 'kernel'), 'lm_head.weight', ('embed', 'vocab'), transposed=True, needs='untied_head')

_ATTENTION, _MLP = 'model.layers.{}.self_attn.', 'model.layers.{}.mlp.'

# In the order in which tensors are read, written and published: a layer's together, which keeps the reader's memory small.
PARAMETERS = (
    Parameter(('embedding', 'embedding'), 'model.embed_tokens.weight', ('vocab', 'embed')),
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


def is_rounded(path: Sequence[Any]) -> bool:
    """Whether the model computes with the parameter at `path` (JAX's keys) in its own dtype; the scales of norms stay float32."""
    return path[-1].key != 'scale'
