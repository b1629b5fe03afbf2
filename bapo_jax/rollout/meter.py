"""Measures when an engine was busy, how many tokens it sampled, and when the trainer waited for it.

A spell is an interval (first, last), in seconds of time.perf_counter. Evaluations and probes do not count.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from bapo_jax.groups import Author, Response

Spell = tuple[float, float]


class Meter:
    """The spells since the last `read`. An engine's futures end in its own threads, hence the lock."""

    def __init__(self):
        self._lock = threading.Lock()
        self._sampling: list[Spell] = []
        self._waiting: list[Spell] = []
        self._handing: list[Spell] = []
        self._pending, self._since = 0, 0.0  # number of pending answers, and since when there are any
        self._tokens, self._read = 0, time.perf_counter()

    def asked(self, answers: Sequence[Future], before: Sequence[int] = ()) -> None:
        """Counts the engine as busy from now until these and all earlier answers have ended.

        `before` are the tokens of each answer that earlier steps sampled; (): none.
        """
        with self._lock:
            if not self._pending:
                self._since = time.perf_counter()
            self._pending += len(answers)
        for answer, known in itertools.zip_longest(answers, before, fillvalue=0):
            answer.add_done_callback(functools.partial(self._ended, known))

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the trainer waits for responses."""
        return _timed(self._waiting)

    def handing_over(self) -> contextlib.AbstractContextManager[None]:
        """A context in which a policy is loaded into the engine: neither side waits for the other."""
        return _timed(self._handing)

    def read(self, started: float) -> dict[str, Any]:
        """Metrics of the step from `started` to now. A group's tokens count for the step in which it ends."""
        now = time.perf_counter()
        with self._lock:
            sampling = self._sampling + [(self._since, now)] * bool(self._pending)
            tokens, self._tokens = self._tokens, 0
            self._sampling.clear()
        busy = covered(sampling, self._read, now)
        measured = shares(sampling, self._waiting, self._handing, started, now)
        self._waiting.clear()
        self._handing.clear()
        self._read = now
        return measured | ({'perf/throughput/gen': tokens / busy} if tokens and busy else {})

    def _ended(self, known: int, answer: Future) -> None:
        lost = answer.cancelled() or answer.exception()
        with self._lock:
            self._tokens += 0 if lost else tokens_sampled(answer.result()) - known
            self._pending -= 1
            if not self._pending:
                self._sampling.append((self._since, time.perf_counter()))


def tokens_sampled(responses: Sequence[Response]) -> int:
    """The tokens that a policy sampled: not those that were given, nor an environment's."""
    return sum(int(r.by(Author.POLICY, Author.PLACEHOLDER).sum()) for r in responses)


def shares(
    sampling: Sequence[Spell], waiting: Sequence[Spell], handing: Sequence[Spell], start: float, end: float
) -> dict[str, float]:
    """Fractions of the time: the trainer waited, and the trainer worked while nothing was sampled."""
    idle = end - start - covered([*sampling, *waiting, *handing], start, end)
    return {
        'perf/idle/trainer': covered(waiting, start, end) / (end - start),
        'perf/idle/engine': idle / (end - start),
    }


def covered(spells: Sequence[Spell], start: float, end: float) -> float:
    """The seconds between `start` and `end` that lie in any of the spells, which may overlap."""
    seconds, until = 0.0, start
    for first, last in sorted(spells):
        seconds += max(0.0, min(last, end) - max(first, until))
        until = max(until, last)
    return seconds


@contextlib.contextmanager
def _timed(spells: list[Spell]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    spells.append((started, time.perf_counter()))
