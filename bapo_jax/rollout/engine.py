"""What the loop asks of whoever generates: hold one policy, answer prompts with it, token ids in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax

from bapo_jax.groups import Prompt, Response

# What a draw is for; folded into the random keys, so that the same prompt at the same step is drawn independently for each.
FRESH, REEVALUATION, EVALUATION, TRACKING, PROBE = range(5)


class RolloutError(RuntimeError):
    """The engine returned no trainable responses; the message names the server and the failure."""


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
    """One engine holds one policy at a time, and calls to it come one after the other."""

    servers: int  # how many other programs answer, whose log-probs the trainer checks against its own; 0: this process answers

    def load(self, params: Any, version: int) -> None:
        """Answers with `params` from now on, and stamps responses with `version`; nothing to do where it holds that version.

        The caller keeps `params` alive and unchanged, and takes what was begun before another policy is loaded. Raises RolloutError.
        """

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[tuple[Response, ...]]:
        """`group_size` responses to each prompt, in the order of `prompts`; `draws` has one for each. Raises RolloutError."""

    def close(self) -> None:
        """Lets go of processes and connections."""
