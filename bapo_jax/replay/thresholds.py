"""Accuracy thresholds: c2(t) and c3(t) follow average performance (eq. 8); mu is compared on the grid k/G."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

DIRECTIONS = ('easy_to_hard', 'literal')
TOLERANCE = 1e-6  # in units of k: far above float rounding, far below the distance 1 between two levels


def threshold(c: float | Sequence[float], r_tot: float, direction: str) -> float:
    """Returns a threshold of eq. 8 at average performance r_tot in [0, 1].

    c is (value at r_tot = 0, value at r_tot = 1). A single number is a fixed threshold. So is a tuple of one,
    which ml_collections makes of a single number given for a tuple field.

    `direction` resolves a contradiction in the paper. 'easy_to_hard' uses the pair as it stands: Table 3's
    ends (4/8, 1/8) replay harder groups as the policy improves. 'literal' is eq. 8 with Table 3 as printed,
    low + r_tot (high - low). It reverses the pair, towards easier groups.

    Raises ValueError if the direction is unknown or if there are more than two values.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f'replay.thresholds={direction!r} is unknown; choose one of {", ".join(DIRECTIONS)}')
    values = np.atleast_1d(np.asarray(c, np.float64))
    if values.shape not in [(1,), (2,)]:
        raise ValueError(
            f'a threshold must be one number or (value at r_tot = 0, value at r_tot = 1), not {c!r}'
        )
    start, end = values[0], values[-1]
    if direction == 'literal':
        start, end = end, start
    return float(start + r_tot * (end - start))


def update_r_tot(r_tot: float | None, fresh_mean: float, decay: float = 0.9) -> float | None:
    """Updates r_tot, the "global average performance" of eq. 8.

    It is an exponential moving average of the fresh groups' mean accuracy, before filtering. r_tot is None
    before the first batch, and then that batch's mean. A step without a verified group has no mean (nan) and
    leaves r_tot unchanged.
    """
    if np.isnan(fresh_mean):
        return r_tot
    return float(fresh_mean) if r_tot is None else float(decay * r_tot + (1 - decay) * fresh_mean)


def in_range(k: int, G: int, low: float, high: float) -> bool:
    """Returns whether low <= k/G <= high (the last term of eq. 5).

    The comparison is in units of k with a tolerance, so a bound on the grid includes its level.
    """
    return low * G - TOLERANCE <= k <= high * G + TOLERANCE


def on_grid(low: float, high: float, G: int) -> tuple[float, float]:
    """Returns the bounds, or the mixed level k/G nearest to their middle if no mixed level lies within them.

    If two levels are equally near, these are the new bounds. Table 3's bounds are 1/8 apart: they always
    contain a level if G is 8, and often no level if G is smaller.
    """
    levels = np.arange(1, G)
    if not len(levels) or any(in_range(int(k), G, low, high) for k in levels):
        return low, high
    away = np.abs(levels - G * (low + high) / 2)
    nearest = levels[away <= away.min() + TOLERANCE] / G
    return float(nearest[0]), float(nearest[-1])


def levels_in_words(replay: Any, G: int) -> str:
    """Describes which groups of G are hard, and which groups X3 replays at each r_tot.

    `replay` is that section of a resolved config. Returns '' if neither X2 nor X3 is on.
    """
    lines = []
    if replay.use_x2:
        lines.append(
            'X2 re-evaluates prompts with at most '
            f'{max(k for k in range(G) if in_range(k, G, 0, replay.c1))} of {G} correct'
        )
    if replay.use_x3:
        r_tots = (np.arange(1200) + 0.5) / 1200
        bounds = [
            tuple(threshold(c, r_tot, replay.thresholds) for c in (replay.c2, replay.c3)) for r_tot in r_tots
        ]
        taken = [on_grid(low, high, G) for low, high in bounds]
        levels = [', '.join(str(k) for k in range(1, G) if in_range(k, G, low, high)) for low, high in taken]
        ends = {
            level: max(r for _, r in piece)
            for level, piece in itertools.groupby(zip(levels, r_tots), lambda x: x[0])
        }
        said = '; '.join(
            f'{level} of {G} correct' + f' up to r_tot {end:.2f}' * (len(ends) > 1)
            for level, end in ends.items()
        )
        nearest = ' (if no level is between replay.c2 and replay.c3, the nearest)' if taken != bounds else ''
        lines.append(f'X3 replays groups with {said}{nearest}')
    return '\n'.join(lines)
