"""Generation with the decoder of decoder.py: prompts are prefilled, then all rows decode token by token.

Token i of a row, counting from the prompt's first, has slot i of that row in the KV cache. Rows of any age
share a batch, and a row's result does not depend on the others: attention sums over blocks of a fixed size,
and a block that a row does not use adds exactly 0. A cache may hold only the first rows. The others are
computed to keep the shapes fixed, and their results are ignored. GPUs attend to the cache in another way:
gpu_decoding.py.

A layer with linear attention has a state of fixed size in place of keys and values (models/delta.py).

Shapes:  P prompts · L prompt tokens (right-padded) · B rows · A ≤ B rows that the cache holds · S key slots
         D width · N query heads · K key/value heads · H head size · V vocabulary. Of linear attention:
         C channels and S tokens of the convolution, N value heads, key heads of size H, value heads of W.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bapo_jax.models import delta
from bapo_jax.models.attention import masked, xla
from bapo_jax.models.decoder import Decoder, ImageFeatures, ModelConfig
from bapo_jax.models.parameters import is_rounded
from bapo_jax.models.vision.patches import Pixels

AttendCached = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]  # with the signature of `attend` below
CACHE_BLOCK = 256  # key slots per block of the attention sum; shorter caches are one block


class Weights(NamedTuple):
    """A policy laid out for generation, with one tree per layer.

    Slicing stacked layers for every token would cost more than the matrix products.
    """

    layers: tuple[Any, ...]
    rest: dict[str, Any]  # embedding, last norm, head, vision tower


class KVCache(NamedTuple):
    """Keys and values, with separate arrays for each layer, so that writing a token copies no other layer.

    Of layers with linear attention, the convolution's earlier inputs and the state, float32.
    """

    k_AxKxSxH: tuple[jax.Array, ...]
    v_AxKxSxH: tuple[jax.Array, ...]
    conv_Ax1xSxC: tuple[jax.Array, ...] = ()
    state_AxNxHxW: tuple[jax.Array, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.k_AxKxSxH[0])


def unstacked(params: Any, config: ModelConfig) -> Weights:
    """The parameters in the model's compute dtype, with unstacked layers."""
    params = jax.tree_util.tree_map_with_path(
        lambda path, w: w.astype(config.dtype) if is_rounded(path) else w, params
    )
    places = [config.stack_of(i) for i in range(config.num_layers)]
    layers = tuple(jax.tree.map(lambda w: w[at], params[stack]) for stack, at in places)
    return Weights(layers, {name: part for name, part in params.items() if name not in dict(places)})


def empty_cache(config: ModelConfig, rows: int, slots: int) -> KVCache:
    """A cache of zeros in the model's compute dtype."""

    full = config.num_layers // config.period

    def zeros(*shape: int, layers: int = full, dtype: str = config.dtype) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((rows, *shape), dtype) for _ in range(layers))

    keys, values = (zeros(config.num_kv_heads, slots, config.head_dim) for _ in range(2))
    if not config.delta:
        return KVCache(keys, values)
    d, linear = config.delta, config.num_layers - full
    state = zeros(d.value_heads, d.key_dim, d.value_dim, layers=linear, dtype='float32')
    return KVCache(keys, values, zeros(1, d.conv - 1, d.channels, layers=linear), state)


def look(graph: nnx.GraphDef, weights: Weights, pixels: Pixels) -> jax.Array:
    """Encodes images into features [I, D]."""
    return _model(graph, weights).vision(*pixels)


