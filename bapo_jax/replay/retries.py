"""Which hard prompts to ask again, and how: lines 12-13 of Algorithm 1, and alternatives to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bapo_jax.groups import Begun, Group
from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.replay.protocol import ScoreBatch


class Retries(Protocol):
    """A row's rule for re-evaluating hard prompts, and the memory that it needs."""

    def choose(self, step: int, buffer: ReplayBuffer, rng: np.random.Generator) -> list[Begun]:
        """Returns the hard prompts, all held by the buffer, that π_θ answers at this step."""

    def pooled(self, reevaluated: Sequence[Group], score: ScoreBatch) -> list[Group]:
        """Returns the groups as they may enter X2, in order. Called before `observe` sees them."""

    def observe(self, groups: Sequence[Group], buffer: ReplayBuffer) -> None:
        """Remembers re-evaluated groups, or fresh groups after the buffer has added them."""

    def metrics(self) -> dict[str, Any]:
        """Returns metrics of the last choice and its outcome; docs/reference/metrics.py has the names."""

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `restore` needs, as arrays for a checkpoint."""

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `state` saved. Arrays of another kind of retries, or no arrays, change nothing."""


class Uniform:
    """The paper's rule: a uniform sample of the hard prompts, asked as before."""

    def __init__(self, most: int):
        """Asks at most `most` prompts at a time."""
        self._most = most

    def choose(self, step: int, buffer: ReplayBuffer, rng: np.random.Generator) -> list[Begun]:
        return [Begun(prompt) for prompt in buffer.hard_prompts(rng, self._most)]

    def pooled(self, reevaluated: Sequence[Group], score: ScoreBatch) -> list[Group]:
        """Returns the groups unchanged."""
        return list(reevaluated)

    def observe(self, groups: Sequence[Group], buffer: ReplayBuffer) -> None:
        """Does nothing: the buffer has all that matters."""

    def metrics(self) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Does nothing: `state` saved nothing."""


class Delayed(Uniform):
    """Hard prompts that failed at least m steps ago, each asked once, those that wait longest first."""

    def __init__(self, most: int, after: int):
        """Asks at most `most` prompts at a time, and each `after` = m steps or more after it failed."""
        super().__init__(most)
        self._after = after

    def choose(self, step: int, buffer: ReplayBuffer, rng: np.random.Generator) -> list[Begun]:
        waited = [
            entry.prompt
            for entry in buffer.bad.values()
            if not entry.sampled and step - entry.stored >= self._after
        ]
        return list(map(Begun, waited[: self._most]))
