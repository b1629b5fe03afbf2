"""Building blocks of the decoder and the vision tower: matrix products, norms, rotation, the gated unit."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bapo_jax.cluster.split import Split, matmul
from bapo_jax.models.remat import PRODUCT, kept


class Rope(NamedTuple):
    """The rotary tables of some tokens, float32 [B, 1, T, H / 2], shared by all layers."""

    cos: jax.Array
    sin: jax.Array


def rotate(x_BxNxTxH: jax.Array, rope: Rope) -> jax.Array:
    """Applies rotary position embedding in Hugging Face's half-rotation layout.

    Tables of less than half a head's numbers turn the first ones, twice as many, and leave the rest.
    """
    cos, sin = rope
    turned = 2 * cos.shape[-1]
    if turned < x_BxNxTxH.shape[-1]:
        first, rest = x_BxNxTxH[..., :turned], x_BxNxTxH[..., turned:]
        return jnp.concatenate([rotate(first, rope), rest], axis=-1)
    first, second = (half.astype(jnp.float32) for half in jnp.split(x_BxNxTxH, 2, axis=-1))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(
        x_BxNxTxH.dtype
    )


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) · up.

    The backward pass keeps only its two inputs: a CPU recomputes the rest faster than it reads it.
    """
    return jax.nn.silu(gate) * up


def _swiglu_backward(saved, gradient):
    gate, up = saved
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    return gradient * up * (sigmoid + silu * (1 - sigmoid)), gradient * silu


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)


class Adapter(NamedTuple):
    """The settings of a low-rank adapter (LoRA, arXiv 2106.09685)."""

    rank: int
    alpha: float
    targets: str  # 'attention', 'mlp', or 'all' linear layers of the decoder

    @property
    def scale(self) -> float:
        """The factor of A B in W + alpha / rank · A B."""
        return self.alpha / self.rank


class Linear(nnx.Module):
    """x @ kernel (+ bias) in the compute dtype `dtype`; parameters are float32.

    With an adapter it is x @ kernel + alpha / rank · (x @ a) @ b.
    """

    def __init__(
        self,
        dtype: str,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        std: float = 0.02,
        width: int = 0,
        adapter: Adapter | None = None,
        rngs: nnx.Rngs,
    ):
        """Initialises the layer. `width` is the kernel axis of the model's width, which 'fsdp' splits."""
        self.kernel = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (inputs, outputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32)) if bias else None
        self.dtype, self.width, self.adapter = dtype, width, adapter
        if adapter:
            self.a = nnx.Param(first_a(rngs.params(), (inputs, adapter.rank)))
            self.b = nnx.Param(jnp.zeros((adapter.rank, outputs), jnp.float32))

    def __call__(self, x_xI: jax.Array, split: Split = Split()) -> jax.Array:
        x_xI = x_xI.astype(self.dtype)
        y_xO = kept(matmul(x_xI, self.kernel[...], split, self.width), PRODUCT)
        if self.adapter:
            y_xO += self.adapter.scale * self._adapted(x_xI, split)
        if self.bias is None:
            return y_xO
        return y_xO + jax.lax.broadcast_to_rank(self.bias[...].astype(self.dtype), y_xO.ndim)

    def _adapted(self, x_xI: jax.Array, split: Split) -> jax.Array:
        """Returns (x @ a) @ b. The matrix that 'tensor' does not split is shared, as a norm's scale is."""
        a, b, whole = self.a[...], self.b[...], split._replace(fsdp=1)
        if self.width == 0:
            return matmul(matmul(x_xI, split.enter(a), split, 0), b, whole, 0)
        return matmul(matmul(x_xI, a, whole, 0), split.enter(b), split, 1)


def first_a(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the first A of an adapter, [..., in, rank]: uniform in ± in^-½, as in PEFT. B starts at 0."""
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


class RMSNorm(nnx.Module):
    """x / rms(x) · scale over the last axis, computed in float32 as in Hugging Face.

    If `from_one`, the factor is 1 + scale.
    """

    def __init__(self, size: int, eps: float, from_one: bool = False):
        self.scale = nnx.Param((jnp.zeros if from_one else jnp.ones)(size, jnp.float32))
        self.eps, self.from_one = eps, from_one

    def __call__(self, x_xI: jax.Array, split: Split = Split()) -> jax.Array:
        """Normalises `x`; pass `split` if `x` is a device's share of work that is split over 'tensor'."""
        x = x_xI.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        scale = split.enter(self.scale[...])
        if self.from_one:
            scale = 1 + scale
        return (x * jax.lax.broadcast_to_rank(scale, x.ndim)).astype(x_xI.dtype)
