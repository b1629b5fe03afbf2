"""What the rows say: scores, best rates, and which runs of part 1 are wanted next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from bapo_jax.config.earlier import MOVED
from bapo_jax.scores import pass_at_k
from studies.lib.rows import Job, Row, job_of, rows_in
from studies.second_proof.arms import (
    ARMS,
    BASE_SEEDS,
    CEILING_SEEDS,
    CONTRASTS,
    RATES,
    SAVED,
    SCAN_SEEDS,
    SEEDS,
)

FILE = Path(__file__).with_name('rows.jsonl')
SCANNED = ('R', 'G', 'RX', 'P')  # P last: its passes follow from what R does
MOST_ADDED = 2  # rates beyond an edge


def read_rows() -> list[Row]:
    return rows_in(FILE)


def of_today(rows: Iterable[Row]) -> list[Row]:
    """The rows of the arms as they stand: P's earlier passes over a batch stay in the file, and count no
    more.
    """
    return [
        row
        for row in rows
        if {MOVED.get(f, f): x for f, x in row['changes'].items()} == ARMS[row['arm']].changes
    ]


def accuracy(row: Row) -> float:
    """mean@n in percent."""
    return 100 * float(np.mean(row['correct'])) / row['samples']


def passed(row: Row, k: int) -> float:
    """pass@k in percent, the mean over the problems."""
    correct = np.array(row['correct'])
    return 100 * float(pass_at_k(np.full(len(correct), row['samples']), correct, k).mean())


def of_part(rows: Sequence[Row], part: str, arm: str) -> list[Row]:
    """The arm's rows of a part, in the order of their seeds."""
    return sorted(
        (row for row in rows if row['part'] == part and row['arm'] == arm), key=lambda row: row['seed']
    )


def scanned(rows: Iterable[Row], arm: str, part: str = 'scan') -> dict[float, list[Row]]:
    """The arm's rows of a scan by rate, rising."""
    of = [row for row in rows if row['part'] == part and row['arm'] == arm]
    return {rate: [row for row in of if row['rate'] == rate] for rate in sorted({row['rate'] for row in of})}


def best_rate(rows: Iterable[Row], arm: str, part: str = 'scan') -> float:
    """The rate with the highest mean@8 over the scan's seeds."""
    by_rate = scanned(rows, arm, part)
    return max(by_rate, key=lambda rate: np.mean([accuracy(row) for row in by_rate[rate]]))


def rates_wanted(rows: Sequence[Row], arm: str) -> list[float]:
    """The rates of the plan, and, where those are measured and the best is at an edge, the next one by a
    factor of two.
    """
    wanted = sorted({*RATES, *scanned(rows, arm)})
    there = scanned(rows, arm)
    if (
        any(len(there.get(rate, ())) < len(SCAN_SEEDS) for rate in wanted)
        or len(wanted) >= len(RATES) + MOST_ADDED
    ):
        return wanted
    best = best_rate(rows, arm)
    return sorted(
        [*wanted, *([best / 2] if best == wanted[0] else []), *([2 * best] if best == wanted[-1] else [])]
    )


def updates_of_p(rows: Sequence[Row]) -> float:
    """P's optimizer steps over R's, each at its best rate of the scan."""
    means = [
        np.mean([row['updates'] for row in scanned(rows, arm)[best_rate(rows, arm)]]) for arm in ('P', 'R')
    ]
    return float(means[0] / means[1])


def earlier_steps(rows: Sequence[Row], arm: str) -> dict[str, int]:
    """By the other arm of a contrast that takes less time: the saved step by which `arm` has taken as many
    seconds.

    By the quickest run of each arm in the scan, since other work slows some. Where that is the last step, the
    other arm is left out.
    """
    seconds = {
        a: min(row['seconds'] for of_rate in scanned(rows, a).values() for row in of_rate) for a in SCANNED
    }
    others = {a if b == arm else b for a, b in CONTRASTS if arm in (a, b)}
    last = ARMS[arm].steps
    steps = {
        other: SAVED * max(1, round(last * seconds[other] / seconds[arm] / SAVED)) for other in sorted(others)
    }
    return {other: step for other, step in steps.items() if step < last}


def wanted(rows: Sequence[Row]) -> list[Job]:
    """The runs that are missing, given those of today: the scan until every best rate is frozen, then the
    twelve seeds, all arms of one, then C and the base.

    Raises ValueError where P does not have R's number of optimizer steps, so that plan.md's rule for it comes
    first.
    """
    have = set(map(job_of, rows))
    scan = [
        Job('scan', arm, rate, seed)
        for seed in SCAN_SEEDS
        for arm in SCANNED
        for rate in rates_wanted(rows, arm)
    ]
    missing = [job for job in scan if job not in have]
    if missing:
        return missing
    if not 0.9 <= (ratio := updates_of_p(rows)) <= 1.1:
        raise ValueError(
            f'P makes {ratio:.2f} times the optimizer steps of R, not within 10 %; change PASSES or '
            'MINI_BATCH in arms.py as plan.md says; the scan of P is then made again'
        )
    finals = [Job('final', arm, best_rate(rows, arm), seed) for seed in SEEDS for arm in SCANNED]
    ceiling = [Job('ceiling', 'C', best_rate(rows, 'R'), seed) for seed in CEILING_SEEDS]
    base = [Job('base', 'base', 0.0, seed) for seed in BASE_SEEDS]
    return [job for job in [*finals, *ceiling, *base] if job not in have]
