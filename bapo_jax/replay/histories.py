"""Earlier responses by prompt: each history is first in first out, and one group holds it, oldest first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bapo_jax.groups import Group, joined, taken
from bapo_jax.replay.arrays import group_bytes, groups_from_arrays, groups_to_arrays


class Histories:
    """The last responses to every prompt that was added.

    The number of prompts is unbounded. Host memory and checkpoints grow until every prompt has a history.
    """

    def __init__(self, kind: str, per_prompt: int):
        """`kind` is the replay's name; a history holds at most `per_prompt` responses."""
        self._kind, self._per_prompt = kind, per_prompt
        self._groups: dict[int, Group] = {}

    @property
    def groups(self) -> dict[int, Group]:
        """The histories by prompt id; read-only. A group's step is that of its newest response."""
        return self._groups

    def add(self, group: Group) -> None:
        """Appends the group's responses to the history of its prompt, and drops the oldest ones."""
        old = self._groups.get(group.prompt.id)
        kept = group if old is None else joined(old, group)
        self._groups[group.prompt.id] = taken(kept, range(kept.size)[-self._per_prompt :])

    def drop(self, prompt_id: int) -> None:
        """Forgets the history of a prompt, if there is one."""
        self._groups.pop(prompt_id, None)

    def metrics(self) -> dict[str, int]:
        """Returns the numbers of prompts and responses, and the bytes of their tokens and log-probs."""
        groups = self._groups.values()
        return {
            f'buffer/{self._kind}/prompts': len(groups),
            f'buffer/{self._kind}/responses': sum(g.size for g in groups),
            f'buffer/{self._kind}/bytes': sum(map(group_bytes, groups)),
        }

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `restore` needs, as arrays for a checkpoint."""
        return groups_to_arrays(list(self._groups.values()))

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores `state` exactly. Raises ValueError if a history is longer than the config allows."""
        groups = {g.prompt.id: g for g in groups_from_arrays(arrays)}
        longest = max((g.size for g in groups.values()), default=0)
        if longest > self._per_prompt:
            field = f'replay.{self._kind}.per_prompt'
            raise ValueError(
                f'a saved history holds {longest} responses, more than {field}={self._per_prompt}; '
                'set that field to the value that the run started with'
            )
        self._groups = groups
