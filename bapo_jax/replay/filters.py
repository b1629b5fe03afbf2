"""Online filters, which choose a step's fresh groups for X1, always whole groups (A.3 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bapo_jax.groups import Group
from bapo_jax.own.method import is_own, own_filter

# The probability of keeping a group with k of G responses correct. The paper's Gaussian N(mu | 0.5, 0.2^2) is
# taken as this probability, scaled to 1 at its centre. The Gaussian and uniform filters may keep all-correct
# and all-wrong groups too (A.3).
KEEP_PROBABILITY = {
    'none': lambda k, G: 1.0,
    'range': lambda k, G: float(1 <= k <= G - 1),
    'gaussian': lambda k, G: math.exp(-((k / G - 0.5) ** 2) / (2 * 0.2**2)),
    'uniform': lambda k, G: 0.6,
}
FILTERS = tuple(KEEP_PROBABILITY)


def fresh_filter(groups: Sequence[Group], kind: str, rng: np.random.Generator) -> list[Group]:
    """Returns X1 of eq. 5: the fresh groups that the filter keeps, whole and in order. It may be empty.

    A group with an infrastructure error has no accuracy, and every filter drops it. Each group takes one draw
    from `rng` regardless of its accuracy, so the groups are filtered independently. `kind` is of FILTERS, or
    'module:function' of the user's. Raises ValueError if the kind is unknown.
    """
    if kind not in FILTERS and not is_own(kind):
        raise ValueError(f'replay.fresh_filter={kind!r} is unknown; choose one of {", ".join(FILTERS)}')
    draws = rng.random(len(groups))
    return [g for g, draw in zip(groups, draws) if not g.infra_error and draw < _keep_probability(g, kind)]


def sound(step: int, groups: Sequence[Group], most: int) -> list[Group]:
    """Returns the groups without infrastructure errors. Raises ValueError if they exceed `most` = B."""
    kept = [g for g in groups if not g.infra_error]
    if len(kept) > most:
        raise ValueError(
            f'{len(kept)} fresh groups of step {step} exceed learner.batch_groups={most}; pass fewer'
        )
    return kept


def _keep_probability(group: Group, kind: str) -> float:
    if is_own(kind):
        return own_filter(kind)(group.rewards, group.accuracy)
    return KEEP_PROBABILITY[kind](group.correct, group.size)
