"""The interface of an engine. It holds one policy and answers prompts with it; tokens go in and come out as ids."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax

from bapo_jax.groups import Prompt, Response

# The purpose of a draw. It enters the random keys, so one prompt at one step is drawn independently for each purpose.
FRESH, REEVALUATION, EVALUATION, TRACKING, PROBE = range(5)


class RolloutError(RuntimeError):
    """The engine returned no trainable responses; the message names the server and the failure."""


class Sampling(NamedTuple):
    """How to sample. The log-probs returned are of logits / temperature, over the whole vocabulary."""

    temperature: float  # 0: the likeliest token always
    max_tokens: int
    top_p: float = 1.0  # of the likeliest tokens that make up this share; below 1 in evaluations alone


class Draw(NamedTuple):
    """Names one use of randomness. The random numbers of response j to prompt p depend on (seed, step, purpose, p.id, j) alone."""

    seed: int
    step: int
    purpose: int

    def key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), self.step), self.purpose)


class Engine(abc.ABC):
    """An engine holds one policy at a time. Its methods are called one after the other, never at once."""

    servers: int  # how many servers answer; the trainer checks their log-probs against its own. 0: this process answers

    @abc.abstractmethod
    def load(self, params: Any, version: int) -> None:
        """Answers with `params` from now on, and stamps responses with `version`. Does nothing where it holds that version already.

        The caller keeps `params` alive and unchanged, and loads no other policy before all that was asked is answered. Raises
        RolloutError.
        """

    @abc.abstractmethod
    def ask(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[Future[tuple[Response, ...]]]:
        """A future for each prompt's `group_size` responses, in the order of `prompts`; `draws` has one for each.

        What was asked earlier is answered first. A future may end with a RolloutError.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends its processes and closes its connections. What is not answered yet is not answered any more."""

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[tuple[Response, ...]]:
        """Asks and waits for all answers. Raises RolloutError; the prompts not answered by then are given up."""
        return gathered(self.ask(prompts, group_size, sampling, draws))


def gathered(futures: Sequence[Future]) -> list[Any]:
    """The results of all futures, in order. Where one ends with an error, cancels the others and raises it."""
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:  # after one failure the others are useless; those that are done do not mind
            future.cancel()
