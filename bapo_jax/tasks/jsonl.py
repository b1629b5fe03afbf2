"""Reads untrusted JSON lines. Every error names the file and row."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

# Most bytes to read, after decompression: 0.8 MB on a disk may be 1 GB of text.
MOST_LINE = 2**26
MOST_FILE = 2**32
_MARK = b'\xef\xbb\xbf'  # UTF-8's byte-order mark, which Windows writes first


def jsonl_rows(path: Path, wanted: str) -> Iterator[tuple[str, dict]]:
    """Yields (file and row, object) for each line of a .jsonl or .jsonl.gz file, or item of a .json list.

    Skips blank lines and a byte-order mark. A list within a list becomes an object with the columns "0", "1"
    and so on. Raises ValueError, naming the `wanted` columns or the limit, if a row is malformed or the file
    is too large.
    """
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f'{path}, row {number}'
        try:
            row = json.loads(line.decode('utf-8').rstrip())
            if b'\\u' in line:
                json.dumps(row, ensure_ascii=False).encode()  # "\\ud800" is valid JSON, but not a character
        except UnicodeError:
            raise ValueError(f'{where}: not UTF-8 text; save the file as UTF-8') from None
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f'{where}: not a line of JSON ({flaw(error)}); correct the line, or write the file again'
            ) from None
        if not isinstance(row, dict):
            raise ValueError(f'{where}: expected an object with {wanted}, got {shown(row)}')
        yield where, row


def _lines(path: Path) -> Iterator[bytes]:
    """Yields a file's lines, decompressed as they are read; for a list in a .json file, one line per item."""
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
                yield line.removeprefix(_MARK) if size == len(line) else line  # the first line
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f'{path}: unreadable or truncated ({short(error)}); download or write it again'
        ) from error


def bounded(size: int, most: int, what: object) -> None:
    """Raises ValueError, naming `what` and the limit, if `size` is more than `most` bytes."""
    if size > most:
        raise ValueError(f'{what} has more than {most >> 20} MiB, which is the limit; split or shorten it')


def _lines_of_list(path: Path, data: bytes) -> list[bytes]:
    try:
        return [
            json.dumps(dict(enumerate(row)) if isinstance(row, list) else row).encode()
            for row in json.loads(data.decode('utf-8'))
        ]
    except UnicodeError:
        raise ValueError(f'{path}: not UTF-8 text; save the file as UTF-8') from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'{path}: not a JSON list ({short(error)}); correct it, or write the file again'
        ) from None


def flaw(error: Exception) -> str:
    """Returns what is wrong with one line of JSON, without the decoder's own count of lines."""
    found = isinstance(error, json.JSONDecodeError)
    return f'{error.msg}: character {error.pos + 1}' if found else short(error)


def short(text: object) -> str:
    """Returns a text, or an error's message, for an error message: on one line, cut to 120 characters."""
    text = ' '.join(str(text).split())
    return text if len(text) <= 120 else f'{text[:117]}...'


def shown(value: object) -> str:
    """Returns a value for an error message, as `short` does; a text is quoted, to show its type."""
    return short(repr(value))
