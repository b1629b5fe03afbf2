"""The LM head: log-probs and entropy of given tokens from hidden states, with logits computed tile by tile.

With l = h W / τ over the vocabulary, y the token and p = softmax(l):

    log-prob  l_y - log Σ exp(l)                gradient by l_j:  1[j = y] - p_j
    entropy   log Σ exp(l) - Σ p l              gradient by l_j:  -p_j (log p_j + entropy)

The forward pass accumulates Σ exp(l) and Σ exp(l) l of each token over blocks of the vocabulary. The backward
pass recomputes each tile of logits. Their gradient has the dtype of the hidden states; the gradient of W is
summed in float32. Each block of W crosses the mesh once per pass, and its gradient once, for any number of
tokens.

Shapes:  N tokens, a multiple of the C tokens of a tile · D width · W words of a block
         V vocabulary (a device's part, if the model is split)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bapo_jax.cluster.split import Split


class Tile(NamedTuple):
    """The size of a tile of logits. Only one exists at a time: 128 MiB in float32."""

    tokens: int = 2048
    words: int = 16384


class _Sums(NamedTuple):
    """Running sums of each token's logits [N] over the blocks of the vocabulary so far."""

    largest: jax.Array
    exp: jax.Array  # Σ exp(l - largest)
    exp_l: jax.Array  # Σ exp(l - largest) l
    chosen: jax.Array  # the token's own logit, once its block has been processed


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def head(
    hidden_NxD, weight_VxD, token_N, count, temperature, split: Split, entropy_gradient: bool, tile: Tile
):
    """Returns (log-prob, entropy), float32 [N]; only the first `count` values are meaningful.

    `hidden_NxD[i]` is the state that predicts `token_N[i]`; `weight_VxD` is this device's part of the head.
    Without `entropy_gradient` the entropy is treated as a constant. The temperature is not differentiated.
    """
    return _forward(hidden_NxD, weight_VxD, token_N, count, temperature, split, entropy_gradient, tile)[0]


def _forward(hidden_NxD, weight_VxD, token_N, count, temperature, split, entropy_gradient, tile):
    token_N = _within(token_N, weight_VxD, split)
    N = len(token_N)
    sums = _Sums(jnp.full(N, -jnp.inf, jnp.float32), *jnp.zeros((3, N), jnp.float32))
    for first, last in _blocks(weight_VxD, tile):
        weight_WxD = split.gather(weight_VxD[first:last].astype(hidden_NxD.dtype), 1)

        def add_tile(i, sums: _Sums, weight_WxD=weight_WxD, first=first) -> _Sums:
            old, hidden_CxD, token_C = _cut((sums, hidden_NxD, token_N), i, tile)
            l_CxW = _logits(hidden_CxD, weight_WxD, temperature)
            largest_C = jnp.maximum(old.largest, jnp.max(l_CxW, axis=1))
            exp_CxW, kept_C = jnp.exp(l_CxW - largest_C[:, None]), jnp.exp(old.largest - largest_C)
            new = _Sums(
                largest_C,
                old.exp * kept_C + jnp.sum(exp_CxW, axis=1),
                old.exp_l * kept_C + jnp.sum(exp_CxW * l_CxW, axis=1),
                old.chosen + jnp.sum(jnp.where(_is_token(token_C, l_CxW, first), l_CxW, 0.0), axis=1),
            )
            return _put(sums, new, i, tile)

        sums = _over_tiles(add_tile, sums, N, count, tile)
    if split.tensor > 1:
        largest_N = jax.lax.pmax(sums.largest, 'tensor')
        scale_N = jnp.exp(sums.largest - largest_N)
        sums = _Sums(
            largest_N, *jax.lax.psum((sums.exp * scale_N, sums.exp_l * scale_N, sums.chosen), 'tensor')
        )
    normaliser_N = sums.largest + jnp.log(sums.exp)
    entropy_N = normaliser_N - sums.exp_l / sums.exp
    saved = (hidden_NxD, weight_VxD, token_N, count, temperature, normaliser_N, entropy_N)
    return (sums.chosen - normaliser_N, entropy_N), saved


