"""The client of vLLM servers: it sends token ids, and receives token ids, log-probs and policy versions.

All servers of an engine hold the same policy, which travels as `rollout/publish.py` writes it. Each prompt is one request for its
whole group. Every response is checked before the trainer sees it (`rollout/replies.py`). A group that fails is asked for again.
Requests of a server that does not answer go to the others until the next policy. With none left, a supervised server is restarted.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
from absl import logging

from bapo_jax.groups import Prompt, Response
from bapo_jax.hosts import Hosts
from bapo_jax.models.qwen import ModelConfig
from bapo_jax.rollout.engine import Draw, Engine, RolloutError, Sampling
from bapo_jax.rollout.publish import publish, remove_unneeded
from bapo_jax.rollout.published import read_manifest
from bapo_jax.rollout.replies import ROUTE, Asked, BadResponse, read_group, request
from bapo_jax.rollout.supervise import SupervisedServer
from bapo_jax.tasks.sight import Sight

_ATTEMPTS = 3  # how often a group is asked for before its BadResponse is an error
_CONNECT_S = 10.0
_IMAGE_THREADS = 2  # reading, resizing and encoding release the interpreter's lock for the most part


class Unreachable(RolloutError):
    """A server gave no answer or reported that it is broken. Another server may answer."""


class LoadFailed(Unreachable):
    """A server failed while it loaded a policy. It serves none, and must start again."""


class PolicyRefused(RolloutError):
    """A server refused the published policy, and still serves the one before."""


class VllmEngine(Engine):
    """`servers` are base URLs, or servers that the engine supervises. All of them read the directory `policies`.

    `sight` is how a model that reads images sees them; None for a model of text.
    """

    def __init__(
        self, servers: Sequence[str | SupervisedServer], policies: Path, model: ModelConfig, *, token: str, dtype: str,
        stop_tokens: Sequence[int], concurrency: int, deadline_s: float, hosts: Hosts = Hosts(),
        sight: Sight | None = None,
    ):  # fmt: skip
        self._supervised = {server.url: server for server in servers if isinstance(server, SupervisedServer)}
        self._urls = [server.url if isinstance(server, SupervisedServer) else server for server in servers]
        self.servers = len(self._urls)
        self._serving: set[str] = set()  # URLs of servers known to hold the current policy
        self._policies, self._model, self._dtype, self._hosts = Path(policies).absolute(), model, dtype, hosts
        self._stop_tokens, self._deadline_s, self._sight = list(stop_tokens), deadline_s, sight
        # A version that an interrupted run left may differ from this run's version of the same number.
        remove_unneeded(self._policies, ())
        self._path: Path | None = None
        self._version = self._previous = None
        # The event loop has a thread of its own, so rollouts of later steps run while the trainer's thread trains.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name='rollout', daemon=True)
        self._thread.start()
        self._session = self._run(_open_session(token, deadline_s))
        # Reading a full reply takes 10 ms under the interpreter's lock, so more threads would gain nothing. On the loop itself it
        # would take as long in all, but the loop would stall twice as long where many replies come at once.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix='replies')
        self._images = ThreadPoolExecutor(_IMAGE_THREADS, thread_name_prefix='images')
        self.asked_again = 0  # groups that were asked for once more, because of a BadResponse
        self._free = asyncio.Semaphore(concurrency * len(self._urls))
        self._under_way = dict.fromkeys(self._urls, 0)
        self._revival = asyncio.Lock()
        atexit.register(self.close)  # a run that fails may leave it open

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

    def ask(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[Future[tuple[Response, ...]]]:
        """Sends one request a prompt, to the server with the fewest under way.

        `draws` are not used: a server's samples depend on its other requests, even with a seed in each request. On CPU such a seed
        also kills vLLM 0.32 when a prompt is read in two pieces.
        """
        if self._version is None:
            raise RuntimeError('the engine holds no policy yet: call load(params, version) before asking it')
        image_token = self._model.vision.image_token if self._model.vision else None
        asked = Asked(group_size, sampling.max_tokens, self._version, self._model.vocab_size, image_token)
        return [asyncio.run_coroutine_threadsafe(self._group(prompt, sampling, asked), self._loop) for prompt in prompts]

    def close(self) -> None:
        if self._loop.is_closed():
            return
        atexit.unregister(self.close)
        self._run(self._give_up())
        self._reader.shutdown()
        self._images.shutdown(cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()
        for server in self._supervised.values():
            server.stop()

    def _run(self, work: Coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ---- policies

    async def _load_everywhere(self) -> None:
        self._serving.clear()
        results = await asyncio.gather(*(self._load(url) for url in self._urls), return_exceptions=True)
        for url, result in zip(self._urls, results, strict=True):
            if isinstance(result, Unreachable) and url in self._supervised:
                await self._restart(url, result)
            elif isinstance(result, Unreachable):
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
            await self._post(url, '/reset_encoder_cache')  # features that the old vision tower made
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
        """Brings the supervised servers back once none answers. Raises Unreachable where none is supervised."""
        async with self._revival:
            if self._serving:  # another request has revived them
                return
            if not self._supervised:
                raise Unreachable(f'no rollout server answers; the last said: {reason}') from reason
            await asyncio.gather(*(self._restart(url, reason) for url in self._supervised))

    async def _restart(self, url: str, reason: Unreachable) -> None:
        """Loads the current policy into a supervised server; starts it again before, unless it had only dropped a connection."""
        try:
            if isinstance(reason, LoadFailed):
                raise reason
            await self._load(url)
        except Unreachable:
            logging.warning('%s; starting the server again with policy %s', reason, self._version)
            await asyncio.to_thread(self._supervised[url].restart)
            await self._load(url)

    async def _post(self, url: str, route: str, body: Any = None) -> Any:
        reply = await self._send(url, route, body)
        return json.loads(reply) if reply else None

    # ---- responses

    async def _group(self, prompt: Prompt, sampling: Sampling, asked: Asked) -> tuple[Response, ...]:
        """One group's responses, when its turn comes: the semaphore admits requests in the order in which they were made.

        So the images of no more than those under way are in memory.
        """
        async with self._free:
            what = prompt, asked.group_size, sampling, self._stop_tokens
            if prompt.images:
                body = await self._with_images(*what)
                asked = asked._replace(prompt=prompt.tokens)
            else:
                body = request(*what)
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    return await self._answer(body, asked)
                except BadResponse as e:
                    if attempt == _ATTEMPTS:
                        raise
                    self.asked_again += 1
                    logging.warning('%s; asking for the group again (%d of %d)', e, attempt + 1, _ATTEMPTS)

    async def _with_images(self, prompt: Prompt, *what: Any) -> dict[str, Any]:
        """The request of a prompt with images, which take some 10 ms each. Raises RolloutError where one cannot be read."""
        try:
            return await self._loop.run_in_executor(self._images, request, prompt, *what, self._sight)
        except (ValueError, OSError) as e:
            raise RolloutError(f'prompt {prompt.id}: {e}') from e

    async def _answer(self, body: dict[str, Any], asked: Asked) -> tuple[Response, ...]:
        """One reply, read and checked, from whichever server answers. Raises BadResponse, or Unreachable where none does."""
        reason = None
        for attempts_left in reversed(range(2 * len(self._urls) + 1)):
            if not self._serving:
                await self._revive(reason)
            url = min(self._serving, key=self._under_way.__getitem__)
            self._under_way[url] += 1
            try:
                reply = await self._send(url, ROUTE, body)
                return await self._loop.run_in_executor(self._reader, read_group, reply, asked, url)
            except Unreachable as e:
                if not attempts_left:
                    raise
                if url in self._serving:
                    self._serving.discard(url)
                    logging.warning('%s; its requests are sent again', e)
                reason = e
            finally:
                self._under_way[url] -= 1

    # ---- connections

    async def _send(self, url: str, route: str, body: Any) -> bytes:
        """The body of a server's reply. Raises Unreachable where there is none, and RolloutError where the request is refused."""
        try:
            async with self._session.post(url + route, json=body, allow_redirects=False) as reply:
                said = await reply.read()
        except aiohttp.ClientError as e:
            raise Unreachable(f'{url}{route}: no answer ({type(e).__name__}: {e})') from e
        except TimeoutError as e:
            raise Unreachable(f'{url}{route}: no answer in {self._deadline_s:g} s (rollout.deadline_s)') from e
        if reply.status != 200:
            error = Unreachable if reply.status >= 500 else RolloutError
            raise error(f'{url}{route}: status {reply.status}: {said[:500].decode("utf-8", "replace")}')
        return said

    async def _give_up(self) -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._session.close()


async def _open_session(token: str, deadline_s: float) -> aiohttp.ClientSession:
    """The connections of an engine. aiohttp reads a body of 9 MB three times as fast as httpx2 does."""
    return aiohttp.ClientSession(
        headers={'Authorization': f'Bearer {token}'},
        timeout=aiohttp.ClientTimeout(total=deadline_s, sock_connect=_CONNECT_S),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
    )
