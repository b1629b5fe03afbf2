"""The decoder of Qwen2 and Qwen3 in Flax NNX, layers scanned.

The two differ only in the attention: Qwen2 adds a bias to queries, keys and values; Qwen3 has no bias and normalises each head's
queries and keys.

Shapes:  B rows · T tokens fed now · S key slots · D width · N query heads · K key/value heads · H head size · F MLP width
         V vocabulary · L layers.  Parameters (listed in parameters.py) are float32; matrix products run in `config.dtype`.

Left out, because no checkpoint that this project trains needs them: sliding windows, rope scaling, dropout, attention sinks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bapo_jax.models.attention import masked
from bapo_jax.models.parameters import PARAMETERS, Parameter

# (q_BxTxNxH, k_BxKxSxH, v_BxKxSxH) -> [B, T, N·H]; the function itself masks.
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


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


class KVCache(NamedTuple):
    """Keys and values, and the slot written next. Each layer has its own array, so writing a slot copies no other layer."""

    k_BxKxSxH: tuple[jax.Array, ...]
    v_BxKxSxH: tuple[jax.Array, ...]
    next_slot: jax.Array  # int32 scalar


def empty_cache(config: ModelConfig, batch: int, slots: int) -> KVCache:
    """A cache of zeros for `batch` rows of `slots` tokens, in the model's compute dtype."""
    zeros = jnp.zeros((batch, config.num_kv_heads, slots, config.head_dim), config.dtype)
    return KVCache((zeros,) * config.num_layers, (zeros,) * config.num_layers, jnp.int32(0))


def rope(x_BxTxNxH: jax.Array, positions_BxT: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding in the half-rotation layout of Hugging Face's Qwen."""
    half = x_BxTxNxH.shape[-1] // 2
    frequency_h = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BxTx1xh = positions_BxT[:, :, None, None].astype(jnp.float32) * frequency_h[None, None, None, :]
    cos, sin = jnp.cos(angle_BxTx1xh), jnp.sin(angle_BxTx1xh)
    first, second = jnp.split(x_BxTxNxH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BxTxNxH.dtype)


@jax.custom_vjp
def matmul(x_xI: jax.Array, kernel_IxO: jax.Array) -> jax.Array:
    """x @ kernel, with an explicit backward pass.

    XLA on CPU would transpose the output's wide gradient instead of the narrow input, which halves the speed of the gated MLP's
    gradient.
    """
    return x_xI @ kernel_IxO


def _matmul_backward(saved, gradient_xO):
    x_xI, kernel_IxO = saved
    x_MxI, gradient_MxO = (a.reshape(-1, a.shape[-1]) for a in (x_xI, gradient_xO))
    return gradient_xO @ kernel_IxO.T, x_MxI.T @ gradient_MxO


matmul.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), _matmul_backward)


class Linear(nnx.Module):
    """x @ kernel (+ bias) in the model's compute dtype; parameters are float32."""

    def __init__(
        self, config: ModelConfig, inputs: int, outputs: int, *, bias: bool = False, std: float = 0.02, rngs: nnx.Rngs
    ):
        self.kernel = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32)) if bias else None
        self.dtype = config.dtype

    def __call__(self, x_xI: jax.Array) -> jax.Array:
        y_xO = matmul(x_xI.astype(self.dtype), self.kernel[...].astype(self.dtype))
        if self.bias is None:
            return y_xO
        return y_xO + jax.lax.broadcast_to_rank(self.bias[...].astype(self.dtype), y_xO.ndim)


class RMSNorm(nnx.Module):
    """x / rms(x) · scale over the last axis, computed in float32 as Hugging Face does."""

    def __init__(self, config: ModelConfig, size: int):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = config.rms_norm_eps

    def __call__(self, x_xI: jax.Array) -> jax.Array:
        x = x_xI.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (x * jax.lax.broadcast_to_rank(self.scale[...], x.ndim)).astype(x_xI.dtype)


