"""The parameters of the decoder and of its vision tower, one row each.

All code that needs facts about parameters reads this table: checkpoints and publishing (hf.py), sharding
(sharding.py), the server's check of a published policy (rollout/vllm/worker.py) and the memory model
(dry_run/).

A new parameter needs one row here and one attribute of a module in decoder.py or vision/tower.py. This file
does not import JAX, since the server's process may lack it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Parameter(NamedTuple):
    """One parameter of the tree. Those of layers or vision blocks are stacked on the first axis."""

    path: tuple[str, ...]  # in the parameter tree
    name: str  # Hugging Face's; '{}' is the layer's number; '': in no file: starts at 0 and is never written
    # Logical axis of each dimension (a field of sharding.ShardingRules); None: never split.
    axes: tuple[str | None, ...]
    transposed: bool = False  # Hugging Face stores [out, in], the tree [in, out]
    needs: str = ''  # the ModelConfig property of models with this parameter; '': every model has it

    @property
    def per_layer(self) -> bool:
        return self.axes[0] == 'layers'


EMBEDDING = Parameter(('embedding', 'embedding'), 'model.embed_tokens.weight', ('vocab', 'embed'))
HEAD = Parameter(
    ('head', 'kernel'), 'lm_head.weight', ('embed', 'vocab'), transposed=True, needs='untied_head'
)

_ATTENTION, _MLP = 'model.layers.{}.self_attn.', 'model.layers.{}.mlp.'

# In the order in which tensors are read, written and published. A layer's tensors are together, which keeps
# the reader's memory small.
PARAMETERS = (
    EMBEDDING,
    Parameter(
        ('layers', 'attention_norm', 'scale'), 'model.layers.{}.input_layernorm.weight', ('layers', None)
    ),
    Parameter(
        ('layers', 'q', 'kernel'), _ATTENTION + 'q_proj.weight', ('layers', 'embed', 'heads'), transposed=True
    ),
    Parameter(
        ('layers', 'k', 'kernel'), _ATTENTION + 'k_proj.weight', ('layers', 'embed', 'heads'), transposed=True
    ),
    Parameter(
        ('layers', 'v', 'kernel'), _ATTENTION + 'v_proj.weight', ('layers', 'embed', 'heads'), transposed=True
    ),
    Parameter(
        ('layers', 'o', 'kernel'), _ATTENTION + 'o_proj.weight', ('layers', 'heads', 'embed'), transposed=True
    ),
    Parameter(
        ('layers', 'mlp_norm', 'scale'), 'model.layers.{}.post_attention_layernorm.weight', ('layers', None)
    ),
    Parameter(
        ('layers', 'gate', 'kernel'), _MLP + 'gate_proj.weight', ('layers', 'embed', 'mlp'), transposed=True
    ),
    Parameter(
        ('layers', 'up', 'kernel'), _MLP + 'up_proj.weight', ('layers', 'embed', 'mlp'), transposed=True
    ),
    Parameter(
        ('layers', 'down', 'kernel'), _MLP + 'down_proj.weight', ('layers', 'mlp', 'embed'), transposed=True
    ),
    Parameter(('layers', 'q', 'bias'), _ATTENTION + 'q_proj.bias', ('layers', 'heads'), needs='qkv_bias'),
    Parameter(('layers', 'k', 'bias'), _ATTENTION + 'k_proj.bias', ('layers', 'heads'), needs='qkv_bias'),
    Parameter(('layers', 'v', 'bias'), _ATTENTION + 'v_proj.bias', ('layers', 'heads'), needs='qkv_bias'),
    Parameter(('layers', 'q_norm', 'scale'), _ATTENTION + 'q_norm.weight', ('layers', None), needs='qk_norm'),
    Parameter(('layers', 'k_norm', 'scale'), _ATTENTION + 'k_norm.weight', ('layers', None), needs='qk_norm'),
    Parameter(('norm', 'scale'), 'model.norm.weight', (None,)),
    HEAD,
    # A critic's, in place of the head. No policy has one, so no exported or published policy contains it.
    Parameter(('value', 'kernel'), '', ('embed', None), needs='value_head'),
)

_BLOCK, _VISION, _MERGER = 'visual.blocks.{}.', ('vision', 'blocks'), 'visual.merger.'

# The vision tower's parameters, published after the decoder's. Only 'fsdp' splits them; 'tensor' holds
# copies, since the tower has a tenth of the parameters.
VISION_PARAMETERS = tuple(
    row._replace(needs='vision')
    for row in (
        # As in the file, [out, channel, time, height, width].
        Parameter(
            ('vision', 'patches', 'kernel'),
            'visual.patch_embed.proj.weight',
            ('embed', None, None, None, None),
        ),
        Parameter((*_VISION, 'attention_norm', 'scale'), _BLOCK + 'norm1.weight', ('layers', None)),
        Parameter(
            (*_VISION, 'qkv', 'kernel'),
            _BLOCK + 'attn.qkv.weight',
            ('layers', 'embed', None),
            transposed=True,
        ),
        Parameter(
            (*_VISION, 'o', 'kernel'), _BLOCK + 'attn.proj.weight', ('layers', None, 'embed'), transposed=True
        ),
        Parameter((*_VISION, 'mlp_norm', 'scale'), _BLOCK + 'norm2.weight', ('layers', None)),
        Parameter(
            (*_VISION, 'gate', 'kernel'),
            _BLOCK + 'mlp.gate_proj.weight',
            ('layers', 'embed', None),
            transposed=True,
        ),
        Parameter(
            (*_VISION, 'up', 'kernel'),
            _BLOCK + 'mlp.up_proj.weight',
            ('layers', 'embed', None),
            transposed=True,
        ),
        Parameter(
            (*_VISION, 'down', 'kernel'),
            _BLOCK + 'mlp.down_proj.weight',
            ('layers', None, 'embed'),
            transposed=True,
        ),
        Parameter((*_VISION, 'qkv', 'bias'), _BLOCK + 'attn.qkv.bias', ('layers', None)),
        Parameter((*_VISION, 'o', 'bias'), _BLOCK + 'attn.proj.bias', ('layers', None)),
        Parameter((*_VISION, 'gate', 'bias'), _BLOCK + 'mlp.gate_proj.bias', ('layers', None)),
        Parameter((*_VISION, 'up', 'bias'), _BLOCK + 'mlp.up_proj.bias', ('layers', None)),
        Parameter((*_VISION, 'down', 'bias'), _BLOCK + 'mlp.down_proj.bias', ('layers', None)),
        Parameter(('vision', 'merge_norm', 'scale'), _MERGER + 'ln_q.weight', (None,)),
        Parameter(
            ('vision', 'merge_in', 'kernel'), _MERGER + 'mlp.0.weight', ('embed', None), transposed=True
        ),
        Parameter(('vision', 'merge_in', 'bias'), _MERGER + 'mlp.0.bias', (None,)),
        Parameter(
            ('vision', 'merge_out', 'kernel'), _MERGER + 'mlp.2.weight', (None, 'embed'), transposed=True
        ),
        Parameter(('vision', 'merge_out', 'bias'), _MERGER + 'mlp.2.bias', (None,)),
    )
)


def is_rounded(path: Sequence[Any]) -> bool:
    """Returns whether the model casts the parameter at `path` (JAX's keys) to its compute dtype.

    The scales of norms stay float32.
    """
    return path[-1].key != 'scale'
