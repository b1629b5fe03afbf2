"""Faults and recoveries of a run: a line on standard error, and a row of events.jsonl in the run directory.

Any module reports one; the open run writes it down.
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

from bapo_jax.terminal import without_passwords

FILE = 'events.jsonl'
_log = logging.getLogger('bapo_jax.events')


def report(event: str, message: str, **fields: Any) -> None:
    """Reports a fault or a recovery. `event` names its kind in a few words; `fields` are what a program would ask for."""
    message = without_passwords(message)
    _log.warning('%s', message, extra={'row': {'event': event, **fields, 'message': message}})


class _Rows(logging.Handler):
    """Appends each report as a row. A disk that takes no row loses the row, not the run."""

    def __init__(self, file: Path):
        super().__init__()
        self._file, self.counts = file, Counter()

    def emit(self, record: logging.LogRecord) -> None:
        row = {'time': datetime.fromtimestamp(record.created, UTC).isoformat(timespec='seconds'), **record.row}
        self.counts[row['event']] += 1
        with contextlib.suppress(OSError), self._file.open('a', encoding='utf-8') as f:
            f.write(json.dumps(row) + '\n')


@contextlib.contextmanager
def recorded(directory: Path) -> Iterator[Counter[str]]:
    """Inside, every report becomes a row of events.jsonl in `directory`. Yields how many there were of each kind."""
    rows = _Rows(directory / FILE)
    _log.addHandler(rows)
    try:
        yield rows.counts
    finally:
        _log.removeHandler(rows)


def in_words(counts: Counter[str]) -> str:
    """'2 × server lost, 1 × checkpoint damaged'."""
    return ', '.join(f'{count} × {event}' for event, count in counts.items())
