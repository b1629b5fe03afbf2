"""Part 8 (plan_8.md): which runs are wanted next, and the tables: python -m studies.second_proof.matched

Opens no answers while a run of the six new cells is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from studies.first_proof.grid import WEAK_BASE
from studies.lib.contrasts import Contrast, holm, mean_interval, of_questions, paired, paired_both
from studies.lib.rows import Job, Row, job_of, markdown_table, opened, sealed
from studies.lib.runner import hash_of
from studies.second_proof.analysis import ALPHA, KS, interval, mean_of, scores, trained, verdict
from studies.second_proof.arms import MATCHED_RATES, SEEDS
from studies.second_proof.rows import accuracy, of_today, passed, read_rows

BASE, CPU = '79d97665f267273a', 'AMD EPYC'  # of part 1; its base as hash_of says
PART_1 = {'G': 1e-4, 'P': 1e-4, 'R': 5e-5, 'RX': 1e-4}  # the rates of the cells that it has
R_RATE = PART_1['R']
NEW = {
    **{arm: next(rate for rate in MATCHED_RATES if rate != had) for arm, had in PART_1.items()},
    'S': R_RATE,
    'M': R_RATE,
}
CELLS = [*PART_1.items(), *NEW.items()]
CONTRASTS = [
    *((a, b, rate) for a, b in (('R', 'G'), ('R', 'P'), ('RX', 'R')) for rate in MATCHED_RATES),
    ('S', 'R', R_RATE),
    ('M', 'R', R_RATE),
]
PREDICTED = {  # points of mean@32 and pass@32, by the plan, whose G - R is R - G here
    ('R', 'G', 5e-5): ('1', '-2 to -1'), ('R', 'G', 1e-4): ('1', '-1'), ('S', 'R', 5e-5): ('0.9', 'falls'),
    ('M', 'R', 5e-5): ('0.5', 'falls'),
}  # fmt: skip
SECOND_SEEDS = SEEDS[:4]
ON_SECOND = [*(('second_' + arm, rate) for arm in 'GR' for rate in MATCHED_RATES), ('second_S', R_RATE)]
Cell = tuple[str, float]


def wanted_matched(rows: Sequence[Row]) -> list[Job]:
    """The runs that are missing, in the plan's order."""
    have = set(map(job_of, rows))
    wanted = [
        Job('repeat', 'R', R_RATE, SEEDS[0]),
        *(Job('matched', arm, rate, seed) for seed in SEEDS for arm, rate in NEW.items()),
        *(Job('second', arm, rate, seed) for seed in SECOND_SEEDS for arm, rate in ON_SECOND),
    ]
    return [job for job in wanted if job not in have]


def check_base() -> None:
    """Raises ValueError if the base is not that of part 1, with whose runs the new ones are compared."""
    found = hash_of(WEAK_BASE)
    if found != BASE:
        raise ValueError(
            f'{WEAK_BASE} has the hash {found}, and part 1 had {BASE}; make it again on two cores of an AMD '
            'EPYC with jax 0.10.2'
        )


def of_cell(rows: Sequence[Row], cell: Cell) -> list[Row]:
    """The runs of a cell, in the order of their seeds."""
    part = 'final' if cell in PART_1.items() else 'second' if cell in ON_SECOND else 'matched'
    of = {row['seed']: row for row in rows if (row['part'], row['arm'], row['rate']) == (part, *cell)}
    return [opened(of[seed]) for seed in (SECOND_SEEDS if part == 'second' else SEEDS)]


def differences(rows: Sequence[Row], a: Cell, b: Cell, k: int) -> np.ndarray:
    """a - b in points, [seeds, problems]."""
    pairs = zip(of_cell(rows, a), of_cell(rows, b), strict=True)
    return np.stack(
        [
            of_questions(x['correct'], x['samples'], k) - of_questions(y['correct'], y['samples'], k)
            for x, y in pairs
        ]
    )


def contrasts(rows: Sequence[Row]) -> list[tuple[str, int, Contrast, Contrast]]:
    """(contrast and rate, k, by seeds and problems, by seeds alone) of each; k = 1 is mean@32."""
    found = []
    for k in (1, 32):
        for a, b, rate in CONTRASTS:
            d, name = differences(rows, (a, rate), (b, rate), k), f'{a} - {b} at {rate:g}'
            found.append((name, k, paired_both(name, d), paired(name, d.mean(axis=1))))
    return found


def contrasts_table(rows: Sequence[Row]) -> str:
    found = contrasts(rows)
    rejected = holm([both.p for _, _, both, _ in found], ALPHA)
    lines = [
        [
            name, 'mean@32' if k == 1 else f'pass@{k}', f'{both.mean:.2f}', interval(both.interval95), interval(seeds.interval95),
            f'{both.p:.4f}' if both.p >= 1e-4 else '< 0.0001', verdict(both, holds),
        ]
        for (name, k, both, seeds), holds in zip(found, rejected, strict=True)
    ]  # fmt: skip
    return markdown_table(
        ['contrast', 'score', 'points', '95 %, seeds and problems', '95 %, seeds', 'p', 'verdict'], lines
    )


