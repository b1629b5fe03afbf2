"""Loads a published policy into a vLLM server, and checks that all its workers hold that policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bapo_jax.rollout.engine import RolloutError
from bapo_jax.rollout.vllm.exchange import Unreachable
from bapo_jax.rollout.vllm.replies import BadResponse, read_model_length, read_results, read_success
from bapo_jax.weights.manifest import Manifest, RefusedPolicy, read_manifest


class LoadFailed(Unreachable):
    """A server failed while loading a policy. It now serves none and must be restarted."""


class PolicyRefused(RolloutError):
    """A server refused the published policy and still serves the previous one."""


class PolicyLoading:
    """Loads the policy at `path` into servers. `send` is VllmEngine's."""

    def __init__(self, send: Callable[..., Awaitable[bytes]]):
        self._send = send
        self.path: Path | None = None  # of the newest published policy
        self.manifest: Manifest | None = None

    def take(self, path: Path) -> None:
        """Makes the policy published at `path` the one to load. Raises PolicyRefused if it is incomplete."""
        try:
            self.path, self.manifest = path, read_manifest(path)
        except RefusedPolicy as e:
            raise PolicyRefused(str(e)) from e

    async def into(self, url: str) -> int:
        """Makes the server check the policy, pause, load it, reset its caches, take its name and resume.

        Another trainer may load in between, so the workers confirm their policy after the naming. Returns the
        server's model length.
        """
        model_length = await self._told(url, '/v1/models', read_model_length, method='GET')
        await self._call_workers(url, 'check_policy')
        await self._send(url, '/pause?mode=keep')
        try:
            await self._call_workers(url, 'load_policy')
            if not await self._told(url, '/reset_prefix_cache', read_success):
                raise RolloutError(
                    f'{url} could not reset its prefix cache, so responses would mix policies; restart the '
                    'server'
                )
            await self._send(url, '/reset_mm_cache')
            await self._send(url, '/reset_encoder_cache')  # features from the old vision tower
            if not await self._told(
                url, '/update_weight_version', read_success, {'new_version': self.manifest.name}
            ):
                raise RolloutError(
                    f'{url}: it did not accept the policy name {self.manifest.name}, which its responses '
                    'must state; read the log of the server, and serve with vLLM 0.32 or later'
                )
            await self._call_workers(url, 'confirm_policy')
        finally:
            await self._send(url, '/resume')
        return model_length

    async def _call_workers(self, url: str, method: str) -> None:
        """Calls a method of PolicyLoader (worker.py) on the policy. Raises PolicyRefused or LoadFailed."""
        name, call = self.manifest.name, {'method': method, 'kwargs': {'path': str(self.path)}}
        for worker in await self._told(url, '/collective_rpc', read_results, call):
            if 'refused' in worker:
                raise PolicyRefused(f'{url} refused policy {name}: {worker["refused"]}')
            if 'broken' in worker:
                raise LoadFailed(
                    f'{url} failed while loading policy {name} and must be restarted: {worker["broken"]}'
                )
            if worker != {'version': self.manifest.version, 'checksum': self.manifest.checksum}:
                raise PolicyRefused(
                    f'{url} read {worker}, not what is in {self.path}; mount the same directory there'
                )

    async def _told(
        self, url: str, route: str, read: Callable[[bytes, str], Any], body: Any = None, method: str = 'POST'
    ) -> Any:
        """The result of `read` for a control route's reply. Raises Unreachable if the reply is not vLLM's."""
        try:
            return read(await self._send(url, route, body, method=method), url + route)
        except BadResponse as e:
            raise Unreachable(str(e)) from e
