"""Packed attention: causal, grouped-query, and masked between the segments of a row. One kernel per platform.

A kernel is a function (q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT) -> [B, T, N·H] that computes

    softmax_s(q_t · k_s / √H) v_s     over the keys s <= t with segment_s = segment_t.

No kernel materialises the [T, T] scores of a long row, forward or backward. Padding is segment 0; its outputs
are finite but meaningless.

    xla      any device: query blocks, each recomputed in the backward pass
    splash   TPU: Pallas splash attention
    triton   GPU: this project's flash attention, gpu_attention.py
    cudnn    GPU, Hopper and later: cuDNN's attention, cudnn_attention.py

The table KERNELS in kernels.py states where each kernel runs and which one `auto` selects.

Shapes:  B rows · T tokens in a row · S keys seen · Q queries of a block · M blocks
         N query heads · K key/value heads · G = N/K · H head size
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bapo_jax.models import cudnn_attention
from bapo_jax.models.remat import ATTENTION, kept

Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

_XLA_BLOCK = 512  # most queries whose scores exist at once


def masked(
    q_BxTxNxH: jax.Array, k_BxKxSxH: jax.Array, v_BxKxSxH: jax.Array, mask_BxTxS: jax.Array
) -> jax.Array:
    """Returns grouped-query softmax attention, [B, T, N·H]. Every query must see at least one key."""
    B, T, N, H = q_BxTxNxH.shape
    K, S = k_BxKxSxH.shape[1:3]
    # Queries that share a key head are the rows of one matrix product, which is several times faster on CPU.
    q_BxKxGTxH = (
        (q_BxTxNxH * H**-0.5)
        .reshape(B, T, K, N // K, H)
        .transpose(0, 2, 3, 1, 4)
        .reshape(B, K, N // K * T, H)
    )
    score_BxKxGTxS = jnp.einsum('bkqh,bksh->bkqs', q_BxKxGTxH, k_BxKxSxH, preferred_element_type=jnp.float32)
    score_BxKxGxTxS = score_BxKxGTxS.reshape(B, K, N // K, T, S)
    score_BxKxGxTxS = jnp.where(mask_BxTxS[:, None, None], score_BxKxGxTxS, jnp.finfo(jnp.float32).min)
    weight_BxKxGTxS = (
        jax.nn.softmax(score_BxKxGxTxS, axis=-1).astype(v_BxKxSxH.dtype).reshape(B, K, N // K * T, S)
    )
    out_BxKxGTxH = jnp.einsum('bkqs,bksh->bkqh', weight_BxKxGTxS, v_BxKxSxH)
    return out_BxKxGTxH.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N * H)


def xla(
    q_BxTxNxH: jax.Array, k_BxKxTxH: jax.Array, v_BxKxTxH: jax.Array, segment_BxT: jax.Array
) -> jax.Array:
    return kept(_in_blocks(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, segment_BxT), ATTENTION)


def slotted(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, *, shared: int, slot: int) -> jax.Array:
    """Computes `xla` attention for rows with a prompt in the first `shared` tokens, then slots of responses.

    A response token sees the prompt and the earlier tokens of its own segment.
    """
    B, T, N, H = q_BxTxNxH.shape
    K, slots = k_BxKxTxH.shape[1], (T - shared) // slot
    segment_p = segment_BxT[:, :shared]
    of_prompt = _in_blocks(
        q_BxTxNxH[:, :shared], k_BxKxTxH[:, :, :shared], v_BxKxTxH[:, :, :shared], segment_p, segment_p
    )

    def behind_the_prompt(x_BxKxTxH):
        """Returns each slot's keys, preceded by the prompt's, [B · slots, K, shared + slot, H]."""
        prompt = jnp.broadcast_to(x_BxKxTxH[:, None, :, :shared], (B, slots, K, shared, H))
        own = x_BxKxTxH[:, :, shared:].reshape(B, K, slots, slot, H).swapaxes(1, 2)
        return jnp.concatenate([prompt, own], axis=3).reshape(B * slots, K, shared + slot, H)

    segment_q = segment_BxT[:, shared:].reshape(B * slots, slot)
    segment_k = jnp.concatenate([jnp.repeat(segment_p, slots, axis=0), segment_q], axis=1)
    q = q_BxTxNxH[:, shared:].reshape(B * slots, slot, N, H)
    of_slots = _in_blocks(q, behind_the_prompt(k_BxKxTxH), behind_the_prompt(v_BxKxTxH), segment_q, segment_k)
    return kept(jnp.concatenate([of_prompt, of_slots.reshape(B, T - shared, N * H)], axis=1), ATTENTION)


def _in_blocks(q_BxTxNxH, k_BxKxSxH, v_BxKxSxH, segment_BxT, segment_BxS):
    """Returns causal attention among T tokens, which also see the S - T keys before them.

    Padding (segment 0) among the earlier keys is not seen.
    """
    T = q_BxTxNxH.shape[1]
    arrays = (q_BxTxNxH, k_BxKxSxH, v_BxKxSxH, segment_BxT, segment_BxS)
    if T <= _XLA_BLOCK:
        return masked(
            q_BxTxNxH,
            k_BxKxSxH,
            v_BxKxSxH,
            _mask(jnp.arange(T), segment_BxT, segment_BxS, segment_BxS.shape[1] - T),
        )
    # Each of four spans of query blocks sees the keys up to its own end: 5/8 of all pairs, of which 1/2 are
    # needed. The last block may be shorter. Unrolled single blocks would compute only 1/2, but XLA would hold
    # the scores of several blocks at once.
    whole = T // _XLA_BLOCK
    ends = sorted({_XLA_BLOCK * (whole * i // 4) for i in range(5)} | {T})
    return jnp.concatenate(
        [_span(*arrays, *span, min(_XLA_BLOCK, span[1] - span[0])) for span in zip(ends, ends[1:])], axis=1
    )


def segment_mask(segment_BxT: jax.Array) -> jax.Array:
    """Returns bool [B, T, T]: a token sees itself and the earlier tokens of its segment."""
    return _mask(jnp.arange(segment_BxT.shape[1]), segment_BxT, segment_BxT, 0)


def _mask(at_Q: jax.Array, segment_BxQ: jax.Array, segment_BxS: jax.Array, before: int) -> jax.Array:
    """Returns the mask of queries at `at_Q`, bool [B, Q, S].

    A query sees itself, the earlier keys of its segment, and the first `before` keys except padding.
    """
    S = segment_BxS.shape[1]
    causal_QxS = at_Q[:, None] + before >= jnp.arange(S)[None]
    own_BxQxS = causal_QxS[None] & (segment_BxQ[:, :, None] == segment_BxS[:, None, :])
    if not before:
        return own_BxQxS
    is_before_S = jnp.arange(S) < before
    return jnp.where(is_before_S[None, None], (segment_BxS > 0)[:, None], own_BxQxS)


def _span(q_BxTxNxH, k_BxKxSxH, v_BxKxSxH, segment_BxT, segment_BxS, first: int, last: int, block: int):
    """Returns attention of queries `first` to `last`, in blocks that the backward pass recomputes."""
    before = k_BxKxSxH.shape[2] - q_BxTxNxH.shape[1]
    k_BxKxSxH, v_BxKxSxH = k_BxKxSxH[:, :, : before + last], v_BxKxSxH[:, :, : before + last]
    segment_BxS = segment_BxS[:, : before + last]

    @jax.checkpoint
    def one_block(_, queries):
        q_BxQxNxH, segment_BxQ, at_Q = queries
        return None, masked(q_BxQxNxH, k_BxKxSxH, v_BxKxSxH, _mask(at_Q, segment_BxQ, segment_BxS, before))

    def blocks_first(x_BxT):
        return x_BxT[:, first:last].reshape(x_BxT.shape[0], -1, block, *x_BxT.shape[2:]).swapaxes(0, 1)

    queries = (blocks_first(q_BxTxNxH), blocks_first(segment_BxT), jnp.arange(first, last).reshape(-1, block))
    _, out_MxBxQxD = jax.lax.scan(one_block, None, queries)
    return out_MxBxQxD.swapaxes(0, 1).reshape(q_BxTxNxH.shape[0], last - first, -1)


def splash(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, *, interpret: bool = False):
    """Runs Pallas splash attention; `interpret` runs the kernel on any device, for tests."""
    # Imported here because the import takes seconds and only a TPU needs it.
    from jax.experimental.pallas.ops.tpu import splash_attention

    B, T, N, H = q_BxTxNxH.shape
    tile = largest_divisor(T, (1024, 512, 256, 128))
    sizes = splash_attention.BlockSizes(
        block_q=tile, block_kv=tile, block_q_dkv=tile, block_kv_dkv=tile, block_q_dq=tile, block_kv_dq=tile
    )
    causal = splash_attention.MultiHeadMask([splash_attention.CausalMask((T, T))] * N)
    kernel = splash_attention.make_splash_mha_single_device(
        causal, block_sizes=sizes, residual_checkpoint_name=ATTENTION, interpret=interpret
    )

    def one_row(q_NxTxH, k_KxTxH, v_KxTxH, segment_T):
        return kernel(
            q_NxTxH, k_KxTxH, v_KxTxH, segment_ids=splash_attention.SegmentIds(segment_T, segment_T)
        )

    # The kernel does not scale. The factor in bfloat16 would be rounded, by up to 1.3e-3 for some head sizes.
    q_BxTxNxH = (q_BxTxNxH.astype(jnp.float32) * H**-0.5).astype(q_BxTxNxH.dtype)
    out_BxNxTxH = jax.vmap(one_row)(q_BxTxNxH.swapaxes(1, 2), k_BxKxTxH, v_BxKxTxH, segment_BxT)
    return out_BxNxTxH.swapaxes(1, 2).reshape(B, T, N * H)


def triton(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, *, interpret: bool = False):
    """Runs this project's flash attention; `interpret` runs the kernel on any device, for tests."""
    # Imported here because the import takes seconds and only a GPU needs it.
    from bapo_jax.models import gpu_attention

    return gpu_attention.attention(
        q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, residual_name=ATTENTION, interpret=interpret
    )


def cudnn(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, *, call: Callable[..., jax.Array] | None = None):
    """Runs cuDNN's attention; `call` replaces cuDNN's own function in tests.

    The backward pass needs more than the result, so it reruns the forward pass if a policy keeps the result.
    """
    return kept(cudnn_attention.attention(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, call=call), ATTENTION)


def largest_divisor(T: int, sizes: tuple[int, ...]) -> int:
    """Returns the first of `sizes` (largest first) that divides T. Raises ValueError if none does."""
    for size in sizes:
        if T % size == 0:
            return size
    raise ValueError(
        f'a row of {T} tokens is not a multiple of {sizes[-1]}; use kernel_for() to choose the kernel'
    )