def summary_table(rows: Sequence[Row]) -> str:
    """A line a contrast: both scores, each with its interval by seeds and problems, what was predicted, and
    the verdict.
    """
    found = contrasts(rows)
    rejected = holm([both.p for _, _, both, _ in found], ALPHA)
    told = {
        (name, k): [f'{both.mean:.1f} ({both.interval95[0]:.1f} to {both.interval95[1]:.1f})', verdict(both, holds)]
        for (name, k, both, _), holds in zip(found, rejected, strict=True)
    }  # fmt: skip
    lines = []
    for a, b, rate in CONTRASTS:
        name, predicted = f'{a} - {b} at {rate:g}', PREDICTED.get((a, b, rate), ('', ''))
        cells = [(told[name, k][0], x, told[name, k][1]) for k, x in zip((1, 32), predicted, strict=True)]
        lines.append([name, *cells[0], *cells[1]])
    return markdown_table(
        ['contrast', 'mean@32', 'predicted', 'verdict', 'pass@32', 'predicted', 'verdict'], lines
    )


def repeats(rows: Sequence[Row]) -> bool:
    """Whether R's first run gave the same answers once more; by their hash, so that none is read."""
    [again] = [row for row in rows if row['part'] == 'repeat']
    return again['sha256'] == sealed(of_cell(rows, ('R', R_RATE))[0])['sha256']


def cells_table(rows: Sequence[Row], cells: Sequence[Cell] = CELLS) -> str:
    """Every cell's scores and what they cost: means over its seeds; of seconds the median, since sessions had
    machines of one name and different speeds. † marks a cell with rows of another processor than part 1's.
    """
    lines = []
    for arm, rate in cells:
        of = of_cell(rows, (arm, rate))
        start, end = np.mean([row['entropy'] for row in of], axis=0)
        lines.append([
            arm.removeprefix('second_') + '†' * any(row['cpu'] != CPU for row in of), f'{rate:g}', mean_interval([accuracy(row) for row in of]), *scores(of), *mean_of(of, 'updates'),
            trained(of), f'{np.median([row["seconds"] for row in of]):,.0f}', f'{np.mean([row["x1"] for row in of]):.1f}', f'{start:.3f} → {end:.3f}',
        ])  # fmt: skip
    costs = ['updates', '10⁶ tokens trained', 'seconds', 'mixed fresh groups a step', 'entropy']
    return markdown_table(['arm', 'rate', 'mean@32', *(f'pass@{k}' for k in KS[1:]), *costs], lines)


def frontier(rows: Sequence[Row]) -> dict[Cell, tuple[float, float]]:
    """(mean@32, pass@32) of each cell."""
    return {
        cell: tuple(float(np.mean([passed(row, k) for row in of_cell(rows, cell)])) for k in (1, 32))
        for cell in CELLS
    }


def dominated(rows: Sequence[Row]) -> dict[Cell, Cell]:
    """Cells that have less of both scores than another, each difference with an interval without 0."""
    found = {}
    for cell in CELLS:
        for other in CELLS:
            over = (paired_both('', differences(rows, other, cell, k)) for k in (1, 32))
            if other != cell and all(c.interval95[0] > 0 for c in over):
                found[cell] = other
    return found


def interaction_table(rows: Sequence[Row]) -> str:
    """R - G and R - P at the higher rate less the same at the lower one, by seeds and problems. The plan asked
    for the first, to explore.
    """
    lines = []
    for other in 'GP':
        for k in (1, 32):
            low, high = (differences(rows, ('R', rate), (other, rate), k) for rate in sorted(MATCHED_RATES))
            found = paired_both('', high - low)
            score = 'mean@32' if k == 1 else f'pass@{k}'
            lines.append([f'R - {other}', score, f'{found.mean:.2f}', interval(found.interval95)])
    return markdown_table(['at the higher rate, less at the lower', 'score', 'points', '95 %'], lines)


def second_table(rows: Sequence[Row]) -> str:
    """The second base, which enters no verdict."""
    return cells_table(rows, ON_SECOND)


TABLES: tuple[Callable[[Sequence[Row]], str], ...] = (contrasts_table, cells_table, interaction_table)


def main() -> None:
    rows = of_today(read_rows())
    missing = [job for job in wanted_matched(rows) if job.part != 'second']
    if 'repeat' not in {job.part for job in missing}:
        print(f"R's first run {'repeats' if repeats(rows) else 'does not repeat'}.\n")
    if missing:
        sys.exit(f'error: {len(missing)} runs are missing; python -m studies.second_proof.run --part=8')
    for table in TABLES:
        print(table(rows), end='\n\n')
    for cell, other in dominated(rows).items():
        print(f'{cell} is dominated by {other}')
    if not wanted_matched(rows):
        print(f'\n{second_table(rows)}')


if __name__ == '__main__':
    main()
