"""Writes a step's metrics: to metrics.jsonl (each step exactly once), TensorBoard events, log.sinks, and the terminal."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from bapo_jax import events, terminal
from bapo_jax.files import write_text
from bapo_jax.run.sinks import drop_lost, finish_sinks, start_sinks


class MetricsLog:
    """Writes metrics.jsonl and TensorBoard events. Rows after step `continue_after` are dropped: their work was lost.

    Processes of their own (sinks.py) send the rows of metrics.jsonl to the `sinks`.
    """

    def __init__(self, directory: Path, continue_after: int, sinks: Sequence[str] = ()):
        self._directory, self._path = directory, directory / 'metrics.jsonl'
        rows = [row for row in read_metrics(directory) if row['step'] <= continue_after]
        there = rows[-1]['step'] if rows else 0
        if there < continue_after:
            message = f'{self._path} ends at step {there}, the checkpoint is of step {continue_after}; the rows between are lost'
            events.report('metrics missing', message, after=there, until=continue_after)
        write_text(self._path, ''.join(json.dumps(row) + '\n' for row in rows))
        # tensorboardX's SummaryWriter writes in a thread. A full disk ends that thread, and the trainer would wait for it for ever.
        # Its EventsWriter waits for the disk at every flush (fsync), which a disk that others use makes long.
        (directory / 'tensorboard').mkdir(exist_ok=True)
        file = directory / 'tensorboard' / f'events.out.tfevents.{time.time():.0f}.{socket.gethostname()}'
        self._tensorboard = file.open('ab')
        self._add(0, file_version='brain.Event:2')
        self._add(continue_after + 1, session_log=SessionLog(status=SessionLog.START))  # later events of before are no longer shown
        self._sinks = start_sinks(sinks, directory)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Raises OSError where the disk takes no more."""
        if not self._path.exists():
            message = f'{self._path} was removed while the run goes on; its rows up to now are lost'
            events.report('metrics missing', message, until=step - 1)
        with self._path.open('a', encoding='utf-8') as f:
            f.write(json.dumps({'step': step, **metrics}) + '\n')
        scalars = [Summary.Value(tag=name, simple_value=x) for name, x in metrics.items() if isinstance(x, (int, float))]
        self._add(step, summary=Summary(value=scalars))
        drop_lost(self._sinks, self._directory)

    def close(self) -> None:
        """Waits for the sinks, by their deadline."""
        self._tensorboard.close()
        finish_sinks(self._sinks, self._directory)

    def _add(self, step: int, **what: Any) -> None:
        """Writes a TensorBoard record: length and data, each with its checksum."""
        data = Event(wall_time=time.time(), step=step, **what).SerializeToString()
        length = struct.pack('<Q', len(data))
        for part in (length, data):
            self._tensorboard.write(part + struct.pack('<I', masked_crc32c(part)))
        self._tensorboard.flush()


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """`read_rows` of a run's metrics.jsonl."""
    return read_rows(Path(directory) / 'metrics.jsonl')


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of `iter_rows` in a list; empty where there is no file."""
    return list(iter_rows(path))


def iter_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows, one a step, of a file of JSON lines. Leaves out a last line that a crash cut short.

    Raises ValueError, naming the line, where another line is no row, or of no later step than the line before.
    """
    if not path.is_file():
        return
    before = None
    with path.open('rb') as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b'\n'):  # behind the last newline: half a row
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise ValueError(f'{path}, line {number} is damaged ({str(e)[:200]}); restore the file, or remove that line') from e
            if not isinstance(row, dict) or type(row.get('step')) is not int:
                raise ValueError(f"{path}, line {number} has no 'step'; restore the file, or remove that line")
            if before is not None and row['step'] <= before:
                steps = f'step {row["step"]}, after {before}'
                raise ValueError(f'{path}, line {number} is of {steps}; restore the file, or remove that line')
            before = row['step']
            yield row


def short(number: float) -> str:
    """950, 12.3k, 1234.5k."""
    return f'{number:.0f}' if number < 1000 else f'{number / 1000:.1f}k'


_QUIET_S = 180.0  # least seconds between two notes where there is no terminal


class ProgressBar:
    """Shows the fresh groups' score, batch composition, speed and time left: a bar on a terminal, else a line every ten steps.

    The speed is seconds a step, and tokens a second of the update and of generation. Then the shares of the step in which the trainer
    and the engine waited, the update's share of the devices' peak if that is known, and how full vLLM servers' KV caches were.
    """

    def __init__(self, steps: int, done: int):
        self._console, self._steps, self._started, self._first = terminal.console(), steps, time.perf_counter(), done
        self._bar = Progress(
            TextColumn('step'), MofNCompleteColumn(), BarColumn(bar_width=8), TimeElapsedColumn(), TextColumn('left'),
            TimeRemainingColumn(), TextColumn('{task.fields[note]}', table_column=Column()), console=self._console,  # it may wrap
            refresh_per_second=1,  # at rich's 10 its thread takes more than 1 % of a quickstart step (benchmarks/logging_cost.py)
        )  # fmt: skip
        self._task = self._bar.add_task('', total=steps, completed=done, note='compiling …')
        if self._console.is_terminal:
            self._bar.start()
            terminal.guard()
        self._noted = time.monotonic()

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        note = (
            f'reward {metrics["critic/score/mean"]:.3f}   X1/X2/X3 {metrics["bapo/x1_groups"]}/{metrics["bapo/x2_groups"]}'
            f'/{metrics["bapo/x3_groups"]}   {metrics["timing_s/step"]:.1f} s/step'
        )
        rates = [metrics.get(f'perf/throughput/{side}') for side in ('update', 'gen')]
        if None not in rates:
            note += f'   {short(rates[0])}/{short(rates[1])} tok/s'
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
        """Says what goes on within a step: beside the bar, else in a line every few minutes."""
        if self._console.is_terminal:
            self._bar.update(self._task, note=text)
        elif time.monotonic() - self._noted > _QUIET_S:
            self._noted = time.monotonic()
            print(text, flush=True)

    def show(self, text: str) -> None:
        """Prints it above the bar."""
        if text:
            self._console.print(text, soft_wrap=True, highlight=False)

    def stop(self) -> None:
        if self._console.is_terminal:
            self._bar.stop()
