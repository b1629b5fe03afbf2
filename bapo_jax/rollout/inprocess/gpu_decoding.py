"""Attention of new tokens over the KV cache on GPU: one kernel per layer, which also updates the cache.

XLA has no such kernel: its loop over blocks (decoding.py) runs a dozen kernels per iteration, which copy each
block before they read it. Each program of this kernel handles one row's queries of one key head. It loops
over blocks of that row's own keys and reads no others (online softmax). So its result depends neither on
other rows nor on the cache's size. It is written in Pallas and compiled by Triton. Sums are float32; products
use the cache's dtype, and float32 runs in TF32, JAX's default on GPU.

Shapes:  A rows that the cache holds · S key slots · N query heads · K key/value heads · G = N/K · H head size
         C keys per block · Q, W: G and H in whole tiles · M = N + 2 K heads of a token
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_BLOCK_BYTES = 2**13  # of a block of keys, or of values: three of each fit any card's shared memory
_SMALLEST = 16  # least size of either side of a matrix product in Triton


def attend(
    q_Ax1xNxH,
    k_AxKx1xH,
    v_AxKx1xH,
    k_AxKxSxH,
    v_AxKxSxH,
    position_A: jax.Array,
    used: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `decoding.attend`, but `used` is ignored. `interpret` runs the kernel on any device, for tests."""
    (A, _, N, H), (K, S) = q_Ax1xNxH.shape, k_AxKxSxH.shape[1:3]
    Q, W = (max(_SMALLEST, pl.next_power_of_2(n)) for n in (N // K, H))
    C = min(64, max(_SMALLEST, _BLOCK_BYTES // (W * k_AxKxSxH.dtype.itemsize)))
    # One array for all heads, so that XLA computes it in one kernel, with bias and rotation.
    token_AxMxH = jnp.concatenate([q_Ax1xNxH[:, 0], k_AxKx1xH[:, :, 0], v_AxKx1xH[:, :, 0]], axis=1)
    key_spec = pl.BlockSpec((None, None, pl.cdiv(S, C) * C, W), lambda k, a: (a, k, 0, 0))
    sum_AxKxGxH, k_AxKxSxH, v_AxKxSxH = pl.pallas_call(
        functools.partial(_kernel, queries=N // K, slots=S, head=H, keys=C),
        grid=(K, A),
        in_specs=[
            pl.BlockSpec((None,), lambda k, a: (a,)),
            pl.BlockSpec((None, N + 2 * K, W), lambda k, a: (a, 0, 0)),
            key_spec,
            key_spec,
        ],
        out_specs=[pl.BlockSpec((None, None, Q, W), lambda k, a: (a, k, 0, 0)), key_spec, key_spec],
        out_shape=[jax.ShapeDtypeStruct((A, K, N // K, H), q_Ax1xNxH.dtype), k_AxKxSxH, v_AxKxSxH],
        input_output_aliases={2: 1, 3: 2},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        name='attention_to_cache',
        interpret=interpret,
    )(position_A, token_AxMxH, k_AxKxSxH, v_AxKxSxH)
    return sum_AxKxGxH.reshape(A, 1, N * H), k_AxKxSxH, v_AxKxSxH


def _kernel(
    position_ref,
    token_ref,
    _k_ref,
    _v_ref,
    out_ref,
    k_ref,
    v_ref,
    *,
    queries: int,
    slots: int,
    head: int,
    keys: int,
):
    """Updates the cache in place. Loads are masked: tiles may exceed the data; later keys are not read."""
    (Q, W), C, G, K, k = out_ref.shape, keys, queries, pl.num_programs(0), pl.program_id(0)
    position, scale = position_ref[...], math.log2(math.e) / math.sqrt(head)
    in_head_W = jnp.arange(W) < head
    is_query_QxW = (jnp.arange(Q) < G)[:, None] & in_head_W[None]
    q_QxW = triton.load(
        token_ref.at[k * G + jnp.arange(Q)[:, None], jnp.arange(W)[None]], mask=is_query_QxW, other=0
    )
    own_k_W, own_v_W = (
        triton.load(token_ref.at[G * K + i * K + k, :], mask=in_head_W, other=0) for i in range(2)
    )
    for cache_ref, own_W in ((k_ref, own_k_W), (v_ref, own_v_W)):
        triton.store(cache_ref.at[position, :], own_W, mask=in_head_W & (position < slots))

    def visit(i, carry):
        sum_QxW, top_Q, total_Q = carry
        at_C, seen_C = pl.ds(i * C, C), i * C + jnp.arange(C) < position
        k_CxW, v_CxW = (
            triton.load(x.at[at_C, :], mask=seen_C[:, None] & in_head_W[None], other=0)
            for x in (k_ref, v_ref)
        )
        score_QxC = jnp.where(seen_C[None], _dot(q_QxW, k_CxW, 1) * scale, -jnp.inf)
        new_Q = jnp.maximum(top_Q, jnp.max(score_QxC, axis=1))
        weight_QxC, fade_Q = jnp.exp2(score_QxC - new_Q[:, None]), jnp.exp2(top_Q - new_Q)
        sum_QxW = sum_QxW * fade_Q[:, None] + _dot(weight_QxC.astype(v_CxW.dtype), v_CxW, 0)
        return sum_QxW, new_Q, total_Q * fade_Q + jnp.sum(weight_QxC, axis=1)

    # The token attends to itself from registers, since the stores above may not have arrived. This starts the
    # sum.
    own_score_Q = jnp.sum(q_QxW.astype(jnp.float32) * own_k_W.astype(jnp.float32)[None], axis=1) * scale
    start = jnp.broadcast_to(own_v_W.astype(jnp.float32)[None], (Q, W)), own_score_Q, jnp.ones(Q, jnp.float32)
    sum_QxW, _, total_Q = jax.lax.fori_loop(0, pl.cdiv(position, C), visit, start)
    triton.store(out_ref, (sum_QxW / total_Q[:, None]).astype(out_ref.dtype), mask=is_query_QxW)


def _dot(a: jax.Array, b: jax.Array, b_axis: int) -> jax.Array:
    return jax.lax.dot_general(a, b, (((1,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)
