"""What the terminal is shown: texts of data, models, servers and files, which cannot steer it.

A command guards its standard output and standard error (`guard`). So all that is printed there is escaped, also messages of errors,
warnings, and tracebacks. Tables are printed by `console`, which takes no text for rich's markup.
"""

from __future__ import annotations

import re
import signal
import sys
from types import TracebackType
from typing import Any, TextIO

# Control characters but tab and newline, what ends a line in Unicode, what turns the direction of text, and halves of characters.
_STEERING = re.compile('[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')
_PASSWORD = re.compile(r'(?<=://)[^/?#\s]+(?=@)')  # of a URL: user:password
_PROGRESS = re.compile('\r|(?:\x1b\\[A)+')  # how bars of tqdm go back: the hub's downloads have them


def plain(text: str) -> str:
    """The text with every character that would steer a terminal written out: '\\x1b' for ESC. No password of a URL is in it."""
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], without_passwords(text))


def without_passwords(text: str) -> str:
    """The text with '…' for the user and the password of each URL."""
    return _PASSWORD.sub('…', text) if '://' in text else text


def guard() -> None:
    """From now on what this process prints is `plain`, and never fails for a character that the terminal does not have.

    Ctrl-C prints no traceback.

    To be called again where rich has put other streams in place, beside a bar.
    """
    sys.excepthook = _explain
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see the package's __init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed
            guard_stream(stream)


def guard_stream(stream: TextIO) -> None:
    """`guard` for one stream. `stream.unguarded` writes as before."""
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
    """In place of Python's last words on an error: whoever pressed Ctrl-C knows where the process was interrupted."""
    if issubclass(kind, KeyboardInterrupt):
        print('interrupted', file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


class _Unguarded:
    """A guarded stream, to write to as it is."""

    def __init__(self, stream: TextIO, write: Any):
        self._stream, self.write = stream, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console(**options: Any) -> Any:
    """A rich console that shows texts as they are: `plain`, and without markup or emoji codes. Its own styles stay."""
    from rich.console import Console  # a tenth of a second that few processes need

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> Any:
            return super().render_str(plain(text), **how)

        @property
        def file(self) -> Any:
            return getattr(super().file, 'unguarded', super().file)

    return Plain(markup=False, emoji=False, **options)
