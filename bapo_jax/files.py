"""Writes files atomically: a file is there whole or not at all. And what a command does where a standard stream is closed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Writes `text` as UTF-8; a reader sees the old file or the new one, never a part."""
    write_bytes(path, text.encode())


def replace_part(path: Path, name: str, text: str) -> None:
    """Puts `text` between the lines <!-- name --> and <!-- /name --> of a page. Raises ValueError for a page without that part."""
    before, found, rest = path.read_text('utf-8').partition(f'<!-- {name} -->\n')
    _, ended, after = rest.partition(f'<!-- /{name} -->')
    if not (found and ended):
        raise ValueError(f'{path} has no part {name!r}; put <!-- {name} --> and <!-- /{name} --> on lines of their own')
    write_text(path, f'{before}{found}{text}{ended}{after}')


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data`; a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(path.name + '.partial')
    temporary.write_bytes(data)
    os.replace(temporary, path)


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


@contextlib.contextmanager
def closing_output() -> Iterator[None]:
    """Inside, whoever reads standard output may close it, as `| head` does: the process then ends with status 1 and no message."""
    open_streams()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes there when Python ends
        sys.exit(1)
