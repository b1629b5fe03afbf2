"""Which runs of part 2 (plan_2.md) are wanted next: two scans, then the best of each kind, and the base that
searches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from studies.lib.rows import Job, Row, job_of
from studies.second_proof.arms import HARD_FINAL_SEEDS, HARD_SEEDS, KINDS, SEARCH, SEARCH_SEEDS
from studies.second_proof.rows import accuracy, best_rate, passed, scanned, wanted

SCAN = 'hard_scan'
WITHIN = 1.0  # points of mean@8 that a setting of `spread` may be behind the best of its kind


def best_setting(rows: Sequence[Row], kind: str, rate: float) -> str:
    """The setting of highest mean@8 at this rate; of `spread` that of highest pass@8 among those near the
    highest mean@8.
    """

    def mean(setting: str, score) -> float:
        return float(np.mean([score(row) for row in scanned(rows, setting, SCAN)[rate]]))

    means = {setting: mean(setting, accuracy) for setting in KINDS[kind]}
    if kind != 'spread':
        return max(means, key=means.__getitem__)
    near = [setting for setting, of_setting in means.items() if of_setting >= max(means.values()) - WITHIN]
    return max(near, key=lambda setting: mean(setting, lambda row: passed(row, 8)))


def wanted_hard(rows: Sequence[Row]) -> list[Job]:
    """The runs that are missing, given those of today. Raises ValueError while a run of part 1's scan is
    missing.
    """
    if any(job.part == 'scan' for job in wanted(rows)):
        raise ValueError("part 2 runs at R's frozen rate; run the scan of part 1 first: --part=1")
    have, rate = set(map(job_of, rows)), best_rate(rows, 'R')
    scan = [
        Job(SCAN, setting, rate, seed) for seed in HARD_SEEDS for kind in KINDS.values() for setting in kind
    ]
    if missing := [job for job in scan if job not in have]:
        return missing
    best = [best_setting(rows, kind, rate) for kind in KINDS]
    scan = [
        Job(SCAN, setting, r, seed) for seed in HARD_SEEDS for r in (rate / 2, 2 * rate) for setting in best
    ]
    if missing := [job for job in scan if job not in have]:
        return missing
    finals = [
        Job('hard', setting, best_rate(rows, setting, SCAN), seed)
        for seed in HARD_FINAL_SEEDS
        for setting in best
    ]
    if missing := [job for job in finals if job not in have]:
        return missing
    search = [
        Job('search', arm, rate if SEARCH[arm].steps else 0.0, seed)
        for seed in SEARCH_SEEDS
        for arm in SEARCH
    ]
    return [job for job in search if job not in have]
