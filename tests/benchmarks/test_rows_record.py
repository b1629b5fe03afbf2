"""The tables of benchmarks/rows.md are those of the record, and the record has every row of the methods table."""

from bapo_jax.methods import METHODS
from benchmarks import rows


def test_the_page_has_the_records_numbers():
    record, page = rows.read_record(), rows.PAGE.read_text('utf-8')
    for part, table in (('measured', rows.table(record)), ('elsewhere', rows.elsewhere(record))):
        assert f'<!-- {part} -->\n{table}<!-- /{part} -->' in page
    recorded = {row['row']: row for row in record if row['config'] == 'quickstart'}
    assert set(recorded) == set(METHODS)
    for name, row in recorded.items():
        [line] = [line for line in rows.table(record).splitlines() if line.startswith(f'| `{name}` |')]
        told = f'{row["reward"][0]:.3f} → {row["reward"][1]:.3f}'
        assert line.split(' | ')[1] == told and line.count(' | ') == len(rows.COLUMNS) - 1
    for config in ('adapter', 'experts'):
        assert {row['row'] for row in record if row['config'] == config} == set(METHODS)
    for row in record:
        assert row['config'] in rows.ON and row['acted'] == list(rows.PARTS.get(row['row'], {}))


def test_rows_of_other_places_are_named():
    place = {'reward': [0.1, 0.2], 'acted': [], 'updates': 1, 'cpu': 'X', 'cores': 2, 'jax': '1', 'date': 'today'}
    record = [
        place | dict.fromkeys(rows.COUNTS, 1) | {'config': config, 'row': name}
        for config in ('quickstart', 'diagrams')
        for name in ('grpo', 'dapo', 'ppo')
    ]
    assert '; X, 2 cores, jax 1, today)' in rows.table(record)
    record[1] |= {'cores': 1, 'jax': None}
    assert '; X, 1 core, today: `dapo`; X, 2 cores, jax 1, today: the others)' in rows.table(record)
    record[4] |= {'reward': [0.4, 0.8], 'cores': 1, 'date': 'sunday'}
    line = '| `python -m benchmarks.rows --on=diagrams` | 3 | 0.200 → 0.400 | X, 1 core, jax 1; X, 2 cores, jax 1; sunday to today |'
    assert rows.elsewhere(record).splitlines()[2:] == [line]
