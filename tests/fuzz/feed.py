"""Feeds a target with inputs, and tells what it accepts and refuses from what crashes it."""

from __future__ import annotations

import faulthandler
import itertools
import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

CORPUS = Path(__file__).parent / 'corpus'
LONGEST = 20_000  # characters of a message that somebody reads
ACCEPTED, CRASH = 'accepted', 'crash'
STUCK_S = 900.0  # for inputs fed at once: where even the deadline's signal goes unheard, the process ends with its stack


class Outcome(NamedTuple):
    kind: str  # ACCEPTED, CRASH, or the name of the error that refused the input
    seconds: float
    why: str = ''  # of a crash


class Target(NamedTuple):
    """Something that parses. Inputs are values of JSON, so that they can be kept."""

    make: Callable[[Random], Any]
    outcomes: Callable[[Sequence[Any]], list[Outcome]]
    deadline_s: float  # of an input
    at_once: int = 200  # inputs given to `outcomes`


class Overdue(BaseException):
    """The deadline passed. No Exception: nothing on the way handles it."""


class Tally:
    """What became of a target's inputs."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.crashes: list[tuple[Any, Outcome]] = []
        self.slowest_s = self.seconds = 0.0


def fed(name: str, target: Target, count: int, seed: int = 0) -> Tally:
    """Feeds the target's corpus, then `count` inputs. Input i of a seed is always the same."""
    tally, began = Tally(), time.monotonic()
    made = (target.make(Random(f'{seed} {name} {i}')) for i in range(count))
    inputs = itertools.chain(corpus(name), made)
    while some := list(itertools.islice(inputs, target.at_once)):
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        for said, outcome in zip(some, target.outcomes(some), strict=True):
            if outcome.seconds > target.deadline_s:
                outcome = outcome._replace(kind=CRASH, why=outcome.why or f'took {outcome.seconds:.1f} s')
            tally.kinds[outcome.kind] += 1
            tally.slowest_s = max(tally.slowest_s, outcome.seconds)
            if outcome.kind == CRASH:
                tally.crashes.append((said, outcome))
    faulthandler.cancel_dump_traceback_later()
    tally.seconds = time.monotonic() - began
    return tally


def corpus(name: str) -> list[Any]:
    file = CORPUS / f'{name}.jsonl'
    return [json.loads(line) for line in file.read_text('utf-8').splitlines()] if file.is_file() else []


def parsing(
    make: Callable[[Random], Any], parse: Callable[[Any], Any], deadline_s: float, *refusals: type[Exception], naming: str = ''
) -> Target:
    """The target of a parser that takes one input. It refuses as `tried` says."""
    return Target(make, lambda inputs: [tried(said, parse, deadline_s, *refusals, naming=naming) for said in inputs], deadline_s)


def tried(
    said: Any, parse: Callable[[Any], Any], deadline_s: float, *refusals: type[Exception], naming: str = ''
) -> Outcome:
    """What becomes of an input.

    A refusal is an error of exactly one of these types, whose message the pattern `naming` finds: a ValueError of json is none.
    """
    began, kind, why = time.perf_counter(), ACCEPTED, ''
    try:
        with deadline(deadline_s):
            parse(said)
    except Overdue:
        kind, why = CRASH, f'no end after {deadline_s:g} s'
    except Exception as e:
        kind = type(e).__name__
        if type(e) not in refusals or not re.search(naming, str(e)) or len(str(e)) > LONGEST:
            kind, why = CRASH, f'{type(e).__name__}: {str(e)[:300]!a}'
    return Outcome(kind, time.perf_counter() - began, why)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises Overdue inside, in the main thread, when the time is over."""

    def ring(*_: Any) -> None:
        raise Overdue

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
