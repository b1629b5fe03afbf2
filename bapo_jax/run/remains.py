"""What lies in a run directory beside its checkpoints: files of steps, and whether a checkpoint was ever there.

    checkpoints/none_yet    since a run begins, until its first checkpoint is whole

A run that ended before its first checkpoint begins anew. Where checkpoints were lost that would delete the record of the run, so
it is refused.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from bapo_jax import events
from bapo_jax.run.log import read_metrics

NONE_YET = 'none_yet'
_FOLDERS = ('evals', 'rollouts', 'skipped')  # a file a step, by its number


def say_none_yet(checkpoints: Path) -> None:
    """Notes that no checkpoint was written so far."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    (checkpoints / NONE_YET).write_text('No checkpoint of this run is whole yet. The same command begins it anew.\n', 'utf-8')


def has_checkpoint(workdir: Path) -> bool:
    """Whether there is a complete one; it may be damaged."""
    return any(path.name.isdecimal() for path in (workdir / 'checkpoints').glob('[0-9]*'))


def look_for_first(workdir: Path) -> None:
    """Takes that note back once there is a checkpoint."""
    if has_checkpoint(workdir):
        (workdir / 'checkpoints' / NONE_YET).unlink(missing_ok=True)


def check_remains(workdir: Path) -> None:
    """Raises ValueError where a run has files of steps and its checkpoints are gone, or metrics.jsonl is damaged."""
    step, file = last_step(workdir)
    if step > 0 and not has_checkpoint(workdir) and not (workdir / 'checkpoints' / NONE_YET).is_file():
        raise ValueError(
            f'{file} is of step {step}, and there is no checkpoint; to begin anew would delete what this run has recorded. Restore '
            f'{workdir / "checkpoints"}, or give another --workdir'
        )


def last_step(workdir: Path) -> tuple[int, Path]:
    """The last step of which there is a row of metrics or a file, and the file that says so. 0 in a new directory."""
    rows = read_metrics(workdir)
    of_metrics = rows[-1]['step'] if rows else 0
    return max([(of_metrics, workdir / 'metrics.jsonl'), *_of_steps(workdir)], key=lambda of_file: of_file[0])


def drop_later(workdir: Path, step: int) -> None:
    """Deletes the files of steps after `step`, where the run goes on: their work was lost. Says so where it begins anew."""
    last, _ = last_step(workdir)
    if step == 0 and last > 0:
        message = f'{workdir} begins anew: it ended at step {last} or later, before its first checkpoint (checkpoint.every)'
        events.report('begun anew', message, until=last)
    for of, file in _of_steps(workdir):
        if of > step:
            shutil.rmtree(file) if file.is_dir() else file.unlink()


def _of_steps(workdir: Path) -> Iterator[tuple[int, Path]]:
    """(step, file) of the evaluations and rollouts; of an evaluation that was broken off, its folder."""
    for folder in _FOLDERS:
        for file in sorted((workdir / folder).glob('[0-9]*')):
            if found := re.fullmatch(r'(\d+)\.(json|jsonl\.zst|partial)', file.name):
                yield int(found[1]), file
