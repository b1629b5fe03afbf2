"""The interface of prompt selectors: they choose prompts, observe results, and can be saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bapo_jax.groups import Begun, Group, Prompt


class PromptSelector(Protocol):
    """Chooses the training prompts of each step."""

    learns: bool  # whether its observations change its later choices

    def references(self) -> list[Prompt]:
        """Prompts to ask before `next`, which may depend on their results. Most selectors need none.

        `observe` gets their groups. They are trained on if `next` returns their prompts.
        """
        return []

    def next(self) -> list[Prompt]:
        """The prompts of the next step, all different."""

    def begin(self, prompts: Sequence[Prompt]) -> list[Begun]:
        """With what the responses to prompts of the last `next` begin. Most selectors give nothing."""
        return [Begun(prompt) for prompt in prompts]

    def observe(self, groups: Sequence[Group]) -> None:
        """Observes the rollout policy's results, for selectors that learn which prompts are useful."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the last `next` and of the observations, for the log."""

    def state(self) -> str:
        """Everything `restore` needs, as JSON."""

    def restore(self, state: str) -> None:
        """Restores what `state` saved."""
