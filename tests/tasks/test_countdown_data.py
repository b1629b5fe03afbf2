"""The generator draws what it promises, the test sets never change, and a bad source is refused with its row and the remedy."""

import gzip
import hashlib
import itertools
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hub_stub import folder_files

from bapo_jax.tasks.countdown.problems import (
    BENCHMARKS,
    benchmark,
    generate,
    problem_key,
    solvable,
    test_problems as fixed_problems,
    training_problems,
)
from bapo_jax.tasks.countdown import problems as countdown_problems

SHARED = Path(__file__).resolve().parents[3] / 'shared' / 'data'
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason='the shared data directory is absent')

ROWS = [{'nums': [44, 19, 35], 'target': 98}, {'nums': [63, 95, 96], 'target': 64}, {'nums': [95, 11, 56], 'target': 28}]
PROBLEMS = [{'numbers': row['nums'], 'target': row['target']} for row in ROWS]


# ---- solvable ---------------------------------------------------------------------------------------------------------


def reachable(numbers):
    """All values of the numbers, by the pair recursion of the published procedure, with no shortcut: the reference."""
    if len(numbers) == 1:
        return {numbers[0]}
    values = set()
    for a, b in itertools.permutations(range(len(numbers)), 2):
        rest = [n for k, n in enumerate(numbers) if k not in (a, b)]
        x, y = numbers[a], numbers[b]
        results = {x + y, x * y}
        if x >= y:
            results.add(x - y)
            if y and x % y == 0:
                results.add(x // y)
        for result in results:
            values |= reachable([*rest, result])
    return values


@pytest.mark.parametrize(('size', 'cases', 'top'), [(1, 20, 20), (2, 200, 20), (3, 100, 30), (4, 20, 99), (3, 100, 3), (4, 15, 2)])
def test_solvable_equals_the_pair_recursion(size, cases, top):
    draw = random.Random(size * 1000 + top)
    for _ in range(cases):
        numbers = [draw.randint(0, top) for _ in range(size)]  # zeros and ones included
        values = reachable(numbers)
        for target in [*range(-2, 110), *draw.sample(sorted(values), min(20, len(values)))]:
            assert solvable(numbers, target) == (target in values), (numbers, target)


@pytest.mark.parametrize(('numbers', 'target'), [([44, 19, 35], 98), ([63, 95, 96], 64), ([95, 11, 56], 28), ([49, 41, 73], 17)])
def test_the_first_problems_of_the_public_set_are_solvable(numbers, target):
    assert solvable(numbers, target)


def test_fractions_and_negative_numbers_on_the_way_do_not_count():
    assert not solvable([3, 3, 7, 7], 24)  # 7 * (3 + 3/7)
    assert solvable([2, 5, 4], 1)  # (5 - 4) needs no sign: |2*2 - 5| and the like are larger - smaller
    assert not solvable([1, 1], 50)


# ---- generate ---------------------------------------------------------------------------------------------------------


def test_generated_problems_are_solvable_distinct_and_in_range():
    problems = generate(400, seed=3)
    assert len(problems) == 400
    assert len({problem_key(p) for p in problems}) == 400
    assert {len(p['numbers']) for p in problems} == {3, 4}
    for p in problems:
        assert all(type(n) is int and 1 <= n <= 99 for n in p['numbers'])
        assert type(p['target']) is int and 10 <= p['target'] <= 100
        json.dumps(p)
    for p in problems[:60]:
        assert p['target'] in reachable(p['numbers'])
    # uniform: about half of each size, and targets all over the range
    assert 160 < sum(len(p['numbers']) == 3 for p in problems) < 240
    assert 50 < sum(p['target'] for p in problems) / 400 < 60
    assert len({p['target'] for p in problems}) > 80


def test_generation_depends_on_the_seed_alone():
    assert generate(50, seed=3) == generate(50, seed=3)
    assert generate(50, seed=3)[:20] == generate(20, seed=3)
    assert generate(50, seed=3) != generate(50, seed=4)


def test_excluded_problems_do_not_come():
    first = generate(50, seed=3)
    again = generate(50, seed=3, exclude=frozenset(map(problem_key, first)))
    assert not {problem_key(p) for p in first} & {problem_key(p) for p in again}


def test_generation_finds_all_there_are_and_then_gives_up(monkeypatch):
    monkeypatch.setattr(countdown_problems, 'NUMBERS', (8, 11))
    monkeypatch.setattr(countdown_problems, 'TARGETS', (16, 22))  # the sums of two such numbers: each can be reached
    pairs = itertools.combinations_with_replacement(range(8, 12), 2)
    supply = sum(16 <= value <= 22 for pair in pairs for value in reachable(list(pair)))
    assert len(generate(supply, seed=0, sizes=(2,))) == supply
    with pytest.raises(ValueError, match=rf'found only {supply} of {supply + 1} different problems'):
        generate(supply + 1, seed=0, sizes=(2,))


def test_bad_arguments_of_generate():
    with pytest.raises(ValueError, match='count'):
        generate(-1, seed=0)
    for sizes in [(), (1, 3), (7,)]:
        with pytest.raises(ValueError, match='sizes'):
            generate(1, seed=0, sizes=sizes)
    assert generate(0, seed=0) == []


# ---- test sets --------------------------------------------------------------------------------------------------------


def test_the_test_sets_never_change():
    """Scores are comparable between versions and machines only while these hold."""
    digests = {n: hashlib.sha256(json.dumps(fixed_problems(n), sort_keys=True).encode()).hexdigest()[:16] for n in BENCHMARKS}
    assert digests == {'cd34': 'a648c1c68aac8080', 'cd4': 'ccdf7a3bc0bc645c'}


def test_the_test_sets_are_as_described_and_disjoint():
    cd34, cd4 = fixed_problems('cd34'), fixed_problems('cd4')
    assert len(cd34) == len(cd4) == 200
    assert {len(p['numbers']) for p in cd34} == {3, 4} and {len(p['numbers']) for p in cd4} == {4}
    assert len({problem_key(p) for p in cd34 + cd4}) == 400
    assert benchmark('cd34') == cd34 and benchmark('cd4') == cd4
    assert all(solvable(p['numbers'], p['target']) for p in cd34 + cd4)


def test_changing_what_was_returned_changes_no_test_set():
    fixed_problems('cd34')[0]['numbers'].append(1)
    assert len(fixed_problems('cd34')[0]['numbers']) in (3, 4)
    assert fixed_problems('cd34') == generate(200, seed=1001)


@pytest.mark.parametrize('seed', [0, 1001, 1002])  # also with the seeds of the test sets themselves
def test_training_problems_are_disjoint_from_the_test_sets(seed):
    train = training_problems('generated', limit=300, seed=seed)
    assert len(train) == 300
    tests = {problem_key(p) for name in BENCHMARKS for p in fixed_problems(name)}
    assert not tests & {problem_key(p) for p in train}


@pytest.mark.parametrize('limit', [0, -1])
def test_generating_needs_a_limit(limit):
    with pytest.raises(ValueError, match=r'task\.limit'):
        training_problems('generated', limit=limit, seed=0)


# ---- files ------------------------------------------------------------------------------------------------------------


def write(path, rows):
    if path.suffix == '.parquet':
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        data = ''.join(json.dumps(row) + '\n' for row in rows).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
    return str(path)


@pytest.mark.parametrize('name', ['a.parquet', 'a.jsonl', 'a.jsonl.gz'])
def test_reads_every_format(tmp_path, name):
    path = write(tmp_path / name, [{'id': 'x', **row} for row in ROWS])
    for limit, expected in [(0, PROBLEMS), (-1, PROBLEMS), (2, PROBLEMS[:2]), (99, PROBLEMS)]:
        assert training_problems(path, limit=limit, seed=0) == expected
    assert benchmark(path) == PROBLEMS


def test_a_file_need_not_end_in_a_line_break(tmp_path):
    path = tmp_path / 'a.jsonl'
    path.write_text('\n'.join(json.dumps(row) for row in ROWS))
    assert benchmark(str(path)) == PROBLEMS


@needs_shared
def test_reads_the_shared_training_file():
    problems = training_problems(str(SHARED / 'countdown_synth_cd34_train_4000.jsonl.gz'), limit=1000, seed=0)
    assert len(problems) == 1000
    assert all(solvable(p['numbers'], p['target']) for p in problems[:200])


def test_test_problems_in_a_training_file_are_dropped_before_the_limit_counts(tmp_path):
    leak = fixed_problems('cd34')[0]
    leaked = {'nums': leak['numbers'][::-1], 'target': leak['target']}
    path = write(tmp_path / 'a.jsonl', [leaked, *ROWS])
    assert training_problems(path, limit=2, seed=0) == PROBLEMS[:2]
    assert len(benchmark(path)) == 4  # one's own test set is left as it is
    with pytest.raises(ValueError, match='problems of cd34 or cd4'):
        training_problems(write(tmp_path / 'b.jsonl', [leaked]), limit=0, seed=0)


GOOD = '{"nums": [1, 2], "target": 3}'
BAD_ROWS = {
    'no nums': ('{"target": 3}', r"column 'nums' is missing"),
    'no target': ('{"nums": [1, 2]}', r"column 'target' is missing"),
    'nums a string': ('{"nums": "1 2", "target": 3}', '"nums" must be a list'),
    'nums with a fraction': ('{"nums": [1, 2.5], "target": 3}', '"nums" must be a list'),
    'nums with true': ('{"nums": [1, true], "target": 3}', '"nums" must be a list'),
    'nums with null': ('{"nums": [1, null], "target": 3}', '"nums" must be a list'),
    'negative nums': ('{"nums": [1, -2], "target": 3}', '"nums" must be a list'),
    'nums empty': ('{"nums": [], "target": 3}', '"nums" must be a list'),
    'target a string': ('{"nums": [1, 2], "target": "3"}', '"target" must be an integer'),
    'target a fraction': ('{"nums": [1, 2], "target": 3.5}', '"target" must be an integer'),
    'target null': ('{"nums": [1, 2], "target": null}', '"target" must be an integer'),
    'target true': ('{"nums": [1, 2], "target": true}', '"target" must be an integer'),
    'not an object': ('[1, 2]', 'expected an object'),
    'cut short': ('{"nums": [1, 2], "tar', 'not a line of JSON'),
    'nested without end': ('[' * 100_000, 'not a line of JSON'),
}


@pytest.mark.parametrize('name', BAD_ROWS)
def test_a_bad_row_is_named(tmp_path, name):
    line, message = BAD_ROWS[name]
    path = tmp_path / 'a.jsonl'
    path.write_text(f'{GOOD}\n{GOOD}\n{line}')
    for read in (benchmark, lambda p: training_problems(p, limit=1, seed=0)):  # also where the limit would not reach it
        with pytest.raises(ValueError, match=rf'a\.jsonl, row 3: .*{message}'):
            read(str(path))


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / 'a.jsonl'
    path.write_bytes(GOOD.encode() + b'\n{"nums": [1, 2], "target": 3, "note": "\xe9"}\n')
    with pytest.raises(ValueError, match=r'a\.jsonl, row 2: not UTF-8'):
        benchmark(str(path))


@pytest.mark.parametrize('name', ['a.parquet', 'a.jsonl.gz'])
@pytest.mark.parametrize('damage', ['cut', 'garbage', 'empty', 'flipped'])
def test_a_damaged_file(tmp_path, name, damage):
    path = Path(write(tmp_path / name, ROWS * 100))
    data = path.read_bytes()
    half = len(data) // 2
    damaged = {'cut': data[:half], 'garbage': b'what is this' * 9, 'empty': b'', 'flipped': data[:half] + b'\xff' * 40}
    path.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=rf'{name}: .*(again|no rows)'):
        benchmark(str(path))


