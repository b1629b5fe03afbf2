"""ARPO's batch (arXiv 2505.16282): a stored success takes the place of a response where a whole group failed.

In the authors' code, a group has failed if the mean of its outcomes is below 0.2 and their standard deviation
below 0.05; an outcome above 0.1 is a success. For outcomes of 0 and 1 that is k = 0 and a correct response.
Rewards of the mixed group are normalised together, so the success has a positive advantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import REPLAY, X1, Batch, Begun, Group, Verdict, joined, make_batch, taken
from bapo_jax.replay.filters import sound
from bapo_jax.replay.histories import Histories
from bapo_jax.replay.protocol import Rng, ScoreBatch


class Arpo:
    """ARPO's memory: the last `per_prompt` correct responses to every prompt, first in first out."""

    buffer = None

    def __init__(self, config: Any, batch_groups: int):
        """`config` is the `replay` section of a resolved config; `batch_groups` is B."""
        self._batch_groups = batch_groups
        self._successes = Histories('arpo', config.arpo.per_prompt)

    @property
    def history(self) -> dict[int, Group]:
        """The stored successes by prompt id, one group each; read-only."""
        return self._successes.groups

    def hard_prompts(self, step: int, rng: Rng) -> list[Begun]:
        """Returns []: ARPO re-evaluates nothing."""
        return []

    def compose(
        self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group], rng: Rng, score: ScoreBatch
    ) -> Batch:
        """Returns the fresh groups; where one failed whole, a new group with a success in its first place.

        The success is a uniform draw from those of the prompt, which are from before this step. A new group
        has the origin REPLAY. Groups with infrastructure errors are left out.
        """
        draws = rng('compose')
        x1 = sound(step, fresh, self._batch_groups)
        groups = [
            g if g.correct or g.prompt.id not in self.history else led_by(self._drawn(g, draws), g)
            for g in x1
        ]
        origins = [X1 if made is g else REPLAY for made, g in zip(groups, x1, strict=True)]
        return make_batch(groups, origins)

    def times_trained(self, batch: Batch) -> list[int | None]:
        """Returns 1 for fresh groups, and None for mixed ones: their responses come from several steps."""
        return [1 if o == X1 else None for o in batch.origins]

    def add(self, step: int, fresh: Sequence[Group], batch: Batch) -> None:
        """Stores the correct responses of the fresh groups. A replayed success is not stored again."""
        for g in fresh:
            right = [i for i, verdict in enumerate(g.verdicts) if verdict == Verdict.CORRECT]
            if right and not g.infra_error:
                self._successes.add(taken(g, right))

    def metrics(self, step: int) -> dict[str, int]:
        """Returns the size of the memory."""
        return self._successes.metrics()

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `restore` needs, as arrays for a checkpoint."""
        return self._successes.state()

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores `state` exactly. Raises ValueError if a prompt has more than replay.arpo.per_prompt."""
        self._successes.restore(arrays)

    def _drawn(self, group: Group, draws: np.random.Generator) -> Group:
        stored = self.history[group.prompt.id]
        return taken(stored, [int(draws.integers(stored.size))])


def led_by(first: Group, group: Group) -> Group:
    """Returns a new group: the response of `first`, a group of one, then all of `group` but its first one."""
    return joined(first, taken(group, range(1, group.size)))