def _backward(split, entropy_gradient, tile, saved, gradients):
    hidden_NxD, weight_VxD, token_N, count, temperature, normaliser_N, entropy_N = saved
    per_token = (hidden_NxD, token_N, normaliser_N, entropy_N, *gradients)
    d_hidden_NxD, d_weights = jnp.zeros(hidden_NxD.shape, jnp.float32), []
    for first, last in _blocks(weight_VxD, tile):
        weight_WxD = split.gather(weight_VxD[first:last].astype(hidden_NxD.dtype), 1)

        def add_tile(i, sums, weight_WxD=weight_WxD, first=first):
            d_hidden_NxD, d_weight_WxD = sums
            hidden_CxD, token_C, normaliser_C, entropy_C, by_logp_C, by_entropy_C = _cut(per_token, i, tile)
            l_CxW = _logits(hidden_CxD, weight_WxD, temperature)
            logp_CxW = l_CxW - normaliser_C[:, None]
            p_CxW = jnp.exp(logp_CxW)
            g_CxW = by_logp_C[:, None] * (_is_token(token_C, l_CxW, first).astype(jnp.float32) - p_CxW)
            if entropy_gradient:
                g_CxW = g_CxW - by_entropy_C[:, None] * p_CxW * (logp_CxW + entropy_C[:, None])
            g_CxW = (g_CxW / temperature).astype(hidden_CxD.dtype)
            d_hidden_CxD = jnp.matmul(g_CxW, weight_WxD, preferred_element_type=jnp.float32)
            d_hidden_NxD = _put(d_hidden_NxD, _cut(d_hidden_NxD, i, tile) + d_hidden_CxD, i, tile)
            return d_hidden_NxD, d_weight_WxD + jnp.matmul(
                g_CxW.T, hidden_CxD, preferred_element_type=jnp.float32
            )

        sums = (d_hidden_NxD, jnp.zeros(weight_WxD.shape, jnp.float32))
        d_hidden_NxD, d_weight_WxD = _over_tiles(add_tile, sums, len(token_N), count, tile)
        d_weights.append(split.scatter(d_weight_WxD, 1))
    if split.tensor > 1:
        d_hidden_NxD = jax.lax.psum(d_hidden_NxD, 'tensor')
    d_weight_VxD = jnp.concatenate(d_weights).astype(weight_VxD.dtype)
    return d_hidden_NxD.astype(hidden_NxD.dtype), d_weight_VxD, None, None, jnp.zeros_like(temperature)


head.defvjp(_forward, _backward)


def _blocks(weight_VxD: jax.Array, tile: Tile) -> list[tuple[int, int]]:
    """Returns the bounds [first, last) of each block of the vocabulary."""
    V = weight_VxD.shape[0]
    return [(first, min(first + tile.words, V)) for first in range(0, V, tile.words)]


def _over_tiles(add_tile: Callable[[Any, Any], Any], sums: Any, N: int, count, tile: Tile) -> Any:
    """Applies `add_tile(i, sums)` for every tile that holds any of the first `count` tokens."""
    if N == tile.tokens:
        return add_tile(0, sums)  # a loop would keep XLA from fusing it with the code around it
    return jax.lax.fori_loop(0, (count + tile.tokens - 1) // tile.tokens, add_tile, sums)


def _cut(arrays: Any, i, tile: Tile) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * tile.tokens, tile.tokens), arrays)


def _put(arrays: Any, parts: Any, i, tile: Tile) -> Any:
    return jax.tree.map(
        lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, i * tile.tokens, 0), arrays, parts
    )


def _logits(hidden_CxD: jax.Array, weight_WxD: jax.Array, temperature) -> jax.Array:
    return jnp.matmul(hidden_CxD, weight_WxD.T, preferred_element_type=jnp.float32) / temperature


def _within(token_N: jax.Array, weight_VxD: jax.Array, split: Split) -> jax.Array:
    """Returns token ids relative to this device's part of the vocabulary; others are out of range."""
    return token_N if split.tensor == 1 else token_N - jax.lax.axis_index('tensor') * weight_VxD.shape[0]


def _is_token(token_C: jax.Array, l_CxW: jax.Array, first: int) -> jax.Array:
    """Returns bool [C, W], True at each token's own word, for a block that begins at word `first`."""
    return token_C[:, None] == first + jnp.arange(l_CxW.shape[1], dtype=token_C.dtype)[None]
