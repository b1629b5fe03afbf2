"""Reports faults and recoveries of a run: a line on standard error and a row of events.jsonl.

Any module may report one; the open run writes it to its directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bapo_jax.machine.terminal import without_passwords

EVENTS_FILE = 'events.jsonl'
_log = logging.getLogger('bapo_jax.machine.events')


def report(event: str, message: str, **fields: Any) -> None:
    """Reports a fault or a recovery. `event` names its kind briefly; `fields` are data for programs."""
    message = without_passwords(message)
    _log.warning('%s', message, extra={'row': {'event': event, **fields, 'message': message}})


def utc(seconds: float) -> str:
    """Returns seconds since 1970 as the records of a run state them: '2026-11-29T07:18:34+00:00'."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec='seconds')


class _Rows(logging.Handler):
    """Appends each report to the file as a row. If the disk fails, the row is lost, but the run continues."""

    def __init__(self, file: Path):
        super().__init__()
        self._file, self.counts = file, Counter()

    def emit(self, record: logging.LogRecord) -> None:
        row = {
            'time': utc(record.created),
            **record.row,
        }
        self.counts[row['event']] += 1
        with contextlib.suppress(OSError), self._file.open('a', encoding='utf-8') as f:
            f.write(json.dumps(row) + '\n')


@contextlib.contextmanager
def recorded(directory: Path) -> Iterator[Counter[str]]:
    """Inside, every report becomes a row of events.jsonl in `directory`. Yields the counts by kind."""
    rows = _Rows(directory / EVENTS_FILE)
    _log.addHandler(rows)
    try:
        yield rows.counts
    finally:
        _log.removeHandler(rows)


def counts_in_words(counts: Counter[str]) -> str:
    """The counts as text: '2 × server lost, 1 × checkpoint damaged'."""
    return ', '.join(f'{count} × {event}' for event, count in counts.items())
