"""Writes docs/reference/fields.md from the table of fields (bapo_jax/config/table.py).

    python -m docs.reference.fields
"""

from __future__ import annotations

from pathlib import Path

from bapo_jax.config import rows
from bapo_jax.config.field import Field
from bapo_jax.config.table import SECTIONS, TOP_LEVEL
from bapo_jax.machine.files import replace_part

PAGE = Path(__file__).with_name('fields.md')


def markdown() -> str:
    """A table for the fields beside the sections, and one for each section."""
    parts = [_table('Outside the sections', 'Method, seed and duration.', TOP_LEVEL, '')]
    parts += [_table(f'`{name}`', what, table, f'{name}.') for name, (what, table) in SECTIONS.items()]
    return ''.join(parts) + '\n'


def _table(heading: str, what: str, table: dict, prefix: str) -> str:
    lines = ['| field | default | must be | may change | what it is for |', '| --- | --- | --- | --- | --- |']
    lines += [_line(name, row) for name, row in rows(table, prefix)]
    return f'\n## {heading}\n\n{what}\n\n' + '\n'.join(lines) + '\n'


def _line(name: str, row: Field) -> str:
    change = row.change.value + ('' if row.alike else '; per host')
    cells = (f'`{name}`', f'`{row.default!r}`', row.check.words, change, row.comment)
    return f'| {" | ".join(cell.replace("|", chr(92) + "|") for cell in cells)} |'


if __name__ == '__main__':
    replace_part(PAGE, 'fields', markdown())
