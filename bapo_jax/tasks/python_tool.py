"""A Python tool: a turn that ends with a block of code gets what the code prints. It runs in a sandbox.

Each run begins anew, with `sympy` and `numpy` at hand, and knows nothing of earlier runs. Its limits are in
python_worker.py and sandbox.py.
"""

from __future__ import annotations

import functools
import os
import queue
import re
import textwrap

from bapo_jax.tasks import sandbox
from bapo_jax.tasks.verifier_pool import MACHINE_FAILED, VerifierPool, bare_environment

OFFER = (  # what a prompt says of the tool
    ' You can run Python: end a message with a ```python block, and you get what it prints. sympy and numpy '
    'are installed. Each run begins anew.'
)
RUN_BYTES = 1 << 30  # address space of a run, 0.3 GB of it Python and its packages
MOST_AT_ONCE = 16
_LATE_S = 60.0  # a worker that takes so long did not get the CPU; it ends a run earlier by itself
_OPENING = re.compile(r'^[ \t]*```[ \t]*(?:python3?|py)[ \t]*\r?\n', re.MULTILINE | re.IGNORECASE)
_FENCE = re.compile(r'^[ \t]*```', re.MULTILINE)


def code_in(turn: str) -> str | None:
    """The code of the ```python block that a turn ends with; None if it ends with none."""
    turn = turn.rstrip()
    openings = list(_OPENING.finditer(turn))
    if not openings or not turn.endswith('```'):
        return None
    code = turn[openings[-1].end() :].removesuffix('```')
    return None if _FENCE.search(code) else textwrap.dedent(code)  # another fence: the block ended before


def block_for(turn: str) -> str | None:
    """What the code at the end of a turn prints, as a block; None if there is no code.

    Raises RuntimeError if the machine did not run the code.
    """
    code = code_in(turn)
    return None if code is None else f'```output\n{output_of(code)}\n```'


def output_of(code: str) -> str:
    """What some code prints. Raises RuntimeError if the machine did not run it."""
    pools = _pools()
    pool = pools.get()
    try:
        [outcome] = pool.run([code])
    finally:
        pools.put(pool)
    if outcome == MACHINE_FAILED or 'refused' in outcome:
        why = 'its process failed' if outcome == MACHINE_FAILED else outcome['refused']
        raise RuntimeError(f'the Python tool did not run: {why}')
    return outcome['output']


@functools.cache
def check_reply() -> None:
    """Raises ValueError if this machine cannot confine the tool."""
    why = sandbox.why_not()
    try:
        if not why and output_of('print(1 + 1)') != '2':
            why = 'a first run printed something else'
    except RuntimeError as error:
        why = str(error)
    if why:
        raise ValueError(
            f'task.turns needs a sandbox for the Python tool, which this machine cannot give: {why}; set '
            'task.turns=0'
        )


@functools.cache
def _pools() -> queue.SimpleQueue[VerifierPool]:
    """Pools of one worker: each answers one thread at a time."""
    pools = queue.SimpleQueue()
    for _ in range(min(len(os.sched_getaffinity(0)), MOST_AT_ONCE)):
        pools.put(
            VerifierPool(
                'bapo_jax.tasks.python_worker', workers=1, wall_s=_LATE_S, memory_bytes=RUN_BYTES,
                environment={**bare_environment(), 'PYTHONHASHSEED': '0', 'OPENBLAS_NUM_THREADS': '1'},
            )
        )  # fmt: skip
    return pools
