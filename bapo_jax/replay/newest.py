"""The newest groups of a run, first in first out: the memory of several replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bapo_jax.groups import REPLAY, Batch, Begun, Group
from bapo_jax.replay.arrays import group_bytes, groups_from_arrays, groups_to_arrays
from bapo_jax.replay.protocol import Rng


class Newest:
    """A replay but for `compose`: the last groups that were added, and how often each was trained on.

    Sampling removes none of them.
    """

    buffer = None

    def __init__(self, kind: str, capacity: int):
        """`kind` is the replay's name; it holds at most `capacity` groups."""
        self._kind, self._capacity = kind, capacity
        self._groups: list[Group] = []
        self._uses: list[int] = []
        self._composed: dict[str, float] = {}  # metrics of the last batch

    @property
    def groups(self) -> list[Group]:
        """The held groups, oldest first; read-only."""
        return self._groups

    @property
    def uses(self) -> list[int]:
        """How often each held group was trained on; read-only."""
        return self._uses

    def hard_prompts(self, step: int, rng: Rng) -> list[Begun]:
        """Returns []: nothing is re-evaluated."""
        return []

    def with_fresh(self, fresh: Sequence[Group]) -> list[Group]:
        """Returns what `add` would hold."""
        return [*self._groups, *(g for g in fresh if not g.infra_error)][-self._capacity :]

    def times_trained(self, batch: Batch) -> list[int]:
        """Returns how often each group was trained on, this time included; call it before `add`."""
        uses = self._uses_by_id()
        return [uses.get(id(g), 0) + 1 for g in batch.groups]

    def add(self, step: int, fresh: Sequence[Group], batch: Batch) -> None:
        """Appends the fresh groups without infrastructure errors, and counts what `batch` trained on."""
        uses, trained = self._uses_by_id(), {id(g) for g in batch.groups}
        self._groups = self.with_fresh(fresh)
        self._uses = [uses.get(id(g), 0) + (id(g) in trained) for g in self._groups]

    def replayed(self, batch: Batch, step: int) -> dict[str, float]:
        """Returns means over the replayed groups of a new batch: age in steps, accuracy, earlier uses."""
        groups, uses = batch.of_origin(REPLAY), self._uses_by_id()
        if not groups:
            return {}
        return {
            'bapo/replay/age': float(np.mean([step - g.step for g in groups])),
            'bapo/replay/mean_reward': float(np.mean([g.accuracy for g in groups])),
            'bapo/replay/uses': float(np.mean([uses[id(g)] for g in groups])),
        }

    def metrics(self, step: int) -> dict[str, float]:
        """Returns metrics of the last batch, and the number and bytes of the groups."""
        return {
            **self._composed,
            f'buffer/{self._kind}/groups': len(self._groups),
            f'buffer/{self._kind}/bytes': sum(map(group_bytes, self._groups)),
        }

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `restore` needs, as arrays for a checkpoint."""
        return {**groups_to_arrays(self._groups), 'uses': np.array([*self._uses, 0], np.int64)}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores `state` exactly. Raises ValueError if it holds more groups than the capacity."""
        groups = groups_from_arrays(arrays)
        if len(groups) > self._capacity:
            raise ValueError(
                f'a saved memory holds {len(groups)} groups, more than '
                f'replay.{self._kind}.capacity={self._capacity}; '
                'set that field to the value that the run started with'
            )
        self._groups, self._uses = groups, arrays['uses'][: len(groups)].tolist()

    def _uses_by_id(self) -> dict[int, int]:
        return {id(g): n for g, n in zip(self._groups, self._uses, strict=True)}
