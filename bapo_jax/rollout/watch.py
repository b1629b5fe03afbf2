"""What a server says of its own work while replies are awaited: whether it makes progress, and whether a reply is lost.

A reply is lost where the server has ended the request and the reply does not come. What lies between may forget a connection, or
swallow a reply. That a server makes progress with others says nothing of either. So its counts are read from time to time while a
request waits long, and tell of two cases:

- The server is idle: by two looks it runs and queues nothing and wrote nothing in between, and no part of any reply came.
- The request is overtaken: one that was sent later has been answered. vLLM admits requests in the order in which they come, so this
  one is past the queue. From then on each of its responses gets a token at every iteration, and ends after as many as it may have.

What the server does for others only delays the first case. Neither goes by time: a request that the server runs, however slowly, is
not lost. Should a look be mistaken all the same, it costs a group two repetitions at most (`vllm_engine.py`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp

from bapo_jax.rollout.engine import RolloutError
from bapo_jax.rollout.exchange import exchange
from bapo_jax.rollout.replies import BadResponse, Load, read_load

_ALIVE_S = 60.0  # most seconds for /health and /metrics: one process answers them and writes replies of megabytes
_LONG_S = 60.0  # how long a request waits before its server is looked at; most runs' replies have come by then
_EVERY_S = 30.0  # from look to look; a server that makes JSON of many replies at once delivers one in this time
_STAGES = 4  # most iterations for a token: with pipeline parallelism each stage has requests of its own, and counts for itself


class LostReply(BadResponse):
    """The server has ended a request, and its reply did not come."""


class _Seen(NamedTuple):
    """What a look found."""

    load: Load
    heard: int  # parts of all replies that had come from the server
    parts: int  # of them, those to this request


@dataclass(eq=False)
class _Request:
    most_tokens: int  # of a response
    sent_s: float
    patience: asyncio.Timeout
    parts: int = 0  # of its reply that have come
    overtaken: bool = False
    ends_by: float | None = None  # the iterations by which it has ended, once it is overtaken
    seen: _Seen | None = None  # at the look before
    why_lost: str = ''

    def look(self, load: Load, heard: int) -> str:
        """Why the reply is lost, by this look and the one before; empty where it may still come."""
        before, self.seen = self.seen, _Seen(load, heard, self.parts)
        if self.overtaken and self.ends_by is None and load.iterations is not None:
            self.ends_by = load.iterations + _STAGES * self.most_tokens
        if before is None or before.parts != self.parts:
            return ''
        if load.sequences == 0 and before == self.seen:
            return 'the server runs and queues nothing, and has written nothing since the look before'
        if self.ends_by is not None and (load.iterations or 0) > self.ends_by:
            return 'one that was sent later is answered, and the server has since made more iterations than a response takes'
        return ''


class Watch:
    """The requests for groups that are under way at one server, and looks at it. `send` is VllmEngine's, for its other routes."""

    def __init__(self, url: str, send: Callable[..., Awaitable[bytes]], deadline_s: float):
        self._url, self._send, self._limit_s = url, send, min(_ALIVE_S, deadline_s)
        self._under_way: list[_Request] = []  # in the order in which they were sent
        self._heard, self._looking = 0, None

    async def progress(self) -> tuple[float | None, str]:
        """How many tokens the server has read and written since it started, and its state in words; None where it is not alive."""
        try:
            await self._send(self._url, '/health', method='GET', limit_s=self._limit_s)
            done = (await self._load()).tokens
        except RolloutError as e:
            return None, str(e)
        return done, f'/health is well, /metrics counts {done:.0f} tokens read and written'

    async def _load(self) -> Load:
        return read_load(await self._send(self._url, '/metrics', method='GET', limit_s=self._limit_s))

    async def exchange(
        self, session: aiohttp.ClientSession, url: str, body: Any, method: str, limit_s: float, most: int,
    ) -> tuple[int, float, bytes]:  # fmt: skip
        """As `exchange`, for a group. Raises LostReply too: the connection is closed, and vLLM aborts what it may still run."""
        try:
            async with asyncio.timeout(None) as patience:
                request = _Request(body['sampling_params']['max_tokens'], asyncio.get_running_loop().time(), patience)
                heard = functools.partial(self._hear, request)
                return await self._watched(request, exchange(session, url, body, method, limit_s, most, heard))
        except TimeoutError as e:
            if not patience.expired():
                raise
            raise LostReply(f'{url}: a reply is lost: {request.why_lost}') from e

    async def _watched(self, request: _Request, reply: Awaitable[tuple[int, float, bytes]]) -> tuple[int, float, bytes]:
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
        """Looks at the server while requests are under way, and ends the patience of those whose reply is lost."""
        loop = asyncio.get_running_loop()
        while self._under_way:
            await asyncio.sleep(_EVERY_S)
            sent_by = loop.time() - _LONG_S
            if not any(request.sent_s < sent_by for request in self._under_way):
                continue
            try:
                load = await self._load()
            except RolloutError:
                load = Load()  # nothing is known, and two looks must be one after the other
            for request in self._under_way:
                if request.sent_s < sent_by and not request.why_lost:
                    request.why_lost = request.look(load, self._heard)
                    if request.why_lost:
                        request.patience.reschedule(loop.time())
