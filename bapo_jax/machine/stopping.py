"""How a process stops: after a signal within a grace period, and after its last message within seconds.

A signal interrupts waits for responses (`leaving_waits`); work that changes the run's state is finished
first. Signals belong to the process, so the state here is global. Printing cannot block or fail here, since
every command guards its output (output.py).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

STATUS = 75  # exit status of a run that was stopped before its end (EX_TEMPFAIL): start it again
END_S = 5.0  # most seconds from the last message to the end of the process, whatever its threads wait for
_AT_ONCE = (signal.SIGTERM, signal.SIGINT)  # a second one ends the process at once
# Others come from a terminal that closes, or from a scheduler before a time limit.
_ASKING = (*_AT_ONCE, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Signals that close together count as one: `timeout` sends two, as do a closing terminal and its shell.
_TOGETHER_S = 1.0


class Stopped(Exception):
    """A signal arrived during a wait."""


_requested = _waiting = _heeding = False
_half = math.inf  # the time at which half of the grace period is over


def on_asking(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Installs `handler` for every signal that asks a command to stop, and returns the previous handlers.

    SIGHUP stays ignored under nohup.
    """
    asking = [
        number for number in _ASKING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    return {number: signal.signal(number, handler) for number in asking}


@contextlib.contextmanager
def passed_on(to: Callable[[int], None]) -> Iterator[None]:
    """Inside, every signal that asks this process to stop is passed to `to` instead, as to a child's."""
    before = on_asking(lambda number, _: to(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def on_signal(grace_s: float) -> Iterator[None]:
    """Inside, a signal asks the run to stop. The process ends with STATUS after at most `grace_s` seconds.

    If the signal interrupts a wait and nothing else catches Stopped, as at the run's start, the process ends.
    """
    global _requested, _waiting, _heeding, _half
    _requested = _waiting = False
    _half = math.inf
    heeded, _heeding = _heeding, True
    late = threading.Timer(grace_s, _give_up, (grace_s,))
    late.daemon = True
    first = math.inf  # time of the first signal in _AT_ONCE

    def stop(number: int, _) -> None:
        global _requested, _half
        nonlocal first
        if number in _AT_ONCE:
            if time.monotonic() - first > _TOGETHER_S:
                os._exit(STATUS)
            first = min(first, time.monotonic())
        if _requested:
            return
        _requested, _half = True, time.monotonic() + grace_s / 2
        late.start()
        say(
            f'\n{signal.Signals(number).name}: saving a checkpoint and stopping, within {grace_s:g} s '
            '(checkpoint.grace_s); a second Ctrl-C or SIGTERM ends the run at once'
        )
        if _waiting:
            raise Stopped

    before = on_asking(stop)
    try:
        yield
    except Stopped:
        say('stopped while starting, before any new step; the same command continues')
        sys.exit(STATUS)
    finally:
        _heeding = heeded
        late.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def requested() -> bool:
    """Whether a signal asked the run to stop."""
    return _requested


def result_in_time(future: Future) -> Any:
    """Returns the result of a future, for which a run that is to stop waits half of its time at most.

    Raises the future's error, or TimeoutError.
    """
    while not future.done() and time.monotonic() < _half:
        wait([future], timeout=0.5)  # a signal may come meanwhile
    return future.result(timeout=0)


@contextlib.contextmanager
def leaving_waits() -> Iterator[None]:
    """Inside, a signal raises Stopped; within `on_signal`, so does one that arrived before.

    Use it for waits of the main thread that change nothing.
    """
    global _waiting
    _waiting = True
    try:
        if _requested and _heeding:
            raise Stopped
        yield
    finally:
        _waiting = False


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Wraps all the work of the process, which ends with its status at most END_S seconds after this block.

    Threads of the checkpoint library may wait minutes for a full disk, and Python waits for them, so all work
    has to be finished inside. Exit handlers (atexit) registered inside run, and nothing after them: Python
    would take seconds to free the objects of a compiled program.
    """
    status = 1
    atexit.register(lambda: os._exit(status))
    try:
        yield
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        raise
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
        raise
    finally:
        late = threading.Timer(END_S, os._exit, (status,))
        late.daemon = True
        late.start()
        on_asking(lambda *_: os._exit(status))


def _give_up(grace_s: float) -> None:
    say(
        f'error: the run did not stop within {grace_s:g} s (checkpoint.grace_s); run the same command to '
        'continue from the last checkpoint'
    )
    os._exit(STATUS)


def say(message: str) -> None:
    """Prints to the original standard error: a progress bar may have replaced it, and may be drawing now."""
    print(message, file=sys.__stderr__, flush=True)
