"""Replay without removal (arXiv 2604.08706): a batch is a uniform sample of the last N groups.

A step adds its fresh groups, and they have no certain place in the batch. With `ratio` groups trained on for
each fresh one, a group is used `ratio` times on average, while it is among the last N. Advantages and
behaviour log-probs are those of the time of generation, since a group is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


from bapo_jax.groups import REPLAY, X1, Batch, Group, make_batch
from bapo_jax.replay.buffer import sample
from bapo_jax.replay.newest import Newest
from bapo_jax.replay.protocol import Rng, ScoreBatch


class Fifo(Newest):
    """The last `capacity` = N groups, and uniform batches of them."""

    def __init__(self, config: Any, batch_groups: int):
        """`config` is the `replay` section of a resolved config; a batch has ratio · B groups."""
        self._size = config.fifo.ratio * batch_groups
        super().__init__('fifo', config.fifo.capacity)

    def compose(
        self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group], rng: Rng, score: ScoreBatch
    ) -> Batch:
        """Returns a uniform sample, without replacement, of the last N groups, fresh ones (X1) first.

        It is empty until there are as many groups as a batch has.
        """
        held, is_fresh = self.with_fresh(fresh), {id(g) for g in fresh}
        drawn = sample(rng('compose'), held, self._size) if len(held) >= self._size else []
        x1 = [g for g in drawn if id(g) in is_fresh]
        replayed = [g for g in drawn if id(g) not in is_fresh]
        batch = make_batch([*x1, *replayed], [X1] * len(x1) + [REPLAY] * len(replayed))
        self._composed = self.replayed(batch, step)
        return batch
