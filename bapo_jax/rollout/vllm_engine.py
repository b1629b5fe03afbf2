"""The client of vLLM servers: it sends token ids, and receives token ids, log-probs and policy versions.

All servers of an engine hold the same policy, which travels as `rollout/publish.py` writes it. Each prompt is one request for its
whole group. Every response is checked before the trainer sees it (`rollout/replies.py`). A group that fails is asked for again, of
another server where there is one. So is one whose reply is lost (`rollout/watch.py`). A slow server is waited for while it makes
progress, a busy one asked again later. Requests of a server that does neither go to the others until the next policy. With none
left, a supervised server is restarted.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bapo_jax import events
from bapo_jax.groups import Prompt, Response
from bapo_jax.hosts import Hosts
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.rollout.engine import Draw, Engine, RolloutError, Sampling
from bapo_jax.rollout.exchange import Dropped, Unreachable, exchange, open_session
from bapo_jax.rollout.gauges import Gauges
from bapo_jax.rollout.publish import publish, remove_unneeded
from bapo_jax.rollout.published import Manifest, RefusedPolicy, read_manifest
from bapo_jax.rollout.replies import (
    ROUTE, Asked, BadResponse, most_bytes, read_group, read_model_length, read_results, read_success, request,
)  # fmt: skip
from bapo_jax.rollout.supervise import SupervisedServer
from bapo_jax.rollout.watch import LostReply, Watch
from bapo_jax.tasks.sight import Sight

_ATTEMPTS = 3  # how often a group is asked for before its BadResponse is an error
_PATIENCE = 10  # deadlines that a reply may take in all from a server that makes progress
_BACKOFF_S, _DOUBLINGS = 0.5, 6  # waits of a request to a busy server: the first, and how often they double, to 32 s
_MOST_CONTROL = 2**24  # bytes of a reply that is no group; /metrics has some 100,000
_IMAGE_THREADS = 2  # reading, resizing and encoding release the interpreter's lock for the most part


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
        self._serving: dict[str, int] = {}  # URLs of servers known to hold the current policy, and their model lengths
        self._dropped: Unreachable | None = None  # why the last server was left out
        self._policies, self._model, self._dtype, self._hosts = Path(policies).absolute(), model, dtype, hosts
        self._stop_tokens, self._deadline_s, self._sight = list(stop_tokens), deadline_s, sight
        # A version that an interrupted run left may differ from this run's version of the same number.
        remove_unneeded(self._policies, ())
        self._path: Path | None = None
        self._manifest: Manifest | None = None
        self._version = self._previous = None
        # The event loop has a thread of its own, so rollouts of later steps run while the trainer's thread trains.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name='rollout', daemon=True)
        self._thread.start()
        self._session = self._run(open_session(token))
        # Reading a full reply takes 10 ms under the interpreter's lock, so more threads would gain nothing. On the loop itself it
        # would take as long in all, but the loop would stall twice as long where many replies come at once.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix='replies')
        self._images = ThreadPoolExecutor(_IMAGE_THREADS, thread_name_prefix='images')
        self.asked_again = 0  # groups that were asked for once more, because of a BadResponse
        self._free = asyncio.Semaphore(concurrency * len(self._urls))
        self._under_way = dict.fromkeys(self._urls, 0)
        self._watches, self._gauges = {url: Watch(url, self._send, deadline_s) for url in self._urls}, Gauges(self._send)
        self._revival = asyncio.Lock()
        atexit.register(self.close)  # a run that fails may leave it open

    def load(self, params: Any, version: int) -> None:
        """Publishes `params` and loads them into the servers; returns when every server that answers has them.

        Raises PolicyRefused, or Unreachable where no server answers.
        """
        if version == self._version:
            return
        self._path = publish(self._policies, version, params, self._model, self._dtype, self._hosts)
        try:
            self._manifest = read_manifest(self._path)
        except RefusedPolicy as e:
            raise PolicyRefused(str(e)) from e
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
        asked = Asked(
            group_size, sampling.max_tokens, self._manifest.name, self._model.vocab_size, tuple(self._stop_tokens), image_token
        )  # fmt: skip
        return [asyncio.run_coroutine_threadsafe(self._group(prompt, sampling, asked), self._loop) for prompt in prompts]

    def metrics(self) -> dict[str, float]:
        return self._gauges.taken()

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
        """Loads the current policy into every server; starts those that do not answer again, where they are supervised.

        Raises Unreachable where none answers then.
        """
        self._serving.clear()
        results = await asyncio.gather(*(self._load(url) for url in self._urls), return_exceptions=True)
        dead = {url: result for url, result in zip(self._urls, results, strict=True) if isinstance(result, Unreachable)}
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Unreachable):
                raise result
        for url in dead.keys() - self._supervised.keys():
            events.report('server left out', f'{dead[url]}; going on without it until the next policy', server=url)
        await asyncio.gather(*(self._restart(url, dead[url]) for url in dead.keys() & self._supervised.keys()))
        if not self._serving:
            raise Unreachable(f'no rollout server answers; the last said: {results[-1]}') from results[-1]

    async def _load(self, url: str) -> None:
        """Hands the server the policy; once more where it drops the connection."""
        try:
            await self._hand_over(url)
        except Dropped:
            await self._hand_over(url)

    async def _hand_over(self, url: str) -> None:
        """Has the server check the policy. Then pauses it, loads, resets its caches and names the policy; resumes in any case.

        Other trainers' calls may fall in between, so the workers are asked once more what they hold, after the naming.
        """
        model_length = await self._told(url, '/v1/models', read_model_length, method='GET')
        await self._call_workers(url, 'check_policy')
        await self._send(url, '/pause?mode=keep')
        try:
            await self._call_workers(url, 'load_policy')
            if not await self._told(url, '/reset_prefix_cache', read_success):
                raise RolloutError(f'{url}: its prefix cache could not be reset, so responses would mix two policies')
            await self._send(url, '/reset_mm_cache')
            await self._send(url, '/reset_encoder_cache')  # features that the old vision tower made
            if not await self._told(url, '/update_weight_version', read_success, {'new_version': self._manifest.name}):
                raise RolloutError(f'{url}: it did not take the name of policy {self._manifest.name}, which its responses must state')
            await self._call_workers(url, 'confirm_policy')
        finally:
            await self._send(url, '/resume')
        self._serving[url] = model_length

    async def _call_workers(self, url: str, method: str) -> None:
        """Calls a method of worker.py's PolicyLoader with the policy's path. Raises PolicyRefused or LoadFailed."""
        name, call = self._manifest.name, {'method': method, 'kwargs': {'path': str(self._path)}}
        for worker in await self._told(url, '/collective_rpc', read_results, call):
            if 'refused' in worker:
                raise PolicyRefused(f'{url} refused policy {name}: {worker["refused"]}')
            if 'broken' in worker:
                raise LoadFailed(f'{url} failed while it loaded policy {name}, and must start again: {worker["broken"]}')
            if worker != {'version': self._manifest.version, 'checksum': self._manifest.checksum}:
                raise PolicyRefused(f'{url} read {worker}, not what is in {self._path}: it must see the same directory there')

    async def _revive(self, reason: Unreachable) -> None:
        """Brings the servers back once none answers: supervised ones, and others where the last had only dropped a connection.

        Raises Unreachable where none comes back.
        """
        async with self._revival:
            if self._serving:  # another request has revived them
                return
            if not self._supervised and not isinstance(reason, Dropped):
                raise Unreachable(f'no rollout server answers; the last said: {reason}') from reason
            await self._load_everywhere()

    async def _restart(self, url: str, reason: Unreachable) -> None:
        """Starts a supervised server again, with the current policy."""
        events.report('server restarted', f'{reason}; starting the server again with policy {self._version}', server=url)
        await asyncio.to_thread(self._supervised[url].restart)
        await self._load(url)

    async def _told(self, url: str, route: str, read: Callable[[bytes, str], Any], body: Any = None, method: str = 'POST') -> Any:
        """What `read` makes of a control route's reply. Raises Unreachable where it is another's than vLLM's."""
        try:
            return read(await self._send(url, route, body, method=method), url + route)
        except BadResponse as e:
            raise Unreachable(str(e)) from e

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
            spoiled: set[str] = set()
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    # The last reply is waited for whatever a look may say: it might be mistaken thrice.
                    return await self._answer(body, asked, len(prompt.tokens), spoiled, attempt < _ATTEMPTS)
                except BadResponse as e:
                    if attempt == _ATTEMPTS:
                        raise
                    self.asked_again += 1
                    message = f'{e}; asking for the group again ({attempt + 1} of {_ATTEMPTS})'
                    events.report('reply lost' if isinstance(e, LostReply) else 'group asked again', message, prompt=prompt.id)

    async def _with_images(self, prompt: Prompt, *what: Any) -> dict[str, Any]:
        """The request of a prompt with images, which take some 10 ms each. Raises RolloutError where one cannot be read."""
        try:
            return await self._loop.run_in_executor(self._images, request, prompt, *what, self._sight)
        except (ValueError, OSError) as e:
            raise RolloutError(f'prompt {prompt.id}: {e}') from e

    async def _answer(
        self, body: dict[str, Any], asked: Asked, prompt_tokens: int, spoiled: set[str], watched: bool
    ) -> tuple[Response, ...]:
        """One reply, read and checked, from whichever server answers, if possible none of those that have `spoiled` the group.

        Raises BadResponse, and adds the server to these; raises Unreachable where none answers.
        """
        for attempts_left in reversed(range(2 * len(self._urls) + 1)):
            if not self._serving:
                await self._revive(self._dropped)
            url = min(self._serving.keys() - spoiled or self._serving, key=self._under_way.__getitem__)
            of_server = asked._replace(max_tokens=min(asked.max_tokens, self._serving[url] - prompt_tokens))
            self._under_way[url] += 1
            try:
                reply = await self._reply(url, body, most_bytes(of_server, prompt_tokens), watched)
                self._gauges.look(url, last=self._under_way[url] == 1)
                return await self._loop.run_in_executor(self._reader, read_group, reply, of_server, url)
            except BadResponse:
                spoiled.add(url)
                raise
            except Unreachable as e:
                if not attempts_left:
                    raise
                if self._serving.pop(url, None) is not None:
                    events.report('server left out', f'{e}; its requests are sent again', server=url)
                self._dropped = e
            finally:
                self._under_way[url] -= 1

    async def _reply(self, url: str, body: dict[str, Any], most: int, watched: bool) -> bytes:
        """A server's reply to a group, of `most` bytes, which may take several deadlines while the server makes progress with
        this group or others.

        Progress is one more token in its metrics from one deadline to the next. Its /health alone says nothing: vLLM 0.32 answers
        that while its engine process is stopped. Raises Unreachable, and LostReply where the request is `watched`.
        """
        limit_s, through = (_PATIENCE + 1) * self._deadline_s, self._watches[url].exchange if watched else exchange
        sending = asyncio.ensure_future(self._send(url, ROUTE, body, limit_s=limit_s, most=most, through=through))
        try:
            done = None
            for deadlines in range(1, _PATIENCE + 1):
                await asyncio.wait({sending}, timeout=self._deadline_s)
                if sending.done():
                    return sending.result()
                before, done, state = done, *await self._watches[url].progress()
                if done in (None, before) and not sending.done():
                    break
        finally:
            sending.cancel()
        waited = f'{deadlines} × {self._deadline_s:g} s (rollout.deadline_s)'
        raise Unreachable(f'{url}{ROUTE}: no reply to a group in {waited}; {state}')

    # ---- connections

    async def _send(
        self, url: str, route: str, body: Any = None, *, method: str = 'POST', limit_s: float = 0.0, most: int = _MOST_CONTROL,
        through: Callable[..., Awaitable[tuple[int, float, bytes]]] = exchange,
    ) -> bytes:  # fmt: skip
        """The body of a server's reply, of `most` bytes, within `limit_s` seconds (0: rollout.deadline_s).

        A busy server is asked again, for rollout.deadline_s seconds at most. Raises Unreachable where there is no reply,
        RolloutError where the request is refused, and BadResponse (of control routes Unreachable) for a reply that is not read.
        """
        limit_s, give_up = limit_s or self._deadline_s, self._loop.time() + self._deadline_s
        for tried in itertools.count(1):
            self._hosts.progress(f'waits for {url}{route}')
            try:
                status, wait_s, said = await through(self._session, url + route, body, method, limit_s, most)
            except BadResponse as e:
                raise e if route == ROUTE else Unreachable(str(e)) from e
            except TimeoutError as e:
                raise Unreachable(f'{url}{route}: no answer in {limit_s:g} s (rollout.deadline_s={self._deadline_s:g})') from e
            if status == 200:
                return said
            told = f'{url}{route}: status {status}: {said[:500].decode("utf-8", "replace")}'
            busy = status == 429 or status == 503 and route == ROUTE  # vLLM 0.32 says 503 where its queue has no room
            if not busy and status >= 500:
                raise Unreachable(told)
            if not busy:
                raise RolloutError(told)
            wait_s = wait_s or _BACKOFF_S * 2 ** min(tried - 1, _DOUBLINGS) * random.uniform(0.5, 1)
            if self._loop.time() + wait_s > give_up:
                raise Unreachable(f'{told} (asked {tried} times; rollout.deadline_s={self._deadline_s:g} allows no further wait)')
            await asyncio.sleep(wait_s)

    async def _give_up(self) -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._session.close()
