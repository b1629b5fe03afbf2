"""An engine around an engine: the task's environment replies to a response, and the policy continues it.

The policy's turn ends with a stop token. If the task's `reply` has an answer to the turn, that becomes a span
of the environment, which nobody trains on. The engine then continues this response alone, by the policy that
its group was requested from. A response ends with a turn without a reply, after `most_turns` replies, or at
the token limit. So a group of episodes is a group: nothing behind this engine knows the difference.

A response depends only on its random keys and on the replies. Turn t has the draw `Draw.again(2 t)`,
since a continuation in a later step has an odd one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from bapo_jax.groups import LENGTH, STOP, UNFINISHED, Author, Begun, Prompt, Response, Span
from bapo_jax.rollout.engine import Ask, Draw, Engine, RolloutError, Sampling
from bapo_jax.rollout.vllm.replies import BadResponse
from bapo_jax.tasks.turns import reply_text

# (ground truth, text of a turn) -> the environment's answer, or None. It must end by itself, and may raise.
Reply = Callable[[Any, str], str | None]

_THREADS = 4  # per core: a tool's answer is waited for


class NoReply(BadResponse):
    """The environment's reply to a response failed, which costs the group."""


class Episodes(Engine):
    """`inner`, with at most `most_turns` replies to a response."""

    def __init__(self, inner: Engine, tokenizer: Any, reply: Reply, most_turns: int):
        self._inner, self._tokenizer, self._reply, self._most_turns = inner, tokenizer, reply, most_turns
        self.servers, self.holds_several = inner.servers, inner.holds_several
        threads = _THREADS * len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix='replies')
        self._pending: set[_Episodes] = set()

    def load(self, params: Any, version: int) -> None:
        self._inner.load(params, version)

    def ask(
        self, begun: Sequence[Begun], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[Future[tuple[Response, ...]]]:
        ask = self._inner.asker()
        groups = []
        for one, draw, answer in zip(begun, draws, ask(begun, group_size, sampling, draws), strict=True):
            group = _Episodes(one, group_size, sampling, draw, ask)
            self._pending.add(group)
            group.future.add_done_callback(lambda _, group=group: self._ended(group))
            self._follow(group, 0, answer)
            groups.append(group)
        return [group.future for group in groups]

    def probe(
        self, prompt: Prompt, group_size: int, sampling: Sampling, draw: Draw
    ) -> list[tuple[Response, ...]]:
        return self._inner.probe(prompt, group_size, sampling, draw)

    def metrics(self) -> dict[str, float]:
        return self._inner.metrics()

    def close(self) -> None:
        self._inner.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for group in list(self._pending):
            group.fail(RolloutError('the engine was closed before it had answered'))

    def _follow(self, group: _Episodes, first: int, answer: Future[tuple[Response, ...]]) -> None:
        """Goes on with the responses that `answer` will hold; the first of them is number `first`."""
        group.asked.add(answer)
        answer.add_done_callback(lambda _: self._answered(group, first, answer))
        if group.future.done():  # it was given up meanwhile
            answer.cancel()

    def _answered(self, group: _Episodes, first: int, answer: Future[tuple[Response, ...]]) -> None:
        """Runs in the engine's thread, which must not wait for a tool."""
        group.asked.discard(answer)
        if answer.cancelled():
            group.future.cancel()
        elif error := answer.exception():
            group.fail(error)
        else:
            for j, response in enumerate(answer.result(), start=first):
                try:
                    self._pool.submit(self._go_on, group, j, response)
                except RuntimeError:  # the engine was closed
                    group.fail(RolloutError('the engine was closed before it had answered'))
                    return

    def _go_on(self, group: _Episodes, j: int, response: Response) -> None:
        """Takes a response's next turn, or its end."""
        if group.future.done():
            return
        try:
            begun = self._replied(group, j, response)
        except Exception as error:  # a tool may fail in any way
            lost = NoReply(f'no reply to a response ({type(error).__name__}: {str(error)[:300]})')
            lost.__cause__ = error
            group.fail(lost)
            return
        if isinstance(begun, Response):
            group.take(j, begun)
            return
        turn = sum(span.author == Author.ENVIRONMENT for span in begun.spans)
        try:
            [answer] = group.ask([begun], 1, group.sampling, [group.draw.again(2 * turn)])
        except Exception as error:
            group.fail(RolloutError(f'the engine takes no further turn: {error}'))
        else:
            self._follow(group, j, answer)

    def _replied(self, group: _Episodes, j: int, response: Response) -> Begun | Response:
        """A response with the environment's reply, to be continued; or as it ends."""
        prompt, limit, own = group.begun.prompt, group.sampling.max_tokens, newest_turn(response)
        replies = sum(span.author == Author.ENVIRONMENT for span in response.spans)
        if response.finish != STOP or replies == self._most_turns:
            return response
        if response.by(Author.PLACEHOLDER).any():  # no engine could read it again: see `finish_of`
            return response
        text = self._reply(prompt.ground_truth, self._tokenizer.decode(own, skip_special_tokens=True))
        if text is None:
            return response
        said = reply_text(
            self._tokenizer, self._tokenizer.decode(prompt.tokens), self._tokenizer.decode(own[-1:]), text
        )
        tokens = np.asarray(self._tokenizer.encode(said, add_special_tokens=False), np.int32)
        if not len(tokens):
            return response
        if len(response.tokens) + len(tokens) >= limit:  # no room for another turn
            return Response(response.spans, LENGTH)
        spans = (*response.spans, Span(tokens, None, Author.ENVIRONMENT))
        most = group.begun.most
        left = most and most - sum(len(s.tokens) for s in spans[len(group.begun.spans) :])
        if most and left < 1:
            return Response(spans, UNFINISHED)
        return Begun(prompt, spans, group.begun.first + j, left)

    def _ended(self, group: _Episodes) -> None:
        self._pending.discard(group)
        group.give_up()


def newest_turn(response: Response) -> np.ndarray:
    """What was written after the environment's last reply, int32 [tokens]."""
    start = at = 0
    for span in response.spans:
        at += len(span.tokens)
        if span.author == Author.ENVIRONMENT:
            start = at
    return response.tokens[start:]


class _Episodes:
    """A requested group, and its finished responses by index."""

    def __init__(self, begun: Begun, size: int, sampling: Sampling, draw: Draw, ask: Ask):
        self.begun, self.size, self.sampling, self.draw, self.ask = begun, size, sampling, draw, ask
        self.asked: set[Future] = set()  # of the inner engine, under way
        self.future: Future[tuple[Response, ...]] = Future()
        self._responses: dict[int, Response] = {}
        self._settled = False  # it has ended, or nobody waits for it any more
        self._lock = threading.Lock()  # the turns of one group end in several threads

    def take(self, j: int, response: Response) -> None:
        with self._lock:
            self._responses[j] = response
            whole = len(self._responses) == self.size
        if whole and self._settle():
            self.future.set_result(tuple(self._responses[i] for i in range(self.size)))

    def fail(self, error: BaseException) -> None:
        if self._settle():
            self.future.set_exception(error)

    def give_up(self) -> None:
        """After the end: cancels what is still under way, and wakes those who wait for a cancelled group."""
        self._settle()
        for answer in list(self.asked):
            answer.cancel()

    def _settle(self) -> bool:
        """Whether the caller is to end the future: the first caller, unless the group was cancelled."""
        with self._lock:
            first, self._settled = not self._settled, True
            return first and self.future.set_running_or_notify_cancel()
