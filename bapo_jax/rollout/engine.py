"""The interface of an engine. It holds one policy and answers prompts with it; tokens go in and come out as ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax

from bapo_jax.groups import Prompt, Response

# The purpose of a draw. It enters the random keys, so one prompt at one step is drawn independently for each purpose.
FRESH, REEVALUATION, EVALUATION, TRACKING, PROBE = range(5)


class RolloutError(RuntimeError):
    """The engine returned no trainable responses; the message names the server and the failure."""


class Sampling(NamedTuple):
    """How to sample. The log-probs returned are of logits / temperature, over the whole vocabulary."""

    temperature: float
    max_tokens: int


class Draw(NamedTuple):
    """Names one use of randomness. The random numbers of response j to prompt p depend on (seed, step, purpose, p.id, j) alone."""

    seed: int
    step: int
    purpose: int

    def key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), self.step), self.purpose)


class Engine(Protocol):
    """An engine holds one policy at a time. Its methods are called one after the other, never at once."""

    servers: int  # how many servers answer; the trainer checks their log-probs against its own. 0: this process answers

    def load(self, params: Any, version: int) -> None:
        """Answers with `params` from now on, and stamps responses with `version`. Does nothing where it holds that version already.

        The caller keeps `params` alive and unchanged, and loads no other policy during `generate`. Raises RolloutError.
        """

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[tuple[Response, ...]]:
        """`group_size` responses to each prompt, in the order of `prompts`; `draws` has one for each. Raises RolloutError."""

    def close(self) -> None:
        """Ends its processes and closes its connections."""
