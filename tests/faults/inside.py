"""A trainer that is struck at a moment which nobody outside can see. Everything else is `python -m bapo_jax.train`.

    python -m tests.faults.inside '{"moment": "an update", "call": 2, "signal": 15}' FLAGS…

What strikes: a "signal" to the process itself; an "errno" that is raised; "hangs", seconds for which nothing goes on, after the signal
if there is one; "jump", seconds by which the clock is wrong from then on.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

from bapo_jax.learner.learner import Learner
from bapo_jax.machine import files
from bapo_jax.rollout.engine import EVALUATION, FRESH, REEVALUATION
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.run import run
from bapo_jax.run.checkpoint import Checkpoints
from bapo_jax.run.log.metrics import MetricsLog


def _asked_for(purpose: int) -> tuple[Any, str, Callable[..., bool]]:
    return JaxEngine, 'ask', lambda self, prompts, size, sampling, draws: draws[-1].purpose == purpose


# What is called, and which of its calls count.
MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    'generation': _asked_for(FRESH),
    'a re-evaluation': _asked_for(REEVALUATION),
    'an evaluation': _asked_for(EVALUATION),
    'an update': (Learner, 'update', lambda *_: True),
    'a save': (Checkpoints, 'save', lambda *_: True),
    'a directory of a checkpoint': (os, 'makedirs', lambda path, *_, **__: 'orbax-checkpoint-tmp' in os.fspath(path)),
    'a row of metrics': (MetricsLog, 'write', lambda *_: True),
    'a file of rollouts': (run, 'write_rollouts', lambda *_: True),
    'a file of an evaluation': (files, 'write_text', lambda path, _: path.parent.name == 'evals'),
}


def strike(fault: dict[str, Any]) -> None:
    if 'signal' in fault:
        os.kill(os.getpid(), fault['signal'])
    until = time.monotonic() + fault.get('hangs', 0.0)
    while time.monotonic() < until:
        time.sleep(0.1)
    if 'errno' in fault:
        raise OSError(fault['errno'], os.strerror(fault['errno']), 'the disk')
    if 'jump' in fault:
        now = time.time
        time.time = lambda: now() + fault['jump']


def arm(fault: dict[str, Any]) -> None:
    """The fault strikes before the `call`th call of its moment."""
    owner, name, counts = MOMENTS[fault['moment']]
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        if counts(*args):
            calls.append(1)
            if len(calls) == fault.get('call', 1):
                strike(fault)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def full_in_a_checkpoint() -> None:
    """Orbax says ValueError."""

    def full(*_, **__):
        raise ValueError('RESOURCE_EXHAUSTED: No space left on device')

    init = Checkpoints.__init__

    def begun(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._manager.save = full

    Checkpoints.__init__ = begun


if __name__ == '__main__':
    fault = json.loads(sys.argv.pop(1))
    if fault['moment'] == 'a checkpoint':
        full_in_a_checkpoint()
    else:
        arm(fault)
    runpy.run_module('bapo_jax.train', run_name='__main__', alter_sys=True)
