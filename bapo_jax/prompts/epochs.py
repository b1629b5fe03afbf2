"""Shuffled epochs: every prompt once per epoch, in a new order each time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import grain

from bapo_jax.groups import Group, Prompt
from bapo_jax.prompts.protocol import PromptSelector


def check_enough(prompts: Sequence[Prompt], batch: int) -> None:
    """Raises ValueError if there are fewer prompts than one batch takes."""
    if len(prompts) < batch:
        raise ValueError(
            f'{len(prompts)} training prompts are fewer than learner.batch_groups={batch}; lower it or '
            'raise task.limit'
        )


class ShuffledEpochs(PromptSelector):
    """Yields every prompt once per epoch, in a new order; a remainder that fills no batch is left out.

    Raises ValueError if there are fewer prompts than one batch takes.
    """

    learns = False

    def __init__(self, prompts: Sequence[Prompt], batch: int, seed: int):
        check_enough(prompts, batch)
        self._prompts = prompts
        indices = (
            grain.MapDataset.range(len(prompts)).shuffle(seed=seed).batch(batch, drop_remainder=True).repeat()
        )
        self._stream = iter(indices.to_iter_dataset(grain.ReadOptions(num_threads=0)))

    def next(self) -> list[Prompt]:
        return [self._prompts[i] for i in next(self._stream)]

    def observe(self, groups: Sequence[Group]) -> None:
        """The order does not depend on results."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> str:
        return json.dumps(self._stream.get_state())

    def restore(self, state: str) -> None:
        position: dict[str, Any] = json.loads(state)
        self._stream.set_state(position)
