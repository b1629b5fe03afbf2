"""FreshPER's batch (arXiv 2604.16918): the fresh groups, and earlier ones drawn by a priority that ages.

A group's priority is base · exp(-age / τ), with its age in steps. It is drawn with P ∝ priority^α, and the
weights of its tokens are multiplied by (N · P)^-β over the largest such factor of the draw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import REPLAY, X1, Batch, Group, make_batch
from bapo_jax.replay.filters import sound
from bapo_jax.replay.newest import Newest
from bapo_jax.replay.protocol import Rng, ScoreBatch


def mean_advantage(rewards: np.ndarray) -> float:
    """Mean |A| of a group with A = (r - mean) / (std + 1e-6); 0 if all rewards are equal."""
    if np.ptp(rewards) == 0:
        return 0.0
    rewards = rewards.astype(np.float64)
    return float(np.abs(rewards - rewards.mean()).mean() / (rewards.std(ddof=1) + 1e-6))


def mean_reward(rewards: np.ndarray) -> float:
    """Mean |r| of a group."""
    return float(np.abs(rewards.astype(np.float64)).mean())


BASES = {'advantage': mean_advantage, 'reward': mean_reward}


class Freshper(Newest):
    """The last `capacity` groups, and their priorities."""

    def __init__(self, config: Any, batch_groups: int):
        """`config` is the `replay` section of a resolved config; `batch_groups` is B.

        A batch has at most B fresh groups and ratio · B earlier ones.
        """
        self._config, self._batch_groups = config.freshper, batch_groups
        super().__init__('freshper', config.freshper.capacity)

    def compose(
        self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group], rng: Rng, score: ScoreBatch
    ) -> Batch:
        """Returns the fresh groups, then earlier ones drawn by priority without replacement, with weights.

        Groups of priority 0 are not drawn, so there may be fewer than ratio · B. Fresh groups have weight 1.
        """
        x1, held = sound(step, fresh, self._batch_groups), self.groups
        chance = self.probabilities(step)
        count = min(self._config.ratio * self._batch_groups, int(np.count_nonzero(chance)))
        drawn = (
            rng('compose').choice(len(held), count, replace=False, p=chance) if count else np.zeros(0, int)
        )
        drawn = np.sort(drawn)
        weight = (len(held) * chance[drawn]) ** -self._config.beta
        batch = make_batch([*x1, *(held[i] for i in drawn)], [X1] * len(x1) + [REPLAY] * len(drawn))
        self._composed = self.replayed(batch, step)
        if count:
            weight /= weight.max()
            batch = dataclasses.replace(batch, weights=(*[1.0] * len(x1), *weight.tolist()))
            self._composed['bapo/replay/weight'] = float(weight.mean())
        return batch

    def probabilities(self, step: int) -> np.ndarray:
        """Returns P of each held group at `step`, float64; all 0 if no group has a priority."""
        c, groups = self._config, self.groups
        base = np.array([BASES[c.base](g.rewards) for g in groups], np.float64)
        age = np.array([step - g.step for g in groups], np.float64)
        priority = base**c.alpha * np.exp(-c.alpha * age / c.tau)
        return priority / (priority.sum() or 1.0)
