"""Records each start of a run in its config.json: the command, the code, the hardware, and how it ended.

A start that ends in order, or with an error, gets an `end`. A crash can write nothing, so a start without an
end has crashed, is still running, or was copied while it ran.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bapo_jax
from bapo_jax.machine import events
from bapo_jax.machine.terminal import without_passwords
from bapo_jax.run.directory import environment, part_of, record

FINISHED, STOPPED, WITH_ERROR = 'finished', 'stopped', 'failed'  # the outcomes that a start's `end` records
RUNNING, CRASHED, NOT_BEGUN, UNKNOWN = 'running', 'crashed', 'not begun', 'unknown'  # those that it does not
CHECKOUT = Path(bapo_jax.__file__).parents[1]
_GIT_S = 10.0  # most seconds to wait for git, which may read a slow disk


class RunOutcome(NamedTuple):
    """How a run has ended, or that it has not."""

    kind: str  # one of the above
    words: str  # the same with the step: 'stopped after step 40 of 60'


def outcome(
    starts: Sequence[Mapping[str, Any]] | None, planned: Any, step: int, held: bool | None
) -> RunOutcome:
    """Returns how a run ended whose last training step in metrics.jsonl is `step`; 0 if it has none.

    `starts` are those in its config.json, None if it records none, and `planned` is its `steps`. `held` says
    whether a process trains the run; None if nobody looked. Damaged entries count as missing.
    """
    start = starts[-1] if starts else {}
    steps = next((n for n in (start.get('steps'), planned) if type(n) is int and n), 0)
    of = f' of {steps}' if steps else ''
    done = f'after step {step}{of}' if step else f'before the first step{of}'
    end = part_of(start, 'end')
    if held:
        return RunOutcome(RUNNING, f'running, {done}')
    if end.get('outcome') == FINISHED:
        return RunOutcome(FINISHED, f'finished, {end.get("step")} steps')
    if end.get('outcome') == WITH_ERROR:
        return RunOutcome(WITH_ERROR, f'failed {done}: {end.get("error")}')
    if end:
        return RunOutcome(STOPPED, f'stopped after step {end.get("step")}{of}')
    if start:
        otherwise = 'still running' if held is None else 'copied while it ran'
        return RunOutcome(CRASHED, f'crashed {done}, or {otherwise}')
    if starts is not None:
        return RunOutcome(NOT_BEGUN, 'not begun: its start failed')
    if 0 < steps <= step:
        return RunOutcome(FINISHED, f'finished, {step} steps')
    return RunOutcome(UNKNOWN, f'ended {done}; its version did not record how')


def with_start(
    settings: Mapping[str, Any], step: int, steps: int, arguments: Sequence[str]
) -> dict[str, Any]:
    """Returns a run's settings with this process as its newest start.

    The run is at `step` of `steps`; `arguments` are sys.argv.
    """
    start = {
        'time': events.utc(time.time()),
        'step': step,
        'steps': steps,
        'command': as_typed(arguments),
        'version': bapo_jax.__version__,
        'commit': commit_of(CHECKOUT),
        'host': socket.gethostname(),
        **environment(),
    }
    return {**settings, 'starts': [*settings['starts'], start]}


def records_finish(starts: Sequence[Mapping[str, Any]], step: int) -> bool:
    """Whether the newest start, if any, has recorded that the run finished after `step`."""
    end = starts[-1].get('end') if starts else None
    return isinstance(end, dict) and (end.get('outcome'), end.get('step')) == (FINISHED, step)


def crashed(starts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the newest start, if any, has recorded no end. Nobody may be training the run."""
    return bool(starts) and not part_of(starts[-1], 'end')


def record_end(
    workdir: Path, settings: Mapping[str, Any], step: int, finished: bool, error: str = ''
) -> None:
    """Writes into config.json how the newest start ended after `step`: in order, or with `error`, one line.

    `settings` are those of `with_start`. Does nothing if that start has an end: a finished run was started
    again. If the file cannot be written, that is reported: the run itself has not failed.
    """
    *earlier, last = settings['starts']
    if 'end' in last:
        return
    end = {'time': events.utc(time.time()), 'step': step, 'outcome': FINISHED if finished else STOPPED}
    if error:
        end |= {'outcome': WITH_ERROR, 'error': without_passwords(error)}
    try:
        record(workdir, {**settings, 'starts': [*earlier, {**last, 'end': end}]})
    except OSError as e:
        message = (
            f'{workdir}: {end["outcome"]} after step {step}, but config.json cannot record that ({e}), so '
            'bapo-show will call it crashed; make room on the disk, then run the same command'
        )
        events.report('end not recorded', message, step=step)


def as_typed(arguments: Sequence[str]) -> str:
    """Returns sys.argv as a command line, without passwords in URLs: 'bapo-train --config=quickstart …'.

    `python -m bapo_jax.train` has the same flags, so it is named bapo-train, too.
    """
    program = Path(arguments[0]).name
    words = ['bapo-train' if program == 'train.py' else program, *arguments[1:]]
    return without_passwords(shlex.join(words))


def commit_of(checkout: Path, digits: int = 40) -> str | None:
    """Returns the commit of a git checkout, in so many digits, with '-dirty' if tracked files differ from it.

    Returns None if the directory is no checkout or git cannot tell.
    """
    if not (checkout / '.git').exists():  # git would find the repository of a directory above
        return None
    command = [
        'git',
        '-C',
        str(checkout),
        'describe',
        '--always',
        f'--abbrev={digits}',
        '--exclude=*',
        '--dirty',
    ]
    # In a hook, git's variables name the hook's repository.
    here = {name: value for name, value in os.environ.items() if not name.startswith('GIT_')}
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True, env=here)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip()
