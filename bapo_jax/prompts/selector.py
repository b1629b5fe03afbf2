"""Prompt selection. A selector chooses a step's prompts, observes their results, and can be saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ml_collections import ConfigDict

from bapo_jax.groups import Group, Prompt
from bapo_jax.prompts.epochs import ShuffledEpochs
from bapo_jax.prompts.mopps import Mopps


class PromptSelector(Protocol):
    """Chooses the training prompts of each step."""

    learns: bool  # whether its observations change its later choices

    def next(self) -> list[Prompt]:
        """The prompts of the next step, all different."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Observes the rollout policy's results, for selectors that learn which prompts are useful."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the last `next` and of the observations, for the log."""

    def state(self) -> str:
        """Everything `restore` needs, as JSON."""

    def restore(self, state: str) -> None:
        """Restores what `state` saved."""


def make_selector(config: ConfigDict, prompts: Sequence[Prompt]) -> PromptSelector:
    """The selector that the config names. Raises ValueError if it is unknown or there are too few prompts."""
    p, batch, seed = config.prompts, config.learner.batch_groups, config.seed
    if p.selector == 'shuffled':
        return ShuffledEpochs(prompts, batch, seed)
    if p.selector == 'mopps':
        return Mopps(prompts, batch, seed, **p.mopps)
    raise ValueError(f'prompts.selector={p.selector!r} is unknown; choose one of shuffled, mopps')
