"""Trains the runs of a comparison, one after the other, and continues those that were cut short."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bapo_jax.compare.arms import Job
from bapo_jax.machine import stopping
from bapo_jax.machine.stopping import Stopped

LOG = 'train.log'  # in a run directory: each start's command, and what it printed
_POLL_S = 0.5
_LAST_LINES = 5  # of a failed run's log


class RunFailed(Exception):
    """A run ended before its last step. The message has the end of its log."""


def has_finished(job: Job) -> bool:
    """Whether the same command, with the same code of the user's, has trained this run and evaluated it."""
    scored = (job.workdir / 'evals' / f'{job.steps:06d}.json').is_file()
    return scored and _starts(job)[-1:] == [_as_typed(job)]


def check_begun(job: Job) -> None:
    """Raises ValueError if another command began this run: it would go on with a mixture of settings."""
    starts = _starts(job)
    if (job.workdir / 'config.json').is_file() and starts and starts[-1] != _as_typed(job):
        raise ValueError(
            f'{job.workdir} was begun with other settings, or another version of your code; give another '
            f'--workdir, or repeat the command that has:\n    {starts[-1].removeprefix("$ ")}'
        )


def finish(job: Job, watch: Callable[[int], None]) -> None:
    """Trains a run to its end. `watch` gets the number of steps done, twice a second.

    A signal to this process goes on to the run, which then saves a checkpoint, or ends at once if it has not
    begun. Raises Stopped if a signal stopped it, and RunFailed if it failed.
    """
    job.workdir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, '-m', 'bapo_jax.train', *_flags(job)]
    run, sent = None, set()

    def pass_on(number: int) -> None:
        sent.add(number)
        if run:
            run.send_signal(number)

    with stopping.passed_on(pass_on):
        with (job.workdir / LOG).open('a', encoding='utf-8') as log:
            log.write(_as_typed(job) + '\n')
            log.flush()
            run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for number in tuple(sent):  # arrived while the run was started
            run.send_signal(number)
        while run.poll() is None:
            watch(steps_done(job))
            time.sleep(_POLL_S)
    if run.returncode == stopping.STATUS or -run.returncode in sent:
        raise Stopped
    if run.returncode:
        raise RunFailed(
            f'{job.workdir} failed with status {run.returncode}; mend what its {LOG} says, then run the same '
            f'command to continue:\n{_end_of(job.workdir / LOG)}'
        )


def steps_done(job: Job) -> int:
    """The number of training steps in the run's metrics."""
    path = job.workdir / 'metrics.jsonl'
    rows = path.read_bytes().splitlines() if path.is_file() else []
    return sum(b'"critic/score/mean"' in row for row in rows)


def _starts(job: Job) -> list[str]:
    """The commands that started this run, as `_as_typed`."""
    log = job.workdir / LOG
    lines = log.read_text('utf-8', 'replace').splitlines() if log.is_file() else []
    return [line for line in lines if line.startswith('$ ')]


def _flags(job: Job) -> list[str]:
    return [*job.flags, f'--workdir={job.workdir}']


def _as_typed(job: Job) -> str:
    code = ', '.join(f'{module} {source}' for module, source in sorted(job.code.items()))
    return '$ ' + shlex.join(['bapo-train', *_flags(job)]) + (f'  # {code}' if code else '')


def _end_of(log: Path) -> str:
    lines = [line for line in log.read_text('utf-8', 'replace').splitlines() if line.strip()]
    return '\n'.join(f'    {line}' for line in lines[-_LAST_LINES:])
