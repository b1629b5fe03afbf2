"""The client of vLLM servers: it sends token ids, and receives token ids, log-probs and policy versions.

All servers of an engine hold the same policies, in the format of `weights/publish.py`: one, or adapters of
several versions. One request asks for a prompt's whole group. Every response is checked before the trainer
sees it (`rollout/vllm/replies.py`). A failed group, or one whose reply is lost (`rollout/vllm/watch.py`), is
requested again, from another server if there is one. The client waits for a slow server while it makes
progress, and retries a busy one later. Requests to any other failing server move to the remaining ones until
the next policy. If none remains, supervised servers are restarted.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bapo_jax.cluster.hosts import Hosts
from bapo_jax.groups import STOP, Begun, Prompt, Response
from bapo_jax.machine import events
from bapo_jax.models.adapters import travels_alone
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.rollout.engine import (
    Ask,
    Draw,
    Engine,
    RolloutError,
    Sampling,
    finish_of,
    results_of,
    tokens_left,
)
from bapo_jax.rollout.vllm.exchange import Unreachable, exchange, open_session
from bapo_jax.rollout.vllm.gauges import Gauges
from bapo_jax.rollout.vllm.replies import (
    BASE_WEIGHTS,
    ROUTE,
    Asked,
    BadResponse,
    most_bytes,
    read_group,
    request,
)
from bapo_jax.rollout.vllm.serving import Serving
from bapo_jax.rollout.vllm.supervise import SupervisedServer
from bapo_jax.rollout.vllm.watch import LostReply, Watch
from bapo_jax.tasks.sight import Sight
from bapo_jax.weights.manifest import number_of
from bapo_jax.weights.publish import publish, remove_unneeded

_ATTEMPTS = 3  # requests for a group before its BadResponse is raised
_PATIENCE = 10  # most deadlines that a reply may take from a server that makes progress
_BACKOFF_S, _DOUBLINGS = 0.5, 6  # retries of a busy server: the first wait, and how often it doubles, to 32 s
_MOST_CONTROL = 2**24  # most bytes of a control route's reply; /metrics has about 100,000
_LAST_WORDS_S = 2.0  # most seconds that servers get to drop a trainer's adapters at its end
_IMAGE_THREADS = 2  # reading, resizing and encoding mostly release the GIL


class _Held:
    """A policy that the servers hold as long as this object is referred to, if it is an adapter."""

    def __init__(self, version: int, adapter: str):
        self.version, self.adapter = version, adapter  # its name on servers; '': no adapter


class VllmEngine(Engine):
    """Samples from `servers`, base URLs or servers to supervise, which all read the directory `policies`.

    `sight` prepares images for a model that reads them; None for a text-only model. `base` is the model that
    servers were started with; the files of an adapter name it.
    """

    def __init__(
        self, servers: Sequence[str | SupervisedServer], policies: Path, model: ModelConfig, *, token: str,
        dtype: str, stop_tokens: Sequence[int], concurrency: int, deadline_s: float, hosts: Hosts = Hosts(),
        sight: Sight | None = None, base: str = '',
    ):  # fmt: skip
        self._serving = Serving(servers, self._send)
        self._urls, self.servers = self._serving.urls, len(servers)
        self._policies, self._model, self._dtype, self._hosts = Path(policies).absolute(), model, dtype, hosts
        self._stop_tokens, self._deadline_s, self._sight = list(stop_tokens), deadline_s, sight
        # A version left by an interrupted run may differ from this run's version of the same number.
        remove_unneeded(self._policies, ())
        self._version = self._previous = None
        self._base, self.holds_several = base, travels_alone(model)
        self._held: weakref.WeakSet[_Held] = weakref.WeakSet()
        self._holding = threading.Lock()
        # The event loop has its own thread, so later steps are sampled while the trainer's thread trains.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name='rollout', daemon=True)
        self._thread.start()
        self._session = self._run(open_session(token))
        # Parsing a full reply holds the GIL for 10 ms, so more threads would gain nothing. On the event loop
        # it would take the same total time, but stall the loop twice as long when many replies arrive at
        # once.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix='replies')
        self._images = ThreadPoolExecutor(_IMAGE_THREADS, thread_name_prefix='images')
        self.asked_again = 0  # requests repeated because of a BadResponse
        self._free = asyncio.Semaphore(concurrency * len(self._urls))
        self._under_way = dict.fromkeys(self._urls, 0)
        self._watches, self._gauges = (
            {url: Watch(url, self._send, deadline_s) for url in self._urls},
            Gauges(self._send),
        )
        atexit.register(self.close)  # a failed run may leave it open

    def load(self, params: Any, version: int) -> None:
        """Publishes `params` and loads them into the servers; returns when every reachable server has them.

        Raises PolicyRefused, or Unreachable if no server answers.
        """
        if version == self._version:
            return
        path = publish(self._policies, version, params, self._model, self._dtype, self._hosts, self._base)
        self._previous, self._version = self._version, version
        self._run(self._serving.take_up(path))
        needed = {self._version, self._previous}
        if self.holds_several:
            with self._holding:
                needed |= {held.version for held in self._held}
            unneeded = [name for name in self._serving.loading.adapters if number_of(name) not in needed]
            self._run(self._serving.drop(unneeded))
        remove_unneeded(self._policies, needed)

    def ask(
        self, begun: Sequence[Begun], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[Future[tuple[Response, ...]]]:
        """Sends one request per prompt, to the server with the fewest requests in flight.

        `draws` are ignored: a server's samples depend on its other requests, even if each request has a seed.
        On CPU such a seed also crashes vLLM 0.32 when a prompt is prefilled in two chunks.
        """
        return self.asker()(begun, group_size, sampling, draws)

    def asker(self) -> Ask:
        held = self._hold()

        def ask(begun, group_size, sampling, draws):
            return [self._begin(self._group(one, group_size, sampling, self._free, held)) for one in begun]

        return ask

    def probe(
        self, prompt: Prompt, group_size: int, sampling: Sampling, draw: Draw
    ) -> list[tuple[Response, ...]]:
        asked = Begun(prompt), group_size, sampling, contextlib.nullcontext(), self._hold()
        others = (set(self._urls) - {url} for url in self._urls)
        return results_of([self._begin(self._group(*asked, spoiled)) for spoiled in others])

    def metrics(self) -> dict[str, float]:
        return self._gauges.taken()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        atexit.unregister(self.close)
        if adapters := list(self._serving.loading.adapters):
            with contextlib.suppress(RolloutError, TimeoutError):
                self._run(asyncio.wait_for(self._serving.drop(adapters), _LAST_WORDS_S))
        self._run(self._give_up())
        self._reader.shutdown()
        self._images.shutdown(cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()
        self._serving.stop()

    def _hold(self) -> _Held:
        """The policy that is loaded now. Raises RuntimeError if there is none."""
        if self._version is None:
            raise RuntimeError('the engine holds no policy yet: call load(params, version) before asking it')
        held = _Held(self._version, self._serving.loading.adapter if self.holds_several else '')
        with self._holding:
            self._held.add(held)
        return held

    def _begin(self, work: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine) -> Any:
        return self._begin(work).result()

    # ---- responses

    async def _group(
        self, begun: Begun, size: int, sampling: Sampling, room: contextlib.AbstractAsyncContextManager,
        held: _Held, spoiled: Collection[str] = (),
    ) -> tuple[Response, ...]:  # fmt: skip
        """One group's responses, with what they begin with, preferably not from servers that are `spoiled`.

        `room` admits requests in order, which limits the images in memory. The policy `held` answers if it is
        an adapter, else the one that the servers hold by then.
        """
        prompt, spoiled, most = begun.read, set(spoiled), tokens_left(begun, sampling)
        image_token = self._model.vision.image_token if self._model.vision else None
        asked = Asked(
            size, most, (), self._model.vocab_size, tuple(self._stop_tokens), image_token,
            adapter=held.adapter,
        )  # fmt: skip
        async with room:
            what = prompt, size, sampling._replace(max_tokens=most), self._stop_tokens
            if prompt.images:
                body = await self._with_images(*what)
                asked = asked._replace(prompt=prompt.tokens)
            else:
                body = request(*what, adapter=held.adapter)
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    # The last attempt is not watched: the watch might be mistaken three times.
                    own = await self._answer(body, asked, len(prompt.tokens), spoiled, attempt < _ATTEMPTS)
                    return tuple(
                        Response(begun.spans + r.spans, finish_of(begun, r.spans, r.finish == STOP, sampling))
                        for r in own
                    )
                except BadResponse as e:
                    if attempt == _ATTEMPTS:
                        raise
                    self.asked_again += 1
                    message = f'{e}; requesting the group again (attempt {attempt + 1} of {_ATTEMPTS})'
                    events.report(
                        'reply lost' if isinstance(e, LostReply) else 'group asked again',
                        message,
                        prompt=prompt.id,
                    )

    async def _with_images(self, prompt: Prompt, *what: Any) -> dict[str, Any]:
        """A request with images, which take about 10 ms each. Raises RolloutError if one cannot be read."""
        try:
            return await self._loop.run_in_executor(self._images, request, prompt, *what, self._sight)
        except (ValueError, OSError) as e:
            raise RolloutError(f'prompt {prompt.id}: {e}') from e

    async def _answer(
        self, body: dict[str, Any], asked: Asked, prompt_tokens: int, spoiled: set[str], watched: bool
    ) -> tuple[Response, ...]:
        """One reply, read and checked, preferably from a server that has not `spoiled` the group.

        Raises BadResponse, after adding the server to `spoiled`, and Unreachable if no server answers.
        """
        loaded = len(self._serving.names)
        for attempts_left in reversed(range(2 * len(self._urls) + 1)):
            lengths = await self._serving.lengths()
            url = min(lengths.keys() - spoiled or lengths, key=self._under_way.__getitem__)
            fitting = asked._replace(max_tokens=min(asked.max_tokens, lengths[url] - prompt_tokens))
            self._under_way[url] += 1
            try:
                reply = await self._reply(url, body, most_bytes(fitting, prompt_tokens), watched)
                self._gauges.look(url, last=self._under_way[url] == 1)
                names = (BASE_WEIGHTS,) if asked.adapter else self._serving.names[loaded - 1 :]
                fitting = fitting._replace(policies=tuple(names))
                return await self._loop.run_in_executor(self._reader, read_group, reply, fitting, url)
            except BadResponse:
                spoiled.add(url)
                raise
            except Unreachable as e:
                if not attempts_left:
                    raise
                self._serving.leave_out(url, e)
            finally:
                self._under_way[url] -= 1

    async def _reply(self, url: str, body: dict[str, Any], most: int, watched: bool) -> bytes:
        """A server's reply to a group, of at most `most` bytes.

        It may take several deadlines while the server makes progress with any group: its token count in
        /metrics must rise from one deadline to the next. /health is not enough: vLLM 0.32 answers it while
        its engine process is stopped. Raises Unreachable if no reply comes, and LostReply if a `watched`
        request is lost.
        """
        limit_s, through = (
            (_PATIENCE + 1) * self._deadline_s,
            self._watches[url].exchange if watched else exchange,
        )
        sending = asyncio.ensure_future(
            self._send(url, ROUTE, body, limit_s=limit_s, most=most, through=through)
        )
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
        waited = f'{deadlines} × {self._deadline_s:g} s (rollout.deadline_s; raise it if the server is slow)'
        raise Unreachable(f'{url}{ROUTE}: no reply to a group in {waited}; {state}')

    # ---- connections

    async def _send(
        self, url: str, route: str, body: Any = None, *, method: str = 'POST', limit_s: float = 0.0,
        most: int = _MOST_CONTROL, through: Callable[..., Awaitable[tuple[int, float, bytes]]] = exchange,
    ) -> bytes:  # fmt: skip
        """A server's reply, of at most `most` bytes, within `limit_s` seconds (0: rollout.deadline_s).

        Retries a busy server for at most rollout.deadline_s seconds. Raises Unreachable if there is no reply,
        RolloutError if the request is refused, and BadResponse (Unreachable on control routes) if the reply
        is not read.
        """
        limit_s, give_up = limit_s or self._deadline_s, self._loop.time() + self._deadline_s
        for tried in itertools.count(1):
            self._hosts.progress(f'waiting for {url}{route}')
            try:
                status, wait_s, said = await through(self._session, url + route, body, method, limit_s, most)
            except BadResponse as e:
                raise e if route == ROUTE else Unreachable(str(e)) from e
            except TimeoutError as e:
                raise Unreachable(
                    f'{url}{route}: no answer in {limit_s:g} s (rollout.deadline_s={self._deadline_s:g})'
                ) from e
            if status == 200:
                return said
            told = f'{url}{route}: status {status}: {said[:500].decode("utf-8", "replace")}'
            busy = status == 429 or status == 503 and route == ROUTE  # 503: vLLM 0.32's queue is full
            if not busy and status >= 500:
                raise Unreachable(told)
            if not busy:
                raise RolloutError(told)
            wait_s = wait_s or _BACKOFF_S * 2 ** min(tried - 1, _DOUBLINGS) * random.uniform(0.5, 1)
            if self._loop.time() + wait_s > give_up:
                raise Unreachable(
                    f'{told} (tried {tried} times; raise rollout.deadline_s={self._deadline_s:g}, or lower '
                    'rollout.concurrency)'
                )
            await asyncio.sleep(wait_s)

    async def _give_up(self) -> None:
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._session.close()
