"""Packed attention: causal, grouped-query, and masked between the segments of a row. One signature, one kernel a platform.

A kernel is a function (q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT) -> [B, T, N·H] of

    softmax_s(q_t · k_s / √H) v_s     over the keys s <= t with segment_s = segment_t.

No kernel forms [T, T] scores for a long row, forward or backward. Padding is segment 0; its outputs are finite and meaningless.

    xla      any device: query blocks, each recomputed in the backward pass
    splash   TPU: Pallas splash attention
    triton   GPU: our own flash attention, gpu_attention.py
    cudnn    GPU, Hopper and later: cuDNN's, cudnn_attention.py

The table KERNELS, below the functions, says where each runs, and which `auto` takes.

Shapes:  B rows · T tokens in a row · S keys seen · Q queries of a block · M blocks
         N query heads · K key/value heads · G = N/K · H head size
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from bapo_jax.models import cudnn_attention
from bapo_jax.models.remat import ATTENTION, kept

Attention = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

_XLA_BLOCK = 512  # the most queries whose scores exist at once


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


def xla(q_BxTxNxH: jax.Array, k_BxKxTxH: jax.Array, v_BxKxTxH: jax.Array, segment_BxT: jax.Array) -> jax.Array:
    return kept(_in_blocks(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, segment_BxT), ATTENTION)


def slotted(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, *, shared: int, slot: int) -> jax.Array:
    """`xla` for rows of a prompt, in the first `shared` tokens, and slots of its responses: a token sees the prompt and its own."""
    B, T, N, H = q_BxTxNxH.shape
    K, slots = k_BxKxTxH.shape[1], (T - shared) // slot
    segment_p = segment_BxT[:, :shared]
    of_prompt = _in_blocks(q_BxTxNxH[:, :shared], k_BxKxTxH[:, :, :shared], v_BxKxTxH[:, :, :shared], segment_p, segment_p)

    def behind_the_prompt(x_BxKxTxH):
        """[B · slots, K, shared + slot, H]: each slot's keys, the prompt's before them."""
        prompt = jnp.broadcast_to(x_BxKxTxH[:, None, :, :shared], (B, slots, K, shared, H))
        own = x_BxKxTxH[:, :, shared:].reshape(B, K, slots, slot, H).swapaxes(1, 2)
        return jnp.concatenate([prompt, own], axis=3).reshape(B * slots, K, shared + slot, H)

    segment_q = segment_BxT[:, shared:].reshape(B * slots, slot)
    segment_k = jnp.concatenate([jnp.repeat(segment_p, slots, axis=0), segment_q], axis=1)
    q = q_BxTxNxH[:, shared:].reshape(B * slots, slot, N, H)
    of_slots = _in_blocks(q, behind_the_prompt(k_BxKxTxH), behind_the_prompt(v_BxKxTxH), segment_q, segment_k)
    return kept(jnp.concatenate([of_prompt, of_slots.reshape(B, T - shared, N * H)], axis=1), ATTENTION)


def _in_blocks(q_BxTxNxH, k_BxKxSxH, v_BxKxSxH, segment_BxT, segment_BxS):
    """Causal attention among T tokens, which also see S - T keys before them, those that are no padding (segment 0)."""
    T = q_BxTxNxH.shape[1]
    arrays = (q_BxTxNxH, k_BxKxSxH, v_BxKxSxH, segment_BxT, segment_BxS)
    if T <= _XLA_BLOCK:
        return masked(q_BxTxNxH, k_BxKxSxH, v_BxKxSxH, _mask(jnp.arange(T), segment_BxT, segment_BxS, segment_BxS.shape[1] - T))
    # Each of four spans of query blocks sees the keys up to its own end: 5/8 of all pairs, where 1/2 are needed. The last block may
    # be shorter. Single blocks without a loop would need 1/2, but XLA then holds the scores of several at once.
    whole = T // _XLA_BLOCK
    ends = sorted({_XLA_BLOCK * (whole * i // 4) for i in range(5)} | {T})
    return jnp.concatenate([_span(*arrays, *span, min(_XLA_BLOCK, span[1] - span[0])) for span in zip(ends, ends[1:])], axis=1)


def segment_mask(segment_BxT: jax.Array) -> jax.Array:
    """bool [B, T, T]: a token sees itself and the earlier tokens of its own segment."""
    return _mask(jnp.arange(segment_BxT.shape[1]), segment_BxT, segment_BxT, 0)


def _mask(at_Q: jax.Array, segment_BxQ: jax.Array, segment_BxS: jax.Array, before: int) -> jax.Array:
    """bool [B, Q, S]: queries at `at_Q` see the earlier keys of their segment, and of the `before` first all but padding."""
    S = segment_BxS.shape[1]
    causal_QxS = at_Q[:, None] + before >= jnp.arange(S)[None]
    own_BxQxS = causal_QxS[None] & (segment_BxQ[:, :, None] == segment_BxS[:, None, :])
    if not before:
        return own_BxQxS
    is_before_S = jnp.arange(S) < before
    return jnp.where(is_before_S[None, None], (segment_BxS > 0)[:, None], own_BxQxS)


def _span(q_BxTxNxH, k_BxKxSxH, v_BxKxSxH, segment_BxT, segment_BxS, first: int, last: int, block: int):
    """Attention of the queries `first` to `last`, block by block; the backward pass recomputes each block."""
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

    # The kernel scales nothing. In bfloat16 the factor itself would be rounded, by up to 1.3e-3 for some sizes of heads.
    q_BxTxNxH = (q_BxTxNxH.astype(jnp.float32) * H**-0.5).astype(q_BxTxNxH.dtype)
    out_BxNxTxH = jax.vmap(one_row)(q_BxTxNxH.swapaxes(1, 2), k_BxKxTxH, v_BxKxTxH, segment_BxT)
    return out_BxNxTxH.swapaxes(1, 2).reshape(B, T, N * H)


def triton(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, *, interpret: bool = False):
    """`interpret` runs the kernel's program on any device, for tests."""
    # Imported here, since the import takes seconds and only a GPU needs it.
    from bapo_jax.models import gpu_attention

    return gpu_attention.attention(
        q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, residual_name=ATTENTION, interpret=interpret
    )


