"""cuDNN's packed attention, for Hopper and later cards: one call for a row's segments, forward and backward.

JAX has it only under a private name (`jax._src.cudnn.fused_attention_stablehlo`), so it may change with any
version. Requirements:

    numbers   bfloat16; heads of up to 256 numbers, a multiple of 8
    segments  their lengths and first tokens, for a compiled-in number of segments, SEGMENTS. Packing puts
              no more into a row; a row with more gives NaN, not the attention of the first segments.
    keys      one head per query head before jax 0.12: older versions multiply the offsets of keys by the
              number of query heads (jax#39521), which is silently wrong
    rows      at most `most_rows` on a device at once: JAX counts segments' first numbers in int32, including
              the end of the last row

cuDNN writes nothing for a token without a segment. So padding is zeroed in its inputs, hence in their
gradients, and in its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

SEGMENTS = 64  # most per row; each takes 4 · N bytes per token in the backward pass
SHARED_KEYS = jax.__version_info__ >= (0, 12)  # the offsets of grouped queries are correct


def attention(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, *, call: Callable[..., jax.Array] | None = None):
    """Returns [B, T, N·H]: softmax_s(q_t · k_s / √H) v_s over s <= t with segment_s = segment_t.

    Segment 0 is padding, and its result is 0. Segments are numbered from 1 in row order. `call` replaces
    cuDNN's own function in tests.
    """
    B, T, N, H = q_BxTxNxH.shape
    real_BxTx1x1 = (segment_BxT > 0)[:, :, None, None]
    share = 1 if SHARED_KEYS else N // k_BxKxTxH.shape[1]
    k_BxTxKxH, v_BxTxKxH = (jnp.repeat(x.swapaxes(1, 2), share, axis=2) for x in (k_BxKxTxH, v_BxKxTxH))
    arrays = (jnp.where(real_BxTx1x1, x, jnp.zeros((), x.dtype)) for x in (q_BxTxNxH, k_BxTxKxH, v_BxTxKxH))
    length_BxM, start_BxM1 = lengths_and_starts(segment_BxT)
    out_BxTxNxH = (call or _of_cudnn)(
        *arrays,
        q_seqlen=length_BxM,
        kv_seqlen=length_BxM,
        q_offsets=start_BxM1,
        kv_offsets=start_BxM1,
        scale=H**-0.5,
    )
    out_BxTxNxH = jnp.where(real_BxTx1x1, out_BxTxNxH, jnp.zeros((), out_BxTxNxH.dtype))
    fits_B = jnp.max(segment_BxT, axis=1) <= SEGMENTS
    return jnp.where(
        fits_B[:, None, None], out_BxTxNxH.reshape(B, T, N * H), jnp.full((), jnp.nan, out_BxTxNxH.dtype)
    )


def most_rows(T: int, N: int, H: int) -> int:
    """Returns the most rows B per call, for T tokens, N heads on a device and H numbers a head.

    B · T · N · H must be below 2^31.
    """
    return (2**31 - 1) // (T * N * H)


def lengths_and_starts(segment_BxT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the lengths, int32 [B, M], and first tokens, int32 [B, M + 1], of each row's segments.

    Segments are 1 to M = SEGMENTS; absent segments are -1.
    """
    number_M = jnp.arange(1, SEGMENTS + 1, dtype=segment_BxT.dtype)
    length_BxM = jnp.sum(segment_BxT[:, None] == number_M[None, :, None], axis=2, dtype=jnp.int32)
    start_BxM = jnp.cumsum(length_BxM, axis=1) - length_BxM
    length_BxM, start_BxM = (jnp.where(length_BxM > 0, x, -1) for x in (length_BxM, start_BxM))
    return length_BxM, jnp.pad(start_BxM, ((0, 0), (0, 1)), constant_values=-1)


def _of_cudnn(*arrays: jax.Array, **more: Any) -> jax.Array:
    # Imported here because it is private: a jax without it then breaks only this kernel.
    from jax._src.cudnn import fused_attention_stablehlo as fused

    return fused.dot_product_attention(*arrays, mask_type=fused.MaskType.PADDING_CAUSAL, **more)
