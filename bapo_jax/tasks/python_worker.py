"""Process that runs Python code of a policy, each in a confined process of its own (sandbox.py).

The same code prints the same text, but for what it reads of the clock, of process numbers and of memory
addresses: a fork has everything as it was after the import, all sources of random numbers are seeded, and the
pool sets the seed of hashes.
"""

from __future__ import annotations

import io
import os
import random
import select
import signal
import sys
import time
import traceback
from typing import NoReturn

import numpy as np
import sympy  # noqa: F401 - imported once, for every fork

from bapo_jax.tasks.sandbox import confine
from bapo_jax.tasks.worker_process import serve

RUN_CPU_S = 5  # of one run
RUN_WALL_S = 10.0
MOST_OUTPUT = 65_536  # of its output, after which it is stopped
MOST_CHARACTERS = 1000  # of the output that is returned
_CONFINED = b'+'  # what a process writes before it runs the code; so no code can pass for a refusal


def run(code: str) -> dict[str, str]:
    """What the code prints and raises, under 'output'; under 'refused' why the kernel did not confine it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _run_confined(code, write)
    os.close(write)
    ended = os.pidfd_open(child)
    output, until = b'', time.monotonic() + RUN_WALL_S
    while len(output) <= MOST_OUTPUT and _waits(read, until) and (data := os.read(read, 65_536)):
        output += data
    # It may have closed its output, and run on.
    late = len(output) <= MOST_OUTPUT and not _waits(ended, until)
    os.kill(child, signal.SIGKILL)  # it is not reaped yet, so the number is still its own
    os.close(read)
    os.close(ended)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = output.removeprefix(_CONFINED).decode('utf-8', 'replace').rstrip()
    if not output.startswith(_CONFINED):
        return {'refused': text or f'its process ended with status {status}'}
    if len(output) > MOST_OUTPUT or len(text) > MOST_CHARACTERS:
        return {'output': f'{text[:MOST_CHARACTERS]}\n(the rest is cut)'.lstrip()}
    if late or status in (-signal.SIGXCPU, -signal.SIGKILL):
        text += '\n(stopped: too slow)'
    elif status < 0:
        text += '\n(stopped: it crashed)'
    return {'output': text.strip() or '(no output)'}


def _waits(file: int, until: float) -> bool:
    """Waits until `file` can be read; returns False if it is too late."""
    return bool(select.select([file], [], [], max(0.0, until - time.monotonic()))[0])


def _run_confined(code: str, output: int) -> NoReturn:
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        # Nothing is held back: what the code printed before it was stopped counts.
        sys.stdout = io.TextIOWrapper(
            open(1, 'wb', 0, closefd=False), 'utf-8', 'backslashreplace', write_through=True
        )
        sys.stderr = sys.stdout
        confine(RUN_CPU_S)
        _seed()
        os.write(1, _CONFINED)
        exec(compile(code, '<code>', 'exec'), {'__name__': '__main__'})
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code)
    except BaseException as error:
        print(_where(error) + traceback.format_exception_only(error)[-1].rstrip())
    finally:
        os._exit(0)


def _where(error: BaseException) -> str:
    """The line of the code, if the error is of one."""
    places = traceback.extract_tb(error.__traceback__)
    lines = [place.lineno for place in places if place.filename == '<code>']
    if not lines and isinstance(error, SyntaxError) and error.filename == '<code>':
        lines = [error.lineno]
    return f'line {lines[-1]}: ' if lines else ''


def _seed() -> None:
    """Seeds every source of random numbers, also of generators that the code makes without a seed."""
    source, seed = random.Random(0), random.Random.seed
    os.urandom = random._urandom = source.randbytes  # of secrets, uuid and numpy's default_rng
    random.Random.seed = lambda self, a=None, version=2: seed(self, 0 if a is None else a, version)
    random.seed(0)
    np.random.seed(0)


if __name__ == '__main__':
    serve(run)
