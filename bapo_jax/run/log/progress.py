"""Shows a run's progress and speed: as a bar on a terminal, as lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
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


_QUIET_S = 180.0  # minimum seconds between two notes on the same work if there is no terminal
_GAP = '   '  # between the parts of a line
_BESIDE = 37  # columns of the bar, the times and the words between them, without the two numbers of steps


def side_by_side(parts: Sequence[str], width: int) -> list[str]:
    """The parts side by side in lines of at most `width` characters; no part is broken."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(_GAP) + len(part) <= width:
            lines[-1] += _GAP + part
        else:
            lines.append(part)
    return lines


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
        self._task = self._bar.add_task('', total=steps, completed=done, note='starting …')
        if self._console.is_terminal:
            self._bar.start()
            terminal.guard()
        self._noted, self._work = time.monotonic(), ''

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        sizes = '/'.join(str(metrics[f'bapo/{part}_groups']) for part in ('x1', 'x2', 'x3'))
        parts = [f'reward {metrics["critic/score/mean"]:.3f}', f'X1/X2/X3 {sizes}']
        parts.append(f'{metrics["timing_s/step"]:.1f} s/step')
        rates = [metrics.get(f'perf/throughput/{side}') for side in ('update', 'gen')]
        if None not in rates:
            parts.append(f'{short_number(rates[0])}/{short_number(rates[1])} tok/s')
        idle = [metrics.get(f'perf/idle/{side}') for side in ('trainer', 'engine')]
        if None not in idle:
            parts.append(f'idle {100 * idle[0]:.0f}/{100 * idle[1]:.0f}%')
        if 'perf/mfu/actor' in metrics:
            parts.append(f'MFU {100 * metrics["perf/mfu/actor"]:.0f}%')
        if 'perf/servers/cache_used' in metrics:
            parts.append(f'cache {100 * metrics["perf/servers/cache_used"]:.0f}%')
        if metrics.get('perf/servers/preemptions'):
            parts.append(f'{metrics["perf/servers/preemptions"]:.0f} preempted')
        if self._console.is_terminal:
            beside = self._console.width - _BESIDE - 2 * len(str(self._steps))
            self._bar.update(self._task, completed=step, note='\n'.join(side_by_side(parts, beside)))
        elif step % 10 == 0 or step == self._steps:
            left = (time.perf_counter() - self._started) / max(1, step - self._first) * (self._steps - step)
            line = [f'step {step}/{self._steps}', *parts, f'left {left / 60:.1f} min']
            print(_GAP.join(line), flush=True)

    def note(self, text: str) -> None:
        """Shows what happens within a step, 'WORK: HOW FAR': beside the bar, else in lines.

        There the start of other work has a line, and after it one every few minutes.
        """
        work = text.partition(':')[0]
        if self._console.is_terminal:
            self._bar.update(self._task, note=text)
        elif work != self._work or time.monotonic() - self._noted > _QUIET_S:
            self._noted, self._work = time.monotonic(), work
            print(text, flush=True)

    def show(self, text: str) -> None:
        """Prints `text` above the bar, on a terminal without breaking a word that fits a line."""
        if text:
            self._console.print(text, highlight=False)

    def stop(self) -> None:
        if self._console.is_terminal:
            self._bar.stop()
