"""Statistics of the studies: paired t over seeds, and Holm's procedure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from bapo_jax.report import contrast
from bapo_jax.report.contrast import mean_interval as mean_interval
from bapo_jax.report.contrast import p_of_mean, t_interval
from bapo_jax.scores import pass_at_k


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
    return Contrast(name, float(d.mean()), p_of_mean(d), t_interval(d, 0.9), t_interval(d))


def paired_both(name: str, differences: np.ndarray) -> Contrast:
    """The mean of differences [seeds, problems] for other seeds and other problems; t, seeds - 1 degrees.

    The variance is that of the seeds' means plus that of the problems' means minus that of the cells, each
    over its number; it is at least that of the seeds' means alone.
    """
    d = np.asarray(differences, float)
    over_seeds = d.mean(axis=1).var(ddof=1) / len(d)
    both = over_seeds + d.mean(axis=0).var(ddof=1) / d.shape[1] - d.var(ddof=1) / d.size
    mean, error, free = float(d.mean()), float(np.sqrt(max(both, over_seeds))), len(d) - 1
    p = 2 * float(stdtr(free, -abs(mean) / error)) if error else float(mean == 0)
    ends = ((mean - half, mean + half) for half in (error * float(stdtrit(free, q)) for q in (0.95, 0.975)))
    return Contrast(name, mean, p, *ends)


def of_questions(correct: Sequence[int], samples: int, k: int) -> np.ndarray:
    """pass@k of each question in percent; k = 1 gives the mean of its samples."""
    return 100 * pass_at_k(np.full(len(correct), samples), np.array(correct), k)


def holm(ps: Sequence[float], alpha: float) -> list[bool]:
    """Which of the hypotheses Holm's step-down procedure rejects, in the order given."""
    return [p <= alpha for p in contrast.holm(ps)]
