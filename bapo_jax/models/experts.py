"""Mixture of experts in place of a layer's MLP: each token passes the experts that a router chooses for it.

Routing is dropless: every token reaches all of its experts, however many tokens one expert gets.

Shapes:  L layers · B rows · T tokens · D width · E experts · S experts that a token chooses ·
         F width of an expert · P = B T S pairs of a token and one of its experts ·
         I, O inputs and outputs of a matrix · G responses of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bapo_jax.cluster.long_rows import summed
from bapo_jax.cluster.split import Split, grouped_matmul
from bapo_jax.models.layers import swiglu
from bapo_jax.models.remat import PRODUCT, kept


class Routing(NamedTuple):
    """How tokens choose experts."""

    experts: int  # of a layer
    chosen: int  # by a token
    normalised: bool  # the weights of a token's experts add up to 1


class Routed(NamedTuple):
    """What routing did; of several layers, stacked."""

    expert_BxTxS: jax.Array  # int32: the experts that tokens chose
    imbalance: jax.Array | None  # a layer's `imbalance`, if asked for


class Counted(NamedTuple):
    """The tokens over which experts' loads are to be even."""

    response_BxT: jax.Array  # int32, 1, 2, … along the row; 0 on tokens that do not count
    weight_BxT: jax.Array  # float32, 0 on those


def route(logits_BxTxE: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (weight, expert) of the experts that each token chooses, [B, T, S], and all probabilities.

    Experts are int32. As in Hugging Face, logits have the compute dtype, and probabilities [B, T, E] are
    float32. The weights are the largest of them, in the logits' dtype.
    """
    probability_BxTxE = jax.nn.softmax(logits_BxTxE.astype(jnp.float32))
    weight_BxTxS, expert_BxTxS = jax.lax.top_k(probability_BxTxE, routing.chosen)
    if routing.normalised:
        weight_BxTxS /= jnp.sum(weight_BxTxS, axis=-1, keepdims=True)
    return weight_BxTxS.astype(logits_BxTxE.dtype), expert_BxTxS, probability_BxTxE


def imbalance(
    probability_BxTxE: jax.Array, expert_BxTxS: jax.Array, counted: Counted, split: Split = Split()
) -> jax.Array:
    """Returns Σ_i w_i E / S Σ_e f_ie P_ie, responses' balance loss (DeepSeek-V3, arXiv 2412.19437, eq. 17).

    f_ie is the share of a response's tokens that chose expert e, which has no gradient, and P_ie the mean of
    their probabilities of it. The term of a response is 1 if all experts are chosen alike, and at most E / S.
    A token's weight is w_i / its response's tokens. Thus it adds up over micro-batches and devices.
    """
    (B, T, E), response_BxT = probability_BxTxE.shape, counted.response_BxT
    row_Bx1 = jnp.arange(B)[:, None]
    zeros_BxGxE = jnp.zeros((B, split.tokens * T + 1, E), jnp.float32)
    count_BxGxE = zeros_BxGxE.at[row_Bx1[..., None], response_BxT[..., None], expert_BxTxS].add(1.0)
    count_BxGxE = summed(count_BxGxE, split.tokens)
    load_BxGxE = count_BxGxE / jnp.maximum(count_BxGxE.sum(axis=-1, keepdims=True), 1.0)  # f / S
    of_tokens_BxT = jnp.sum(load_BxGxE[row_Bx1, response_BxT] * probability_BxTxE, axis=-1)
    return E * jnp.sum(counted.weight_BxT * of_tokens_BxT)


class ExpertLinear(nnx.Module):
    """x @ kernel of each row's expert, in the compute dtype `dtype`; parameters are float32."""

    def __init__(self, dtype: str, shape_ExIxO: tuple[int, int, int], *, width: int = 0, rngs: nnx.Rngs):
        """Initialises the layer; `width` is as in `Linear`."""
        self.kernel = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape_ExIxO, jnp.float32))
        self.dtype, self.width = dtype, width

    def __call__(self, x_PxI: jax.Array, size_E: jax.Array, split: Split) -> jax.Array:
        """Returns [P, O]; rows and `size_E` are as in `grouped_matmul`."""
        x_PxI = x_PxI.astype(self.dtype)
        return kept(grouped_matmul(x_PxI, self.kernel[...], size_E, split, self.width), PRODUCT)


class Experts(nnx.Module):
    """The gated MLPs of a layer."""

    def __init__(self, dtype: str, experts: int, width: int, inner: int, *, rngs: nnx.Rngs):
        """`width` is that of the model (D), `inner` that of an expert (F)."""
        self.gate = ExpertLinear(dtype, (experts, width, inner), rngs=rngs)
        self.up = ExpertLinear(dtype, (experts, width, inner), rngs=rngs)
        self.down = ExpertLinear(dtype, (experts, inner, width), width=1, rngs=rngs)

    def __call__(
        self, h_BxTxD: jax.Array, weight_BxTxS: jax.Array, expert_BxTxS: jax.Array, split: Split = Split()
    ) -> jax.Array:
        """Returns Σ weight · MLP of the experts [B, T, D]; if split, what this device's widths add to it."""
        B, T, D = h_BxTxD.shape
        S, E = expert_BxTxS.shape[-1], self.gate.kernel.shape[0]
        expert_P = expert_BxTxS.reshape(-1)
        order_P = jnp.argsort(expert_P)  # stable
        size_E = jnp.bincount(expert_P, length=E)
        copies_PxD = jnp.broadcast_to(h_BxTxD[:, :, None], (B, T, S, D)).reshape(-1, D)
        x_PxD = _permuted(copies_PxD, order_P)
        inner_PxF = swiglu(self.gate(x_PxD, size_E, split), self.up(x_PxD, size_E, split))
        # The weights are factors before `down`: the backward pass then needs its F inputs, not its D outputs.
        weight_P = _permuted(weight_BxTxS.reshape(-1), order_P)
        y_PxD = self.down(inner_PxF * weight_P[:, None], size_E, split)
        return _permuted(y_PxD, jnp.argsort(order_P)).reshape(B, T, S, D).sum(axis=2)


def loads(expert_LxBxTxS: jax.Array, counts_BxT: jax.Array, experts: int) -> jax.Array:
    """Returns how many of the tokens that count chose each expert, int32 [L, E]."""
    L = expert_LxBxTxS.shape[0]
    layer_Lx1 = jnp.arange(L)[:, None]
    one_LxBxTxS = jnp.broadcast_to(counts_BxT[None, :, :, None], expert_LxBxTxS.shape).astype(jnp.int32)
    zeros_LxE = jnp.zeros((L, experts), jnp.int32)
    return zeros_LxE.at[layer_Lx1, expert_LxBxTxS.reshape(L, -1)].add(one_LxBxTxS.reshape(L, -1))


def _permuted(x_Px: jax.Array, order_P: jax.Array) -> jax.Array:
    """Returns the rows [P, ...] in that order. Each occurs once, so gradients need no sum in random order."""
    return x_Px.at[order_P].get(unique_indices=True, mode='promise_in_bounds')
