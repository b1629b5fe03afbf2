"""Process that runs Python code of a policy, each in a confined process of its own (sandbox.py).

The same code prints the same text, unless it reads a clock: a fork has everything as it was after the import,
the seeds of random numbers are set, and the pool sets that of hashes.
"""

from __future__ import annotations

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
_UNCONFINED = 99  # exit status


def run(code: str) -> dict[str, str]:
    """What the code prints and raises, under 'output'; under 'refused' why the kernel did not confine it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _run_confined(code, write)
    os.close(write)
    output, until = b'', time.monotonic() + RUN_WALL_S
    while len(output) <= MOST_OUTPUT and (left := until - time.monotonic()) > 0:
        if not select.select([read], [], [], left)[0]:
            break
        if not (data := os.read(read, 65_536)):
            break
        output += data
    late = time.monotonic() >= until
    os.kill(child, signal.SIGKILL)  # it is not reaped yet, so the number is still its own
    os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = output.decode('utf-8', 'replace').rstrip()
    if status == _UNCONFINED:
        return {'refused': text}
    if len(text) > MOST_CHARACTERS:
        return {'output': f'{text[:MOST_CHARACTERS]}\n(the rest is cut)'}
    if late or status in (-signal.SIGXCPU, -signal.SIGKILL):
        text += '\n(stopped: too slow)'
    elif status < 0:
        text += '\n(stopped: it crashed)'
    return {'output': text.strip() or '(no output)'}


def _run_confined(code: str, output: int) -> NoReturn:
    status = _UNCONFINED
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, 'w', encoding='utf-8', errors='backslashreplace', closefd=False)
        sys.stderr = sys.stdout
        confine(RUN_CPU_S)
        status = 0
        random.seed(0)
        np.random.seed(0)
        exec(compile(code, '<code>', 'exec'), {'__name__': '__main__'})
    except SystemExit:
        pass
    except BaseException as error:
        places = traceback.extract_tb(error.__traceback__)
        lines = [place.lineno for place in places if place.filename == '<code>']
        where = f'line {lines[-1]}: ' if lines else ''
        print(where + traceback.format_exception_only(error)[-1].rstrip())
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(status)


if __name__ == '__main__':
    serve(run)
