"""Which hard prompts are asked again, and how: lines 12-13 of Algorithm 1, and what other rows do there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bapo_jax.groups import Batch, ByGroup, Group, Prompt
from bapo_jax.replay.buffer import ReplayBuffer

Score = Callable[[Batch], ByGroup]  # log-probs of every response token under π_θ


class Retries(Protocol):
    """What a row does with hard prompts, and what it remembers for that."""

    def choose(self, step: int, buffer: ReplayBuffer, rng: np.random.Generator) -> list[Prompt]:
        """The prompts that π_θ answers at this step, all of them hard ones that the buffer holds."""

    def pooled(self, reevaluated: Sequence[Group], score: Score) -> list[Group]:
        """Their groups, in order, as they may enter X2. Called before `observe` has seen them."""

    def observe(self, groups: Sequence[Group], buffer: ReplayBuffer) -> None:
        """Remembers re-evaluated groups, or fresh ones once the buffer has taken them in."""

    def metrics(self) -> dict[str, Any]:
        """Of the last choice, and what became of it; run/metric_table.py has the names."""

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `restore` needs, as arrays for a checkpoint."""

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Puts back what `state` saved. With the arrays of another choice, or none, nothing is known."""


class Uniform:
    """The paper's: any of the hard prompts that are held, as they were asked before."""

    def __init__(self, most: int):
        """`most` prompts are asked again at a time."""
        self._most = most

    def choose(self, step: int, buffer: ReplayBuffer, rng: np.random.Generator) -> list[Prompt]:
        return buffer.hard_prompts(rng, self._most)

    def pooled(self, reevaluated: Sequence[Group], score: Score) -> list[Group]:
        """The groups as they are."""
        return list(reevaluated)

    def observe(self, groups: Sequence[Group], buffer: ReplayBuffer) -> None:
        """Nothing: the buffer knows all that matters."""

    def metrics(self) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Nothing was saved."""
