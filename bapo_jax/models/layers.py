"""What the decoder and the vision tower are made of: matrix products, norms, rotation, the gated unit."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bapo_jax.models.remat import PRODUCT, kept
from bapo_jax.models.split import Split, matmul


class Rope(NamedTuple):
    """The rotary tables of some tokens, float32 [B, 1, T, H / 2]; one for all layers."""

    cos: jax.Array
    sin: jax.Array


def rotate(x_BxNxTxH: jax.Array, rope: Rope) -> jax.Array:
    """Rotary position embedding in the half-rotation layout of Hugging Face."""
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
    """x @ kernel (+ bias) in the compute dtype `dtype`; parameters are float32."""

    def __init__(
        self, dtype: str, inputs: int, outputs: int, *, bias: bool = False, std: float = 0.02, width: int = 0, rngs: nnx.Rngs,
    ):  # fmt: skip
        """`width` is the axis of the kernel that has the model's width: the one that 'fsdp' splits."""
        self.kernel = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32)) if bias else None
        self.dtype, self.width = dtype, width

    def __call__(self, x_xI: jax.Array, split: Split = Split()) -> jax.Array:
        y_xO = kept(matmul(x_xI.astype(self.dtype), self.kernel[...], split, self.width), PRODUCT)
        if self.bias is None:
            return y_xO
        return y_xO + jax.lax.broadcast_to_rank(self.bias[...].astype(self.dtype), y_xO.ndim)


class RMSNorm(nnx.Module):
    """x / rms(x) · scale over the last axis, computed in float32 as Hugging Face does."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x_xI: jax.Array, split: Split = Split()) -> jax.Array:
        """`split` where `x` is what a device has of work that 'tensor' shares."""
        x = x_xI.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (x * jax.lax.broadcast_to_rank(split.enter(self.scale[...]), x.ndim)).astype(x_xI.dtype)
