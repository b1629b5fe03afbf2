"""Polls a server while replies are pending: whether it makes progress, and whether a reply is lost.

A reply is lost if the server has ended the request but the reply does not arrive: the network between may
drop a connection or a reply. A server's progress with other requests does not show this. So its metrics are
polled while a request waits long, and they reveal two cases:

- The server is idle: at two polls in a row it runs and queues nothing, it has generated nothing in between,
  and no part of any reply has arrived.
- The request is overtaken: one that was sent later has been answered. vLLM admits requests in order of
  arrival, so this one has left the queue. From then on, each of its responses gets a token at every
  iteration, and ends within its token limit.

Other requests on the server can only delay the first case. Neither depends on time: a request that the server
runs, however slowly, is not lost. A mistaken poll costs a group at most two retries (`client.py`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp

from bapo_jax.rollout.engine import RolloutError
from bapo_jax.rollout.vllm.exchange import exchange
from bapo_jax.rollout.vllm.replies import BadResponse, Load, read_load

_ALIVE_S = 60.0  # timeout of /health and /metrics; their process also writes replies of megabytes
_LONG_S = 60.0  # how long a request waits before polling; most runs' replies arrive earlier
_EVERY_S = 30.0  # between polls; a server that encodes many replies at once delivers one in this time
# Most iterations per token: with pipeline parallelism, each stage has its own requests and counts separately.
_STAGES = 4


class LostReply(BadResponse):
    """The server has ended a request, but its reply did not arrive."""


class _Seen(NamedTuple):
    """The result of a poll."""

    load: Load
    heard: int  # parts of all replies received from the server
    parts: int  # those of this request's reply


@dataclass(eq=False)
class _Request:
    most_tokens: int  # per response
    sent_s: float
    patience: asyncio.Timeout
    parts: int = 0  # received parts of its reply
    overtaken: bool = False
    ends_by: float | None = None  # the iteration by which it has ended, once it is overtaken
    seen: _Seen | None = None  # at the previous poll
    why_lost: str = ''

    def look(self, load: Load, heard: int) -> str:
        """Why the reply is lost, by this poll and the previous one; '' if it may still arrive."""
        before, self.seen = self.seen, _Seen(load, heard, self.parts)
        if self.overtaken and self.ends_by is None and load.iterations is not None:
            self.ends_by = load.iterations + _STAGES * self.most_tokens
        if before is None or before.parts != self.parts:
            return ''
        if load.sequences == 0 and before == self.seen:
            return 'the server has no running or queued request, and has sent nothing since the previous poll'
        if self.ends_by is not None and (load.iterations or 0) > self.ends_by:
            return (
                'a later request is answered, and the server has since made more iterations than a response '
                'takes'
            )
        return ''


class Watch:
    """Polls one server and tracks its pending groups. `send` is VllmEngine's, for other routes."""

    def __init__(self, url: str, send: Callable[..., Awaitable[bytes]], deadline_s: float):
        self._url, self._send, self._limit_s = url, send, min(_ALIVE_S, deadline_s)
        self._under_way: list[_Request] = []  # in the order of sending
        self._heard, self._looking = 0, None

    async def progress(self) -> tuple[float | None, str]:
        """The tokens that the server has read and generated (None if it is not alive), and a message."""
        try:
            await self._send(self._url, '/health', method='GET', limit_s=self._limit_s)
            done = (await self._load()).tokens
        except RolloutError as e:
            return None, str(e)
        return done, f'/health answers, and /metrics counts {done:.0f} tokens of prompts and responses'

    async def _load(self) -> Load:
        return read_load(await self._send(self._url, '/metrics', method='GET', limit_s=self._limit_s))

    async def exchange(
        self, session: aiohttp.ClientSession, url: str, body: Any, method: str, limit_s: float, most: int,
    ) -> tuple[int, float, bytes]:  # fmt: skip
        """As `exchange`, for a group, but also raises LostReply if its reply is lost.

        The connection is then closed, and vLLM aborts the request if it still runs.
        """
        try:
            async with asyncio.timeout(None) as patience:
                request = _Request(
                    body['sampling_params']['max_tokens'], asyncio.get_running_loop().time(), patience
                )
                heard = functools.partial(self._hear, request)
                return await self._watched(
                    request, exchange(session, url, body, method, limit_s, most, heard)
                )
        except TimeoutError as e:
            if not patience.expired():
                raise
            raise LostReply(f'{url}: a reply is lost: {request.why_lost}') from e

    async def _watched(
        self, request: _Request, reply: Awaitable[tuple[int, float, bytes]]
    ) -> tuple[int, float, bytes]:
        self._under_way.append(request)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_on())
        try:
            status, *rest = await reply
            if status == 200:
                for earlier in self._under_way[: self._under_way.index(request)]:
                    earlier.overtaken = True
            return status, *rest
        finally:
            self._under_way.remove(request)

    def _hear(self, request: _Request) -> None:
        request.parts += 1
        self._heard += 1

    async def _look_on(self) -> None:
        """Polls the server while requests are pending, and stops waiting for those whose reply is lost."""
        loop = asyncio.get_running_loop()
        while self._under_way:
            await asyncio.sleep(_EVERY_S)
            sent_by = loop.time() - _LONG_S
            if not any(request.sent_s < sent_by for request in self._under_way):
                continue
            try:
                load = await self._load()
            except RolloutError:
                load = Load()  # nothing is known, and two polls must be consecutive
            for request in self._under_way:
                if request.sent_s < sent_by and not request.why_lost:
                    request.why_lost = request.look(load, self._heard)
                    if request.why_lost:
                        request.patience.reschedule(loop.time())
