"""SIGTERM and Ctrl-C: a run stops where it can, within a time. A second signal ends the process at once.

A wait for responses is left (`leaving_waits`); work that changes the run's state is finished first. Signals are the process's, so
is what is kept here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

STATUS = 75  # the exit status of a run that was stopped before its end (EX_TEMPFAIL): start it again


class Stopped(Exception):
    """A signal came during a wait."""


_requested = _waiting = False


@contextlib.contextmanager
def on_signal(grace_s: float) -> Iterator[None]:
    """Inside, SIGTERM and SIGINT ask the run to stop. The process ends with STATUS `grace_s` seconds later, whatever it does."""
    global _requested, _waiting
    _requested = _waiting = False
    late = threading.Timer(grace_s, _give_up, (grace_s,))
    late.daemon = True

    def stop(number: int, _) -> None:
        global _requested
        if _requested:
            os._exit(STATUS)
        _requested = True
        late.start()
        told = (
            f'\n{signal.Signals(number).name}: stopping, with a checkpoint, in at most {grace_s:g} s (checkpoint.grace_s); '
            'a second signal ends at once\n'
        )
        os.write(1, told.encode())  # the signal may have come during a print, and print must not be entered twice
        if _waiting:
            raise Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        late.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def requested() -> bool:
    """Whether a signal came."""
    return _requested


@contextlib.contextmanager
def leaving_waits() -> Iterator[None]:
    """Inside, a signal raises Stopped, also one that came before. For waits of the main thread that change nothing."""
    global _waiting
    _waiting = True
    try:
        if _requested:
            raise Stopped
        yield
    finally:
        _waiting = False


def _give_up(grace_s: float) -> None:
    print(f'error: not stopped after {grace_s:g} s (checkpoint.grace_s); the last checkpoint counts', flush=True)
    os._exit(STATUS)
