"""Flash attention on GPU: causal, grouped-query, and only over the blocks that a row's segments need.

A query block reads the key blocks from the start of its first token's segment to its own. A key block is read
by the query blocks up to the end of its last token's segment. So the cost is the sum of the squared segment
lengths, and padding costs next to nothing. Blocks in which every query sees every key are not masked.

The kernels are Pallas programs, compiled by Triton. A program holds one block of one head and loops over the
blocks it reads:

  forward query block: out = Σ_s exp2(score - lse) v, score = (q · k) log2(e) / √H, lse = log2 Σ_s exp2(score)
  dq      query block: ds = exp2(score - lse) (do · v - delta), dq = Σ_s ds k / √H, delta = Σ_h do · out
  dkv     key block:   dv = Σ exp2(score - lse) do, dk = Σ ds q / √H, over queries of all G query heads

Sums are float32. Products have the inputs' dtype; float32 inputs use TF32, JAX's default on GPU.

Shapes:  B rows · T tokens in a row · N query heads · K key/value heads · G = N/K · H head size
         Q queries of a block · S keys of a block · M blocks
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from bapo_jax.models.gpu_tiles import ENOUGH_PROGRAMS, KernelTile, Tiles, key_bounds, query_bounds, tiles_of


class _Static(NamedTuple):
    """Compile-time constants of the kernels, besides the shapes."""

    scale: float  # 1 / √H of the head's true size
    tiles: Tiles
    residual_name: str
    interpret: bool


def attention(
    q_BxTxNxH,
    k_BxKxTxH,
    v_BxKxTxH,
    segment_BxT,
    *,
    tiles: Tiles | None = None,
    residual_name: str = '',
    interpret: bool = False,
):
    """Returns [B, T, N·H]: softmax_s(q_t · k_s / √H) v_s over s <= t with segment_s = segment_t.

    The result has the inputs' dtype. A segment's tokens are contiguous in a row. Segment 0 is padding: each
    of its tokens sees only itself. Rows and heads of any size are padded to whole tiles. The residuals of the
    backward pass, the result and the log-sums, are named `residual_name` for rematerialisation policies.
    `interpret` runs the kernels on any device, for tests.
    """
    B, T, N, H = q_BxTxNxH.shape
    tiles = tiles or tiles_of(H * q_BxTxNxH.dtype.itemsize)
    longest = max(max(tile.queries, tile.keys) for tile in tiles)
    more_tokens, more_head = -T % longest, pl.next_power_of_2(max(H, 16)) - H

    def whole(x, token_axis: int):
        widths = [(0, 0)] * x.ndim
        widths[token_axis] = (0, more_tokens)
        if x.ndim == 4:
            widths[3] = (0, more_head)
        return jnp.pad(x, widths)

    # Each padding token gets an id of its own, so that no other token sees it and no block is read for it.
    id_BxT = whole(segment_BxT, 1)
    id_BxT = jnp.where(id_BxT == 0, -1 - jnp.arange(T + more_tokens, dtype=id_BxT.dtype)[None], id_BxT)
    static = _Static(H**-0.5, tiles, residual_name, interpret)
    out_BxTxNxH = _flash(whole(q_BxTxNxH, 1), whole(k_BxKxTxH, 2), whole(v_BxKxTxH, 2), id_BxT, static)
    return out_BxTxNxH[:, :T, :, :H].reshape(B, T, N * H)


# ---- which blocks are read


# ---- the kernels


def _read(bounds_ref, visit, carry):
    """Folds `visit(block, carry, masked)` over the blocks within the bounds `bounds_ref` [4]."""
    bounds = [bounds_ref[i] for i in range(4)]
    for first, last, masked in zip(bounds, bounds[1:], (True, False, True)):
        carry = jax.lax.fori_loop(first, last, functools.partial(visit, masked=masked), carry)
    return carry


def _dot(a_IxH: jax.Array, b_JxH: jax.Array, *, b_axis: int = 1) -> jax.Array:
    """Returns a bᵀ, float32 [I, J]; if `b_axis` is 0, a b, [I, H]."""
    return jax.lax.dot_general(
        a_IxH, b_JxH, (((1,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32
    )


def _sees(query_id, query, key_id, key):
    """Returns whether a query sees a key, from their segment ids and token positions."""
    return (query_id == key_id) & (query >= key)


def _block(index, size: int):
    """Returns the slice of a block's tokens, and their positions in the row."""
    return pl.ds(index * size, size), index * size + jnp.arange(size, dtype=jnp.int32)