def prefill(
    graph: nnx.GraphDef, weights: Weights, tokens_PxL: jax.Array, length_P: jax.Array,
    positions: jax.Array | None = None, images: ImageFeatures | None = None,
) -> tuple[jax.Array, KVCache]:  # fmt: skip
    """Prefills prompts of `length_P` tokens. Returns each last token's hidden state [P, D], and the KV cache.

    Padding after a prompt is computed too, but no used token attends to it. Prompts with images need
    `positions` [3, P, L]; other positions count from 0.
    """
    P, L = tokens_PxL.shape
    one_segment_PxL, counts_PxL = jnp.ones((P, L), jnp.int32), jnp.arange(L)[None] < length_P[:, None]
    keys, values, convs, states = [], [], [], []

    def attend(q_PxLxNxH, k_PxKxLxH, v_PxKxLxH):
        keys.append(k_PxKxLxH)
        values.append(v_PxKxLxH)
        return xla(q_PxLxNxH, k_PxKxLxH, v_PxKxLxH, one_segment_PxL)

    def conv(x_PxLxC, kernel_CxS):
        earlier = kernel_CxS.shape[1] - 1
        padded = jnp.pad(x_PxLxC, ((0, 0), (earlier, 0), (0, 0)))
        at_PxS = length_P[:, None] + jnp.arange(earlier)[None]  # the prompt's last tokens
        convs.append(jnp.take_along_axis(padded, at_PxS[..., None], axis=1)[:, None])
        return delta.convolved(x_PxLxC, kernel_CxS, one_segment_PxL)

    def rule(q, k, v, *log_decay_and_beta_PxLxN):
        counted = (jnp.where(counts_PxL[..., None], x, 0.0) for x in log_decay_and_beta_PxLxN)
        out_PxLxNxW, state = delta.delta_rule(q, k, v, *counted, one_segment_PxL)
        states.append(state)
        return out_PxLxNxW

    positions = jnp.broadcast_to(jnp.arange(L), (P, L)) if positions is None else positions
    ways = {'layers': attend, 'delta_layers': delta.Recur(conv, rule)}
    hidden_PxLxD = _forward(graph, weights, tokens_PxL, positions, lambda stack, _: ways[stack], images)
    last_PxD = jnp.take_along_axis(hidden_PxLxD, (length_P - 1)[:, None, None], axis=1)[:, 0]
    return last_PxD, KVCache(*map(tuple, (keys, values, convs, states)))


