"""The load of vLLM servers, from their /metrics: polled while they answer, since afterwards they are empty.

A poll is a task on the engine's event loop that nobody waits for. A failed poll contributes no numbers.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from bapo_jax.rollout.engine import RolloutError

_EVERY_S = 5.0  # least seconds between two polls of a server
_LIMIT_S = 5.0  # timeout of a poll
# vLLM 0.32 reports these, in one line for each engine of a server; a fraction may be written as 9e-05.
_CACHE, _WAITING, _PREEMPTIONS = (
    re.compile(rb'^vllm:' + name + rb'(?:\{.*\})? (\d+(?:\.\d+)?(?:e[+-]\d+)?)$', re.MULTILINE)
    for name in (rb'kv_cache_usage_perc', rb'num_requests_waiting', rb'num_preemptions_total')
)


class Fill(NamedTuple):
    """The result of a poll; None for what the server does not report."""

    cache_used: float | None  # fraction of the KV cache, for the server's fullest engine
    waiting: float | None  # responses that wait for memory
    preemptions: float | None  # since the server started


def read_fill(body: bytes) -> Fill:
    """Reads the reply of /metrics."""
    cache, waiting, preemptions = (
        list(map(float, count.findall(body))) for count in (_CACHE, _WAITING, _PREEMPTIONS)
    )
    return Fill(
        max(cache, default=None), sum(waiting) if waiting else None, sum(preemptions) if preemptions else None
    )


class Gauges:
    """Results of polls since the last call of `taken`. `send` is VllmEngine's; `look` runs in its loop."""

    def __init__(self, send: Callable[..., Awaitable[bytes]]):
        self._send, self._lock = send, threading.Lock()
        self._found: dict[str, float] = {}
        self._looks: dict[str, asyncio.Task] = {}
        self._due: dict[str, float] = {}  # when the next poll is due
        self._preempted: dict[str, float] = {}  # a server's count at the last poll

    def look(self, url: str, last: bool) -> None:
        """Polls a server that has just sent a reply, if it is due or this was the `last` pending reply."""
        now, before = asyncio.get_running_loop().time(), self._looks.get(url)
        if (before is None or before.done()) and (last or now >= self._due.get(url, now)):
            self._due[url] = now + _EVERY_S
            self._looks[url] = asyncio.create_task(self._look(url))

    def taken(self) -> dict[str, float]:
        """The metrics since the last call."""
        with self._lock:
            found, self._found = self._found, {}
        return found

    def found(self, url: str, fill: Fill) -> None:
        """Adds a poll. Preemptions count from the previous poll, or from 0 if the server was restarted."""
        with self._lock:
            for name, value in (('cache_used', fill.cache_used), ('waiting', fill.waiting)):
                if value is not None:
                    self._found[f'perf/servers/{name}'] = max(
                        value, self._found.get(f'perf/servers/{name}', 0.0)
                    )
            if fill.preemptions is not None:
                before = self._preempted.get(url, fill.preemptions)
                new = fill.preemptions - before if fill.preemptions >= before else fill.preemptions
                self._found['perf/servers/preemptions'] = (
                    self._found.get('perf/servers/preemptions', 0.0) + new
                )
                self._preempted[url] = fill.preemptions

    async def _look(self, url: str) -> None:
        try:
            self.found(url, read_fill(await self._send(url, '/metrics', method='GET', limit_s=_LIMIT_S)))
        except RolloutError:
            pass
