"""Generation by the decoder of decoder.py: prompts are read at once, then every row gains a token at a time.

Each row has its own place in the cache: token i of a row, the prompt's included, has slot i. Rows of any age share a batch, and what
a row computes does not depend on the others: attention sums over blocks of a fixed size, and a block that a row does not use adds
exactly 0 to it. A cache may hold the first rows alone. The others compute beside them, so that shapes stay, and count for nothing.
GPUs attend to the cache otherwise: gpu_decoding.py.

Shapes:  P prompts · L prompt tokens (right-padded) · B rows · A ≤ B rows that the cache holds · S key slots · D width · N query heads
         K key/value heads · H head size · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bapo_jax.models.attention import masked, xla
from bapo_jax.models.parameters import is_rounded
from bapo_jax.models.patches import Pixels
from bapo_jax.models.decoder import Decoder, ImageFeatures, ModelConfig

Attend = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]  # as `attend` here
BLOCK = 256  # key slots that one sum of attention takes; shorter caches are one block


class Weights(NamedTuple):
    """A policy laid out for generation: a tree a layer, since slicing stacked layers for every token costs more than the products."""

    layers: tuple[Any, ...]
    rest: dict[str, Any]  # embedding, last norm, head, vision tower


class KVCache(NamedTuple):
    """Keys and values of each layer. Each has its own array, so writing a token copies no other layer."""

    k_AxKxSxH: tuple[jax.Array, ...]
    v_AxKxSxH: tuple[jax.Array, ...]

    @property
    def rows(self) -> int:
        return len(self.k_AxKxSxH[0])


def unstacked(params: Any, config: ModelConfig) -> Weights:
    """The parameters in the dtype that the model computes in, layers apart."""
    params = jax.tree_util.tree_map_with_path(lambda path, w: w.astype(config.dtype) if is_rounded(path) else w, params)
    layers = tuple(jax.tree.map(lambda w: w[i], params['layers']) for i in range(config.num_layers))
    return Weights(layers, {name: part for name, part in params.items() if name != 'layers'})


def empty_cache(config: ModelConfig, rows: int, slots: int) -> KVCache:
    """A cache of zeros in the model's compute dtype."""

    def zeros() -> tuple[jax.Array, ...]:
        shape = (rows, config.num_kv_heads, slots, config.head_dim)
        return tuple(jnp.zeros(shape, config.dtype) for _ in range(config.num_layers))

    return KVCache(zeros(), zeros())


def look(graph: nnx.GraphDef, weights: Weights, pixels: Pixels) -> jax.Array:
    """The features [I, D] of images."""
    return _model(graph, weights).vision(*pixels)


def prefill(
    graph: nnx.GraphDef, weights: Weights, tokens_PxL: jax.Array, length_P: jax.Array, positions: jax.Array | None = None,
    images: ImageFeatures | None = None,
) -> tuple[jax.Array, KVCache]:  # fmt: skip
    """Reads prompts of `length_P` tokens; returns the hidden state [P, D] of each one's last token, and the keys and values of all.

    What stands behind a prompt's end is read too, and nothing that counts sees it. Prompts with images state their `positions`
    [3, P, L]; others count from 0.
    """
    P, L = tokens_PxL.shape
    one_segment_PxL, keys, values = jnp.ones((P, L), jnp.int32), [], []

    def attend(q_PxLxNxH, k_PxKxLxH, v_PxKxLxH):
        keys.append(k_PxKxLxH)
        values.append(v_PxKxLxH)
        return xla(q_PxLxNxH, k_PxKxLxH, v_PxKxLxH, one_segment_PxL)

    positions = jnp.broadcast_to(jnp.arange(L), (P, L)) if positions is None else positions
    hidden_PxLxD = _forward(graph, weights, tokens_PxL, positions, lambda _: attend, images)
    last_PxD = jnp.take_along_axis(hidden_PxLxD, (length_P - 1)[:, None, None], axis=1)[:, 0]
    return last_PxD, KVCache(tuple(keys), tuple(values))


