"""Packed attention: causal, grouped-query, and masked between the segments of a row. One signature, one kernel a platform.

A kernel is a function (q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT) -> [B, T, N·H] of

    softmax_s(q_t · k_s / √H) v_s     over the keys s <= t with segment_s = segment_t.

No kernel forms [T, T] scores for a long row, forward or backward. Padding is segment 0; its outputs are finite and meaningless.

    xla      any device: query blocks, each recomputed in the backward pass
    splash   TPU: Pallas splash attention
    triton   GPU: Pallas flash attention. cuDNN's is no choice: JAX's public dot_product_attention takes no segment ids.

Shapes:  B rows · T tokens in a row · S keys seen · Q queries of a block · M blocks
         N query heads · K key/value heads · G = N/K · H head size
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

KERNELS = ('auto', 'xla', 'splash', 'triton')
ATTENTION = 'attention'  # under this name a kernel's result, and what its backward pass needs, may be kept (qwen.REMAT)
Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

_AUTO = {'cpu': 'xla', 'gpu': 'triton', 'tpu': 'splash'}
_PLATFORM = {kernel: platform for platform, kernel in _AUTO.items() if kernel != 'xla'}
_ROW_MULTIPLE = {'splash': 128, 'triton': 16}  # the smallest tile of tokens of each kernel
_HEAD_MULTIPLE = {'splash': 32, 'triton': 16}
_XLA_BLOCK = 512  # the most queries whose scores exist at once


def choose(name: str, platform: str, model: Any, *, row_tokens: int, tensor: int) -> str:
    """The kernel that `name` means on `platform` ('cpu', 'gpu', 'tpu') for that ModelConfig, heads split `tensor` ways.

    Raises ValueError, naming the field, the reason and the remedy, where the kernel cannot run there or refuses the shapes. No
    other kernel replaces it.
    """
    kernel = _AUTO[platform] if name == 'auto' else name
    problem, rows, heads = '', _ROW_MULTIPLE.get(kernel, 1), _HEAD_MULTIPLE.get(kernel, 1)
    if kernel != 'xla' and platform != _PLATFORM[kernel]:
        problem = f'runs on {_PLATFORM[kernel].upper()} alone, and the devices are {platform.upper()}; set model.attention=auto'
    elif row_tokens % rows:
        problem = f'wants learner.row_tokens={row_tokens} to be a multiple of {rows}; raise it, or set model.attention=xla'
    elif model.head_dim % heads:
        problem = f"wants the model's head size {model.head_dim} to be a multiple of {heads}; set model.attention=xla"
    elif model.num_heads % tensor or model.num_kv_heads % tensor:
        problem = (
            f'wants whole heads on a device, and mesh.tensor={tensor} does not divide {model.num_heads} query and '
            f'{model.num_kv_heads} key heads; lower mesh.tensor'
        )
    if problem:
        raise ValueError(f'model.attention={name!r}: the kernel {kernel} {problem}')
    return kernel


def packed(kernel: str) -> Attention:
    """The kernel that `choose` named; it is given one device's own rows and heads."""
    return {'xla': xla, 'splash': splash, 'triton': triton}[kernel]


