"""The prose of the page, argument.md: its sections, and what stands in their {placeholders}."""

from __future__ import annotations

import re
from pathlib import Path

from studies.first_proof.answer import TOGETHER
from studies.first_proof.rows import Rows, less_as_text

PLACEHOLDER = re.compile(r'\{([^{}]+)\}')
COMPARISON = re.compile(
    r'(?P<of>\w+): (?P<name>[\w-]+) less (?P<other>[\w-]+)(, equal (?P<at>responses|seconds))?(, on '
    r'(?P<benchmark>\w+))?'
)


def sections() -> list[str]:
    """The parts of argument.md, each from its heading on; what precedes the first heading is for its editors."""
    text = Path(__file__).with_name('argument.md').read_text('utf-8')
    return [part.rstrip('\n') + '\n' for part in re.split('^(?=##? )', text, flags=re.MULTILINE)[1:]]


def row_sets(rows: Rows) -> dict[str, Rows]:
    """What a comparison may name before its colon: every base, and three sets of rows beside them."""
    sets = {
        base: [row for row in rows if row['base'] == base]
        for base in dict.fromkeys(row['base'] for row in rows)
    }
    return sets | {
        'together': [row for row in rows if row['base'] in TOGETHER],
        'weak_four_later': [row for row in sets.get('weak_four', []) if row['seed'] > 1],
        'weak_and_quickstart': [row for row in rows if row['base'] in ('weak', 'quickstart')],
    }


def fill(section: str, sets: dict[str, Rows], facts: dict[str, str]) -> str:
    """The section with a value for every placeholder: a comparison of two settings in one of `sets`, or one
    of `facts`.

    Raises KeyError with the placeholder's name where it is neither.
    """

    def value(placeholder: re.Match[str]) -> str:
        found = COMPARISON.fullmatch(placeholder[1])
        if not found:
            return facts[placeholder[1]]
        kind = (found['benchmark'],) if found['benchmark'] else ()
        return less_as_text(
            sets.get(found['of'], []), found['name'], found['other'], found['at'] or 'steps', kind
        )

    return PLACEHOLDER.sub(value, section)
