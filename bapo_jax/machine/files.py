"""Writes files atomically: a file is complete, or it is absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def is_of_disk(error: OSError) -> bool:
    """Whether the error means a full, read-only or broken disk."""
    return error.errno in _DISK


def write_text(path: Path, text: str) -> None:
    """Writes `text` as UTF-8; a reader sees the old file or the new one, never a partial one."""
    write_bytes(path, text.encode())


def check_directory(path: Path, flag: str) -> None:
    """Raises NotADirectoryError, naming flag and remedy, if `path` or a parent of it is a file."""
    there = next(part for part in (path, *path.parents) if os.path.lexists(part))
    if not there.is_dir():
        raise NotADirectoryError(f'{flag}={path}: {there} is not a directory; give another path')


def replace_part(path: Path, name: str, text: str) -> None:
    """Replaces the text between the lines <!-- name --> and <!-- /name --> of a page.

    Raises ValueError if the page has no such part.
    """
    before, found, rest = path.read_text('utf-8').partition(f'<!-- {name} -->\n')
    _, ended, after = rest.partition(f'<!-- /{name} -->')
    if not (found and ended):
        raise ValueError(
            f'{path} has no part {name!r}; put <!-- {name} --> and <!-- /{name} --> on lines of their own'
        )
    write_text(path, f'{before}{found}{text}{ended}{after}')


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data`; a reader sees the old file or the new one, never a partial one."""
    temporary = path.with_name(path.name + '.partial')
    temporary.write_bytes(data)
    os.replace(temporary, path)
