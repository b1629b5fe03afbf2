"""The interface of rollout engines, which hold one policy and answer prompts with it, all in token ids."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, NamedTuple

import jax

from bapo_jax.groups import LENGTH, STOP, UNFINISHED, Author, Begun, Prompt, Response, Span
from bapo_jax.machine.ending import CONTINUES, Ending

# The purpose of a draw. It is part of the random key, so each purpose samples a prompt independently.
FRESH, REEVALUATION, EVALUATION, TRACKING, PROBE, FAILED = range(6)
_PURPOSES = 16  # room for more of them
_TURNS = 1024  # twice as many as task.turns allows


Ask = Callable[..., list[Future[tuple[Response, ...]]]]  # the signature of `Engine.ask`


class RolloutError(Ending, RuntimeError):
    """The engine returned no trainable responses; the message names the server and the failure."""

    remedy = CONTINUES


class Sampling(NamedTuple):
    """How to sample. The log-probs returned are of logits / temperature, over the whole vocabulary."""

    temperature: float  # 0: greedy, with log-probs at temperature 1
    max_tokens: int  # of a response
    top_p: float = 1.0  # nucleus sampling threshold; below 1 only in evaluations


class Draw(NamedTuple):
    """One use of randomness. Response j to prompt p is keyed only by (seed, step, purpose, p.id, j)."""

    seed: int
    step: int
    purpose: int

    def again(self, turn: int, group: int = 0) -> Draw:
        """The draw of a response's later turn, or of its continuation in a later step.

        `group` numbers the groups of one prompt that are continued in the same step.
        """
        return self._replace(purpose=self.purpose + _PURPOSES * (turn + _TURNS * group))

    def key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), self.step), self.purpose)


class Engine(abc.ABC):
    """An engine asks the policy that was loaded last. A response says which policy sampled which tokens."""

    # The number of servers, whose log-probs the trainer checks against its own; 0 if this process samples.
    servers: int
    # Whether several policies answer side by side, so that a `load` need not wait for pending groups.
    holds_several = False

    @abc.abstractmethod
    def load(self, params: Any, version: int) -> None:
        """Makes `params` the policy of what is requested from now on; responses state `version`.

        Groups may be pending. They may be completed by the policy that they were requested from, or by the
        new one. The caller keeps `params` alive and unchanged until the next `load`. Raises RolloutError.
        """

    @abc.abstractmethod
    def ask(
        self, begun: Sequence[Begun], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[Future[tuple[Response, ...]]]:
        """Returns at once, with a future for each group of `group_size` responses, in order.

        A response has the spans that it begins with, and then a span by the policy. `sampling.max_tokens`
        limits them together. A response that `Begun.most` cuts is UNFINISHED. `draws` has one draw per group.
        Groups requested earlier, in this call or another, are answered first. If a group fails, its future
        raises RolloutError, and the others are not affected. Every future ends within the engine's own
        deadlines. Cancelling a future gives up its group.
        """

    def asker(self) -> Ask:
        """`ask`, answered by the policy that is loaded now also if it is called after the next `load`.

        The engine keeps that policy while the caller keeps what is returned. Servers that hold one policy
        whole do not: they answer with the one that they hold by then.
        """
        return self.ask

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[tuple[Response, ...]]:
        """The groups of `ask` for these prompts. If one fails, cancels the others and raises its error."""
        return results_of(self.ask([Begun(prompt) for prompt in prompts], group_size, sampling, draws))

    def probe(
        self, prompt: Prompt, group_size: int, sampling: Sampling, draw: Draw
    ) -> list[tuple[Response, ...]]:
        """A group from each server, also while other groups are pending. If one fails, raises its error."""
        return []

    def metrics(self) -> dict[str, float]:
        """Metrics that the servers, if any, have reported since the last call. Does not wait for them."""
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Gives up pending requests, ends the engine's processes and closes its connections."""


def tokens_left(begun: Begun, sampling: Sampling) -> int:
    """The most tokens that a policy may add to a response. Raises ValueError if there are none."""
    left = sampling.max_tokens - begun.length
    if left < 1:
        raise ValueError(
            f'prompt {begun.prompt.id}: {begun.length} tokens are given of a response of at most '
            f'{sampling.max_tokens}; give fewer'
        )
    return min(left, begun.most or left)


def finish_of(begun: Begun, own: Sequence[Span], stopped: bool, sampling: Sampling) -> str:
    """The finish reason of a response to which a policy added the spans `own`.

    A sampled image token has no image, so no engine could read it again: that response ends here.
    """
    if stopped:
        return STOP
    added = sum(len(span.tokens) for span in own)
    goes_on = added == begun.most and begun.length + added < sampling.max_tokens
    return UNFINISHED if goes_on and all(span.author != Author.PLACEHOLDER for span in own) else LENGTH


def results_of(futures: Sequence[Future]) -> list[Any]:
    """The results of all futures, in order. If one fails, cancels the others and raises its error."""
    try:
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()  # no effect on those that are done
