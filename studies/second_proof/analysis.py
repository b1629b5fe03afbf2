"""The numbers and verdicts of plan.md, from rows.jsonl: python -m studies.second_proof.analysis

Refuses while a run is missing, so that nobody sees an outcome before the last run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from studies.second_proof.arms import CONTRASTS, SEEDS
from studies.second_proof.rows import Row, accuracy, of_today, passed, read_rows, wanted

GUARDED = (('R', 'P'), ('R', 'G'))
ALPHA, RELEVANT, GUARD = 0.05, 1.0, -2.0  # points


class Contrast(NamedTuple):
    """A paired difference in points over seeds."""

    name: str
    mean: float
    p: float  # two-sided, uncorrected
    interval90: tuple[float, float]
    interval95: tuple[float, float]


def paired(name: str, differences: Sequence[float]) -> Contrast:
    """The paired t of these differences, one a seed."""
    d = np.asarray(differences, float)
    error, free = d.std(ddof=1) / np.sqrt(len(d)), len(d) - 1
    p = 2 * stats.t.sf(abs(d.mean() / error), free)
    intervals = ((float(d.mean() - w), float(d.mean() + w)) for w in (stats.t.ppf(q, free) * error for q in (0.95, 0.975)))
    return Contrast(name, float(d.mean()), float(p), *intervals)


def holm(ps: Sequence[float], alpha: float = ALPHA) -> list[bool]:
    """Which of the hypotheses Holm's step-down procedure rejects, in the order given."""
    rejected, order = [False] * len(ps), np.argsort(ps, kind='stable')
    for done, i in enumerate(order):
        if ps[i] > alpha / (len(ps) - done):
            break
        rejected[i] = True
    return rejected


def verdict(contrast: Contrast, rejected: bool) -> str:
    """In the words of the plan."""
    if rejected and abs(contrast.mean) >= RELEVANT:
        return 'helps' if contrast.mean > 0 else 'harms'
    if -RELEVANT <= contrast.interval90[0] and contrast.interval90[1] <= RELEVANT:
        return 'no relevant effect, though not 0' if rejected else 'no relevant effect'
    return 'open'


def by_seed(rows: Sequence[Row], arm: str) -> list[Row]:
    """The arm's rows of the twelve seeds, in the order of the seeds."""
    of = {row['seed']: row for row in rows if row['part'] == 'final' and row['arm'] == arm}
    return [of[seed] for seed in SEEDS]


def main() -> None:
    rows = of_today(read_rows())
    if missing := wanted(rows):
        sys.exit(f'error: {len(missing)} runs are missing; python -m studies.second_proof.run goes on with them')
    means = [
        paired(f'{a} - {b}', [accuracy(x) - accuracy(y) for x, y in zip(by_seed(rows, a), by_seed(rows, b), strict=True)])
        for a, b in CONTRASTS
    ]
    print('mean@32        points   95 % interval   p         verdict')
    for c, rejected in zip(means, holm([c.p for c in means]), strict=True):
        low, high = c.interval95
        print(f'{c.name:12}   {c.mean:6.2f}   {low:5.2f} to {high:5.2f}   {c.p:.5f}   {verdict(c, rejected)}')
    print('pass@32')
    for a, b in GUARDED:
        c = paired(f'{a} - {b}', [passed(x, 32) - passed(y, 32) for x, y in zip(by_seed(rows, a), by_seed(rows, b), strict=True)])
        low, high = c.interval95
        print(f'{c.name:12}   {c.mean:6.2f}   {low:5.2f} to {high:5.2f}   guard {"holds" if c.mean > GUARD else "does not hold"}')


if __name__ == '__main__':
    main()