def attend_to(
    q_Bx1xNxH: jax.Array, k_BxKxSxH: jax.Array, v_BxKxSxH: jax.Array, length_B: jax.Array, used: jax.Array
) -> jax.Array:
    """Attention [B, 1, N·H] of one query per row to its first `length_B` keys; no length exceeds `used`.

    Sums only the blocks that `used` requires, relative to the highest score so far (online softmax).
    """
    (B, _, N, H), (K, S) = q_Bx1xNxH.shape, k_BxKxSxH.shape[1:3]
    if S <= CACHE_BLOCK:
        return masked(q_Bx1xNxH, k_BxKxSxH, v_BxKxSxH, (jnp.arange(S)[None] < length_B[:, None])[:, None])
    q_BxKxGxH = (q_Bx1xNxH * H**-0.5).reshape(B, K, N // K, H)

    def add_block(i, state):
        highest_BxKxG, total_BxKxG, sum_BxKxGxH = state
        k_BxKxCxH, v_BxKxCxH = (
            jax.lax.dynamic_slice_in_dim(x, i * CACHE_BLOCK, CACHE_BLOCK, axis=2)
            for x in (k_BxKxSxH, v_BxKxSxH)
        )
        score_BxKxGxC = jnp.einsum(
            'bkgh,bkch->bkgc', q_BxKxGxH, k_BxKxCxH, preferred_element_type=jnp.float32
        )
        seen_Bx1x1xC = (i * CACHE_BLOCK + jnp.arange(CACHE_BLOCK)[None] < length_B[:, None])[:, None, None]
        score_BxKxGxC = jnp.where(seen_Bx1x1xC, score_BxKxGxC, -jnp.inf)
        new_BxKxG = jnp.maximum(highest_BxKxG, score_BxKxGxC.max(axis=-1))
        weight_BxKxGxC, kept_BxKxG = (
            jnp.exp(score_BxKxGxC - new_BxKxG[..., None]),
            jnp.exp(highest_BxKxG - new_BxKxG),
        )
        block_sum = jnp.einsum(
            'bkgc,bkch->bkgh',
            weight_BxKxGxC.astype(v_BxKxCxH.dtype),
            v_BxKxCxH,
            preferred_element_type=jnp.float32,
        )
        total_BxKxG = total_BxKxG * kept_BxKxG + weight_BxKxGxC.sum(axis=-1)
        return new_BxKxG, total_BxKxG, sum_BxKxGxH * kept_BxKxG[..., None] + block_sum

    nothing = (
        jnp.full((B, K, N // K), jnp.finfo(jnp.float32).min),
        jnp.zeros((B, K, N // K)),
        jnp.zeros((B, K, N // K, H)),
    )
    _, total_BxKxG, sum_BxKxGxH = jax.lax.fori_loop(0, -(-used // CACHE_BLOCK), add_block, nothing)
    return (sum_BxKxGxH / total_BxKxG[..., None]).reshape(B, 1, N * H).astype(q_Bx1xNxH.dtype)


def attend(
    q_Ax1xNxH, k_AxKx1xH, v_AxKx1xH, k_AxKxSxH, v_AxKxSxH, position_A: jax.Array, used: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes a new token to the cache. Returns the result of `attend_to`, and the cache's two arrays.

    A row has `position` tokens before the new one. No row in use has more than `used` keys.
    """
    at_A = jnp.arange(len(position_A)), slice(None), position_A
    k_AxKxSxH, v_AxKxSxH = (
        cache.at[at_A].set(new[:, :, 0], unique_indices=True, mode='drop')
        for cache, new in ((k_AxKxSxH, k_AxKx1xH), (v_AxKxSxH, v_AxKx1xH))
    )
    return attend_to(q_Ax1xNxH, k_AxKxSxH, v_AxKxSxH, position_A + 1, used), k_AxKxSxH, v_AxKxSxH


def decode(
    graph: nnx.GraphDef, weights: Weights, token_B: jax.Array, position_B: jax.Array, cache: KVCache,
    used: jax.Array, shift_B: jax.Array | None = None, attend: AttendCached = attend,
) -> tuple[jax.Array, KVCache]:  # fmt: skip
    """Decodes one more token of every row. Returns its hidden state [B, D] and the updated cache.

    `position_B` is the number of tokens before it. `used` is the most slots filled in any row in use,
    including this token; later slots are not read. After images, `shift_B` is added to the token counts to
    give rotary positions. `attend` is the platform's.
    """
    A, B = cache.rows, len(token_B)
    keys, values, convs, states = map(list, cache)

    def of_all_rows(x_Ax):
        return jnp.pad(x_Ax, ((0, B - A), *[(0, 0)] * (x_Ax.ndim - 1)))

    def recur_in(layer: int):
        def conv(x_Bx1xC, kernel_CxS):
            seen_AxSxC = jnp.concatenate([convs[layer][:, 0], x_Bx1xC[:A]], axis=1)
            convs[layer] = seen_AxSxC[:, None, 1:]
            by_AxSxC = seen_AxSxC.astype(jnp.float32) * kernel_CxS.T[None].astype(jnp.float32)
            return of_all_rows(jnp.sum(by_AxSxC, axis=1, keepdims=True))

        def rule(*inputs_Bx1xN):
            out_AxNxW, states[layer] = delta.next_token(*(x[:A, 0] for x in inputs_Bx1xN), states[layer])
            return of_all_rows(out_AxNxW[:, None])

        return delta.Recur(conv, rule)

    def attend_in(layer: int):
        def attend_with_cache(q_Bx1xNxH, k_BxKx1xH, v_BxKx1xH):
            new = q_Bx1xNxH[:A], k_BxKx1xH[:A], v_BxKx1xH[:A]
            sum_Ax1xW, keys[layer], values[layer] = attend(
                *new, keys[layer], values[layer], position_B[:A], used
            )
            return of_all_rows(sum_Ax1xW)

        return attend_with_cache

    rotary_B = position_B if shift_B is None else position_B + shift_B
    ways = {'layers': attend_in, 'delta_layers': recur_in}
    hidden_Bx1xD = _forward(
        graph, weights, token_B[:, None], rotary_B[:, None], lambda stack, place: ways[stack](place)
    )
    return hidden_Bx1xD[:, 0], KVCache(*map(tuple, (keys, values, convs, states)))


def cache_slots(tokens: int, most: int) -> int:
    """The number of key slots for sequences of up to `tokens` tokens, if others have up to `most`.

    Exactly `most` if one block holds them. Otherwise whole blocks, at least two, since a single block is
    summed differently from several.
    """
    return most if most <= CACHE_BLOCK else max(2, -(-tokens // CACHE_BLOCK)) * CACHE_BLOCK


def logits(graph: nnx.GraphDef, weights: Weights, hidden_xD: jax.Array) -> jax.Array:
    """Logits [..., V] in float32."""
    return _model(graph, weights).logits(hidden_xD)


def _forward(
    graph: nnx.GraphDef, weights: Weights, tokens_BxT, positions, attend_in, images=None
) -> jax.Array:
    return _model(graph, weights).unrolled(weights.layers, tokens_BxT, positions, attend_in, images)


def _model(graph: nnx.GraphDef, weights: Weights) -> Decoder:
    """The model with a layer for each stack of layers: `unrolled` needs only one layer's graph."""
    kinds = {'delta_layers' if 'delta' in layer else 'layers': layer for layer in weights.layers}
    return nnx.merge(graph, {**weights.rest, **kinds})