def masked(q_BxTxNxH: jax.Array, k_BxKxSxH: jax.Array, v_BxKxSxH: jax.Array, mask_BxTxS: jax.Array) -> jax.Array:
    """Grouped-query softmax attention, [B, T, N·H]. Every query must see at least one key."""
    B, T, N, H = q_BxTxNxH.shape
    K, S = k_BxKxSxH.shape[1:3]
    # Queries that share a key head become rows of one matrix product, which is several times faster on CPU.
    q_BxKxGTxH = (q_BxTxNxH * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, N // K * T, H)
    score_BxKxGTxS = jnp.einsum('bkqh,bksh->bkqs', q_BxKxGTxH, k_BxKxSxH, preferred_element_type=jnp.float32)
    score_BxKxGxTxS = score_BxKxGTxS.reshape(B, K, N // K, T, S)
    score_BxKxGxTxS = jnp.where(mask_BxTxS[:, None, None], score_BxKxGxTxS, jnp.finfo(jnp.float32).min)
    weight_BxKxGTxS = jax.nn.softmax(score_BxKxGxTxS, axis=-1).astype(v_BxKxSxH.dtype).reshape(B, K, N // K * T, S)
    out_BxKxGTxH = jnp.einsum('bkqs,bksh->bkqh', weight_BxKxGTxS, v_BxKxSxH)
    return out_BxKxGTxH.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N * H)


def segment_mask(segment_BxT: jax.Array) -> jax.Array:
    """bool [B, T, T]: a token sees itself and the earlier tokens of its own segment."""
    T = segment_BxT.shape[1]
    return jnp.tril(jnp.ones((T, T), bool))[None] & (segment_BxT[:, :, None] == segment_BxT[:, None, :])


def xla(q_BxTxNxH: jax.Array, k_BxKxTxH: jax.Array, v_BxKxTxH: jax.Array, segment_BxT: jax.Array) -> jax.Array:
    T = q_BxTxNxH.shape[1]
    if T <= _XLA_BLOCK:
        return checkpoint_name(masked(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_mask(segment_BxT)), ATTENTION)
    # Each of four spans of query blocks sees the keys up to its own end: 5/8 of all pairs, where 1/2 are needed. The last block may
    # be shorter. Single blocks without a loop would need 1/2, but XLA then holds the scores of several at once.
    whole = T // _XLA_BLOCK
    ends = sorted({_XLA_BLOCK * (whole * i // 4) for i in range(5)} | {T})
    arrays = (q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT)
    spans = [_span(*arrays, *span, min(_XLA_BLOCK, span[1] - span[0])) for span in zip(ends, ends[1:])]
    return checkpoint_name(jnp.concatenate(spans, axis=1), ATTENTION)


def _span(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, first: int, last: int, block: int):
    """Attention of the queries `first` to `last`, block by block; the backward pass recomputes each block."""
    k_BxKxSxH, v_BxKxSxH, segment_BxS = k_BxKxTxH[:, :, :last], v_BxKxTxH[:, :, :last], segment_BxT[:, :last]

    @jax.checkpoint
    def one_block(_, queries):
        q_BxQxNxH, segment_BxQ, at_Q = queries
        causal_QxS = at_Q[:, None] >= jnp.arange(last)[None]
        mask_BxQxS = causal_QxS[None] & (segment_BxQ[:, :, None] == segment_BxS[:, None, :])
        return None, masked(q_BxQxNxH, k_BxKxSxH, v_BxKxSxH, mask_BxQxS)

    def blocks_first(x_BxT):
        return x_BxT[:, first:last].reshape(x_BxT.shape[0], -1, block, *x_BxT.shape[2:]).swapaxes(0, 1)

    queries = (blocks_first(q_BxTxNxH), blocks_first(segment_BxT), jnp.arange(first, last).reshape(-1, block))
    _, out_MxBxQxD = jax.lax.scan(one_block, None, queries)
    return out_MxBxQxD.swapaxes(0, 1).reshape(q_BxTxNxH.shape[0], last - first, -1)


def splash(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, *, interpret: bool = False):
    """`interpret` runs the kernel's program on any device, for tests."""
    # Imported here, since the import takes seconds and only a TPU needs it.
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
        return kernel(q_NxTxH, k_KxTxH, v_KxTxH, segment_ids=splash_attention.SegmentIds(segment_T, segment_T))

    out_BxNxTxH = jax.vmap(one_row)((q_BxTxNxH * H**-0.5).swapaxes(1, 2), k_BxKxTxH, v_BxKxTxH, segment_BxT)
    return out_BxNxTxH.swapaxes(1, 2).reshape(B, T, N * H)


def triton(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, *, interpret: bool = False):
    """`interpret` runs the kernel's program on any device, for tests."""
    from jax.experimental.pallas.ops.gpu import attention as gpu

    B, T, N, H = q_BxTxNxH.shape
    forward, backward = largest_divisor(T, (128, 64, 32, 16)), largest_divisor(T, (32, 16))
    sizes = gpu.BlockSizes(forward, forward, backward, backward, backward, backward)
    # This kernel has no grouped queries, so each key head is repeated for the query heads that share it.
    k_BxTxNxH, v_BxTxNxH = (jnp.repeat(x.swapaxes(1, 2), N // x.shape[1], axis=2) for x in (k_BxKxTxH, v_BxKxTxH))
    out_BxTxNxH = gpu.mha(
        q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, segment_BxT, sm_scale=H**-0.5, causal=True, block_sizes=sizes, interpret=interpret
    )
    return out_BxTxNxH.reshape(B, T, N * H)


def largest_divisor(T: int, sizes: tuple[int, ...]) -> int:
    """The first of `sizes`, largest first, that divides T. Raises ValueError where none does."""
    for size in sizes:
        if T % size == 0:
            return size
    raise ValueError(f'a row of {T} tokens is no multiple of {sizes[-1]}; call choose() first, which checks this')
