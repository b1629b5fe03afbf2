"""The attention kernels, and which of them a platform, this jax, a card and a model can use."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from bapo_jax.models import cudnn_attention
from bapo_jax.models.attention import Attention, cudnn, slotted, splash, triton, xla


class Kernel(NamedTuple):
    """A row of the table: where a kernel runs and what it accepts."""

    run: Attention
    platform: str = ''  # '': any platform
    module: str = ''  # the JAX module that it requires
    capability: tuple[int, int] = (0, 0)  # lowest compute capability of a card
    bfloat16: bool = False  # accepts only bfloat16
    row_multiple: int = 1  # divides learner.row_tokens
    head_multiple: int = 1  # divides the head size
    most_head: int | None = None  # largest head size, in numbers
    most_head_bytes: int | None = None  # largest head size, in bytes
    most_head_of_small: int | None = None  # largest head size on cards with little shared memory, in numbers
    int32_offsets: bool = False  # counts the numbers of a device's queries in 32 bits
    most_segments: int | None = None  # per row
    note: str = ''  # printed when a run starts


# `auto` selects the first row that the platform, the installed jax and the card support, and that accepts the
# model's head size and dtype. Evidence: docs/reference/performance.md#attention-kernels-for-gpus.
KERNELS = {
    # TPU: the kernel that ships with JAX.
    'splash': Kernel(splash, 'tpu', row_multiple=128, head_multiple=32),
    # GPU: every card since Ampere. Needs no installation; its equations and programs are tested without a
    # card. JAX plans to remove the module it needs.
    'triton': Kernel(
        triton,
        'gpu',
        module='jax.experimental.pallas.triton',
        capability=(8, 0),
        most_head_bytes=512,
        most_head_of_small=128,
    ),
    # GPU, the successor: ships with jax[cuda13]. It is private to JAX. Its values can only be tested on a
    # card, and no card has confirmed them yet.
    'cudnn': Kernel(
        cudnn,
        'gpu',
        module='jax._src.cudnn.fused_attention_stablehlo',
        capability=(9, 0),
        bfloat16=True,
        row_multiple=64,
        head_multiple=8,
        most_head=256,
        int32_offsets=True,
        most_segments=cudnn_attention.SEGMENTS,
        note='not yet tested on a GPU: run benchmarks/gpu_kernels.py cudnn first',
    ),
    # CPU, where it is the fastest, and all cases without a row above: requires nothing; slow for long rows.
    'xla': Kernel(xla),
}


# Cards with 99 KiB of shared memory per block; data-centre cards have at least 163 (CUDA C++ programming
# guide).
SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))


def kernel_for(
    name: str,
    platform: str,
    model: Any,
    *,
    row_tokens: int,
    tensor: int,
    tokens: int = 1,
    rows: int = 1,
    slot_tokens: int = 0,
    capability: tuple[int, int] | None = None,
) -> str:
    """Returns the kernel that `name` selects on `platform` ('cpu', 'gpu', 'tpu') for the ModelConfig `model`.

    Heads are split `tensor` ways, and once more `tokens` ways if so many devices share a row (long_rows.py).
    `rows` is the number of rows of which a device has tokens in a micro-batch; `capability` is the card's,
    None if unknown. `auto` selects the first kernel that runs there and accepts the model, or
    `xla` if `slot_tokens` is set. It logs a warning if that is not the platform's first kernel.

    Raises ValueError, naming the field, the reason and the remedy, if the kernel cannot run there or does not
    accept the shapes. A kernel named explicitly is never replaced by another.
    """
    kernel = _first(platform, model, slot_tokens, capability) if name == 'auto' else name
    row, problem = KERNELS[kernel], missing(kernel, platform, capability)
    if problem:
        problem += '; set model.attention=auto'
    elif slot_tokens and kernel != 'xla':
        problem = (
            f'does not support learner.slot_tokens={slot_tokens}; set it to 0, or set model.attention=auto'
        )
    elif unfit(kernel, model, capability):
        dtype = 'set model.dtype=bfloat16, or ' * (row.bfloat16 and model.dtype != 'bfloat16')
        problem = f'{unfit(kernel, model, capability)}; {dtype}set model.attention=xla'
    elif row_tokens % row.row_multiple:
        problem = (
            f'needs learner.row_tokens={row_tokens} to be a multiple of {row.row_multiple}; raise it, or set '
            'model.attention=xla'
        )
    elif model.num_heads % tensor or model.num_kv_heads % tensor:
        problem = (
            f'needs whole heads on each device, but mesh.tensor={tensor} does not divide {model.num_heads} '
            f'query and {model.num_kv_heads} key-value heads; lower mesh.tensor'
        )
    elif row.int32_offsets:
        most = cudnn_attention.most_rows(row_tokens, model.num_heads // (tensor * tokens), model.head_dim)
        if rows > most:
            fewer = f'lower learner.micro_batch_rows to {most} per device, or ' * bool(most)
            problem = (
                f'uses 32-bit offsets, which {rows} rows of {row_tokens} tokens per device exceed; '
                f'{fewer}set model.attention=xla'
            )
    if problem:
        raise ValueError(f'model.attention={name!r}: the kernel {kernel} {problem}')
    return kernel


def _first(platform: str, model: Any, slot_tokens: int, capability: tuple[int, int] | None) -> str:
    """Returns the kernel that `auto` selects; logs the reason if it is not the platform's first kernel."""
    there = [kernel for kernel in KERNELS if not missing(kernel, platform, capability)]
    if slot_tokens:
        kernel, why = 'xla', f'does not support learner.slot_tokens={slot_tokens}'
    else:
        kernel = next(kernel for kernel in there if not unfit(kernel, model, capability))
        why = unfit(there[0], model, capability)
    if kernel != there[0]:
        logging.log_first_n(
            logging.WARNING,
            'model.attention=auto: the kernel %s %s; using %s instead',
            1,
            there[0],
            why,
            kernel,
        )
    return kernel


