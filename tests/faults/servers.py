"""The kinds of faults of real vLLM servers, of the way to them, and of a trainer that has them.

Each kind is a context: inside, the run goes on to its end. On leaving it raises where the fault did not come, or was not said. The
trainer's kinds kill it first, so that inside the same command continues.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock

import pytest
from between import Proxy
from small_run import metrics

from bapo_jax.rollout.engine import RolloutError
from bapo_jax.rollout.vllm import watch
from bapo_jax.rollout.vllm.client import VllmEngine
from bapo_jax.rollout.vllm.replies import BadResponse
from bapo_jax.rollout.vllm.supervise import SupervisedServer
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE
from tests.faults.cases import STEPS, Injection, Outcome, Sound, case_of, differing, ledger_of, outcome_of
from tests.faults.served import (
    DEADLINE_S,
    SERVER_ARGS,
    SHORT_S,
    START_S,
    Served,
    engine_of,
    members,
    served_run,
    striking,
)  # fmt: skip

BASE = Path(__file__).resolve().parents[2] / 'configs' / 'quickstart_base'
CHAIN = 'the trainer killed three times in a row'
Kind = Callable[[Served], AbstractContextManager]


@contextmanager
def said(served: Served, *events: str) -> Iterator[None]:
    """On leaving, events.jsonl has these."""
    yield
    file = served.workdir / 'events.jsonl'
    rows = [json.loads(line)['event'] for line in file.read_text().splitlines()] if file.exists() else []
    missing = set(events) - set(rows)
    if missing:
        raise AssertionError(f'events.jsonl does not say {missing}; it says {rows}')


# ---- servers that the trainer started


def kill(*servers: SupervisedServer) -> None:
    for server in servers:
        os.killpg(server.pid, signal.SIGKILL)


def freeze(server: SupervisedServer) -> None:
    os.killpg(server.pid, signal.SIGSTOP)


def freeze_for_two_seconds(server: SupervisedServer) -> None:
    freeze(server)
    time.sleep(2.0)
    os.killpg(server.pid, signal.SIGCONT)


def kill_engine(server: SupervisedServer) -> None:
    os.kill(engine_of(server), signal.SIGKILL)


def freeze_engine(server: SupervisedServer) -> None:
    """It answers /health then."""
    os.kill(engine_of(server), signal.SIGSTOP)


def of_server(
    strike: Callable[..., None], moment: str, calls: int = 1, within_s: float = 0.0, *, servers: int = 1, struck: int = 1,
    deadline_s: float | None = None, event: str = 'server restarted',
) -> Kind:  # fmt: skip
    """`strike` hits the first `struck` of the run's servers. An empty `event`: nothing need be said."""

    @contextmanager
    def kind(served: Served) -> Iterator[None]:
        answering(served.servers, servers)
        served.deadline_s = deadline_s or served.deadline_s
        before = [server.pid for server in served.servers[:struck]]
        at = served.strike(moment, calls, within_s)
        with served.starts(servers), striking(at, lambda: strike(*served.servers[:struck])) as hit:
            with said(served, *filter(None, [event])):
                yield
            if not hit:
                raise AssertionError(f'the run came to no {at.call}. {moment}')
        left = [pid for pid, server in zip(before, served.servers) if pid != server.pid and members(pid)]
        if left:
            raise AssertionError(f'processes of struck servers are left: groups {left}')

    return kind


# ---- the way to a server


@contextmanager
def through(served: Served) -> Iterator[Proxy]:
    """Inside, the run reaches its one server through a proxy."""
    proxy = Proxy(served.servers[0].url)
    served.urls, served.deadline_s = (proxy.url,), SHORT_S
    try:
        yield proxy
    finally:
        proxy.close()
        served.urls = (served.servers[0].url,)


