"""Reads lines of JSON from outside. Every error names file and row."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

# The most that is read of a file, decompressed: 0.8 MB on a disk may be 1 GB of text.
MOST_LINE = 2**26
MOST_FILE = 2**32
_MARK = b'\xef\xbb\xbf'  # the byte-order mark of UTF-8: what Windows writes first


def jsonl_rows(path: Path, wanted: str) -> Iterator[tuple[str, dict]]:
    """Yields (file and row, object) for each line of a .jsonl or .jsonl.gz file, or each object of a list in a .json file.

    Blank lines and a byte-order mark are skipped. A list in a list has its places as columns, "0" and so on. Raises ValueError, which
    says what columns were `wanted`, or what limit the file exceeds.
    """
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f'{path}, row {number}'
        try:
            row = json.loads(line.decode('utf-8'))
            if b'\\u' in line:
                json.dumps(row, ensure_ascii=False).encode()  # "\\ud800" is JSON, and no character
        except UnicodeError:
            raise ValueError(f'{where}: not UTF-8 text; save the file as UTF-8') from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f'{where}: not a line of JSON ({short(error)}); mend the line, or write the file again') from None
        if not isinstance(row, dict):
            raise ValueError(f'{where}: expected an object with {wanted}, got {shown(row)}')
        yield where, row


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, decompressed as they are read; of a list in a .json file one line for each of its items."""
    try:
        if path.suffix == '.json':
            bounded(path.stat().st_size, MOST_FILE, path)
            data = path.read_bytes().removeprefix(_MARK)
            yield from _lines_of_list(path, data) if data.lstrip().startswith(b'[') else data.split(b'\n')
            return
        with (gzip.open if path.suffix == '.gz' else open)(path, 'rb') as file:
            size = 0
            while line := file.readline(MOST_LINE + 1):
                size += len(line)
                bounded(len(line), MOST_LINE, f'{path}: a line')
                bounded(size, MOST_FILE, path)
                yield line.removeprefix(_MARK) if size == len(line) else line  # the first
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f'{path}: unreadable or cut short ({short(error)}); fetch or write it again') from error


def bounded(size: int, most: int, what: object) -> None:
    """Raises ValueError, naming `what` and the limit, where it has more than `most` bytes."""
    if size > most:
        raise ValueError(f'{what} has more than {most >> 20} MiB, the most that is read; split it, or write the file again')


def _lines_of_list(path: Path, data: bytes) -> list[bytes]:
    try:
        return [json.dumps(dict(enumerate(row)) if isinstance(row, list) else row).encode() for row in json.loads(data.decode('utf-8'))]
    except UnicodeError:
        raise ValueError(f'{path}: not UTF-8 text; save the file as UTF-8') from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{path}: not a list in JSON ({short(error)}); mend it, or write the file again') from None


def short(text: object) -> str:
    """A text, or another error's message, as an error message has it: on one line, cut to 120 characters."""
    text = ' '.join(str(text).split())
    return text if len(text) <= 120 else f'{text[:117]}...'


def shown(value: object) -> str:
    """A value of the data as an error message shows it: as `short`, a text in quotes, so that its kind is seen."""
    return short(repr(value))
