"""The GPUs of a rollout server: their names, and the tensor parallelism that follows from them."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Sequence

from bapo_jax.rollout.vllm.flags import DATA, PIPELINE, PREFILL, TENSOR, in_full

ALL = 'all'  # every GPU that this process may use


def named(gpus: int | str) -> tuple[str, ...]:
    """CUDA's names of GPUs: 4 or '4' is one, '6,7' are two. Raises ValueError for a bad or repeated one."""
    names = tuple(name.strip() for name in str(gpus).split(','))
    if len(set(names)) < len(names) or not all(
        re.fullmatch(r'0|[1-9][0-9]*|(GPU|MIG)-[\w/-]+', name) for name in names
    ):
        raise ValueError(
            f"GPUs {gpus!r}: list a server's GPUs as in '6,7', each once; correct rollout.gpus, SERVER_GPUS "
            'or --gpus'
        )
    return names


def visible() -> tuple[str, ...]:
    """The GPUs visible to this process, as the driver lists them. Raises ValueError if there is none."""
    if shown := os.environ.get('CUDA_VISIBLE_DEVICES', '').strip():
        return named(shown)
    try:
        listed = _listed()
    except (OSError, subprocess.SubprocessError) as e:
        raise ValueError(
            f'the GPUs of this machine cannot be listed (nvidia-smi: {e}); name them, as in 0,1,2,3'
        ) from e
    if not listed:
        raise ValueError('nvidia-smi lists no GPU on this machine; check its driver')
    return tuple(listed)


def check_there(gpus: Sequence[str]) -> None:
    """Raises ValueError for a number that no GPU of this machine has. No check if the driver lists none."""
    try:
        count = len(_listed()) if gpus else 0
    except (OSError, subprocess.SubprocessError):
        return
    beyond = [name for name in gpus if name.isdecimal() and int(name) >= count]
    if count and beyond:
        raise ValueError(
            f'GPU {", ".join(beyond)}: this machine has {count}, numbered from 0; correct --gpus or '
            'SERVER_GPUS'
        )


def _listed() -> list[str]:
    """The numbers of the GPUs listed by the driver. Raises OSError or SubprocessError if nvidia-smi fails."""
    words = ['nvidia-smi', '--query-gpu=index', '--format=csv,noheader']
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.split()


def parallel_flags(gpus: Sequence[str], extra: Sequence[str], heads: int = 0) -> list[str]:
    """vLLM's flags that make a server use all `gpus`, in addition to `extra`; [] if no GPU is named.

    Raises ValueError if `extra` uses another number of GPUs, or if the model's attention `heads` (0: unknown)
    cannot be split evenly. Also if `extra` asks for data parallelism, because such a server reports, and
    loads policies into, only its first engine; and for what `in_full` refuses.
    """
    words = in_full(extra)
    tensor, pipeline, prefill, data = (_size(words, name) for name in (TENSOR, PIPELINE, PREFILL, DATA))
    if (data or 1) > 1:
        raise ValueError(
            f'{DATA} {data}: only the first engine would get policies; start a server for each engine instead'
        )
    if not gpus:
        return []
    others = (pipeline or 1) * (prefill or 1)
    wanted = tensor or max(1, len(gpus) // others)
    if wanted * others != len(gpus):
        raise ValueError(
            f'the server has GPU {",".join(gpus)}, but its flags use {wanted * others} GPUs; leave out '
            f'{TENSOR}, which follows from the GPUs, or name {wanted * others} GPUs'
        )
    if heads % wanted:
        fitting = [str(n) for n in range(1, wanted) if heads % n == 0]
        raise ValueError(
            f'{heads} attention heads cannot be split over {wanted} GPUs; give the server '
            f'{" or ".join(fitting)}'
        )
    return [] if tensor else [TENSOR, str(wanted)]


def _size(words: Sequence[str], flag: str) -> int:
    """The last value of a vLLM flag in `words`, which are in the form of `in_full`; 0 if it is not given."""
    size = 0
    for word, value in itertools.pairwise([*words, '']):
        if word == flag:
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(f'{flag} {value}: give a number of GPUs, at least 1')
            size = int(value)
    return size
