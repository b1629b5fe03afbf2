"""Prompt selection. A selector is asked for a step's prompts, is told what became of them, and can be saved and restored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ml_collections import ConfigDict

from bapo_jax.groups import Group, Prompt
from bapo_jax.prompts.epochs import ShuffledEpochs
from bapo_jax.prompts.mopps import Mopps


class PromptSelector(Protocol):
    """Which questions now."""

    learns: bool  # whether what it observes changes what it asks next

    def next(self) -> list[Prompt]:
        """The prompts of the next step, all different."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Takes note of what the rollout policy made of them: for selectors that learn what is worth asking."""

    def metrics(self) -> dict[str, float]:
        """Of the last `next` and of what was observed, for the log."""

    def state(self) -> str:
        """Everything `restore` needs, as JSON."""

    def restore(self, state: str) -> None:
        """Puts back what `state` saved."""


def make_selector(config: ConfigDict, prompts: Sequence[Prompt]) -> PromptSelector:
    """The selector of the config's row. Raises ValueError for an unknown one, and where there are too few prompts."""
    p, batch, seed = config.prompts, config.learner.batch_groups, config.seed
    if p.selector == 'shuffled':
        return ShuffledEpochs(prompts, batch, seed)
    if p.selector == 'mopps':
        return Mopps(prompts, batch, seed, candidates=p.candidates, target=p.target, decay=p.decay)
    raise ValueError(f'prompts.selector={p.selector!r} is unknown; choose one of shuffled, mopps')
