"""How a process stops: on a signal where it can, within a time; and once it has said its last word, within seconds.

A wait for responses is left (`leaving_waits`); work that changes the run's state is finished first. Signals are the process's, so
is what is kept here. Printing can neither block nor fail here where output.py guards it, as in every command.
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
from typing import Any

STATUS = 75  # the exit status of a run that was stopped before its end (EX_TEMPFAIL): start it again
END_S = 5.0  # most seconds between the last message and the end of the process, whatever its threads still wait for
_AT_ONCE = (signal.SIGTERM, signal.SIGINT)  # of these a second one ends the process
_ASKING = (*_AT_ONCE, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # a terminal that closes, a scheduler before a time limit
_TOGETHER_S = 1.0  # a signal may come twice: from `timeout`, or from a terminal that closes and from its shell


class Stopped(Exception):
    """A signal came during a wait."""


_requested = _waiting = _heeding = False


def on_asking(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Gives every signal that asks a command to stop to `handler`. Returns the handlers before. SIGHUP stays ignored under nohup."""
    asking = [number for number in _ASKING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in asking}


@contextlib.contextmanager
def on_signal(grace_s: float) -> Iterator[None]:
    """Inside, a signal asks the run to stop. The process ends with STATUS `grace_s` seconds later, whatever it does.

    Where it leaves a wait that nobody else does, of the run's start, the process ends.
    """
    global _requested, _waiting, _heeding
    _requested = _waiting = False
    heeded, _heeding = _heeding, True
    late = threading.Timer(grace_s, _give_up, (grace_s,))
    late.daemon = True
    first = math.inf  # when the first of _AT_ONCE came

    def stop(number: int, _) -> None:
        global _requested
        nonlocal first
        if number in _AT_ONCE:
            if time.monotonic() - first > _TOGETHER_S:
                os._exit(STATUS)
            first = min(first, time.monotonic())
        if _requested:
            return
        _requested = True
        late.start()
        say(
            f'\n{signal.Signals(number).name}: stopping, with a checkpoint, in at most {grace_s:g} s (checkpoint.grace_s); '
            'a second Ctrl-C or SIGTERM ends at once'
        )
        if _waiting:
            raise Stopped

    before = on_asking(stop)
    try:
        yield
    except Stopped:
        say('stopped at the start; the same command continues')
        sys.exit(STATUS)
    finally:
        _heeding = heeded
        late.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def requested() -> bool:
    """Whether a signal came."""
    return _requested


@contextlib.contextmanager
def leaving_waits() -> Iterator[None]:
    """Inside, a signal raises Stopped, also one that came before, while `on_signal` is on.

    For waits of the main thread that change nothing.
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
    """What is inside is all that the process does. After it the process is gone in END_S seconds, with the status that it has.

    Threads of the checkpoint library wait for minutes for a disk that takes no more, and Python waits for them. What has to be
    finished is finished inside. What is registered inside for the end (atexit) is done, and nothing after it: Python would take
    seconds to put the objects of a compiled program away.
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
    say(f'error: not stopped after {grace_s:g} s (checkpoint.grace_s); the last checkpoint counts')
    os._exit(STATUS)


def say(message: str) -> None:
    """On standard error itself: a progress bar may have taken its place, and the signal may have come while it draws."""
    print(message, file=sys.__stderr__, flush=True)
