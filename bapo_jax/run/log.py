"""Writes a step's metrics: to metrics.jsonl (each step exactly once), to TensorBoard events, and to the terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from bapo_jax.files import write_text


class MetricsLog:
    """Writes metrics.jsonl and TensorBoard events. Rows after step `continue_after` are dropped: their work was lost."""

    def __init__(self, directory: Path, continue_after: int):
        self._path = directory / 'metrics.jsonl'
        rows = [row for row in read_metrics(directory) if row['step'] <= continue_after]
        write_text(self._path, ''.join(json.dumps(row) + '\n' for row in rows))
        self._tensorboard = SummaryWriter(str(directory / 'tensorboard'), purge_step=continue_after + 1)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        with self._path.open('a', encoding='utf-8') as f:
            f.write(json.dumps({'step': step, **metrics}) + '\n')
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        self._tensorboard.close()


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl. Leaves out a last line that a crash cut short."""
    path = Path(directory) / 'metrics.jsonl'
    if not path.is_file():
        return []
    lines = path.read_text('utf-8').split('\n')
    return [json.loads(line) for line in lines[:-1]]  # the text after the last newline is empty or half a row


class ProgressBar:
    """Shows the fresh groups' score, batch composition and time left: a bar on a terminal, else a line every ten steps."""

    def __init__(self, steps: int, done: int):
        self._console, self._steps, self._started, self._first = Console(), steps, time.perf_counter(), done
        self._bar = Progress(
            TextColumn('step'), MofNCompleteColumn(), BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn('left'),
            TimeRemainingColumn(), TextColumn('{task.fields[note]}'), console=self._console,
        )  # fmt: skip
        self._task = self._bar.add_task('', total=steps, completed=done, note='compiling …')
        if self._console.is_terminal:
            self._bar.start()

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        note = (
            f'reward {metrics["critic/score/mean"]:.3f}   X1/X2/X3 {metrics["bapo/x1_groups"]}/{metrics["bapo/x2_groups"]}'
            f'/{metrics["bapo/x3_groups"]}   {metrics["timing_s/step"]:.1f} s/step'
        )
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, note=note)
        elif step % 10 == 0 or step == self._steps:
            left = (time.perf_counter() - self._started) / max(1, step - self._first) * (self._steps - step)
            print(f'step {step}/{self._steps}   {note}   left {left / 60:.1f} min', flush=True)

    def stop(self) -> None:
        if self._console.is_terminal:
            self._bar.stop()
