"""Writes the table of docs/reference/methods.md from the methods table (bapo_jax/methods/).

    python -m docs.reference.methods
"""

from __future__ import annotations

from pathlib import Path

from bapo_jax.machine.files import replace_part
from bapo_jax.methods import METHODS, differs_from

PAGE = Path(__file__).with_suffix('.md')
COLUMNS = (
    'method', 'what it is', 'as', 'which prompts', 'which policy answers', 'what is trained on', 'how it learns', 'source',
)  # fmt: skip
BASES = ['grpo', 'bapo', 'bapo_tuned']  # rows that the table on the page compares others with


def markdown() -> str:
    """The table for docs/reference/methods.md: the four choices of each row, where they differ from the row it names."""
    lines = [f'| {" | ".join(COLUMNS)} |', '|---' * len(COLUMNS) + '|']
    for name, row in METHODS.items():
        other, cells = nearest(name), []
        differing = differs_from(name, other)
        for choice in (row.prompts, row.schedule, row.batch, row.learning):
            cells.append(', '.join(f'`{field}={differing[field]}`' for field in choice if field in differing))
        base = '' if name == other else f'`{other}`'
        lines.append(f'| `{name}` | {row.summary} | {base} | {" | ".join(cells)} | {row.source} |')
    return '\n'.join(lines) + '\n'


def nearest(name: str) -> str:
    """The row of BASES from which this one differs least; for a row of BASES, one before it."""
    others = BASES[: BASES.index(name)] if name in BASES else BASES
    others = [other for other in others if METHODS[other].fields.keys() <= METHODS[name].fields.keys()]
    return min(others, key=lambda other: len(differs_from(name, other)), default='grpo')


if __name__ == '__main__':
    replace_part(PAGE, 'rows', markdown())
