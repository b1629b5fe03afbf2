"""Statistics of the studies: paired t over seeds, and Holm's procedure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


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
    p = 2 * stats.t.sf(abs(d.mean() / error), free) if error else float(d.mean() == 0)
    intervals = (
        (float(d.mean() - w), float(d.mean() + w))
        for w in (stats.t.ppf(q, free) * error for q in (0.95, 0.975))
    )
    return Contrast(name, float(d.mean()), float(p), *intervals)


def holm(ps: Sequence[float], alpha: float) -> list[bool]:
    """Which of the hypotheses Holm's step-down procedure rejects, in the order given."""
    rejected, order = [False] * len(ps), np.argsort(ps, kind='stable')
    for done, i in enumerate(order):
        if ps[i] > alpha / (len(ps) - done):
            break
        rejected[i] = True
    return rejected


def mean_interval(values: Sequence[float]) -> str:
    """The mean with its 95 % interval by t, as text."""
    v = np.asarray(values, float)
    if len(v) < 2:
        return f'{v.mean():.1f}'
    w = stats.t.ppf(0.975, len(v) - 1) * v.std(ddof=1) / np.sqrt(len(v))
    return f'{v.mean():.1f} ({v.mean() - w:.1f} to {v.mean() + w:.1f})'
