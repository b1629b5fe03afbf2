"""The interface of a row's replay: which prompts to ask again, and what to train on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bapo_jax.groups import Batch, Begun, ByGroup, Group
from bapo_jax.replay.buffer import ReplayBuffer

Rng = Callable[[str], np.random.Generator]  # a step's generator for a purpose of replay.PURPOSES
ScoreBatch = Callable[[Batch], ByGroup]  # log-probs of every response token under π_θ


class Replay(Protocol):
    """A row's memory, and the batches that it builds from it."""

    buffer: ReplayBuffer | None  # BAPO's; None if the row has another memory

    def hard_prompts(self, step: int, rng: Rng) -> list[Begun]:
        """Returns the prompts that π_θ re-evaluates at `step`, and with what their responses begin."""

    def compose(
        self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group], rng: Rng, score: ScoreBatch
    ) -> Batch:
        """Returns the batch of `step`, from its fresh and re-evaluated groups and the memory."""

    def times_trained(self, batch: Batch) -> list[int | None]:
        """Returns how often each group of the last batch was trained on, this time included.

        None for a group whose responses have no common number. Call it before `add`, which may evict groups.
        """

    def add(self, step: int, fresh: Sequence[Group], batch: Batch) -> None:
        """Remembers the fresh groups, after this step's draws."""

    def metrics(self, step: int) -> dict[str, Any]:
        """Returns metrics of the last batch, and of the memory at `step` (see docs/reference/metrics.py)."""

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `restore` needs, as arrays for a checkpoint."""

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `state` saved. Raises ValueError if it does not fit the config.

        `arrays` also has those of log.failed_again, if that is on, under other names.
        """


class FromTraces(Replay, Protocol):
    """A replay whose batches have responses of other authors."""

    def receive(self, traces: Mapping[int, Group]) -> None:
        """Gets a judged trace of each prompt that has one, by prompt id, as a group of one response.

        Called once, before `restore`.
        """