@pytest.mark.parametrize(
    ('rows', 'message'),
    [
        ([{'numbers': [1, 2], 'target': 3}], r"column 'nums' is missing; the file has numbers, target"),
        ([{'nums': [1, 2]}], r"column 'target' is missing"),
        ([{'nums': [1, 2], 'target': 3}, {'nums': None, 'target': 3}], 'row 2: "nums" must be a list'),
        ([{'nums': [1.0, 2.0], 'target': 3}], 'row 1: "nums" must be a list'),
        ([{'nums': '12', 'target': 3}], 'row 1: "nums" must be a list'),
        ([{'nums': [1, 2], 'target': 3.0}], 'row 1: "target" must be an integer'),
    ],
)
def test_a_bad_parquet_file(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        benchmark(write(tmp_path / 'a.parquet', rows))


def test_a_source_without_rows(tmp_path):
    schema = pa.schema({'nums': pa.list_(pa.int64()), 'target': pa.int64()})
    pa.parquet.write_table(schema.empty_table(), tmp_path / 'a.parquet')
    for path in (str(tmp_path / 'a.parquet'), write(tmp_path / 'a.jsonl', []), write(tmp_path / 'a.jsonl.gz', [])):
        with pytest.raises(ValueError, match='no rows'):
            training_problems(path, limit=0, seed=0)


def test_a_source_that_is_not_there(tmp_path):
    for name in ('a.parquet', 'a.jsonl', 'a.jsonl.gz'):
        for read in (benchmark, lambda p: training_problems(p, limit=0, seed=0)):
            with pytest.raises(FileNotFoundError, match=f'{name}: no such file'):
                read(str(tmp_path / name))


def test_a_source_of_an_unknown_kind(tmp_path):
    (tmp_path / 'a.csv').write_text('nums,target\n')
    (tmp_path / 'folder.jsonl').mkdir()
    for source in (tmp_path / 'a.csv', tmp_path, tmp_path / 'folder.jsonl'):
        with pytest.raises(ValueError, match=r'expected a file ending in \.parquet'):
            training_problems(str(source), limit=0, seed=0)
    with pytest.raises(ValueError, match=r"task\.train is 'nonsense'; expected 'generated'"):
        training_problems('nonsense', limit=0, seed=0)
    with pytest.raises(ValueError, match=r"unknown countdown benchmark 'aime24'; choose one of cd34, cd4"):
        benchmark('aime24')
    with pytest.raises(ValueError, match='choose one of cd34, cd4'):
        fixed_problems('cd5')


# ---- the hub ----------------------------------------------------------------------------------------------------------


def test_a_hub_data_set_is_read_from_its_train_files_in_order(tmp_path, hub_stub):
    (tmp_path / 'data').mkdir()
    write(tmp_path / 'data' / 'train-00001-of-00002.parquet', ROWS[2:])
    write(tmp_path / 'data' / 'train-00000-of-00002.parquet', ROWS[:2])
    write(tmp_path / 'data' / 'test-not-train.parquet', [{'nums': [1], 'target': 1}])
    hub_stub.repos['datasets/owner/na-me.4'] = {'main': folder_files(tmp_path)}
    assert training_problems('owner/na-me.4', limit=0, seed=0) == PROBLEMS
    assert sorted(hub_stub.files_asked()) == ['data/train-00000-of-00002.parquet', 'data/train-00001-of-00002.parquet']


def test_a_hub_that_cannot_be_reached():
    with pytest.raises(ConnectionError, match=r"task\.train='owner/name' is not a local file, .*HF_HUB_OFFLINE is set"):
        training_problems('owner/name', limit=0, seed=0)


def test_a_missing_file_is_no_matter_of_another_field(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'none\.parquet: no such file; check the path$'):
        benchmark(str(tmp_path / 'none.parquet'))


def test_a_text_in_place_of_a_list_is_seen_to_be_one(tmp_path):
    (tmp_path / 'a.jsonl').write_text('{"nums": "[44, 19, 35]", "target": 98}\n')
    with pytest.raises(ValueError, match=r"non-negative integers, got '\[44, 19, 35\]'; correct"):
        benchmark(str(tmp_path / 'a.jsonl'))
