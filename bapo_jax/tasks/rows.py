"""Reads rows of untrusted .parquet or JSON files, with their locations. Every error names file and row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from bapo_jax.tasks.jsonl import jsonl_rows
from bapo_jax.tasks.parquet import column_names, parquet_rows

FILE_ENDINGS = ('.parquet', '.jsonl', '.jsonl.gz', '.json')


def rows_of(
    path: str | Path, wanted: str, read: Callable[[str], bool] = lambda column: True
) -> Iterator[tuple[str, dict]]:
    """Yields (file and row, row) for each row of a file.

    In a parquet file, only columns for which `read` is true are read; the others are None, so that errors can
    name them. Raises FileNotFoundError, or ValueError, which may name the `wanted` columns.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f'{path}: no such file; check the path')
    if not path.is_file() or not path.name.endswith(FILE_ENDINGS):
        raise ValueError(f'{path}: expected a file ending in {", ".join(FILE_ENDINGS)}')
    row = None
    for row in _parquet_rows(path, read) if path.suffix == '.parquet' else jsonl_rows(path, wanted):
        yield row
    if row is None:
        raise ValueError(f'{path}: no rows; expected columns {wanted}')


def _parquet_rows(path: Path, read: Callable[[str], bool]) -> Iterator[tuple[str, dict]]:
    columns = column_names(path)
    rows = parquet_rows(path, [column for column in columns if read(column)])
    yield from (
        (f'{path}, row {i}', {**dict.fromkeys(columns), **row}) for i, row in enumerate(rows, start=1)
    )
