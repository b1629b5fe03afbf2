"""What the loop asks of whoever generates: hold one policy, answer prompts with it, token ids in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax

from bapo_jax.groups import Prompt, Response

# What a draw is for; folded into the random keys, so that the same prompt at the same step is drawn independently for each.
FRESH, REEVALUATION, EVALUATION, TRACKING, PROBE = range(5)


class RolloutError(RuntimeError):
    """Responses that can be trained on could not be had; the message says who did what, or did not."""


class Sampling(NamedTuple):
    """How to sample. Log-probs returned are of logits / temperature, with no truncation of the distribution."""

    temperature: float
    max_tokens: int


class Draw(NamedTuple):
    """Names one use of randomness: response j of prompt p depends on (seed, step, purpose, p.id, j) and on nothing else."""

    seed: int
    step: int
    purpose: int

    def key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), self.step), self.purpose)


class Engine(Protocol):
    """One engine holds one policy at a time."""

    def load(self, params: Any, version: int) -> None:
        """Answers come from `params` from now on and are stamped with `version`. The caller keeps `params` alive and unchanged."""

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[tuple[Response, ...]]:
        """`group_size` responses to each prompt, in the order of `prompts`; `draws` has one for each."""

    def close(self) -> None:
        """Lets go of processes and connections."""
