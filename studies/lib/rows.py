"""Rows of a study: a JSON line a run, open or sealed, and Markdown tables of them."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


class Job(NamedTuple):
    """A run: the part of its study, what is trained, its learning rate and its seed."""

    part: str
    arm: str
    rate: float
    seed: int


def job_of(row: Row) -> Job:
    return Job(row['part'], row['arm'], row['rate'], row['seed'])


def rows_in(file: Path) -> list[Row]:
    """The rows of a file; none where it is not there yet."""
    return [json.loads(line) for line in file.read_text('utf-8').splitlines()] if file.is_file() else []


def append_row(file: Path, row: Row) -> None:
    with file.open('a', encoding='utf-8') as f:
        f.write(json.dumps(row) + '\n')


def sealed(row: Row) -> Row:
    """The row with its answers compressed, beside their hash, so that nobody reads an outcome by accident."""
    answers = json.dumps(row['correct']).encode()
    return {
        **{name: value for name, value in row.items() if name != 'correct'},
        'sealed': base64.b85encode(zlib.compress(answers)).decode(),
        'sha256': hashlib.sha256(answers).hexdigest(),
    }


def opened(row: Row) -> Row:
    """The row with its answers; one that is not sealed comes back as it is.

    Raises ValueError if the answers are not those of the hash.
    """
    if 'sealed' not in row:
        return row
    answers = zlib.decompress(base64.b85decode(row['sealed']))
    if hashlib.sha256(answers).hexdigest() != row['sha256']:
        raise ValueError(
            f'{row["arm"]}, seed {row["seed"]}: the answers have another hash; restore rows.jsonl'
        )
    return {**row, 'correct': json.loads(answers)}


def answered(file: Path) -> list[int]:
    """How many of the samples of each problem are right, benchmark after benchmark, by an evaluation's
    summary.
    """
    benchmarks = json.loads(file.read_text('utf-8'))['benchmarks'].values()
    return [count for scores in benchmarks for count in scores['correct']]


def markdown_table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    first, *rest = ('| ' + ' | '.join(cells) + ' |' for cells in (titles, *lines))
    return '\n'.join([first, '|---' * len(titles) + '|', *rest])
