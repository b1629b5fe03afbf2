"""The decoder of Qwen2 and Qwen3 in Flax NNX, layers scanned.

The two differ only in the attention: Qwen2 adds a bias to queries, keys and values; Qwen3 has no bias and normalises each head's
queries and keys.

Shapes:  B rows · T tokens · D width · N query heads · K key/value heads · H head size · F MLP width
         V vocabulary · L layers.  Parameters (listed in parameters.py) are float32; matrix products run in `config.dtype`.

Left out, because no checkpoint that this project trains needs them: sliding windows, rope scaling, dropout, attention sinks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bapo_jax.models.attention import ATTENTION
from bapo_jax.models.parameters import PARAMETERS, Parameter
from bapo_jax.models.split import Split, matmul

# (q_BxTxNxH, k_BxKxTxH, v_BxKxTxH) -> [B, T, N·H]; the function itself masks.
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

MLP_INPUT, PRODUCT = 'mlp_input', 'product'  # the residual stream between attention and MLP; x @ kernel

# What is kept of each layer for the backward pass, which computes the rest again; the layer's input is always kept.
REMAT = {
    'none': jax.checkpoint_policies.everything_saveable,
    'matrix_products': jax.checkpoint_policies.save_only_these_names(ATTENTION, MLP_INPUT, PRODUCT),
    'attention_and_mlp_inputs': jax.checkpoint_policies.save_only_these_names(ATTENTION, MLP_INPUT),
    'offload': jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[ATTENTION, MLP_INPUT],
        offload_src='device', offload_dst='pinned_host',
    ),
    'full': jax.checkpoint_policies.nothing_saveable,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The fields of a Hugging Face `config.json` that shape the decoder."""

    model_type: str  # 'qwen2' or 'qwen3'
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    dtype: str = 'float32'  # of the matrix products
    value_head: bool = False  # a critic: states have values, and tokens no logits
    max_positions: int = 0  # tokens of the longest sequence that the model was made for; 0: not stated

    @property
    def qkv_bias(self) -> bool:
        return self.model_type == 'qwen2'

    @property
    def qk_norm(self) -> bool:
        return self.model_type == 'qwen3'

    @property
    def untied_head(self) -> bool:
        return not (self.tie_embeddings or self.value_head)


def parameters_of(config: ModelConfig) -> tuple[Parameter, ...]:
    """The rows of the parameter table that this model has, in the table's order."""
    return tuple(p for p in PARAMETERS if not p.needs or getattr(config, p.needs))


class Rope(NamedTuple):
    """The rotary tables of some tokens, float32 [B, 1, T, H / 2]; one for all layers."""

    cos: jax.Array
    sin: jax.Array


def rope_tables(positions_BxT: jax.Array, config: ModelConfig) -> Rope:
    half = config.head_dim // 2
    frequency_h = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_Bx1xTxh = positions_BxT[:, None, :, None].astype(jnp.float32) * frequency_h[None, None, None, :]
    return Rope(jnp.cos(angle_Bx1xTxh), jnp.sin(angle_Bx1xTxh))


def rotate(x_BxNxTxH: jax.Array, rope: Rope) -> jax.Array:
    """Rotary position embedding in the half-rotation layout of Hugging Face's Qwen."""
    cos, sin = rope
    first, second = (half.astype(jnp.float32) for half in jnp.split(x_BxNxTxH, 2, axis=-1))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BxNxTxH.dtype)


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) · up. The backward pass keeps its two inputs alone: a CPU computes the rest faster than it reads it."""
    return jax.nn.silu(gate) * up


def _swiglu_backward(saved, gradient):
    gate, up = saved
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    return gradient * up * (sigmoid + silu * (1 - sigmoid)), gradient * silu


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)


class Linear(nnx.Module):
    """x @ kernel (+ bias) in the model's compute dtype; parameters are float32."""

    def __init__(
        self, config: ModelConfig, inputs: int, outputs: int, *, bias: bool = False, std: float = 0.02, width: int = 0,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        """`width` is the axis of the kernel that has the model's width: the one that 'fsdp' splits."""
        self.kernel = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32)) if bias else None
        self.dtype, self.width = config.dtype, width

    def __call__(self, x_xI: jax.Array, split: Split = Split()) -> jax.Array:
        y_xO = checkpoint_name(matmul(x_xI.astype(self.dtype), self.kernel[...], split, self.width), PRODUCT)
        if self.bias is None:
            return y_xO
        return y_xO + jax.lax.broadcast_to_rank(self.bias[...].astype(self.dtype), y_xO.ndim)


class RMSNorm(nnx.Module):
    """x / rms(x) · scale over the last axis, computed in float32 as Hugging Face does."""

    def __init__(self, config: ModelConfig, size: int):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = config.rms_norm_eps

    def __call__(self, x_xI: jax.Array, split: Split = Split()) -> jax.Array:
        """`split` where `x` is what a device has of work that 'tensor' shares."""
        x = x_xI.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (x * jax.lax.broadcast_to_rank(split.enter(self.scale[...]), x.ndim)).astype(x_xI.dtype)