@contextmanager
def cut(served: Served) -> Iterator[None]:
    """Once, in the middle of a reply."""
    with through(served) as proxy:

        def arm() -> None:
            proxy.spoil = once

        def once(data: bytes, client: socket.socket) -> bytes:
            proxy.spoil = lambda data, _: data
            client.sendall(data[: len(data) // 2])
            client.shutdown(socket.SHUT_RDWR)
            return b''

        with striking(served.strike('request', 16, 0.1), arm) as hit, said(served, 'server left out'):
            yield
        assert hit


@contextmanager
def trickling(served: Served) -> Iterator[None]:
    """A byte a second: the run ends with a message, and the same command continues once the way is free."""
    with through(served) as proxy:

        def slowly(data: bytes, client: socket.socket) -> bytes:
            for i in range(len(data)):
                client.sendall(data[i : i + 1])
                time.sleep(1.0)
            return b''

        def arm() -> None:
            proxy.spoil = slowly

        with striking(served.strike('request', 16, 0.1), arm), pytest.raises(RolloutError, match='no rollout server answers'):
            served.go_on()
    yield


@contextmanager
def swallowed(served: Served) -> Iterator[None]:
    """Once, a whole reply; the connection stays."""
    with through(served) as proxy, mock.patch.multiple(watch, _LONG_S=1.0, _EVERY_S=1.0):
        served.deadline_s = DEADLINE_S  # two looks come before it

        def arm() -> None:
            proxy.swallow(b'POST /inference/v1/generate')

        with striking(served.strike('request', 16, 0.1), arm) as hit, said(served, 'reply lost'):
            yield
        assert hit


@contextmanager
def damaged(served: Served, moment: str, replies: int) -> Iterator[None]:
    """From that moment on, so many replies to the first group that is answered."""
    reply, armed, spoilt = VllmEngine._reply, [], []

    async def spoiling(self, url, body, *bound):
        said = await reply(self, url, body, *bound)
        if not armed or len(spoilt) == replies or spoilt and body != spoilt[0]:
            return said
        spoilt.append(body)
        return said.replace(b'"token_ids"', b'"tokens"')

    with mock.patch.object(VllmEngine, '_reply', spoiling), striking(served.strike(moment), lambda: armed.append(1)):
        yield
    if len(spoilt) < replies:
        raise AssertionError(f'{len(spoilt)} of {replies} replies were damaged')


@contextmanager
def damaged_once(served: Served) -> Iterator[None]:
    with damaged(served, 'generation', 1), said(served, 'group asked again'):
        yield


@contextmanager
def lost(served: Served) -> Iterator[None]:
    with damaged(served, 'generation', 3), said(served, 'group asked again', 'group lost'):
        yield


@contextmanager
def damaged_in_an_evaluation(served: Served) -> Iterator[None]:
    """The run ends with a message: a score without that question would be of another benchmark."""
    with damaged(served, 'evaluation', 3), pytest.raises(BadResponse, match='cannot be read'):
        served.go_on()
    yield


def group_lost(served: Served) -> Outcome:
    """Another run than the sound one, but for what cannot differ: which prompts each step drew, and that each had one outcome."""
    started = time.monotonic()
    served.go_on()
    seconds = time.monotonic() - started
    rows = ledger_of(served.workdir)
    drawn, wanted = (
        [sorted(row['trained'] + row['filtered'] + row['infra_error']) for row in ledger] for ledger in (rows, served.sound.ledger)
    )
    lost_rows = differing(drawn, wanted)
    once = [row['step'] for row in metrics(served.workdir)] == list(range(STEPS + 1))
    discarded = sum(row.get('bapo/discarded/infra_error', 0) for row in metrics(served.workdir))
    groups = sum(len(row['infra_error']) for row in rows)
    why = '' if once and (groups, discarded) == (1, 1) else f'{groups} groups lost, {discarded} counted; each step once: {once}'
    return Outcome(not why and not lost_rows, lost_rows, seconds, why)


# ---- the trainer


def of_trainer(number: int, moment: str, calls: int = 1, within_s: float = 0.0, *, times: int = 1, own: bool = False) -> Kind:
    """A trainer gets that signal, so many times in a row, and the same command continues. A server of its `own` ends with it."""

    @contextmanager
    def kind(served: Served) -> Iterator[None]:
        if own:
            served.servers[1].stop()
            served.urls, served.deadline_s = (), START_S
        for _ in range(times):
            served.process(served.strike(moment, calls, within_s), number)
        yield

    return kind


SERVER_KINDS: dict[str, Kind] = {
    'the server killed while it answers': of_server(kill, 'request', 16, 0.15),
    'the server killed in the middle of a load': of_server(kill, 'load', 3, 0.15),
    'the server killed in an evaluation': of_server(kill, 'evaluation', 1, 0.2),
    "the server's engine killed while it answers": of_server(kill_engine, 'request', 16, 0.15),
    'the server frozen beyond its deadline': of_server(freeze, 'request', 16, 0.1, deadline_s=SHORT_S),
    "the server's engine frozen beyond its deadline": of_server(freeze_engine, 'request', 16, 0.1, deadline_s=SHORT_S),
    'the server frozen for two seconds': of_server(freeze_for_two_seconds, 'request', 16, 0.15, event=''),
    'one of two servers killed': of_server(kill, 'request', 16, 0.15, servers=2),
    'one of two servers frozen beyond its deadline': of_server(freeze, 'request', 16, 0.1, servers=2, deadline_s=SHORT_S),
    'both of two servers killed': of_server(kill, 'request', 16, 0.15, servers=2, struck=2),
    'a connection cut in the middle of a reply': cut,
    'a reply that trickles in': trickling,
    'a reply that never comes': swallowed,
    'a damaged reply': damaged_once,
    'three damaged replies to a group': lost,
    'three damaged replies in an evaluation': damaged_in_an_evaluation,
    'the trainer killed while the server answers': of_trainer(signal.SIGKILL, 'request', 24, 0.15),
    'the trainer killed while it publishes a policy': of_trainer(signal.SIGKILL, 'publication', 3, 0.05),
    'the trainer killed in a re-evaluation': of_trainer(signal.SIGKILL, 're-evaluation', 1, 0.2),
    'the trainer killed in an evaluation': of_trainer(signal.SIGKILL, 'evaluation', 1, 0.2),
    'the trainer killed, with a server that it started': of_trainer(signal.SIGKILL, 'request', 24, 0.15, own=True),
    'SIGTERM to the trainer, with a server that it started': of_trainer(signal.SIGTERM, 'request', 24, 0.15, own=True),
    CHAIN: of_trainer(signal.SIGKILL, 'request', 12, 0.2, times=3),
}
JUDGES = {'three damaged replies to a group': group_lost}  # of a run that cannot equal the sound one


def answering(servers: tuple[SupervisedServer, ...], wanted: int = 1) -> None:
    """Starts the first `wanted` of them, or starts them again, unless they answer."""
    for server in servers[:wanted]:
        if not server._answers():
            server.restart()


def struck(sound: Sound, servers: tuple[SupervisedServer, SupervisedServer], name: str, seed: int, number: int) -> Outcome:
    """The injection `number` of a seed, of the kind `name`. Raises where the fault did not come, or was not said."""
    answering(servers)
    served = Served(case_of(sound, seed, number), servers)
    try:
        with SERVER_KINDS[name](served):
            return JUDGES.get(name, outcome_of)(served)
    finally:
        shutil.rmtree(served.workdir)


def injections(folder: Path, benchmark: Path) -> dict[str, Injection]:
    """Starts the first of two servers, which end with this process; the second starts when it is needed."""
    os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(24))
    options = {'dtype': 'float32', 'max_tokens': 512, 'deadline_s': START_S, 'extra': SERVER_ARGS}
    first, second = (SupervisedServer(str(BASE), folder / f'server{i}.log', **options) for i in range(2))
    first.start()
    sound = served_run(folder, benchmark, first.url)
    return {name: functools.partial(struck, sound, (first, second), name) for name in SERVER_KINDS}