def _forward_kernel(bounds_ref, q_ref, k_ref, v_ref, id_ref, out_ref, lse_ref, *, static: _Static):
    Q, S, _, _ = static.tiles.forward
    at_Q, query_Q = _block(_reversed(), Q)
    q_QxH, id_Q, scale = q_ref[...], id_ref[at_Q], static.scale * math.log2(math.e)

    def visit(j, carry, masked: bool):
        sum_QxH, top_Q, total_Q = carry
        at_S, key_S = _block(j, S)
        score_QxS = _dot(q_QxH, k_ref[at_S, :])
        if masked:
            sees_QxS = _sees(id_Q[:, None], query_Q[:, None], id_ref[at_S][None], key_S[None])
            score_QxS = jnp.where(sees_QxS, score_QxS, -jnp.inf)
        new_Q = jnp.maximum(top_Q, jnp.max(score_QxS, axis=1) * scale)
        weight_QxS, fade_Q = jnp.exp2(score_QxS * scale - new_Q[:, None]), jnp.exp2(top_Q - new_Q)
        sum_QxH = sum_QxH * fade_Q[:, None] + _dot(weight_QxS.astype(v_ref.dtype), v_ref[at_S, :], b_axis=0)
        return sum_QxH, new_Q, total_Q * fade_Q + jnp.sum(weight_QxS, axis=1)

    # The least finite number, not -∞: if a query sees no key of a block, ∞ - ∞ would be NaN.
    least_Q = jnp.full(Q, jnp.finfo(jnp.float32).min, jnp.float32)
    start = jnp.zeros(q_QxH.shape, jnp.float32), least_Q, jnp.zeros(Q, jnp.float32)
    sum_QxH, top_Q, total_Q = _read(bounds_ref, visit, start)
    out_ref[...] = (sum_QxH / total_Q[:, None]).astype(out_ref.dtype)
    lse_ref[...] = top_Q + jnp.log2(total_Q)


def _dq_kernel(
    bounds_ref, q_ref, k_ref, v_ref, id_ref, do_ref, lse_ref, delta_ref, dq_ref, *, static: _Static
):
    Q, S, _, _ = static.tiles.dq
    at_Q, query_Q = _block(_reversed(), Q)
    q_QxH, do_QxH, lse_Q, delta_Q, id_Q = q_ref[...], do_ref[...], lse_ref[...], delta_ref[...], id_ref[at_Q]

    def visit(j, dq_QxH, masked: bool):
        at_S, key_S = _block(j, S)
        k_SxH = k_ref[at_S, :]
        weight_QxS = jnp.exp2(_dot(q_QxH, k_SxH) * (static.scale * math.log2(math.e)) - lse_Q[:, None])
        if masked:
            sees_QxS = _sees(id_Q[:, None], query_Q[:, None], id_ref[at_S][None], key_S[None])
            weight_QxS = jnp.where(sees_QxS, weight_QxS, 0.0)
        ds_QxS = weight_QxS * (_dot(do_QxH, v_ref[at_S, :]) - delta_Q[:, None])
        return dq_QxH + _dot(ds_QxS.astype(k_SxH.dtype), k_SxH, b_axis=0)

    dq_QxH = _read(bounds_ref, visit, jnp.zeros(q_QxH.shape, jnp.float32))
    dq_ref[...] = (dq_QxH * static.scale).astype(dq_ref.dtype)