class Block(nnx.Module):
    """One decoder layer: attention, then gated MLP. Each reads the normalised residual stream and adds to it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, self.config = config, config

        def linear(inputs: int, outputs: int, bias: bool = False) -> Linear:
            return Linear(c, inputs, outputs, bias=bias, rngs=rngs)

        self.attention_norm, self.mlp_norm = RMSNorm(c, c.hidden_size), RMSNorm(c, c.hidden_size)
        self.q = linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k = linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v = linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.q_norm, self.k_norm = (RMSNorm(c, c.head_dim), RMSNorm(c, c.head_dim)) if c.qk_norm else (None, None)
        self.o = linear(c.num_heads * c.head_dim, c.hidden_size)
        self.gate = linear(c.hidden_size, c.intermediate_size)
        self.up = linear(c.hidden_size, c.intermediate_size)
        self.down = linear(c.intermediate_size, c.hidden_size)

    def __call__(self, x_BxTxD, positions_BxT, attend: Attend, cached=None):
        """Returns (output [B, T, D], keys, values).

        Those are of the T tokens alone or, with `cached` = (keys, values, next slot), the cached ones with the T tokens written in.
        """
        c, (B, T, _) = self.config, x_BxTxD.shape
        h_BxTxD = self.attention_norm(x_BxTxD)
        q_BxTxNxH = self.q(h_BxTxD).reshape(B, T, c.num_heads, c.head_dim)
        k_BxTxKxH = self.k(h_BxTxD).reshape(B, T, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q_BxTxNxH, k_BxTxKxH = self.q_norm(q_BxTxNxH), self.k_norm(k_BxTxKxH)
        q_BxTxNxH = rope(q_BxTxNxH, positions_BxT, c.rope_theta)
        k_BxKxSxH = rope(k_BxTxKxH, positions_BxT, c.rope_theta).swapaxes(1, 2)
        v_BxKxSxH = self.v(h_BxTxD).reshape(B, T, c.num_kv_heads, c.head_dim).swapaxes(1, 2)
        if cached is not None:
            old_k_BxKxSxH, old_v_BxKxSxH, slot = cached
            k_BxKxSxH = jax.lax.dynamic_update_slice(old_k_BxKxSxH, k_BxKxSxH, (0, 0, slot, 0))
            v_BxKxSxH = jax.lax.dynamic_update_slice(old_v_BxKxSxH, v_BxKxSxH, (0, 0, slot, 0))
        x_BxTxD = x_BxTxD + self.o(attend(q_BxTxNxH, k_BxKxSxH, v_BxKxSxH))
        h_BxTxD = self.mlp_norm(x_BxTxD)
        x_BxTxD = x_BxTxD + self.down(jax.nn.silu(self.gate(h_BxTxD)) * self.up(h_BxTxD))
        return x_BxTxD, k_BxKxSxH, v_BxKxSxH


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

    def __call__(self, tokens_BxT, positions_BxT, attend: Attend, *, remat: bool = False):
        """Returns hidden states [B, T, D] after the final norm; `remat` recomputes each layer in the backward pass."""
        graph, stacked = nnx.split(self.layers)

        def layer_step(x_BxTxD, weights):
            return nnx.merge(graph, weights)(x_BxTxD, positions_BxT, attend)[0], None

        x_BxTxD, _ = jax.lax.scan(jax.checkpoint(layer_step) if remat else layer_step, self._embed(tokens_BxT), stacked)
        return self.norm(x_BxTxD)

    def decode(self, tokens_BxT, positions_BxT, mask_BxTxS, cache: KVCache):
        """Returns the hidden states [B, T, D] of T tokens that continue a cache of S slots, and the cache with those tokens.

        `mask_BxTxS` says which slots each token sees. Layers are unrolled: a scan would copy each layer's cache once a token,
        which on CPU costs more than the layer itself.
        """
        def attend(q_BxTxNxH, k_BxKxSxH, v_BxKxSxH):
            return masked(q_BxTxNxH, k_BxKxSxH, v_BxKxSxH, mask_BxTxS)

        x_BxTxD, (graph, stacked), keys, values = self._embed(tokens_BxT), nnx.split(self.layers), [], []
        for i in range(self.config.num_layers):
            layer = nnx.merge(graph, jax.tree.map(lambda w: w[i], stacked))
            cached = (cache.k_BxKxSxH[i], cache.v_BxKxSxH[i], cache.next_slot)
            x_BxTxD, k_BxKxSxH, v_BxKxSxH = layer(x_BxTxD, positions_BxT, attend, cached)
            keys.append(k_BxKxSxH)
            values.append(v_BxKxSxH)
        return self.norm(x_BxTxD), KVCache(tuple(keys), tuple(values), cache.next_slot + tokens_BxT.shape[1])

    def _embed(self, tokens_BxT):
        return self.embedding(tokens_BxT).astype(self.config.dtype)

    def logits(self, hidden_xD: jax.Array) -> jax.Array:
        """Scores [..., V] in float32."""
        weight_DxV = self.head.kernel[...] if self.config.untied_head else self.embedding.embedding[...].T
        return jnp.matmul(hidden_xD, weight_DxV.astype(hidden_xD.dtype), preferred_element_type=jnp.float32)

    def values(self, hidden_xD: jax.Array) -> jax.Array:
        """The value [...] of each state in float32; of a model with a value head alone."""
        return jnp.matmul(hidden_xD.astype(jnp.float32), self.value.kernel[...])[..., 0]
