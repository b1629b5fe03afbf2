"""How full vLLM servers are, by their /metrics: looked at while they answer, since afterwards they are empty.

A look is a task of the engine's own loop that nobody waits for. One that fails leaves its numbers out.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from bapo_jax.rollout.engine import RolloutError

_EVERY_S = 5.0  # least seconds from look to look at a server
_LIMIT_S = 5.0  # of a look
# vLLM 0.32 counts these, one line for each engine of a server; a share may be written as 9e-05.
_CACHE, _WAITING, _PREEMPTIONS = (
    re.compile(rb'^vllm:' + name + rb'(?:\{.*\})? (\d+(?:\.\d+)?(?:e[+-]\d+)?)$', re.MULTILINE)
    for name in (rb'kv_cache_usage_perc', rb'num_requests_waiting', rb'num_preemptions_total')
)


class Fill(NamedTuple):
    """What a look found; None for what the server does not count."""

    cache_used: float | None  # share of the KV cache, of a server's fullest engine
    waiting: float | None  # responses that wait for room
    preemptions: float | None  # since the server started


def read_fill(body: bytes) -> Fill:
    """Reads the reply of /metrics."""
    cache, waiting, preemptions = (list(map(float, count.findall(body))) for count in (_CACHE, _WAITING, _PREEMPTIONS))
    return Fill(max(cache, default=None), sum(waiting) if waiting else None, sum(preemptions) if preemptions else None)


class Gauges:
    """What looks found since `taken` was last called. `send` is VllmEngine's; `look` is called in its loop."""

    def __init__(self, send: Callable[..., Awaitable[bytes]]):
        self._send, self._lock = send, threading.Lock()
        self._found: dict[str, float] = {}
        self._looks: dict[str, asyncio.Task] = {}
        self._due: dict[str, float] = {}  # when the next look is due
        self._preempted: dict[str, float] = {}  # a server's count at the last look

    def look(self, url: str, last: bool) -> None:
        """Begins a look at a server that has just sent a reply, if one is due or this is the `last` reply under way."""
        now, before = asyncio.get_running_loop().time(), self._looks.get(url)
        if (before is None or before.done()) and (last or now >= self._due.get(url, now)):
            self._due[url] = now + _EVERY_S
            self._looks[url] = asyncio.create_task(self._look(url))

    def taken(self) -> dict[str, float]:
        """The metrics, each once."""
        with self._lock:
            found, self._found = self._found, {}
        return found

    def found(self, url: str, fill: Fill) -> None:
        """Adds a look. Preemptions count from the look before; a server that was started again counts from 0."""
        with self._lock:
            for name, value in (('cache_used', fill.cache_used), ('waiting', fill.waiting)):
                if value is not None:
                    self._found[f'perf/servers/{name}'] = max(value, self._found.get(f'perf/servers/{name}', 0.0))
            if fill.preemptions is not None:
                before = self._preempted.get(url, fill.preemptions)
                new = fill.preemptions - before if fill.preemptions >= before else fill.preemptions
                self._found['perf/servers/preemptions'] = self._found.get('perf/servers/preemptions', 0.0) + new
                self._preempted[url] = fill.preemptions

    async def _look(self, url: str) -> None:
        try:
            self.found(url, read_fill(await self._send(url, '/metrics', method='GET', limit_s=_LIMIT_S)))
        except RolloutError:
            pass
