"""What was sampled and is not yet trained on, as the arrays of a checkpoint, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np

from bapo_jax.groups import Group, Verdict
from bapo_jax.replay.arrays import groups_from_arrays, groups_to_arrays
from bapo_jax.rollout.answered import Answered, Pending
from bapo_jax.rollout.unfinished import Unfinished

_PREFIX = 'ahead_'  # of the arrays' names


def to_arrays(pending: Pending) -> dict[str, np.ndarray]:
    """Flattens what is pending; none of the arrays is empty, and {} stands for nothing."""
    if not any(pending):
        return {}
    parts = [[*pending.ready, *map(_as_group, pending.unfinished)]]
    parts += [[*a.fresh, *map(_as_group, a.unfinished)] for a in pending.ahead.values()]
    rows = [
        [step, len(a.fresh), a.generate_s, a.verify_s, a.measures, a.selector, len(a.unfinished)]
        for step, a in pending.ahead.items()
    ]
    counts = np.array([len(pending.ready), len(pending.unfinished)], np.int64)
    arrays = {
        **groups_to_arrays([group for part in parts for group in part]),
        'steps': np.frombuffer(json.dumps(rows).encode(), np.uint8),
        'counts': counts,
    }
    return {_PREFIX + name: array for name, array in arrays.items()}


def from_arrays(arrays: Mapping[str, np.ndarray]) -> Pending:
    """The inverse of `to_arrays`, also for arrays of earlier versions; other arrays are ignored."""
    own = {name.removeprefix(_PREFIX): a for name, a in arrays.items() if name.startswith(_PREFIX)}
    if not own:
        return Pending()
    groups, ahead = iter(groups_from_arrays(own)), {}

    def take(finished: int, unfinished: int) -> tuple[list[Group], list[Unfinished]]:
        of_both = [next(groups) for _ in range(finished + unfinished)]
        return of_both[:finished], [Unfinished(g.prompt, g.responses) for g in of_both[finished:]]

    ready, unfinished = take(*own['counts'].tolist()) if 'counts' in own else ([], [])
    for step, count, *seconds, measures, selector, cut in map(_row, json.loads(own['steps'].tobytes())):
        fresh, cut = take(count, cut)
        ahead[step] = Answered(fresh, [], *seconds, measures, selector, cut)
    return Pending(ahead, unfinished, ready)


def _row(row: list) -> list:
    """A step's row; earlier versions had no unfinished groups."""
    return row if len(row) == 7 else [*row, 0]


def _as_group(unfinished: Unfinished) -> Group:
    """A group without verdicts yet: the arrays need one for each response."""
    n = len(unfinished.responses)
    rewards = np.full(n, math.nan, np.float32)
    return Group(unfinished.prompt, unfinished.responses, (Verdict.INFRA_ERROR,) * n, rewards, 0, (None,) * n)
