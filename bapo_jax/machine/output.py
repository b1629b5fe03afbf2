"""Standard output and standard error to which writing never blocks and never raises.

A reader may end before its writer (Ctrl-C of `train … | tee log` ends tee first) or stop reading (a full
pipe, a terminal after Ctrl-S). The disk of a log may be full. A run continues in all these cases, since its
results are in its files. A filter such as `grade`, whose result is its output, ends with its reader instead.
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

from bapo_jax.machine.files import is_of_disk

LEAST = 4096  # bytes that a pipe accepts atomically
MOST_KEPT = 1 << 20  # bytes buffered for a slow reader; further output is lost
LINGER_S = 2.0  # most seconds that the process waits for such a reader at its end


class Output(io.TextIOBase):
    """A text stream to a descriptor; it is flushed after every line."""

    encoding, errors = 'utf-8', 'backslashreplace'

    def __init__(self, descriptor: int, encoding: str):
        self.encoding, self._descriptor, self._lock = encoding, descriptor, threading.RLock()
        self._kept, self._sending = bytearray(), False

    def write(self, text: str) -> int:
        if len(self._kept) < MOST_KEPT:
            self._kept += text.encode(self.encoding, self.errors)
        if '\n' in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Sends what the reader accepts now. Without a reader, or on a full disk, buffered text is lost."""
        with self._lock:
            if self._sending:  # a signal handler wrote: the interrupted call below sends that too
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
        """Sends what a slow reader accepts within that time."""
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


def guard_streams(*names: str) -> None:
    """From now on, no output blocks or ends the process.

    This covers print, tracebacks, logs, and libraries that write to the descriptors. `names` are 'stdout' or
    'stderr'; without names, both are guarded.
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
    """Opens /dev/null for standard streams that are closed (`>&-`), so that no other file gets their numbers.

    Otherwise a library, a child process or a signal handler could write into that file. Every command calls
    this first.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one
    for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
        if getattr(sys, name) is None:  # Python found it closed
            setattr(sys, name, open(os.devnull, mode, encoding='utf-8'))


def hand_over() -> None:
    """Makes the descriptors blocking again, as another program that replaces this process (exec) expects."""
    for descriptor in (1, 2):
        os.set_blocking(descriptor, True)


@contextlib.contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Inside, if the reader of standard output closes it (`| head`), the process ends silently with status 1.

    If its disk is full, the process ends with a message.
    """
    open_streams()
    try:
        try:
            yield
        finally:
            print(end='', flush=True)  # also notices a stream that was closed from the start
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # takes what Python flushes at its end
        if isinstance(e, BrokenPipeError):
            sys.exit(1)
        sys.exit(f'error: {"standard output: " if is_of_output(e) else ""}{e}')


def is_of_output(error: OSError) -> bool:
    """Whether a stream's reader ended, or its disk is full. An error of a file names the file."""
    return isinstance(error, BrokenPipeError) or is_of_disk(error) and error.filename is None


def _never_blocks(descriptor: int) -> None:
    """Makes a pipe or terminal non-blocking; reopens it, so that others that share it are unaffected."""
    kind = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISCHR(kind)):
        return
    with contextlib.suppress(OSError):  # a pipe without a reader, or another user's terminal
        anew = os.open(f'/proc/self/fd/{descriptor}', os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.dup2(anew, descriptor)
        os.close(anew)