def attend_to(q_Bx1xNxH: jax.Array, k_BxKxSxH: jax.Array, v_BxKxSxH: jax.Array, length_B: jax.Array, used: jax.Array) -> jax.Array:
    """Attention [B, 1, N·H] of one query a row to the row's first `length_B` keys; lengths are at most `used`.

    Blocks are summed one after the other against the highest score so far (online softmax), as many as `used` needs.
    """
    (B, _, N, H), (K, S) = q_Bx1xNxH.shape, k_BxKxSxH.shape[1:3]
    if S <= BLOCK:
        return masked(q_Bx1xNxH, k_BxKxSxH, v_BxKxSxH, (jnp.arange(S)[None] < length_B[:, None])[:, None])
    q_BxKxGxH = (q_Bx1xNxH * H**-0.5).reshape(B, K, N // K, H)

    def add_block(i, state):
        highest_BxKxG, total_BxKxG, sum_BxKxGxH = state
        k_BxKxCxH, v_BxKxCxH = (jax.lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK, axis=2) for x in (k_BxKxSxH, v_BxKxSxH))
        score_BxKxGxC = jnp.einsum('bkgh,bkch->bkgc', q_BxKxGxH, k_BxKxCxH, preferred_element_type=jnp.float32)
        seen_Bx1x1xC = (i * BLOCK + jnp.arange(BLOCK)[None] < length_B[:, None])[:, None, None]
        score_BxKxGxC = jnp.where(seen_Bx1x1xC, score_BxKxGxC, -jnp.inf)
        new_BxKxG = jnp.maximum(highest_BxKxG, score_BxKxGxC.max(axis=-1))
        weight_BxKxGxC, kept_BxKxG = jnp.exp(score_BxKxGxC - new_BxKxG[..., None]), jnp.exp(highest_BxKxG - new_BxKxG)
        of_block = jnp.einsum(
            'bkgc,bkch->bkgh', weight_BxKxGxC.astype(v_BxKxCxH.dtype), v_BxKxCxH, preferred_element_type=jnp.float32
        )
        total_BxKxG = total_BxKxG * kept_BxKxG + weight_BxKxGxC.sum(axis=-1)
        return new_BxKxG, total_BxKxG, sum_BxKxGxH * kept_BxKxG[..., None] + of_block

    nothing = (jnp.full((B, K, N // K), jnp.finfo(jnp.float32).min), jnp.zeros((B, K, N // K)), jnp.zeros((B, K, N // K, H)))
    _, total_BxKxG, sum_BxKxGxH = jax.lax.fori_loop(0, -(-used // BLOCK), add_block, nothing)
    return (sum_BxKxGxH / total_BxKxG[..., None]).reshape(B, 1, N * H).astype(q_Bx1xNxH.dtype)


def attend(
    q_Ax1xNxH, k_AxKx1xH, v_AxKx1xH, k_AxKxSxH, v_AxKxSxH, position_A: jax.Array, used: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes a new token's keys and values to the cache, and returns `attend_to` it with the cache's two arrays.

    A row has `position` tokens before it. At most `used` keys are in any row that counts.
    """
    at_A = jnp.arange(len(position_A)), slice(None), position_A
    k_AxKxSxH, v_AxKxSxH = (
        cache.at[at_A].set(new[:, :, 0], unique_indices=True, mode='drop')
        for cache, new in ((k_AxKxSxH, k_AxKx1xH), (v_AxKxSxH, v_AxKx1xH))
    )
    return attend_to(q_Ax1xNxH, k_AxKxSxH, v_AxKxSxH, position_A + 1, used), k_AxKxSxH, v_AxKxSxH


def decode(
    graph: nnx.GraphDef, weights: Weights, token_B: jax.Array, position_B: jax.Array, cache: KVCache, used: jax.Array,
    shift_B: jax.Array | None = None, attend: Attend = attend,
) -> tuple[jax.Array, KVCache]:  # fmt: skip
    """Reads one more token of every row; returns its hidden state [B, D] and the cache with it.

    `position_B` counts the row's tokens before it. `used` is the most slots that a row which counts has filled, this one included:
    more slots are not read. Behind images a row's rotary positions are not its counts: `shift_B` is added to these. `attend` is the
    platform's.
    """
    A, B = cache.rows, len(token_B)
    keys, values = list(cache.k_AxKxSxH), list(cache.v_AxKxSxH)

    def attend_in(layer: int):
        def attend_with_cache(q_Bx1xNxH, k_BxKx1xH, v_BxKx1xH):
            new = q_Bx1xNxH[:A], k_BxKx1xH[:A], v_BxKx1xH[:A]
            sum_Ax1xW, keys[layer], values[layer] = attend(*new, keys[layer], values[layer], position_B[:A], used)
            return jnp.pad(sum_Ax1xW, ((0, B - A), (0, 0), (0, 0)))

        return attend_with_cache

    rotary_B = position_B if shift_B is None else position_B + shift_B
    hidden_Bx1xD = _forward(graph, weights, token_B[:, None], rotary_B[:, None], attend_in)
    return hidden_Bx1xD[:, 0], KVCache(tuple(keys), tuple(values))


def cache_slots(tokens: int, most: int) -> int:
    """Key slots for sequences of up to that many tokens, where others have up to `most`: of these alone if a block holds them, else
    whole blocks. A single block is summed otherwise than several, so there are two at least."""
    return most if most <= BLOCK else max(2, -(-tokens // BLOCK)) * BLOCK


def logits(graph: nnx.GraphDef, weights: Weights, hidden_xD: jax.Array) -> jax.Array:
    """Scores [..., V] in float32."""
    return _model(graph, weights).logits(hidden_xD)


def _forward(graph: nnx.GraphDef, weights: Weights, tokens_BxT, positions, attend_in, images=None) -> jax.Array:
    return _model(graph, weights).unrolled(weights.layers, tokens_BxT, positions, attend_in, images)


def _model(graph: nnx.GraphDef, weights: Weights) -> Decoder:
    """The model with its first layer in the stacked layers' place: `unrolled` asks for no more than a layer's graph there."""
    return nnx.merge(graph, {**weights.rest, 'layers': weights.layers[0]})
