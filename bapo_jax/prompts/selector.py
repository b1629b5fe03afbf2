"""Prompt selection. A selector is asked for a step's prompts, is told what became of them, and can be saved and restored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import grain
from ml_collections import ConfigDict

from bapo_jax.groups import Group, Prompt


class PromptSelector(Protocol):
    """Which questions now."""

    def next(self) -> list[Prompt]:
        """The prompts of the next step, all different."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Takes note of what the rollout policy made of them: for selectors that learn what is worth asking."""

    def state(self) -> str:
        """Everything `restore` needs, as JSON."""

    def restore(self, state: str) -> None:
        """Puts back what `state` saved."""


class ShuffledEpochs:
    """Every prompt once an epoch, in a new order each; the remainder that fills no batch waits for the next epoch.

    Raises ValueError where there are fewer prompts than one batch takes.
    """

    def __init__(self, prompts: Sequence[Prompt], batch: int, seed: int):
        if len(prompts) < batch:
            raise ValueError(
                f'{len(prompts)} training prompts do not fill learner.batch_groups={batch}; lower it or raise task.limit'
            )
        self._prompts = prompts
        indices = grain.MapDataset.range(len(prompts)).shuffle(seed=seed).batch(batch, drop_remainder=True).repeat()
        self._stream = iter(indices.to_iter_dataset(grain.ReadOptions(num_threads=0)))

    def next(self) -> list[Prompt]:
        return [self._prompts[i] for i in next(self._stream)]

    def observe(self, groups: Sequence[Group]) -> None:
        """The order does not depend on results."""

    def state(self) -> str:
        return json.dumps(self._stream.get_state())

    def restore(self, state: str) -> None:
        position: dict[str, Any] = json.loads(state)
        self._stream.set_state(position)


def make_selector(config: ConfigDict, prompts: Sequence[Prompt]) -> PromptSelector:
    """The selector of the config's row. Raises ValueError where there are too few prompts."""
    return ShuffledEpochs(prompts, config.learner.batch_groups, config.seed)
