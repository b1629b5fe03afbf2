"""The tables of every row of the methods table are those of the record, and the record has every row."""

from bapo_jax.methods import METHODS
from benchmarks import rows


def test_the_page_has_the_records_numbers():
    record, page = rows.read_record(), rows.PAGE.read_text('utf-8')
    for task, (part, width) in rows.TABLES.items():
        table = rows.table(record, task)
        assert f'<!-- {part} -->\n{table}<!-- /{part} -->' in page
        recorded = {row['row']: row for row in record if row['config'] == task}
        assert set(recorded) == set(METHODS) if task == 'quickstart' else recorded.keys() <= METHODS.keys()
        for name, row in recorded.items():
            assert row['acted'] == list(rows.PARTS.get(name, {}))
            [line] = [line for line in table.splitlines() if line.startswith(f'| `{name}` |')]
            told = f'{row["reward"][0]:.3f} → {row["reward"][1]:.3f}'
            assert line.split(' | ')[1].removesuffix(' |') == told and line.count(' | ') == width - 1


def test_rows_of_other_places_are_named():
    place = {'config': 'diagrams', 'reward': [0.1, 0.2], 'acted': [], 'updates': 1, 'cpu': 'X', 'cores': 2, 'jax': '1', 'date': 'today'}
    record = [place | dict.fromkeys(rows.COUNTS, 1) | {'row': name} for name in ('grpo', 'dapo', 'ppo')]
    assert '; X, 2 cores, jax 1, today)' in rows.table(record, 'diagrams')
    record[1] |= {'cores': 1, 'jax': None}
    assert '; X, 1 core, today: `dapo`; X, 2 cores, jax 1, today: the others)' in rows.table(record, 'diagrams')
