"""The study's claims and what it decided, by t over seeds: python -m studies.first_proof.restated [--write]

page.md has intervals by bootstrap over problems and seeds together. With three to five seeds those are too
narrow, and nothing corrects for the number of claims. Here a seed is one observation: the mean over its
problems, and over bases if there are several. Holm corrects the claims. The decisions have no correction:
each is a choice that had to be made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bapo_jax.machine.files import replace_part
from studies.first_proof.answer import TOGETHER
from studies.first_proof.rows import Rows, accuracies, difference, held_out, of
from studies.lib.contrasts import Contrast, holm, paired
from studies.lib.rows import markdown_table

ROWS, README = (Path(__file__).with_name(name) for name in ('rows.jsonl', 'README.md'))
ALPHA = 0.05


def all_rows() -> Rows:
    return [json.loads(line) for line in ROWS.read_text('utf-8').splitlines()]


class Claim(NamedTuple):
    words: str
    bases: tuple[str, ...]
    row: str
    other: str


CLAIMS = (
    Claim('X1 + X2 + X3 less GRPO, problems of 4 numbers', ('weak_four',), 'wide', 'grpo'),
    Claim('X1 + X2 + X3 less GRPO, three bases', TOGETHER, 'wide', 'grpo'),
    Claim('what X3 adds, three bases', TOGETHER, 'wide', 'no_x3'),
    Claim('what X2 adds, three bases', TOGETHER, 'wide', 'wide_no_x2'),
    Claim("the paper's settings less GRPO, weak base", ('weak',), 'paper_lr4e-4', 'grpo'),
    Claim('range filter less Gaussian filter, weak base', ('weak',), 'centre', 'gaussian'),
    Claim('v = 5 less v = 1, weak base', ('weak',), 'v5_behaviour_lr2e-4', 'centre'),
    Claim(
        'GRPO with one update a step less GRPO with four, weak base',
        ('weak',),
        'grpo_one_update_lr2e-4',
        'grpo',
    ),
)


class Decision(NamedTuple):
    default: str
    instead: str
    base: str
    row: str
    other: str


DECISIONS = (
    Decision('`rollout.sync_every = 1`', '5', 'weak', 'centre', 'v5_behaviour_lr2e-4'),
    Decision("`replay.fresh_filter = 'range'`", "`'gaussian'`", 'weak', 'centre', 'gaussian'),
    Decision('`replay.use_x3 = True`, of any mixed group', '`False`', 'quickstart', 'wide', 'no_x3'),
    Decision("`learner.anchor = 'behaviour'`", "`'proximal'`", 'weak', 'centre', 'v1_proximal_lr2e-4'),
    Decision('learning rate 5e-5', '2e-4', 'quickstart', 'centre', 'centre_lr2e-4'),
)


def by_seed(rows: Rows, claim: Claim) -> list[float]:
    """The claim's difference at equal steps in points, one number for each seed that all its bases have."""
    of_seed: dict[int, list[float]] = {}
    for base in claim.bases:
        mine = [row for row in rows if row['base'] == base]
        seeds = sorted(
            {row['seed'] for row in of(mine, claim.row)} & {row['seed'] for row in of(mine, claim.other)}
        )
        differences_SxP = difference(mine, claim.row, claim.other, 'steps', held_out(mine))
        for seed, points in zip(seeds, 100 * differences_SxP.mean(axis=1), strict=True):
            of_seed.setdefault(seed, []).append(float(points))
    return [
        float(np.mean(points)) for _, points in sorted(of_seed.items()) if len(points) == len(claim.bases)
    ]


def restated(rows: Rows) -> list[tuple[Contrast, int, bool]]:
    """Each claim's contrast, its number of seeds, and whether Holm over all claims rejects that it is 0."""
    differences = [by_seed(rows, claim) for claim in CLAIMS]
    contrasts = [paired(claim.words, d) for claim, d in zip(CLAIMS, differences, strict=True)]
    return list(zip(contrasts, map(len, differences), holm([c.p for c in contrasts], ALPHA), strict=True))


def table(rows: Rows) -> str:
    lines = []
    for c, seeds, survives in restated(rows):
        points = f'{c.mean:.1f} ({c.interval95[0]:.1f} to {c.interval95[1]:.1f})'
        lines.append([c.name, str(seeds), points, f'{c.p:.4f}', 'yes' if survives else 'no'])
    titles = [
        'compared, at equal steps',
        'seeds',
        'points, 95 % interval by t',
        'p',
        f'survives Holm over {len(CLAIMS)}',
    ]
    return markdown_table(titles, lines)


def contrast_of(
    rows: Rows, base: str, row: str, other: str, benchmark: str = ''
) -> tuple[Contrast, Contrast, int]:
    """row - other from one base at equal steps, by seed: mean@32 and pass@32 in points, and the number of
    seeds.

    On one benchmark, or on those of the kind of problems that the base trains on.
    """
    mine = [x for x in rows if x['base'] == base]
    seeds = {x['seed'] for x in of(mine, row)} & {x['seed'] for x in of(mine, other)}
    mine = [x for x in mine if x['seed'] in seeds]
    a_SxP, b_SxP = (
        accuracies(mine, name, (benchmark,) if benchmark else held_out(mine)) for name in (row, other)
    )
    name = f'{row} - {other}'
    mean, solved = (
        100 * (a - b).mean(axis=1) for a, b in ((a_SxP, b_SxP), ((a_SxP > 0) * 1.0, (b_SxP > 0) * 1.0))
    )
    return paired(name, mean), paired(name, solved), len(seeds)


def decisions_table(rows: Rows) -> str:
    lines = []
    for decision in DECISIONS:
        *scores, seeds = contrast_of(rows, *decision[2:])
        cells = [f'{c.mean:.1f} ({c.interval95[0]:.1f} to {c.interval95[1]:.1f})' for c in scores]
        lines.append([*decision[:3], str(seeds), *cells])
    return markdown_table(['default', 'in place of', 'base', 'seeds', 'mean@32', 'pass@32'], lines)


if __name__ == '__main__':
    for part, text in (('claims', table(all_rows())), ('decisions', decisions_table(all_rows()))):
        print(text, end='\n\n')
        if '--write' in sys.argv[1:]:
            replace_part(README, part, text + '\n')