def _dkv_kernel(
    bounds_ref, q_ref, k_ref, v_ref, id_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, *, static: _Static
):
    """Keeps scores transposed, [S, Q], so that no computed matrix has to be transposed for a product."""
    Q, S, _, _ = static.tiles.dkv
    at_S, key_S = _block(pl.program_id(0), S)
    k_SxH, v_SxH, id_S = k_ref[...], v_ref[...], id_ref[at_S]

    def visit(i, carry, head, masked: bool):
        dk_SxH, dv_SxH = carry
        at_Q, query_Q = _block(i, Q)
        q_QxH, do_QxH = q_ref[at_Q, head, :], do_ref[at_Q, head, :]
        score_SxQ = _dot(k_SxH, q_QxH) * (static.scale * math.log2(math.e))
        weight_SxQ = jnp.exp2(score_SxQ - lse_ref[head, at_Q][None, :])
        if masked:
            sees_SxQ = _sees(id_ref[at_Q][None], query_Q[None], id_S[:, None], key_S[:, None])
            weight_SxQ = jnp.where(sees_SxQ, weight_SxQ, 0.0)
        dv_SxH = dv_SxH + _dot(weight_SxQ.astype(do_QxH.dtype), do_QxH, b_axis=0)
        ds_SxQ = weight_SxQ * (_dot(v_SxH, do_QxH) - delta_ref[head, at_Q][None, :])
        return dk_SxH + _dot(ds_SxQ.astype(q_QxH.dtype), q_QxH, b_axis=0), dv_SxH

    def add_head(head, carry):
        return _read(bounds_ref, functools.partial(visit, head=head), carry)

    zeros_SxH = jnp.zeros(k_SxH.shape, jnp.float32)
    dk_SxH, dv_SxH = jax.lax.fori_loop(0, q_ref.shape[1], add_head, (zeros_SxH, zeros_SxH))
    dk_ref[...] = (dk_SxH * static.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv_SxH.astype(dv_ref.dtype)


def _reversed():
    """Returns this program's query block index. Late blocks read the most keys, so they start first."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


# ---- the calls


def _forward(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, id_BxT, static: _Static):
    """Returns (out [B, T, N, H], lse [B, N, T]); lse is float32, in bits."""
    grid, at_bounds, at_q, at_kv, at_id, at_lse = _by_query(q_BxTxNxH, k_BxKxTxH, static.tiles.forward)
    (B, T, N, _), tile = q_BxTxNxH.shape, static.tiles.forward
    return _call(
        _forward_kernel, static, tile, grid, 'attention_forward',
        in_specs=[at_bounds, at_q, at_kv, at_kv, at_id],
        out_specs=[at_q, at_lse],
        out_shape=[q_BxTxNxH, jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
    )(key_bounds(id_BxT, tile.queries, tile.keys), q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, id_BxT)  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flash(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, id_BxT, static: _Static):
    return _forward(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, id_BxT, static)[0]


def _flash_forward(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, id_BxT, static: _Static):
    out_BxTxNxH, lse_BxNxT = (
        checkpoint_name(x, static.residual_name)
        for x in _forward(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, id_BxT, static)
    )
    return out_BxTxNxH, (q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, id_BxT, out_BxTxNxH, lse_BxNxT)


def _flash_backward(static: _Static, saved, do_BxTxNxH):
    q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, id_BxT, out_BxTxNxH, lse_BxNxT = saved
    delta_BxTxN = jnp.sum(out_BxTxNxH.astype(jnp.float32) * do_BxTxNxH.astype(jnp.float32), axis=-1)
    inputs = q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, id_BxT, do_BxTxNxH, lse_BxNxT, delta_BxTxN.swapaxes(1, 2)

    tile = static.tiles.dq
    grid, at_bounds, at_q, at_kv, at_id, at_lse = _by_query(q_BxTxNxH, k_BxKxTxH, tile)
    dq_BxTxNxH = _call(
        _dq_kernel, static, tile, grid, 'attention_dq',
        in_specs=[at_bounds, at_q, at_kv, at_kv, at_id, at_q, at_lse, at_lse],
        out_specs=at_q,
        out_shape=q_BxTxNxH,
    )(key_bounds(id_BxT, tile.queries, tile.keys), *inputs)  # fmt: skip

    tile, (B, K, T, H), N = static.tiles.dkv, k_BxKxTxH.shape, q_BxTxNxH.shape[2]
    # A program handles all query heads of a key head, or only one; then their gradients are summed here.
    heads = N // K if B * K * T // tile.keys >= ENOUGH_PROGRAMS else 1
    part = jax.ShapeDtypeStruct((B, N // heads, T, H), k_BxKxTxH.dtype if heads == N // K else jnp.float32)
    grid, at_bounds, at_q, at_kv, at_id, at_lse, at_part = _by_key(q_BxTxNxH, k_BxKxTxH, tile, heads)
    parts = _call(
        _dkv_kernel, static, tile, grid, 'attention_dkv',
        in_specs=[at_bounds, at_q, at_kv, at_kv, at_id, at_q, at_lse, at_lse],
        out_specs=[at_part, at_part],
        out_shape=[part, part],
    )(query_bounds(id_BxT, tile.queries, tile.keys), *inputs)  # fmt: skip
    dk_BxKxTxH, dv_BxKxTxH = (x.reshape(B, K, -1, T, H).sum(axis=2).astype(k_BxKxTxH.dtype) for x in parts)
    return dq_BxTxNxH, dk_BxKxTxH, dv_BxKxTxH, None


_flash.defvjp(_flash_forward, _flash_backward)


def _call(kernel, static: _Static, tile: KernelTile, grid: tuple[int, ...], name: str, **specs):
    # Imported here because JAX plans to remove it: kernels.kernel_for() then selects a replacement.
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        functools.partial(kernel, static=static), grid=grid, name=name, interpret=static.interpret, **specs,
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    )  # fmt: skip


def _by_query(q_BxTxNxH, k_BxKxTxH, tile: KernelTile):
    """Returns the grid of one program per query block, and specs of bounds, queries, keys, ids, log-sums."""
    (B, T, N, H), K, Q = q_BxTxNxH.shape, k_BxKxTxH.shape[1], tile.queries
    M = T // Q  # programs count down, see _reversed
    return (
        (M, N, B),
        pl.BlockSpec((None, None, 4), lambda i, n, b: (b, M - 1 - i, 0)),
        pl.BlockSpec((None, Q, None, H), lambda i, n, b: (b, M - 1 - i, n, 0)),
        pl.BlockSpec((None, None, T, H), lambda i, n, b: (b, n // (N // K), 0, 0)),
        pl.BlockSpec((None, T), lambda i, n, b: (b, 0)),
        pl.BlockSpec((None, None, Q), lambda i, n, b: (b, n, M - 1 - i)),
    )


def _by_key(q_BxTxNxH, k_BxKxTxH, tile: KernelTile, heads: int):
    """Returns the same for one program per key block and `heads` query heads, and the spec of its outputs."""
    (B, T, N, H), K, S = q_BxTxNxH.shape, k_BxKxTxH.shape[1], tile.keys
    parts = N // heads // K  # programs that share a key head
    return (
        (T // S, N // heads, B),
        pl.BlockSpec((None, None, 4), lambda j, n, b: (b, j, 0)),
        pl.BlockSpec((None, T, heads, H), lambda j, n, b: (b, 0, n, 0)),
        pl.BlockSpec((None, None, S, H), lambda j, n, b: (b, n // parts, j, 0)),
        pl.BlockSpec((None, T), lambda j, n, b: (b, 0)),
        pl.BlockSpec((None, heads, T), lambda j, n, b: (b, n, 0)),
        pl.BlockSpec((None, None, S, H), lambda j, n, b: (b, n, j, 0)),
    )
