"""Reads lines of JSON from outside. Every error names file and row."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path


def jsonl_rows(path: Path, wanted: str) -> Iterator[tuple[str, dict]]:
    """Yields (file and row, object) for each line of a .jsonl or .jsonl.gz file, or each object of a list in a .json file.

    Blank lines and a byte-order mark are skipped. A list in a list has its places as columns, "0" and so on. Raises
    ValueError, which says what columns were `wanted`.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == '.gz' else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f'{path}: unreadable or cut short ({short(error)}); fetch or write it again') from error
    data = data.removeprefix(b'\xef\xbb\xbf')  # of UTF-8: what Windows writes first
    if path.suffix == '.json' and data.lstrip().startswith(b'['):
        data = _lines_of_list(path, data)
    for number, line in enumerate(data.split(b'\n'), start=1):
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
            raise ValueError(f'{where}: expected an object with {wanted}, got {short(row)}')
        yield where, row


def _lines_of_list(path: Path, data: bytes) -> bytes:
    try:
        rows = json.loads(data.decode('utf-8'))
        return b'\n'.join(json.dumps(dict(enumerate(row)) if isinstance(row, list) else row).encode() for row in rows)
    except UnicodeError:
        raise ValueError(f'{path}: not UTF-8 text; save the file as UTF-8') from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{path}: not a list in JSON ({short(error)}); mend it, or write the file again') from None


def short(value: object) -> str:
    """A value as an error message shows it: on one line, cut to 120 characters."""
    text = ' '.join((str(value) if isinstance(value, (str, Exception)) else repr(value)).split())
    return text if len(text) <= 120 else f'{text[:117]}...'
