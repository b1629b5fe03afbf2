"""Tracks the files of steps in a run directory, and whether the run ever had a checkpoint.

    checkpoints/none_yet    exists from the start of a run until its first checkpoint is complete

A run that ended before its first checkpoint starts over. If its checkpoints were lost instead, that would
delete the run's records, so it is refused.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from bapo_jax.machine import events
from bapo_jax.run.log.metrics import read_metrics

NONE_YET = 'none_yet'
_FOLDERS = ('evals', 'rollouts', 'skipped')  # each has one file per step, named by its number


def say_none_yet(checkpoints: Path) -> None:
    """Writes the note that no checkpoint is complete yet."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    (checkpoints / NONE_YET).write_text(
        'This run has no complete checkpoint yet. The same command starts it over.\n', 'utf-8'
    )


def has_checkpoint(workdir: Path) -> bool:
    """Whether there is a complete checkpoint, which may be damaged."""
    return any(path.name.isdecimal() for path in (workdir / 'checkpoints').glob('[0-9]*'))


def look_for_first(workdir: Path) -> None:
    """Removes the note of `say_none_yet` once there is a checkpoint."""
    if has_checkpoint(workdir):
        (workdir / 'checkpoints' / NONE_YET).unlink(missing_ok=True)


def check_remains(workdir: Path) -> None:
    """Raises ValueError if a run has files but its checkpoints are gone, or if metrics.jsonl is damaged."""
    step, file = last_step(workdir)
    if step > 0 and not has_checkpoint(workdir) and not (workdir / 'checkpoints' / NONE_YET).is_file():
        raise ValueError(
            f'{file} is of step {step}, but there is no checkpoint, and starting from the beginning would '
            f'delete the records of this run. Restore {workdir / "checkpoints"}, or give another --workdir'
        )


def last_step(workdir: Path) -> tuple[int, Path]:
    """Returns the last step with a metrics row or a file, and that file; step 0 for a new directory."""
    rows = read_metrics(workdir)
    of_metrics = rows[-1]['step'] if rows else 0
    return max([(of_metrics, workdir / 'metrics.jsonl'), *_of_steps(workdir)], key=lambda of_file: of_file[0])


def drop_later(workdir: Path, step: int) -> None:
    """Deletes the files of steps after `step`: their work was lost. Reports it if the run starts over."""
    last, _ = last_step(workdir)
    if step == 0 and last > 0:
        message = (
            f'{workdir} starts from the beginning: it ended at step {last} or later, '
            'before its first checkpoint (checkpoint.every)'
        )
        events.report('begun anew', message, until=last)
    for of, file in _of_steps(workdir):
        if of > step:
            shutil.rmtree(file) if file.is_dir() else file.unlink()


def _of_steps(workdir: Path) -> Iterator[tuple[int, Path]]:
    """Yields (step, file) of evaluations, rollouts and skipped batches; a partial evaluation is a folder."""
    for folder in _FOLDERS:
        for file in sorted((workdir / folder).glob('[0-9]*')):
            if found := re.fullmatch(r'(\d+)\.(json|jsonl\.zst|partial)', file.name):
                yield int(found[1]), file