def cudnn(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, *, call: Callable[..., jax.Array] | None = None):
    """`call` stands in for cuDNN's own, for tests. The backward pass wants more than the result, so a policy that keeps it runs both."""
    return kept(cudnn_attention.attention(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, call=call), ATTENTION)


def largest_divisor(T: int, sizes: tuple[int, ...]) -> int:
    """The first of `sizes`, largest first, that divides T. Raises ValueError where none does."""
    for size in sizes:
        if T % size == 0:
            return size
    raise ValueError(f'a row of {T} tokens is no multiple of {sizes[-1]}; call choose() first, which checks this')


class Kernel(NamedTuple):
    """A row of the table: where a kernel runs and what it takes."""

    run: Attention
    platform: str = ''  # '': any
    module: str = ''  # of JAX, which it cannot do without
    capability: tuple[int, int] = (0, 0)  # the least of a card
    bfloat16: bool = False  # and no other numbers
    row_multiple: int = 1  # of learner.row_tokens
    head_multiple: int = 1
    most_head: int | None = None  # numbers of a head
    most_head_bytes: int | None = None
    most_head_of_small: int | None = None  # numbers, on cards of little shared memory
    int32_offsets: bool = False  # it counts the numbers of a device's queries in 32 bits
    most_segments: int | None = None  # of a row
    note: str = ''  # printed where a run starts


# `auto` takes the first row that the platform, this jax and the card have, and that takes the model's heads and numbers. Evidence:
# docs/performance.md#attention-kernels-for-gpus.
KERNELS = {
    # TPU: the kernel that comes with JAX.
    'splash': Kernel(splash, 'tpu', row_multiple=128, head_multiple=32),
    # GPU: every card since Ampere, nothing to install, and its equations and programs are tested without a card. JAX means to remove it.
    'triton': Kernel(
        triton, 'gpu', module='jax.experimental.pallas.triton', capability=(8, 0), most_head_bytes=512, most_head_of_small=128,
    ),
    # GPU, its successor: comes with jax[cuda13]. It is private to JAX, its values need a card, and no card has shown them yet.
    'cudnn': Kernel(
        cudnn, 'gpu', module='jax._src.cudnn.fused_attention_stablehlo', capability=(9, 0), bfloat16=True, row_multiple=64,
        head_multiple=8, most_head=256, int32_offsets=True, most_segments=cudnn_attention.SEGMENTS,
        note='not confirmed on a card: run benchmarks/gpu_kernels.py cudnn first',
    ),
    # CPU, where it is the fastest, and whatever has no row above: it needs nothing, and is slow for long rows.
    'xla': Kernel(xla),
}  # fmt: skip
# Cards with 99 KiB of shared memory for a block, where those of data centres have 163 or more (CUDA C++ programming guide).
SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))


