"""Statistics of the studies: paired t over seeds, and Holm's procedure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bapo_jax.report import contrast
from bapo_jax.report.contrast import mean_interval as mean_interval
from bapo_jax.report.contrast import p_of_mean, t_interval


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


def holm(ps: Sequence[float], alpha: float) -> list[bool]:
    """Which of the hypotheses Holm's step-down procedure rejects, in the order given."""
    return [p <= alpha for p in contrast.holm(ps)]
