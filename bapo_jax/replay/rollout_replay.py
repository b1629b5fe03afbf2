"""Rollout replay (arXiv 2506.05316): a batch is `fresh` new groups and a random part of the newest earlier ones.

A memory holds the newest group of each prompt, first in first out. A step draws the rest of its batch from
what the memory held before it, uniformly without replacement, and removes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import X1, Batch, Begun, Group, make_batch
from bapo_jax.replay.arrays import groups_from_arrays, groups_to_arrays
from bapo_jax.replay.buffer import sample
from bapo_jax.replay.protocol import Rng, ScoreBatch
from bapo_jax.replay.repo import REPLAY


class RolloutReplay:
    """The newest groups of at most `capacity` prompts, and batches with some of them."""

    buffer = None

    def __init__(self, config: Any, batch_groups: int):
        """`config` is the `replay` section of a resolved config; `batch_groups` is B."""
        self._fresh, self._capacity = config.rollout_replay.fresh, config.rollout_replay.capacity
        self._batch_groups = batch_groups
        self._groups: dict[int, Group] = {}  # by prompt id, oldest first
        self._uses: dict[int, int] = {}  # prompt id -> how often that group was trained on
        self._composed: dict[str, float] = {}  # metrics of the last batch

    @property
    def groups(self) -> list[Group]:
        """The held groups, oldest first."""
        return list(self._groups.values())

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
        replayed = sample(rng('compose'), self.groups, self._batch_groups - self._fresh)
        self._composed = {}
        if replayed:
            self._composed = {
                'bapo/replay/age': float(np.mean([step - g.step for g in replayed])),
                'bapo/replay/mean_reward': float(np.mean([g.accuracy for g in replayed])),
                'bapo/replay/uses': float(np.mean([self._uses[g.prompt.id] for g in replayed])),
            }
        return make_batch([*x1, *replayed], [X1] * len(x1) + [REPLAY] * len(replayed))

    def times_trained(self, batch: Batch) -> list[int]:
        """Returns how often each group of the last batch was trained on, this time included."""
        return [
            1 if origin == X1 else self._uses[g.prompt.id] + 1
            for g, origin in zip(batch.groups, batch.origins, strict=True)
        ]

    def add(self, step: int, fresh: Sequence[Group], batch: Batch) -> None:
        """Counts what was replayed, adds the batch's fresh groups, and drops the oldest above the capacity."""
        for g in batch.of_origin(REPLAY):
            self._uses[g.prompt.id] += 1
        for g in batch.of_origin(X1):
            self._groups.pop(g.prompt.id, None)  # so that the prompt becomes the newest
            self._groups[g.prompt.id], self._uses[g.prompt.id] = g, 1
        for prompt_id in list(self._groups)[: max(0, len(self._groups) - self._capacity)]:
            del self._groups[prompt_id], self._uses[prompt_id]

    def metrics(self, step: int) -> dict[str, float]:
        """Returns metrics of the last batch, and the size of the memory in groups and bytes."""
        sizes = (g.prompt.tokens.nbytes + sum(r.nbytes for r in g.responses) for g in self.groups)
        return {
            **self._composed,
            'buffer/rollout_replay/groups': len(self._groups),
            'buffer/rollout_replay/bytes': sum(sizes),
        }

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `restore` needs, as arrays for a checkpoint."""
        uses = [self._uses[prompt_id] for prompt_id in self._groups]
        return {**groups_to_arrays(self.groups), 'uses': np.array([*uses, 0], np.int64)}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores `state` exactly. Raises ValueError if it holds more groups than the capacity."""
        groups = groups_from_arrays(arrays)
        if len(groups) > self._capacity:
            raise ValueError(
                f'the saved memory holds {len(groups)} groups, more than '
                f'replay.rollout_replay.capacity={self._capacity}; set that field to the value that the run '
                'started with'
            )
        self._groups = {g.prompt.id: g for g in groups}
        self._uses = dict(zip(self._groups, arrays['uses'].tolist()))
