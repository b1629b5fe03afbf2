"""Standard output and error that decide nothing: what is written never blocks and never raises.

A reader may end before its writer (Ctrl-C of `train … | tee log` ends tee first), or stop to read: a full pipe, a terminal under
Ctrl-S. A disk under a log may be full. A run goes on through all of these, for what it knows is in its files. A filter such as
`grade`, whose work is its output, ends with its reader instead.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Iterator

LEAST = 4096  # bytes that a pipe takes at once or not at all
MOST = 1 << 20  # bytes kept for a reader that is slow; what comes after them is lost
LINGER_S = 2.0  # most seconds that the end of the process waits for such a reader


class Output(io.TextIOBase):
    """Text for a descriptor; a whole line is sent at once."""

    encoding, errors = 'utf-8', 'backslashreplace'

    def __init__(self, descriptor: int, encoding: str):
        self.encoding, self._descriptor, self._lock = encoding, descriptor, threading.RLock()
        self._kept, self._sending = bytearray(), False

    def write(self, text: str) -> int:
        if len(self._kept) < MOST:
            self._kept += text.encode(self.encoding, self.errors)
        if '\n' in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Sends what the reader takes now. Where none is left, or the disk is full, what there is to send is lost."""
        with self._lock:
            if self._sending:  # a signal came in the middle: the call below goes on with what its handler wrote
                return
            self._sending = True
            try:
                while self._kept and self._takes_more():
                    del self._kept[: os.write(self._descriptor, self._kept[:LEAST])]
            except BlockingIOError:
                pass
            except OSError:
                self._kept.clear()
            finally:
                self._sending = False

    def linger(self, seconds: float) -> None:
        """Sends what a slow reader takes in that time."""
        until = time.monotonic() + seconds
        self.flush()
        while self._kept and self._takes_more(until - time.monotonic()):
            self.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def _takes_more(self, seconds: float = 0.0) -> bool:
        look = select.poll()
        look.register(self._descriptor, select.POLLOUT)
        return seconds >= 0 and bool(look.poll(1000 * seconds))


def guard(*names: str) -> None:
    """From here on print, tracebacks, logs, and libraries that write to the descriptors neither block nor end the process.

    `names` are of sys.stdout and sys.stderr; both where there are none.
    """
    open_streams()
    for name in names or ('stdout', 'stderr'):
        descriptor = ('stdin', 'stdout', 'stderr').index(name)
        before = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError):
            before.flush()
        _never_blocks(descriptor)
        now = Output(descriptor, getattr(before, 'encoding', None) or 'utf-8')
        setattr(sys, name, now)
        setattr(sys, f'__{name}__', now)
        atexit.register(now.linger, LINGER_S)


def open_streams() -> None:
    """Puts /dev/null in the place of standard streams that are closed (`>&-`), so that no file of ours gets their numbers.

    Else a library, a child process or a signal would write into it. Every command does this first.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free, which is this one
    for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
        if getattr(sys, name) is None:  # Python found it closed
            setattr(sys, name, open(os.devnull, mode, encoding='utf-8'))


def hand_over() -> None:
    """Before another program takes this process's place: it expects descriptors that block."""
    for descriptor in (1, 2):
        os.set_blocking(descriptor, True)


@contextlib.contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Inside, whoever reads standard output may close it, as `| head` does: the process then ends with status 1 and no message.

    Where a disk is full that it goes to, there is a message.
    """
    open_streams()
    try:
        try:
            yield
        finally:
            print(end='', flush=True)  # also where it was closed from the start
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes there when Python ends
        if isinstance(e, BrokenPipeError):
            sys.exit(1)
        sys.exit(f'error: {e}')


def _never_blocks(descriptor: int) -> None:
    """Opens a pipe or terminal anew: whether it blocks would else change for everybody who has it, such as the shell."""
    kind = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISCHR(kind)):
        return
    with contextlib.suppress(OSError):  # a pipe without a reader, or another user's terminal
        anew = os.open(f'/proc/self/fd/{descriptor}', os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.dup2(anew, descriptor)
        os.close(anew)
