"""Shows a run's progress and speed: as a bar on a terminal, as lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from bapo_jax.machine import terminal


def short_number(number: float) -> str:
    """Formats a number as 950, 12.3k or 1234.5k."""
    return f'{number:.0f}' if number < 1000 else f'{number / 1000:.1f}k'


_QUIET_S = 180.0  # minimum seconds between two notes if there is no terminal


class ProgressBar:
    """Shows the fresh groups' score, batch composition, speed and time left.

    It is a bar on a terminal, else a line every ten steps. Speed is seconds per step, and tokens per second
    of the update and of generation. Then come the shares of the step in which the trainer and the engine were
    idle, the update's MFU if known, and the KV cache usage of vLLM servers.
    """

    def __init__(self, steps: int, done: int):
        self._console, self._steps, self._started, self._first = (
            terminal.console(),
            steps,
            time.perf_counter(),
            done,
        )
        self._bar = Progress(
            TextColumn('step'), MofNCompleteColumn(), BarColumn(bar_width=8), TimeElapsedColumn(),
            TextColumn('left'), TimeRemainingColumn(),
            TextColumn('{task.fields[note]}', table_column=Column()),  # Column() lets the note wrap
            console=self._console,
            # At rich's default of 10, its thread takes more than 1 % of a quickstart step
            # (benchmarks/host/logging_cost.py).
            refresh_per_second=1,
        )  # fmt: skip
        self._task = self._bar.add_task('', total=steps, completed=done, note='compiling …')
        if self._console.is_terminal:
            self._bar.start()
            terminal.guard()
        self._noted = time.monotonic()

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        note = (
            f'reward {metrics["critic/score/mean"]:.3f}   X1/X2/X3 '
            f'{metrics["bapo/x1_groups"]}/{metrics["bapo/x2_groups"]}'
            f'/{metrics["bapo/x3_groups"]}   {metrics["timing_s/step"]:.1f} s/step'
        )
        rates = [metrics.get(f'perf/throughput/{side}') for side in ('update', 'gen')]
        if None not in rates:
            note += f'   {short_number(rates[0])}/{short_number(rates[1])} tok/s'
        idle = [metrics.get(f'perf/idle/{side}') for side in ('trainer', 'engine')]
        if None not in idle:
            note += f'   idle {100 * idle[0]:.0f}/{100 * idle[1]:.0f}%'
        if 'perf/mfu/actor' in metrics:
            note += f'   MFU {100 * metrics["perf/mfu/actor"]:.0f}%'
        if 'perf/servers/cache_used' in metrics:
            note += f'   cache {100 * metrics["perf/servers/cache_used"]:.0f}%'
        if metrics.get('perf/servers/preemptions'):
            note += f'   {metrics["perf/servers/preemptions"]:.0f} preempted'
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, note=note)
        elif step % 10 == 0 or step == self._steps:
            left = (time.perf_counter() - self._started) / max(1, step - self._first) * (self._steps - step)
            print(f'step {step}/{self._steps}   {note}   left {left / 60:.1f} min', flush=True)

    def note(self, text: str) -> None:
        """Shows what happens within a step: beside the bar, else in a line every few minutes."""
        if self._console.is_terminal:
            self._bar.update(self._task, note=text)
        elif time.monotonic() - self._noted > _QUIET_S:
            self._noted = time.monotonic()
            print(text, flush=True)

    def show(self, text: str) -> None:
        """Prints `text` above the bar."""
        if text:
            self._console.print(text, soft_wrap=True, highlight=False)

    def stop(self) -> None:
        if self._console.is_terminal:
            self._bar.stop()
