"""Writes what the rows say: page.md with the tables that others cite, and some of the tables of
docs/evidence.md.

    python -m studies.second_proof.page
    python -m studies.second_proof.page --all    # writes nothing, and prints every table

Part 1 must be whole. The others are written once they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from bapo_jax.machine.files import replace_part, write_text
from studies.lib.rows import ROOT, Row
from studies.second_proof import analysis, guard, hard_analysis, large, matched, posthoc, table
from studies.second_proof.guard import wanted_again, wanted_guard
from studies.second_proof.hard import wanted_hard
from studies.second_proof.rows import of_today, read_rows, wanted
from studies.second_proof.table import wanted_table

PAGE = Path(__file__).with_name('page.md')
EVIDENCE = ROOT / 'docs' / 'evidence.md'
LARGER = {'Part 5': large.FINAL, 'Part 6': large.OWN}
SECTIONS = {
    'Part 1: the scan of learning rates': (analysis.rates_table,),
    'Part 1: the contrasts': (analysis.primary_table, analysis.guard_table, analysis.exploratory_table),
    'Part 1: the arms': (analysis.arms_table,),
    'Part 1: how problems move, by the first answers of the base': (analysis.polarisation_table,),
    "Part 1: how often a prompt's next group is mixed, by what is known of it": (analysis.moves_table,),
    'Part 2: the scans': (hard_analysis.scan_table,),
    'Part 2: the best of each kind, five seeds': (hard_analysis.kinds_table, hard_analysis.costs_table),
    'Part 2: from a base that searches': (hard_analysis.search_table, hard_analysis.search_contrasts),
    'Part 3: thirteen methods': (table.table,),
    'Part 3: the scan of learning rates': (table.scan_table,),
    "Part 4: the quickstart's guard": (guard.outcome, guard.five_seeds_table, guard.scan_table),
    'Part 5: a larger policy': large.TABLES[large.FINAL],
    'Part 6: a larger policy, every arm at its own best rate': large.TABLES[large.OWN],
    "Part 7: the quickstart's guard, once more": (guard.outcome_again,),
    'Part 8: rates matched': matched.TABLES,
    'Part 8: a second base': (matched.second_table,),
    **posthoc.TABLES,
}
# The sections of page.md. The other tables stand in docs/evidence.md, or are cited nowhere.
CITED = (
    'Part 1: the contrasts',
    'Part 1: the arms',
    "Part 1: how often a prompt's next group is mixed, by what is known of it",
    'Part 3: thirteen methods',
    'Post hoc: what RX - R could show of X2',
    "Post hoc: beside the paper's percent",
    'Post hoc: what X3 costs in the quickstart',
)
PUBLISHED = {  # what docs/evidence.md has between <!-- NAME --> and <!-- /NAME -->, once the part is whole
    'guard': ('Part 7', guard.outcome_again),
    large.FINAL: ('Part 5', large.TABLES[large.FINAL][0]),
    large.OWN: ('Part 6', large.TABLES[large.OWN][0]),
}


def whole(rows: Sequence[Row]) -> set[str]:
    """The parts of which no run is missing, and parts 5 and 6 where enough of their seeds are there. Post
    hoc: parts 1 and 5.
    """
    missing = {
        'Part 1': wanted,
        'Part 2': wanted_hard,
        'Part 3': wanted_table,
        'Part 4': wanted_guard,
        'Part 7': wanted_again,
        'Part 8': matched.wanted_matched,
    }
    there = {part for part, jobs in missing.items() if not jobs(rows)}
    there |= {name for name, part in LARGER.items() if len(large.seeds(rows, part)) >= large.LEAST}
    return there | ({'Post hoc'} if {'Part 1', 'Part 5'} <= there else set())


def page(rows: Sequence[Row]) -> str:
    """The text of page.md."""
    head = (
        '# Second proof: the tables that are cited\n\n'
        'Written from rows.jsonl; `python -m studies.second_proof.page --all` prints every other table too. '
        '[README.md](README.md) has the answer. Brackets are 95 % intervals by t over seeds.\n\n'
    )
    return head + sections(rows, CITED)


def sections(rows: Sequence[Row], titles: Collection[str] = SECTIONS.keys()) -> str:
    """The sections with these titles of the parts that are whole."""
    parts, text = whole(rows), []
    for title, tables in SECTIONS.items():
        if title in titles and title.partition(':')[0] in parts:
            text += [f'## {title}', *(make(rows) for make in tables)]
    return '\n\n'.join(text) + '\n'


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--all', action='store_true', help='write nothing, and print every table')
    every = parser.parse_args(arguments).all
    rows = of_today(read_rows())
    if missing := wanted(rows):
        sys.exit(
            f'error: {len(missing)} runs are missing; python -m studies.second_proof.run goes on with them'
        )
    if every:
        print(sections(rows), end='')
        return
    write_text(PAGE, page(rows))
    there = whole(rows)
    for name, (part, make) in PUBLISHED.items():
        if part in there:
            replace_part(EVIDENCE, name, make(rows) + '\n')


if __name__ == '__main__':
    main(sys.argv[1:])