class Block(nnx.Module):
    """One decoder layer: attention, then gated MLP. Each reads the normalised residual stream and adds to it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, self.config = config, config

        def linear(inputs: int, outputs: int, bias: bool = False, width: int = 0) -> Linear:
            return Linear(c, inputs, outputs, bias=bias, width=width, rngs=rngs)

        self.attention_norm, self.mlp_norm = RMSNorm(c, c.hidden_size), RMSNorm(c, c.hidden_size)
        self.q = linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k = linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v = linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.q_norm, self.k_norm = (RMSNorm(c, c.head_dim), RMSNorm(c, c.head_dim)) if c.qk_norm else (None, None)
        self.o = linear(c.num_heads * c.head_dim, c.hidden_size, width=1)
        self.gate = linear(c.hidden_size, c.intermediate_size)
        self.up = linear(c.hidden_size, c.intermediate_size)
        self.down = linear(c.intermediate_size, c.hidden_size, width=1)

    def __call__(self, x_BxTxD, rope: Rope, attend: Attend, split: Split = Split()):
        """Returns the residual stream [B, T, D]. Where `split` says so, weights are this device's heads and part of the MLP."""
        c, (B, T, _) = self.config, x_BxTxD.shape
        h_BxTxD = split.enter(self.attention_norm(x_BxTxD))
        # Heads before tokens from here on: on a TPU, rotating in the kernel's own layout saves copies in float32.
        q_BxNxTxH = self.q(h_BxTxD, split).reshape(B, T, -1, c.head_dim).swapaxes(1, 2)
        k_BxKxTxH = self.k(h_BxTxD, split).reshape(B, T, -1, c.head_dim).swapaxes(1, 2)
        if c.qk_norm:
            q_BxNxTxH, k_BxKxTxH = self.q_norm(q_BxNxTxH, split), self.k_norm(k_BxKxTxH, split)
        q_BxTxNxH, k_BxKxTxH = rotate(q_BxNxTxH, rope).swapaxes(1, 2), rotate(k_BxKxTxH, rope)
        v_BxKxTxH = self.v(h_BxTxD, split).reshape(B, T, -1, c.head_dim).swapaxes(1, 2)
        x_BxTxD = x_BxTxD + split.leave(self.o(attend(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH), split))
        x_BxTxD = checkpoint_name(x_BxTxD, MLP_INPUT)
        h_BxTxD = split.enter(self.mlp_norm(x_BxTxD))
        return x_BxTxD + split.leave(self.down(swiglu(self.gate(h_BxTxD, split), self.up(h_BxTxD, split)), split))


class Qwen(nnx.Module):
    """Maps token ids to final hidden states; `logits` maps those to scores over the vocabulary, a critic's `values` to values."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size, config.hidden_size, embedding_init=nnx.initializers.normal(0.02), rngs=rngs
        )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked_layers(layer_rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=layer_rngs)

        self.layers = stacked_layers(rngs)
        self.norm = RMSNorm(config, config.hidden_size)
        if config.untied_head:
            self.head = Linear(config, config.hidden_size, config.vocab_size, rngs=rngs)
        if config.value_head:
            self.value = Linear(config, config.hidden_size, 1, std=0.0, rngs=rngs)

    def __call__(self, tokens_BxT, positions_BxT, attend: Attend, *, remat: str = 'none', split: Split = Split()):
        """Returns hidden states [B, T, D] after the final norm; `remat` is a key of REMAT, what the backward pass recomputes."""
        c, (graph, stacked), rope = self.config, nnx.split(self.layers), rope_tables(positions_BxT, self.config)

        def layer_step(x_BxTxD, weights):
            return nnx.merge(graph, weights)(x_BxTxD, rope, attend, split), None

        # Inside a scan XLA cannot merge what is recomputed with the forward pass, so nothing need be done against it.
        step = layer_step if remat == 'none' else jax.checkpoint(layer_step, policy=REMAT[remat], prevent_cse=False)
        x_BxTxD = split.look_up(self.embedding.embedding[...], tokens_BxT, c.dtype)
        x_BxTxD, _ = jax.lax.scan(step, x_BxTxD, stacked)
        return self.norm(x_BxTxD)

    def unrolled(self, layers: Sequence[Any], tokens_BxT, positions_BxT, attend_in: Callable[[int], Attend]):
        """Returns hidden states [B, T, D] as above, of layers that are not stacked; `attend_in(i)` is the attention of layer i."""
        x_BxTxD = Split().look_up(self.embedding.embedding[...], tokens_BxT, self.config.dtype)
        graph, rope = nnx.split(self.layers)[0], rope_tables(positions_BxT, self.config)
        for i, weights in enumerate(layers):
            x_BxTxD = nnx.merge(graph, weights)(x_BxTxD, rope, attend_in(i))
        return self.norm(x_BxTxD)

    @property
    def head_VxD(self) -> jax.Array:
        """The weights of the scores over the vocabulary: of a split model, this device's part."""
        return self.head.kernel[...].T if self.config.untied_head else self.embedding.embedding[...]

    def logits(self, hidden_xD: jax.Array) -> jax.Array:
        """Scores [..., V] in float32, of a whole model; learner/head.py has log-probs without them."""
        return jnp.matmul(hidden_xD, self.head_VxD.T.astype(hidden_xD.dtype), preferred_element_type=jnp.float32)

    def values(self, hidden_xD: jax.Array, split: Split = Split()) -> jax.Array:
        """The value [...] of each state in float32; of a model with a value head alone."""
        return jnp.matmul(hidden_xD.astype(jnp.float32), split.gather(self.value.kernel[...], 0))[..., 0]


def abstract_params(config: ModelConfig) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The model's graph and the shapes of its parameters; allocates nothing."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Qwen(config, rngs=nnx.Rngs(0))), nnx.Param)[:2]
    return graph, nnx.to_pure_dict(state)
