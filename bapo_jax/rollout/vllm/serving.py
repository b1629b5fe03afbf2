"""The servers that hold the current policy: loads it into all of them, and brings back those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from bapo_jax.machine import events
from bapo_jax.rollout.engine import RolloutError
from bapo_jax.rollout.vllm.exchange import Dropped, Unreachable
from bapo_jax.rollout.vllm.loading import PolicyLoading
from bapo_jax.rollout.vllm.supervise import SupervisedServer


class Serving:
    """`servers` are base URLs, or servers to supervise; `send` is VllmEngine's."""

    def __init__(self, servers: Sequence[str | SupervisedServer], send: Callable[..., Awaitable[bytes]]):
        self._supervised = {server.url: server for server in servers if isinstance(server, SupervisedServer)}
        self.urls = [server.url if isinstance(server, SupervisedServer) else server for server in servers]
        self.loading, self.names = PolicyLoading(send), []  # names of all policies taken up so far
        self._lengths: dict[str, int] = {}  # of the servers that hold the policy: model lengths
        self._dropped: Unreachable | None = None  # why the last server was left out
        self._changing = asyncio.Lock()

    async def take_up(self, path: Path) -> None:
        """Loads a published policy into every server, which then completes pending responses with it.

        Raises PolicyRefused, or Unreachable if no server answers.
        """
        async with self._changing:
            self.loading.take(path)
            self.names.append(self.loading.manifest.name)
            await self._load_everywhere()

    async def lengths(self) -> Mapping[str, int]:
        """The model length of each server that holds the policy, by URL.

        If there is none, brings the servers back, if any is supervised or the last one only dropped the
        connection. Raises Unreachable otherwise, and if no server comes back.
        """
        if self._lengths:
            return self._lengths
        async with self._changing:
            if self._lengths:  # another request has brought them back
                return self._lengths
            if not self._supervised and not isinstance(self._dropped, Dropped):
                raise Unreachable(
                    f'no rollout server answers; see their logs. The last error: {self._dropped}'
                ) from self._dropped
            await self._load_everywhere()
            return self._lengths

    async def drop(self, names: Iterable[str]) -> None:
        """Makes every server that answers forget these adapters; one that does not has lost them."""
        async with self._changing:
            for name in names:
                del self.loading.adapters[name]
                dropping = (self.loading.drop(url, name) for url in self._lengths)
                for result in await asyncio.gather(*dropping, return_exceptions=True):
                    if isinstance(result, BaseException) and not isinstance(result, RolloutError):
                        raise result

    def leave_out(self, url: str, reason: Unreachable) -> None:
        """Sends a server nothing more until the next policy."""
        if self._lengths.pop(url, None) is not None:
            events.report('server left out', f'{reason}; its requests will be sent again', server=url)
        self._dropped = reason

    def stop(self) -> None:
        """Stops the supervised servers."""
        for server in self._supervised.values():
            server.stop()

    async def _load_everywhere(self) -> None:
        """Loads the current policy into every server, and restarts supervised servers that do not answer.

        Raises Unreachable if no server answers after that.
        """
        self._lengths.clear()
        results = await asyncio.gather(*(self._load(url) for url in self.urls), return_exceptions=True)
        dead = {
            url: result
            for url, result in zip(self.urls, results, strict=True)
            if isinstance(result, Unreachable)
        }
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Unreachable):
                raise result
        for url in dead.keys() - self._supervised.keys():
            events.report(
                'server left out',
                f'{dead[url]}; continuing without this server until the next policy',
                server=url,
            )
        await asyncio.gather(
            *(self._restart(url, dead[url]) for url in dead.keys() & self._supervised.keys())
        )
        if not self._lengths:
            raise Unreachable(
                f'no rollout server answers; see their logs. The last error: {results[-1]}'
            ) from results[-1]

    async def _load(self, url: str) -> None:
        """Hands the policy to the server; retries once if the server drops the connection."""
        try:
            self._lengths[url] = await self.loading.into(url)
        except Dropped:
            self._lengths[url] = await self.loading.into(url)

    async def _restart(self, url: str, reason: Unreachable) -> None:
        """Restarts a supervised server, with the current policy."""
        events.report(
            'server restarted',
            f'{reason}; restarting the server with policy {self.loading.manifest.version}',
            server=url,
        )
        await asyncio.to_thread(self._supervised[url].restart)
        await self._load(url)