def unfit(kernel: str, model: Any, capability: tuple[int, int] | None = None) -> str:
    """Returns why a kernel does not accept the model's head size or dtype, or ''."""
    row, H = KERNELS[kernel], model.head_dim
    size, small = H * jnp.dtype(model.dtype).itemsize, capability in SMALL
    if row.bfloat16 and model.dtype != 'bfloat16':
        return f'does not support {model.dtype}'
    if H % row.head_multiple:
        return f'needs a head size that is a multiple of {row.head_multiple}, and the model has {H}'
    if row.most_head and H > row.most_head:
        return f'supports head sizes of up to {row.most_head}, and the model has {H}'
    if row.most_head_bytes and size > row.most_head_bytes:
        return (
            f'supports heads of up to {row.most_head_bytes} bytes, and the model has {size} ({H} numbers in '
            f'{model.dtype})'
        )
    if small and row.most_head_of_small and H > row.most_head_of_small:
        return (
            f'supports head sizes of up to {row.most_head_of_small} on cards of compute capability '
            f'{_dotted(capability)}, which have too little shared memory for {H}'
        )
    return ''


def missing(kernel: str, platform: str, capability: tuple[int, int] | None = None) -> str:
    """Returns why a kernel cannot run on the platform, or ''."""
    row = KERNELS[kernel]
    if row.platform not in ('', platform):
        return f'only runs on {row.platform.upper()}, and the devices are {platform.upper()}'
    if row.module and not _importable(row.module):
        return f'needs {row.module}, which jax {jax.__version__} does not have'
    if capability and capability < row.capability:
        return (
            f'needs a card of compute capability {_dotted(row.capability)} or later, and this one has '
            f'{_dotted(capability)}'
        )
    return ''


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _dotted(capability: tuple[int, int]) -> str:
    return '.'.join(map(str, capability))


def described(kernel: str) -> str:
    """Returns the kernel's name with its note from the table."""
    note = KERNELS[kernel].note
    return f'{kernel} ({note})' if note else kernel


def packed(kernel: str, shared: int = 0, slot: int = 0) -> Attention:
    """Returns the kernel named by `kernel_for`; call it with one device's own rows and heads.

    If `slot` is not 0, rows begin with a prompt of up to `shared` tokens, shared by slots of `slot` tokens.
    """
    if slot:
        return functools.partial(slotted, shared=shared, slot=slot)
    return KERNELS[kernel].run
