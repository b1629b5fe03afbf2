"""The client of vLLM servers: it sends token ids, and receives token ids, log-probs and policy versions.

All servers of an engine hold the same policy, which travels as `rollout/publish.py` writes it. Each prompt is one request for its
whole group. The engine checks every response before the trainer sees it. Requests of a server that does not answer go to the others
until the next policy. With none left, a supervised server is restarted.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
from absl import logging

from bapo_jax.groups import Prompt, Response
from bapo_jax.hosts import Hosts
from bapo_jax.models.qwen import ModelConfig
from bapo_jax.rollout.engine import Draw, RolloutError, Sampling
from bapo_jax.rollout.publish import publish, remove_unneeded
from bapo_jax.rollout.published import read_manifest
from bapo_jax.rollout.supervise import SupervisedServer


class Unreachable(RolloutError):
    """A server gave no answer or reported that it is broken. Another server may answer."""


class LoadFailed(Unreachable):
    """A server failed while it loaded a policy. It serves none, and must start again."""


class PolicyRefused(RolloutError):
    """A server refused the published policy, and still serves the one before."""


class BadResponse(RolloutError):
    """A response is not trainable: of another policy, incomplete, or with impossible tokens or log-probs."""


class VllmEngine:
    """`servers` are base URLs, or the one server that the engine supervises. All of them read the directory `policies`."""

    def __init__(
        self, servers: Sequence[str] | SupervisedServer, policies: Path, model: ModelConfig, *, token: str, dtype: str,
        stop_tokens: Sequence[int], concurrency: int, deadline_s: float, hosts: Hosts = Hosts(),
    ):  # fmt: skip
        self._supervised = servers if isinstance(servers, SupervisedServer) else None
        self._urls = [servers.url] if isinstance(servers, SupervisedServer) else list(servers)
        self.servers = len(self._urls)
        self._serving: set[str] = set()  # URLs of servers known to hold the current policy
        self._policies, self._model, self._dtype, self._hosts = Path(policies).absolute(), model, dtype, hosts
        self._stop_tokens, self._concurrency = list(stop_tokens), concurrency
        # A version that an interrupted run left may differ from this run's version of the same number.
        remove_unneeded(self._policies, ())
        self._path: Path | None = None
        self._version = self._previous = None
        # The event loop has a thread of its own, so rollouts of later steps run while the trainer's thread trains.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name='rollout', daemon=True).start()
        self._client = httpx.AsyncClient(
            headers={'Authorization': f'Bearer {token}'},
            timeout=httpx.Timeout(deadline_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0),
        )
        self._free = asyncio.Semaphore(concurrency * len(self._urls))
        self._under_way = dict.fromkeys(self._urls, 0)
        self._revival: asyncio.Lock = asyncio.Lock()

    def load(self, params: Any, version: int) -> None:
        """Publishes `params` and loads them into the servers; returns when every server that answers has them.

        Raises PolicyRefused, or Unreachable where no server answers.
        """
        if version == self._version:
            return
        self._path = publish(self._policies, version, params, self._model, self._dtype, self._hosts)
        self._previous, self._version = self._version, version
        self._run(self._load_everywhere())
        remove_unneeded(self._policies, {self._version, self._previous})

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[tuple[Response, ...]]:
        """Sends one request a prompt, to the server with the fewest under way. Raises RolloutError where none succeeds.

        `draws` are not used: a server's samples depend on its other requests, even with a seed in each request. On CPU such a seed
        also kills vLLM 0.32 when a prompt is read in two pieces.
        """
        if self._version is None:
            raise RuntimeError('the engine holds no policy yet: call load(params, version) before generate')
        return self._run(self._generate(prompts, group_size, sampling))

    def close(self) -> None:
        self._run(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._supervised:
            self._supervised.stop()

    def _run(self, work: Coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ---- policies

    async def _load_everywhere(self) -> None:
        self._serving.clear()
        results = await asyncio.gather(*(self._load(url) for url in self._urls), return_exceptions=True)
        for url, result in zip(self._urls, results, strict=True):
            if isinstance(result, Unreachable):
                logging.warning('%s; going on without it until the next policy', result)
            elif isinstance(result, BaseException):
                raise result
        if not self._serving:
            await self._revive(results[0])

    async def _load(self, url: str) -> None:
        """Has the server check the policy. Then pauses it, loads, resets its caches and names the version; resumes in any case."""
        await self._call_workers(url, 'check_policy')
        await self._post(url, '/pause?mode=keep')
        try:
            await self._call_workers(url, 'load_policy')
            if not (await self._post(url, '/reset_prefix_cache'))['success']:
                raise RolloutError(f'{url}: its prefix cache could not be reset, so responses would mix two policies')
            await self._post(url, '/reset_mm_cache')
            await self._post(url, '/update_weight_version', {'new_version': str(self._version)})
        finally:
            await self._post(url, '/resume')
        self._serving.add(url)

    async def _call_workers(self, url: str, method: str) -> None:
        """Calls a method of worker.py's PolicyLoader with the policy's path. Raises PolicyRefused or LoadFailed."""
        reply = await self._post(url, '/collective_rpc', {'method': method, 'kwargs': {'path': str(self._path)}})
        for worker in reply['results']:
            if 'refused' in worker:
                raise PolicyRefused(f'{url} refused policy {self._version}: {worker["refused"]}')
            if 'broken' in worker:
                raise LoadFailed(f'{url} failed while it loaded policy {self._version}, and must start again: {worker["broken"]}')
            if worker != {'version': self._version, 'checksum': read_manifest(self._path).checksum}:
                raise PolicyRefused(f'{url} read {worker}, not what is in {self._path}: it must see the same directory there')

    async def _revive(self, reason: Unreachable) -> None:
        """Restarts the supervised server and loads the current policy. Raises Unreachable where no server is supervised."""
        async with self._revival:
            if self._serving:  # another request has revived it
                return
            if self._supervised is None:
                raise Unreachable(f'no rollout server answers; the last said: {reason}') from reason
            try:
                if isinstance(reason, LoadFailed):
                    raise reason
                # It may only have dropped a connection.
                await self._load(self._supervised.url)
            except Unreachable:
                logging.warning('%s; starting the server again with policy %s', reason, self._version)
                await asyncio.to_thread(self._supervised.restart)
                await self._load(self._supervised.url)

    async def _post(self, url: str, route: str, body: Any = None) -> Any:
        try:
            reply = await self._client.post(url + route, json=body)
        except httpx.TransportError as e:
            raise Unreachable(f'{url}{route}: no answer ({type(e).__name__}: {e})') from e
        if reply.status_code >= 500:
            raise Unreachable(f'{url}{route}: status {reply.status_code}: {reply.text[:500]}')
        if reply.status_code != 200:
            raise RolloutError(f'{url}{route}: status {reply.status_code}: {reply.text[:500]}')
        return reply.json() if reply.content else None

    # ---- responses

    async def _generate(self, prompts, group_size, sampling) -> list[tuple[Response, ...]]:
        async def one(prompt: Prompt) -> tuple[Response, ...]:
            reason = None
            async with self._free:
                for attempts_left in reversed(range(2 * len(self._urls) + 1)):
                    if not self._serving:
                        await self._revive(reason)
                    url = min(self._serving, key=self._under_way.__getitem__)
                    self._under_way[url] += 1
                    try:
                        reply = await self._post(url, '/inference/v1/generate', self._request(prompt, group_size, sampling))
                        return self._checked(url, reply, group_size, sampling)
                    except Unreachable as e:
                        if not attempts_left:
                            raise
                        if url in self._serving:
                            self._serving.discard(url)
                            logging.warning('%s; its requests are sent again', e)
                        reason = e
                    finally:
                        self._under_way[url] -= 1

        running = [asyncio.create_task(one(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:  # after one failure the others are useless
                task.cancel()

    def _request(self, prompt: Prompt, group_size: int, sampling: Sampling) -> dict[str, Any]:
        return {
            'token_ids': prompt.tokens.tolist(),
            'sampling_params': {
                'n': group_size,
                'temperature': sampling.temperature,
                'max_tokens': sampling.max_tokens,
                'logprobs': 0,  # of the sampled token alone
                'stop_token_ids': self._stop_tokens,
                'detokenize': False,
            },
        }

    def _checked(self, url: str, reply: dict[str, Any], group_size: int, sampling: Sampling) -> tuple[Response, ...]:
        """The responses of one request. Raises BadResponse unless they are complete, plausible and of the requested version."""

        def need(condition: bool, what: str) -> None:
            if not condition:
                raise BadResponse(f'{url}: a response {what}')

        choices = sorted(reply['choices'], key=lambda choice: choice['index'])
        need(len(choices) == group_size, f'group has {len(choices)} members where {group_size} were asked for')
        responses = []
        for choice in choices:
            tokens = np.array(choice['token_ids'], np.int32)
            logp = np.array([entry['logprob'] for entry in choice['logprobs']['content']], np.float32)
            versions = sorted({span['version'] for span in choice['weight_versions'] or ()})
            need(versions == [str(self._version)], f'is of policy {versions} where {self._version} was asked for')
            most = sampling.max_tokens
            need(1 <= len(tokens) <= most, f'has {len(tokens)} tokens where 1 to {most} were asked for')
            need(len(logp) == len(tokens), f'has {len(tokens)} tokens and {len(logp)} log-probs')
            need(bool((tokens >= 0).all() and (tokens < self._model.vocab_size).all()), 'has a token outside the vocabulary')
            need(bool(np.isfinite(logp).all() and (logp <= 0).all()), 'has a log-prob that is not finite or above 0')
            need(choice['finish_reason'] in ('stop', 'length'), f'ended with {choice["finish_reason"]!r}')
            responses.append(Response(tokens, logp, choice['finish_reason'], self._version))
        return tuple(responses)