def choose(
    name: str, platform: str, model: Any, *, row_tokens: int, tensor: int, rows: int = 1, slot_tokens: int = 0,
    capability: tuple[int, int] | None = None,
) -> str:  # fmt: skip
    """The kernel that `name` means on `platform` ('cpu', 'gpu', 'tpu') for that ModelConfig, heads split `tensor` ways.

    `rows` are those of a device in a micro-batch; `capability` is the card's, None where it is unknown. `auto` is the first kernel that
    runs there and takes the model, and `xla` with `slot_tokens`; the log says where that is not the platform's first. Raises ValueError,
    naming the field, the reason and the remedy, where the kernel cannot run there or refuses the shapes. No other replaces one that was
    named.
    """
    kernel = _first(platform, model, slot_tokens, capability) if name == 'auto' else name
    row, problem = KERNELS[kernel], missing(kernel, platform, capability)
    if problem:
        problem += '; set model.attention=auto'
    elif slot_tokens and kernel != 'xla':
        problem = f'has no rows of a prompt and slots (learner.slot_tokens={slot_tokens}); set it to 0, or set model.attention=auto'
    elif unfit(kernel, model, capability):
        dtype = 'set model.dtype=bfloat16, or ' * (row.bfloat16 and model.dtype != 'bfloat16')
        problem = f'{unfit(kernel, model, capability)}; {dtype}set model.attention=xla'
    elif row_tokens % row.row_multiple:
        problem = f'wants learner.row_tokens={row_tokens} to be a multiple of {row.row_multiple}; raise it, or set model.attention=xla'
    elif model.num_heads % tensor or model.num_kv_heads % tensor:
        problem = (
            f'wants whole heads on a device, and mesh.tensor={tensor} does not divide {model.num_heads} query and '
            f'{model.num_kv_heads} key heads; lower mesh.tensor'
        )
    elif row.int32_offsets:
        most = cudnn_attention.most_rows(row_tokens, model.num_heads // tensor, model.head_dim)
        if rows > most:
            fewer = f'lower learner.micro_batch_rows to {most} a device, or ' * bool(most)
            problem = f'counts in 32 bits, which {rows} rows of {row_tokens} tokens on a device exceed; {fewer}set model.attention=xla'
    if problem:
        raise ValueError(f'model.attention={name!r}: the kernel {kernel} {problem}')
    return kernel


def _first(platform: str, model: Any, slot_tokens: int, capability: tuple[int, int] | None) -> str:
    """What `auto` means; says why, if the platform's own kernel is passed over."""
    there = [kernel for kernel in KERNELS if not missing(kernel, platform, capability)]
    if slot_tokens:
        kernel, why = 'xla', f'has no rows of a prompt and slots (learner.slot_tokens={slot_tokens})'
    else:
        kernel = next(kernel for kernel in there if not unfit(kernel, model, capability))
        why = unfit(there[0], model, capability)
    if kernel != there[0]:
        logging.log_first_n(logging.WARNING, 'model.attention=auto: the kernel %s %s; %s takes its place', 1, there[0], why, kernel)
    return kernel


def unfit(kernel: str, model: Any, capability: tuple[int, int] | None = None) -> str:
    """What keeps a kernel from taking that model's heads and numbers, or ''."""
    row, H = KERNELS[kernel], model.head_dim
    size, small = H * jnp.dtype(model.dtype).itemsize, capability in SMALL
    if row.bfloat16 and model.dtype != 'bfloat16':
        return f'takes no {model.dtype}'
    if H % row.head_multiple:
        return f"wants the model's head size {H} to be a multiple of {row.head_multiple}"
    if row.most_head and H > row.most_head:
        return f'takes heads of up to {row.most_head} numbers, and the model has {H}'
    if row.most_head_bytes and size > row.most_head_bytes:
        return f"takes heads of up to {row.most_head_bytes} bytes, and the model's have {size}, {H} numbers in {model.dtype}"
    if small and row.most_head_of_small and H > row.most_head_of_small:
        return (
            f'takes heads of up to {row.most_head_of_small} numbers on cards of compute capability {_dotted(capability)}, which have '
            f'too little shared memory for {H}'
        )
    return ''


def missing(kernel: str, platform: str, capability: tuple[int, int] | None = None) -> str:
    """What keeps a kernel from running there, or ''."""
    row = KERNELS[kernel]
    if row.platform not in ('', platform):
        return f'runs on {row.platform.upper()} alone, and the devices are {platform.upper()}'
    if row.module and not _importable(row.module):
        return f'needs {row.module}, which jax {jax.__version__} does not have'
    if capability and capability < row.capability:
        return f'runs on cards of compute capability {_dotted(row.capability)} and later, and this one has {_dotted(capability)}'
    return ''


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _dotted(capability: tuple[int, int]) -> str:
    return '.'.join(map(str, capability))


def described(kernel: str) -> str:
    """Its name, with the table's note."""
    note = KERNELS[kernel].note
    return f'{kernel} ({note})' if note else kernel


def packed(kernel: str, shared: int = 0, slot: int = 0) -> Attention:
    """The kernel that `choose` named; it is given one device's own rows and heads.

    With `slot` tokens in a slot, rows begin with a prompt of up to `shared` tokens that slots share.
    """
    if slot:
        return functools.partial(slotted, shared=shared, slot=slot)
    return KERNELS[kernel].run
