"""Weighted sampling without replacement."""

from __future__ import annotations

import numpy as np


def without_replacement(rng: np.random.Generator, log_weight: np.ndarray, count: int) -> np.ndarray:
    """Draws `count` of n items in turn, each with probability ∝ weight among those that are left.

    `log_weight` is float64 [n]; -inf for an item that is only drawn if all others are. Returns indices,
    int64 [count], in the order drawn. The `count` largest log weights + Gumbel noise have this distribution,
    and no weight underflows. Items of weight 0 come last, in the order of their noise.
    """
    noise = rng.gumbel(size=len(log_weight))
    return np.lexsort((-noise, -(log_weight + noise)))[:count]
