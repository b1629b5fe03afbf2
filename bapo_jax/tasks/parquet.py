"""Reads text and number columns from untrusted parquet files. For rows with images see images.py."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from bapo_jax.tasks.jsonl import MOST_FILE, bounded, short

_AT_ONCE = 64  # rows per batch; few, since a value that a file holds once may recur in every row


def column_names(path: Path) -> list[str]:
    """Returns the file's column names. Raises ValueError, naming the file, if it cannot be read."""
    with _naming(path), pyarrow.parquet.ParquetFile(path) as file:
        return file.schema_arrow.names


def parquet_rows(path: Path, wanted: Container[str]) -> Iterator[dict]:
    """Yields the `wanted` columns of each row.

    Raises ValueError, naming the file, if it cannot be read, a text is not UTF-8, or it has more than
    MOST_FILE bytes.
    """
    batches = _batches(path, [name for name in column_names(path) if name in wanted])
    first = size = 0
    for batch in batches:
        size += batch.nbytes
        bounded(size, MOST_FILE, path)
        try:
            rows = rows_in(batch)
        except UnicodeDecodeError:
            bad = next(i for i in range(batch.num_rows) if not _decodes(batch.slice(i, 1)))
            raise ValueError(
                f'{path}, row {first + bad + 1}: not UTF-8 text; save the file as UTF-8'
            ) from None
        yield from rows
        first += batch.num_rows


def _batches(path: Path, columns: list[str]) -> Iterator[pyarrow.RecordBatch]:
    with _naming(path), pyarrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(_AT_ONCE, columns=columns, use_threads=False)


def rows_in(batch: pyarrow.RecordBatch) -> list[dict]:
    """Returns a batch's rows. Decimals, which JSON lacks, become int or float. Raises UnicodeDecodeError."""
    rows = batch.to_pylist()
    for field in batch.schema:
        if 'decimal' in str(field.type):
            rows = [row | {field.name: _number(row[field.name])} for row in rows]
    return rows


def _number(value: Any) -> Any:
    """Converts a Decimal to an int if it is whole, else to a float; also within lists and objects."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list):
        return [_number(part) for part in value]
    return {name: _number(part) for name, part in value.items()} if isinstance(value, dict) else value


def _decodes(batch: pyarrow.RecordBatch) -> bool:
    try:
        batch.to_pylist()
    except UnicodeDecodeError:
        return False
    return True


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(
            f'{path}: not a readable parquet file ({short(error)}); download or write it again'
        ) from error
