"""Rollout replay (arXiv 2506.05316): a batch is `fresh` new groups, and earlier ones up to B.

A memory holds the newest groups, first in first out. A step draws the rest of its batch from what the memory
held before, uniformly without replacement, and removes nothing. Only a prompt's newest group is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


from bapo_jax.groups import REPLAY, X1, Batch, Group, make_batch
from bapo_jax.replay.buffer import sample
from bapo_jax.replay.newest import Newest
from bapo_jax.replay.protocol import Rng, ScoreBatch


class RolloutReplay(Newest):
    """The last `capacity` groups that were trained on, and batches with some of them."""

    def __init__(self, config: Any, batch_groups: int):
        """`config` is the `replay` section of a resolved config; `batch_groups` is B."""
        self._fresh, self._batch_groups = config.rollout_replay.fresh, batch_groups
        super().__init__('rollout_replay', config.rollout_replay.capacity)

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
        self._composed = self.replayed(batch, step)
        return batch

    def add(self, step: int, fresh: Sequence[Group], batch: Batch) -> None:
        """Adds the fresh groups of the batch alone."""
        super().add(step, batch.of_origin(X1), batch)
