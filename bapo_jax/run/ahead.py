"""The steps that were answered ahead of their turn, as the arrays of a checkpoint, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from bapo_jax.replay.arrays import groups_from_arrays, groups_to_arrays
from bapo_jax.rollout.rollouts import Answered

_PREFIX = 'ahead_'  # of the arrays' names


def to_arrays(ahead: Mapping[int, Answered]) -> dict[str, np.ndarray]:
    """Flattens answered steps; none of the arrays is empty, and {} stands for no steps."""
    if not ahead:
        return {}
    groups = [group for answered in ahead.values() for group in answered.fresh]
    rows = [
        [step, len(a.fresh), a.generate_s, a.verify_s, a.measures, a.selector] for step, a in ahead.items()
    ]
    arrays = {**groups_to_arrays(groups), 'steps': np.frombuffer(json.dumps(rows).encode(), np.uint8)}
    return {_PREFIX + name: array for name, array in arrays.items()}


def from_arrays(arrays: Mapping[str, np.ndarray]) -> dict[int, Answered]:
    """The inverse of `to_arrays`; other arrays are ignored."""
    own = {name.removeprefix(_PREFIX): a for name, a in arrays.items() if name.startswith(_PREFIX)}
    if not own:
        return {}
    groups, ahead = iter(groups_from_arrays(own)), {}
    for step, count, *seconds, measures, selector in json.loads(own['steps'].tobytes()):
        ahead[step] = Answered([next(groups) for _ in range(count)], [], *seconds, measures, selector)
    return ahead
