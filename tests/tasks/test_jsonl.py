"""Lines of JSON from outside: each row with its place, and what is wrong named with file and row."""

import gzip
import tracemalloc
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet
import pytest

from bapo_jax.tasks import jsonl, parquet
from bapo_jax.tasks.jsonl import jsonl_rows, short, shown
from bapo_jax.tasks.parquet import parquet_rows


@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.gz'])
def test_rows_come_with_their_place_and_blank_lines_count_but_are_no_rows(tmp_path, name):
    file, data = tmp_path / name, '{"a": 1}\n\n  \n{"a": "é"}'.encode()
    file.write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
    assert list(jsonl_rows(file, 'a')) == [(f'{file}, row 1', {'a': 1}), (f'{file}, row 4', {'a': 'é'})]


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        (b'{"a": ', r'a\.jsonl, row 2: not a line of JSON \(Expecting value: character 6\); correct the line'),
        (b'[' * 100_000, r'a\.jsonl, row 2: not a line of JSON'),
        (b'{"a": "\xe9"}', r'a\.jsonl, row 2: not UTF-8 text; save the file as UTF-8'),
        (b'[1]', r'a\.jsonl, row 2: expected an object with numbers and target, got \[1\]'),
    ],
)
def test_a_bad_line_is_refused_by_file_and_row_after_the_rows_before(tmp_path, line, message):
    file = tmp_path / 'a.jsonl'
    file.write_bytes(b'{"a": 1}\n' + line + b'\n')
    rows = jsonl_rows(file, 'numbers and target')
    assert next(rows)[1] == {'a': 1}
    with pytest.raises(ValueError, match=message):
        next(rows)


def test_a_file_that_is_cut_short_or_missing_is_refused_by_name(tmp_path):
    file = tmp_path / 'a.jsonl.gz'
    file.write_bytes(gzip.compress(b'{"a": 1}\n' * 100)[:-9])
    for path in (file, tmp_path / 'none.jsonl'):
        with pytest.raises(ValueError, match=rf'{path.name}: unreadable or truncated .*; download or write it again'):
            list(jsonl_rows(path, 'a'))


@pytest.mark.parametrize('name', ['a.jsonl', 'a.jsonl.gz', 'a.json'])
def test_no_more_is_read_than_the_limits_say(tmp_path, name, monkeypatch):
    file, row = tmp_path / name, b'{"a": "' + b'x' * 80 + b'"}\n'
    file.write_bytes(gzip.compress(row * 3) if name.endswith('.gz') else row * 3)
    monkeypatch.setattr(jsonl, 'MOST_FILE', 3 * len(row))
    assert len(list(jsonl_rows(file, 'a'))) == 3
    monkeypatch.setattr(jsonl, 'MOST_FILE', 3 * len(row) - 1)
    with pytest.raises(ValueError, match=rf'{name} has more than 0 MiB, which is the limit'):
        list(jsonl_rows(file, 'a'))


def test_a_line_is_read_to_its_limit_and_never_whole(tmp_path, monkeypatch):
    """Of 0.3 MB that would become 64 MB."""
    monkeypatch.setattr(jsonl, 'MOST_LINE', 2**20)
    file = tmp_path / 'a.jsonl.gz'
    file.write_bytes(gzip.compress(b'{"a": 1}\n' + b' ' * 2**26 + b'\n', 1))
    rows = jsonl_rows(file, 'a')
    assert next(rows)[1] == {'a': 1}
    tracemalloc.start()
    with pytest.raises(ValueError, match='a.jsonl.gz: a line has more than 1 MiB'):
        next(rows)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**23


def test_a_parquet_file_is_read_to_the_limit_though_its_pages_are_small(tmp_path, monkeypatch):
    file = tmp_path / 'a.parquet'
    pa.parquet.write_table(pa.table({'a': ['x' * 1000] * 1000, 'b': [1] * 1000}), file)
    assert file.stat().st_size < 10_000 and len(list(parquet_rows(file, 'a'))) == 1000
    monkeypatch.setattr(parquet, 'MOST_FILE', 500_000)
    rows = parquet_rows(file, 'a')
    assert next(rows) == {'a': 'x' * 1000}
    with pytest.raises(ValueError, match=r'a\.parquet has more than 0 MiB'):
        list(rows)


def test_decimal_numbers_of_a_parquet_file_are_ordinary_ones(tmp_path):
    values = [{'a': Decimal('5.00'), 'b': [Decimal('0.25')], 'c': {'d': None}}, {'a': None, 'b': [], 'c': {'d': Decimal(-3)}}]
    pa.parquet.write_table(pa.Table.from_pylist(values), tmp_path / 'a.parquet')
    read = list(parquet_rows(tmp_path / 'a.parquet', ('a', 'b', 'c')))
    assert repr(read) == repr([{'a': 5, 'b': [0.25], 'c': {'d': None}}, {'a': None, 'b': [], 'c': {'d': -3}}])


def test_a_value_in_a_message_is_one_short_line():
    assert short('a\n  b') == 'a b'
    assert shown([1, '2']) == "[1, '2']" and shown('[1,\n2]') == r"'[1,\n2]'" and shown(5) == '5'
    assert short('x' * 121) == 'x' * 117 + '...' and short('x' * 120) == 'x' * 120
