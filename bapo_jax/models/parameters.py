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

# When a parameter is trained: if the model has no adapter, with the vision tower, as part of an adapter,
# as a critic's own.
WHOLE, VISION, ADAPTER, CRITICS = 'whole', 'vision', 'adapter', 'critics'


FLOAT32 = ('scale', 'a_log', 'dt_bias')  # names in paths of parameters that are never rounded
_STACKED = ('layers', 'experts')  # the axes on which tensors of files are stacked, in this order


class Parameter(NamedTuple):
    """One parameter of the tree. The layers', or vision blocks', are stacked on the first axis.

    The experts' are stacked on the second.
    """

    path: tuple[str, ...]  # in the parameter tree
    # Hugging Face's; '{}' is the number of the layer, then of the expert. '': it is in no file, starts at 0
    # and is never written.
    name: str
    # Logical axis of each dimension (a field of sharding.ShardingRules); None: never split.
    axes: tuple[str | None, ...]
    transposed: bool = False  # Hugging Face stores [out, in], the tree [in, out]
    needs: str = ''  # the ModelConfig property of models with this parameter; '': every model has it
    when: str = WHOLE  # it is trained; `is_trained` reads this
    adapter: str = ''  # the targets among which it is, if an adapter may change it (ADAPTER_PARAMETERS)

    @property
    def in_files(self) -> bool:
        """Whether a Hugging Face directory of the model has it."""
        return bool(self.name) and self.when != ADAPTER

    @property
    def indices(self) -> int:
        """How many leading axes number the tensors of files: 0, 1 (layers) or 2 (layers and experts)."""
        return sum(axis in _STACKED for axis in self.axes)


EMBEDDING = Parameter(('embedding', 'embedding'), 'model.embed_tokens.weight', ('vocab', 'embed'))
HEAD = Parameter(
    ('head', 'kernel'), 'lm_head.weight', ('embed', 'vocab'), transposed=True, needs='untied_head'
)

_ATTENTION, _MLP = 'model.layers.{}.self_attn.', 'model.layers.{}.mlp.'
_EXPERT = _MLP + 'experts.{}.'

# A layer's, or in a hybrid model those of a layer with full attention.
_LAYER = (
    Parameter(
        ('layers', 'attention_norm', 'scale'), 'model.layers.{}.input_layernorm.weight', ('layers', None)
    ),
    Parameter(
        ('layers', 'q', 'kernel'),
        _ATTENTION + 'q_proj.weight',
        ('layers', 'embed', 'heads'),
        transposed=True,
        adapter='attention',
    ),
    Parameter(
        ('layers', 'k', 'kernel'),
        _ATTENTION + 'k_proj.weight',
        ('layers', 'embed', 'heads'),
        transposed=True,
        adapter='attention',
    ),
    Parameter(
        ('layers', 'v', 'kernel'),
        _ATTENTION + 'v_proj.weight',
        ('layers', 'embed', 'heads'),
        transposed=True,
        adapter='attention',
    ),
    Parameter(
        ('layers', 'o', 'kernel'),
        _ATTENTION + 'o_proj.weight',
        ('layers', 'heads', 'embed'),
        transposed=True,
        adapter='attention',
    ),
    Parameter(
        ('layers', 'mlp_norm', 'scale'), 'model.layers.{}.post_attention_layernorm.weight', ('layers', None)
    ),
    Parameter(
        ('layers', 'gate', 'kernel'),
        _MLP + 'gate_proj.weight',
        ('layers', 'embed', 'mlp'),
        transposed=True,
        needs='dense',
        adapter='mlp',
    ),
    Parameter(
        ('layers', 'up', 'kernel'),
        _MLP + 'up_proj.weight',
        ('layers', 'embed', 'mlp'),
        transposed=True,
        needs='dense',
        adapter='mlp',
    ),
    Parameter(
        ('layers', 'down', 'kernel'),
        _MLP + 'down_proj.weight',
        ('layers', 'mlp', 'embed'),
        transposed=True,
        needs='dense',
        adapter='mlp',
    ),
    # 'tensor' splits each expert's width as it does an MLP's. So all devices have equal work however tokens
    # are routed, and no token crosses the mesh. An axis of the mesh over experts would give neither, and as
    # routing is dropless and shapes are fixed, each device would need room for the tokens of all.
    Parameter(
        ('layers', 'router', 'kernel'),
        _MLP + 'gate.weight',
        ('layers', 'embed', None),
        transposed=True,
        needs='routed',
    ),
    Parameter(
        ('layers', 'experts', 'gate', 'kernel'),
        _EXPERT + 'gate_proj.weight',
        ('layers', 'experts', 'embed', 'mlp'),
        transposed=True,
        needs='routed',
    ),
    Parameter(
        ('layers', 'experts', 'up', 'kernel'),
        _EXPERT + 'up_proj.weight',
        ('layers', 'experts', 'embed', 'mlp'),
        transposed=True,
        needs='routed',
    ),
    Parameter(
        ('layers', 'experts', 'down', 'kernel'),
        _EXPERT + 'down_proj.weight',
        ('layers', 'experts', 'mlp', 'embed'),
        transposed=True,
        needs='routed',
    ),
    Parameter(('layers', 'q', 'bias'), _ATTENTION + 'q_proj.bias', ('layers', 'heads'), needs='qkv_bias'),
    Parameter(('layers', 'k', 'bias'), _ATTENTION + 'k_proj.bias', ('layers', 'heads'), needs='qkv_bias'),
    Parameter(('layers', 'v', 'bias'), _ATTENTION + 'v_proj.bias', ('layers', 'heads'), needs='qkv_bias'),
    Parameter(('layers', 'q_norm', 'scale'), _ATTENTION + 'q_norm.weight', ('layers', None), needs='qk_norm'),
    Parameter(('layers', 'k_norm', 'scale'), _ATTENTION + 'k_norm.weight', ('layers', None), needs='qk_norm'),
)

