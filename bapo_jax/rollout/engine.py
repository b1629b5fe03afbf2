"""The interface of an engine. It holds one policy and answers prompts with it; tokens go in and come out as ids."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, NamedTuple

import jax
import numpy as np

from bapo_jax.groups import Prompt, Response

# The purpose of a draw. It enters the random keys, so one prompt at one step is drawn independently for each purpose.
FRESH, REEVALUATION, EVALUATION, TRACKING, PROBE, FAILED = range(6)


class RolloutError(RuntimeError):
    """The engine returned no trainable responses; the message names the server and the failure."""


class Sampling(NamedTuple):
    """How to sample. The log-probs returned are of logits / temperature, over the whole vocabulary."""

    temperature: float  # 0: the likeliest token always, with its log-prob at temperature 1
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
    """An engine holds one policy at a time. `load` must not be called while futures of `ask` are pending."""

    servers: int  # how many servers answer; the trainer checks their log-probs against its own. 0: this process answers

    @abc.abstractmethod
    def load(self, params: Any, version: int) -> None:
        """Answers with `params` from now on, and stamps responses with `version`. Does nothing where it holds that version already.

        The caller keeps `params` alive and unchanged until the next `load`. Raises RolloutError.
        """

    @abc.abstractmethod
    def ask(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[Future[tuple[Response, ...]]]:
        """A future for each prompt's group of `group_size` responses, in order; `draws` has one for each prompt. Returns at once.

        Prompts that were asked earlier, in this call or another, are answered first. A group that fails leaves the others alone:
        its future raises RolloutError. Every future ends by the engine's own deadlines. Cancelling one gives its group up.
        """

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[tuple[Response, ...]]:
        """The groups of `ask`. Where one fails, cancels the others and raises its error."""
        return gathered(self.ask(prompts, group_size, sampling, draws))

    def metrics(self) -> dict[str, float]:
        """What the servers said of their work since this was last called, where there are any. Does not wait for them."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Gives up what is pending, ends the engine's processes and closes its connections."""


def trained_tokens(tokens: np.ndarray, image_token: int | None) -> np.ndarray | None:
    """The loss mask of a response that a policy sampled, bool like `tokens`; None where all of them count.

    A policy that reads images may sample the token in whose place their features stand, `image_token`. There is no image there, so
    the model reads the token as a word, and learns nothing of it.
    """
    trained = tokens != image_token
    return None if image_token is None or trained.all() else trained


def gathered(futures: Sequence[Future]) -> list[Any]:
    """The results of all futures, in order. Where one fails, cancels the others and raises its error."""
    try:
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()  # no effect on those that are done
