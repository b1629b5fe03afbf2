"""Escapes text for the terminal, so that data, models, servers and files cannot control it.

A command guards its standard output and standard error (`guard`), so everything printed there is escaped,
including error messages, warnings and tracebacks. `console` prints tables without interpreting rich markup.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from types import TracebackType
from typing import Any, TextIO

# Control characters except tab and newline, Unicode line ends, marks of text direction, and surrogates.
_STEERING = re.compile('[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')
_PASSWORD = re.compile(r'(?<=://)[^/?#\s]+(?=@)')  # user:password in a URL
_WHOLE_LINES = 1000  # columns, more than any row of a table has
_PROGRESS = re.compile('\r|(?:\x1b\\[A)+')  # how tqdm's progress bars of downloads move the cursor


def plain(text: str) -> str:
    """The text with terminal control characters escaped ('\\x1b' for ESC) and without passwords of URLs."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], without_passwords(text))


def without_passwords(text: str) -> str:
    """The text with '…' in place of the user and password of each URL."""
    return _PASSWORD.sub('…', text) if '://' in text else text


def guard() -> None:
    """From now on, all that this process prints is `plain`, and characters the terminal lacks are escaped.

    Ctrl-C prints no traceback. Call this again if rich has replaced the streams for a progress bar.
    """
    sys.excepthook = _explain
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see the package's __init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if it was closed
            guard_stream(stream)


def guard_stream(stream: TextIO) -> None:
    """Guards one stream. `stream.unguarded` writes unescaped text."""
    if 'unguarded' in vars(stream):
        return
    if hasattr(stream, 'reconfigure'):
        stream.reconfigure(errors='backslashreplace')
    write = stream.write

    def plainly(text: str) -> int:
        if _PROGRESS.fullmatch(text):
            return write(text)
        start = '\r' if text.startswith('\r') else ''
        return write(start + plain(text[len(start) :]))

    stream.unguarded, stream.write = _Unguarded(stream, write), plainly


def _explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replaces Python's exception hook: Ctrl-C needs no traceback."""
    if issubclass(kind, KeyboardInterrupt):
        print('interrupted', file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


class _Unguarded:
    """A guarded stream whose `write` does not escape."""

    def __init__(self, stream: TextIO, write: Any):
        self._stream, self.write = stream, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console(**options: Any) -> Any:
    """A rich console that prints text `plain`, without markup or emoji codes. Its own styles still apply.

    In a pipe or a file, rows of tables are whole lines unless COLUMNS limits them.
    """
    from rich.console import Console  # takes a tenth of a second, which few processes need

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> Any:
            return super().render_str(plain(text), **how)

        @property
        def file(self) -> Any:
            return getattr(super().file, 'unguarded', super().file)

    made = Plain(markup=False, emoji=False, **options)
    if not (made.is_terminal or 'width' in options or os.environ.get('COLUMNS')):
        made.width = _WHOLE_LINES
    return made