_DELTA, _LINEAR = ('delta_layers', 'delta'), 'model.layers.{}.linear_attn.'

# Those of a hybrid model's layers with linear attention, which are stacked by themselves.
_DELTA_LAYER = (
    *(
        row._replace(path=('delta_layers', *row.path[1:]), needs='hybrid', adapter='')
        for row in _LAYER
        if row.path[1] in ('attention_norm', 'mlp_norm', 'gate', 'up', 'down')
    ),
    *(
        row._replace(needs='hybrid')
        for row in (
            # 'tensor' splits heads; this tensor, of queries, keys and values, is sliced when it is used.
            Parameter(
                (*_DELTA, 'qkv', 'kernel'),
                _LINEAR + 'in_proj_qkv.weight',
                ('layers', 'embed', None),
                transposed=True,
            ),
            Parameter((*_DELTA, 'conv'), _LINEAR + 'conv1d.weight', ('layers', None, None, None)),
            Parameter(
                (*_DELTA, 'gate', 'kernel'),
                _LINEAR + 'in_proj_z.weight',
                ('layers', 'embed', 'heads'),
                transposed=True,
            ),
            Parameter(
                (*_DELTA, 'beta', 'kernel'),
                _LINEAR + 'in_proj_b.weight',
                ('layers', 'embed', 'heads'),
                transposed=True,
            ),
            Parameter(
                (*_DELTA, 'decay', 'kernel'),
                _LINEAR + 'in_proj_a.weight',
                ('layers', 'embed', 'heads'),
                transposed=True,
            ),
            Parameter((*_DELTA, 'a_log'), _LINEAR + 'A_log', ('layers', 'heads')),
            Parameter((*_DELTA, 'dt_bias'), _LINEAR + 'dt_bias', ('layers', 'heads')),
            Parameter((*_DELTA, 'norm', 'scale'), _LINEAR + 'norm.weight', ('layers', None)),
            Parameter(
                (*_DELTA, 'out', 'kernel'),
                _LINEAR + 'out_proj.weight',
                ('layers', 'heads', 'embed'),
                transposed=True,
            ),
        )
    ),
)

# In the order in which tensors are read, written and published. A layer's tensors are together, which keeps
# the reader's memory small.
PARAMETERS = (
    EMBEDDING,
    *_LAYER,
    *_DELTA_LAYER,
    Parameter(('norm', 'scale'), 'model.norm.weight', (None,)),
    HEAD,
    # A critic's, in place of the head. No policy has one, so no exported or published policy contains it.
    Parameter(('value', 'kernel'), '', ('embed', None), needs='value_head', when=CRITICS),
)

_BLOCK, _VISION, _MERGER = 'visual.blocks.{}.', ('vision', 'blocks'), 'visual.merger.'

# The vision tower's parameters, published after the decoder's. Only 'fsdp' splits them; 'tensor' holds
# copies, since the tower has a tenth of the parameters.
VISION_PARAMETERS = tuple(
    row._replace(needs='vision', when=VISION)
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


def adapter_rows(matrix: Parameter) -> tuple[Parameter, Parameter]:
    """Returns the two matrices A [in, rank] and B [rank, out] that an adapter adds to `matrix`.

    Their names are PEFT's. 'fsdp' splits the model's width, and 'tensor' what it splits of the matrix.
    """
    *layer, inputs, outputs = matrix.axes
    row = matrix._replace(needs=f'adapts_{matrix.adapter}', when=ADAPTER, adapter='')
    stem = 'base_model.model.' + matrix.name.removesuffix('weight')
    return (
        row._replace(path=(*matrix.path[:-1], 'a'), name=stem + 'lora_A.weight', axes=(*layer, inputs, None)),
        row._replace(
            path=(*matrix.path[:-1], 'b'), name=stem + 'lora_B.weight', axes=(*layer, None, outputs)
        ),
    )


# The adapters (LoRA, arXiv 2106.09685) of the decoder's matrices: W + alpha / rank · A B.
ADAPTER_PARAMETERS = tuple(row for p in PARAMETERS if p.adapter for row in adapter_rows(p))


def is_trained(parameter: Parameter, adapts: bool, vision: bool) -> bool:
    """Returns whether a run trains the parameter: it has a gradient and moments, and checkpoints hold it.

    A frozen one is read from model.path at each start. `adapts`: the model has an adapter. `vision`: the
    vision tower is trained.
    """
    return {WHOLE: not adapts, VISION: vision and not adapts, ADAPTER: True, CRITICS: True}[parameter.when]


def parted(params: Any, like: Any) -> tuple[Any, Any]:
    """Splits a tree of nested dicts into (the part at the paths of `like`, the rest).

    None stands for an empty part, also in `like`.
    """
    if like is None:
        return None, params
    if not isinstance(params, dict):
        return params, None
    parts = {key: parted(value, like.get(key)) for key, value in params.items()}
    return tuple({key: part[i] for key, part in parts.items() if part[i] is not None} or None for i in (0, 1))


def united(one: Any, other: Any) -> Any:
    """Returns the tree that `parted` split."""
    if one is None or other is None:
        return other if one is None else one
    return {key: united(one.get(key), other.get(key)) for key in [*one, *(k for k in other if k not in one)]}


def is_rounded(path: Sequence[Any]) -> bool:
    """Returns whether the model casts the parameter at `path` (JAX's keys) to its compute dtype.

    The scales of norms, and the rates at which linear attention forgets, stay float32.
    """
    return path[-1].key not in FLOAT32
