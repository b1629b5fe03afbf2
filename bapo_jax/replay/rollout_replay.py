"""Rollout replay (arXiv 2506.05316): a batch is `fresh` new groups, and earlier ones up to B.

A memory holds the newest groups, first in first out. A step draws the rest of its batch from what the memory
held before, uniformly without replacement, and removes nothing. Only a prompt's newest group is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import REPLAY, X1, Batch, Begun, Group, make_batch
from bapo_jax.replay.buffer import sample
from bapo_jax.replay.newest import Newest
from bapo_jax.replay.protocol import Rng, ScoreBatch


class RolloutReplay:
    """The last `capacity` groups that were trained on, and batches with some of them."""

    buffer = None

    def __init__(self, config: Any, batch_groups: int):
        """`config` is the `replay` section of a resolved config; `batch_groups` is B."""
        self._fresh, self._batch_groups = config.rollout_replay.fresh, batch_groups
        self._newest = Newest('rollout_replay', config.rollout_replay.capacity)
        self._composed: dict[str, float] = {}  # metrics of the last batch

    @property
    def groups(self) -> list[Group]:
        """The held groups, oldest first; read-only."""
        return self._newest.groups

    @property
    def uses(self) -> list[int]:
        """How often each of them was trained on; read-only."""
        return self._newest.uses

    def hard_prompts(self, step: int, rng: Rng) -> list[Begun]:
        """Returns []: nothing is re-evaluated."""
        return []

    def compose(
        self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group], rng: Rng, score: ScoreBatch
    ) -> Batch:
        """Returns the first `fresh` of the fresh groups (X1), then up to B - `fresh` earlier ones.

        Further fresh groups are references of a prompt selector. A group with an infrastructure error is left
        out. A prompt may have a fresh and an earlier group.
        """
        x1 = [g for g in fresh[: self._fresh] if not g.infra_error]
        held = {g.prompt.id: g for g in self.groups}  # the newest of each prompt
        replayed = sample(rng('compose'), list(held.values()), self._batch_groups - self._fresh)
        batch = make_batch([*x1, *replayed], [X1] * len(x1) + [REPLAY] * len(replayed))
        self._composed = self._newest.replayed(batch, step)
        return batch

    def times_trained(self, batch: Batch) -> list[int]:
        """Returns how often each group of the last batch has been trained on, this time included."""
        return self._newest.times_trained(batch)

    def add(self, step: int, fresh: Sequence[Group], batch: Batch) -> None:
        """Adds the fresh groups of the batch, and drops the oldest groups above the capacity."""
        self._newest.add(batch.of_origin(X1), batch)

    def metrics(self, step: int) -> dict[str, float]:
        """Returns metrics of the last batch, and the size of the memory."""
        return {**self._composed, **self._newest.metrics()}

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `restore` needs, as arrays for a checkpoint."""
        return self._newest.state()

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores `state` exactly. Raises ValueError if it holds more groups than the capacity."""
        self._newest.restore(arrays)
