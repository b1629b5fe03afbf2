"""Writes the table of docs/reference/methods.md from the methods table (bapo_jax/methods/).

    python -m docs.reference.methods
"""

from __future__ import annotations

from pathlib import Path

from bapo_jax.machine.files import replace_part
from bapo_jax.methods import METHODS, differs_from

PAGE = Path(__file__).with_suffix('.md')
BASES = ['grpo', 'bapo', 'bapo_tuned']  # rows that the table on the page compares others with


def markdown() -> str:
    """The table for docs/reference/methods.md."""
    lines = ['| method | what it is | fields | source |', '|---|---|---|---|']
    for name, row in METHODS.items():
        other = nearest(name)
        differing = (
            ', '.join(f'`{field}={value}`' for field, value in differs_from(name, other).items()) or '-'
        )
        if other != 'grpo':
            differing = f'`{other}` with {differing}'
        lines.append(f'| `{name}` | {row.summary} | {differing} | {row.source} |')
    return '\n'.join(lines) + '\n'


def nearest(name: str) -> str:
    """The row of BASES from which this one differs least; for a row of BASES, one before it."""
    others = BASES[: BASES.index(name)] if name in BASES else BASES
    others = [other for other in others if METHODS[other].fields.keys() <= METHODS[name].fields.keys()]
    return min(others, key=lambda other: len(differs_from(name, other)), default='grpo')


if __name__ == '__main__':
    replace_part(PAGE, 'rows', markdown())
