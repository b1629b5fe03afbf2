"""Writes and reads metrics: metrics.jsonl (each step exactly once), TensorBoard events and log.sinks."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.event_pb2 import SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from bapo_jax.machine import events
from bapo_jax.machine.files import write_text
from bapo_jax.run.log.sinks import drop_lost
from bapo_jax.run.log.sinks import finish_sinks
from bapo_jax.run.log.sinks import start_sinks


class MetricsLog:
    """Writes metrics.jsonl and TensorBoard events. Rows after step `continue_after` are dropped as lost work.

    Separate processes (sinks.py) send the rows of metrics.jsonl to the `sinks`.
    """

    def __init__(self, directory: Path, continue_after: int, sinks: Sequence[str] = ()):
        self._directory, self._path = directory, directory / 'metrics.jsonl'
        rows = [row for row in read_metrics(directory) if row['step'] <= continue_after]
        there = rows[-1]['step'] if rows else 0
        if there < continue_after:
            message = (
                f'{self._path} ends at step {there}, but the checkpoint is of step {continue_after}; '
                'rows between are lost'
            )
            events.report('metrics missing', message, after=there, until=continue_after)
        write_text(self._path, ''.join(json.dumps(row) + '\n' for row in rows))
        # tensorboardX's SummaryWriter writes in a thread. A full disk kills that thread, and the trainer
        # would wait for it forever. Its EventsWriter calls fsync at every flush, slow on a shared disk.
        (directory / 'tensorboard').mkdir(exist_ok=True)
        file = directory / 'tensorboard' / f'events.out.tfevents.{time.time():.0f}.{socket.gethostname()}'
        self._tensorboard = file.open('ab')
        self._add(0, file_version='brain.Event:2')
        # Hides later events of the earlier session.
        self._add(continue_after + 1, session_log=SessionLog(status=SessionLog.START))
        self._sinks = start_sinks(sinks, directory)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Writes a step's row, with the time. Raises OSError if the disk is full or cannot be written."""
        if not self._path.exists():
            message = f'{self._path} was removed during the run; its earlier rows are lost'
            events.report('metrics missing', message, until=step - 1)
        with self._path.open('a', encoding='utf-8') as f:
            f.write(json.dumps({'step': step, 'time': events.utc(time.time()), **metrics}) + '\n')
        scalars = [
            Summary.Value(tag=name, simple_value=x)
            for name, x in metrics.items()
            if isinstance(x, (int, float))
        ]
        self._add(step, summary=Summary(value=scalars))
        drop_lost(self._sinks, self._directory)

    def close(self) -> None:
        """Closes the files and waits for the sinks until their deadline."""
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
    """Returns the rows of a run's metrics.jsonl; empty if there is no file."""
    return read_rows(Path(directory) / 'metrics.jsonl')


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of `iter_rows` as a list; empty if there is no file."""
    return list(iter_rows(path))


def iter_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a JSON Lines file, one per step. Skips a last line that a crash truncated.

    Raises ValueError, naming the line, if another line is not a row or its step is not later than the last.
    """
    if not path.is_file():
        return
    before = None
    with path.open('rb') as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b'\n'):  # the truncated last row
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise ValueError(
                    f'{path}, line {number} is damaged ({str(e)[:200]}); restore the file, or remove that '
                    'line'
                ) from e
            if not isinstance(row, dict) or type(row.get('step')) is not int:
                raise ValueError(
                    f"{path}, line {number} has no 'step'; restore the file, or remove that line"
                )
            if before is not None and row['step'] <= before:
                steps = f'step {row["step"]} after step {before}'
                raise ValueError(f'{path}, line {number} has {steps}; restore the file, or remove that line')
            before = row['step']
            yield row
