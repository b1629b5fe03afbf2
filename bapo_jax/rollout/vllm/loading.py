"""Loads a published policy into a vLLM server, and checks that all its workers hold that policy.

A server holds one policy whole. Of adapters to its base it holds several, and a request names the one that
answers it: nothing pauses, and a group is completed by the policy that it was requested from.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bapo_jax.rollout.engine import RolloutError
from bapo_jax.rollout.vllm.exchange import Unreachable
from bapo_jax.rollout.vllm.replies import BadResponse, Served, read_results, read_served, read_success
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
        # Adapters that servers must hold, by their names there. No two trainers, and no two starts of one,
        # use the same name, so that neither drops what the other still needs.
        self.adapters: dict[str, tuple[Path, Manifest]] = {}
        self._trainer = secrets.token_hex(4)

    def take(self, path: Path) -> None:
        """Makes the policy published at `path` the one to load. Raises PolicyRefused if it is incomplete."""
        try:
            self.path, self.manifest = path, read_manifest(path)
        except RefusedPolicy as e:
            raise PolicyRefused(str(e)) from e
        if self.manifest.files:
            self.adapters[self.adapter] = path, self.manifest

    @property
    def adapter(self) -> str:
        """What servers call the newest policy if it is an adapter."""
        return f'{self.manifest.name}-{self._trainer}'

    async def into(self, url: str) -> int:
        """Makes the server hold the policy, and every other adapter that it must hold.

        Returns the server's model length. Raises PolicyRefused, and LoadFailed if it now serves none.
        """
        served = await self._told(url, '/v1/models', read_served, method='GET')
        if self.adapters:
            await self._add_adapters(url, served)
        else:
            await self._replace(url)
        return served.model_length

    async def drop(self, url: str, name: str) -> None:
        """Makes the server forget an adapter, once none of its requests is under way."""
        await self._send(url, '/v1/unload_lora_adapter', {'lora_name': name})

    async def _add_adapters(self, url: str, served: Served) -> None:
        """Adds the adapters that this server lacks: the newest one, or all after a restart."""
        for name, (path, manifest) in self.adapters.items():
            if name not in served.names:
                await self._call_workers(url, 'check_policy', path, manifest)
                await self._send(url, '/v1/load_lora_adapter', {'lora_name': name, 'lora_path': str(path)})

    async def _replace(self, url: str) -> None:
        """Makes the server check the policy, pause, load it, reset its caches, take its name and resume.

        Another trainer may load in between, so the workers confirm their policy after the naming.
        """
        of_policy = self.path, self.manifest
        await self._call_workers(url, 'check_policy', *of_policy)
        await self._send(url, '/pause?mode=keep')
        try:
            await self._call_workers(url, 'load_policy', *of_policy)
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
            await self._call_workers(url, 'confirm_policy', *of_policy)
        finally:
            await self._send(url, '/resume')

    async def _call_workers(self, url: str, method: str, path: Path, manifest: Manifest) -> None:
        """Calls a method of PolicyLoader (worker.py) on a policy. Raises PolicyRefused or LoadFailed."""
        call = {'method': method, 'kwargs': {'path': str(path)}}
        for worker in await self._told(url, '/collective_rpc', read_results, call):
            if 'refused' in worker:
                raise PolicyRefused(f'{url} refused policy {manifest.name}: {worker["refused"]}')
            if 'broken' in worker:
                raise LoadFailed(
                    f'{url} failed while loading policy {manifest.name} and must be restarted: '
                    f'{worker["broken"]}'
                )
            if worker != {'version': manifest.version, 'checksum': manifest.checksum}:
                raise PolicyRefused(
                    f'{url} read {worker}, not what is in {path}; mount the same directory there'
                )

    async def _told(
        self, url: str, route: str, read: Callable[[bytes, str], Any], body: Any = None, method: str = 'POST'
    ) -> Any:
        """The result of `read` for a control route's reply. Raises Unreachable if the reply is not vLLM's."""
        try:
            return read(await self._send(url, route, body, method=method), url + route)
        except BadResponse as e:
            raise Unreachable(str(e)) from e
