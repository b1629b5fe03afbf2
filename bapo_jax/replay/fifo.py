"""Replay without removal (arXiv 2604.08706): a batch is a uniform sample of the last N groups.

A step adds its fresh groups, and they have no certain place in the batch. With `ratio` groups trained on for
each fresh one, a group is used `ratio` times on average, while it is among the last N. Advantages and
behaviour log-probs are those of the time of generation, since a group is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import REPLAY, X1, Batch, Begun, Group, make_batch
from bapo_jax.replay.buffer import sample
from bapo_jax.replay.newest import Newest
from bapo_jax.replay.protocol import Rng, ScoreBatch


class Fifo:
    """The last `capacity` = N groups, and uniform batches of them."""

    buffer = None

    def __init__(self, config: Any, batch_groups: int):
        """`config` is the `replay` section of a resolved config; a batch has ratio · B groups."""
        self._size = config.fifo.ratio * batch_groups
        self._newest = Newest('fifo', config.fifo.capacity)
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
        """Returns a uniform sample, without replacement, of the last N groups, fresh ones (X1) first.

        It is empty until there are as many groups as a batch has.
        """
        held, is_fresh = self._newest.with_fresh(fresh), {id(g) for g in fresh}
        drawn = sample(rng('compose'), held, self._size) if len(held) >= self._size else []
        x1 = [g for g in drawn if id(g) in is_fresh]
        replayed = [g for g in drawn if id(g) not in is_fresh]
        batch = make_batch([*x1, *replayed], [X1] * len(x1) + [REPLAY] * len(replayed))
        self._composed = self._newest.replayed(batch, step)
        return batch

    def times_trained(self, batch: Batch) -> list[int]:
        """Returns how often each group of the last batch has been trained on, this time included."""
        return self._newest.times_trained(batch)

    def add(self, step: int, fresh: Sequence[Group], batch: Batch) -> None:
        """Adds the fresh groups, and drops the oldest ones above the capacity."""
        self._newest.add(fresh, batch)

    def metrics(self, step: int) -> dict[str, float]:
        """Returns metrics of the last batch, and the size of the memory."""
        return {**self._composed, **self._newest.metrics()}

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `restore` needs, as arrays for a checkpoint."""
        return self._newest.state()

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores `state` exactly. Raises ValueError if it holds more than replay.fifo.capacity groups."""
        self._newest.restore(arrays)
