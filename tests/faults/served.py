"""Runs that real vLLM servers answer: what makes them repeatable, moments to strike at, and a trainer in a process of its own.

A server's samples are new draws by default. Here each request carries a seed, made of what it asks and of which policy. Then equal
runs are equal bit for bit, whichever server answered, and whatever else it did.

    python -m tests.faults.served SETTING    # the trainer that `Served.process` starts; SETTING is JSON
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
from ml_collections import ConfigDict
from small_run import ROOT, run

from bapo_jax.machine import stopping
from bapo_jax.rollout import start
from bapo_jax.rollout.engine import EVALUATION, FRESH, REEVALUATION
from bapo_jax.rollout.vllm import client
from bapo_jax.rollout.vllm.client import VllmEngine
from bapo_jax.rollout.vllm.loading import PolicyLoading
from bapo_jax.rollout.vllm.supervise import SupervisedServer
from tests.faults.cases import Case, Sound, config_of, read_sound, until

DEADLINE_S, SHORT_S = 20.0, 5.0  # rollout.deadline_s; a group takes .2 s. The short one: where it is to pass
START_S = 240.0  # for a server to start on a busy machine
LIMIT_S = 600.0  # for what is left of a run, restarts included
SERVER_ARGS = ('--enforce-eager',)  # compiling takes 20 s a start


class Strike(NamedTuple):
    """`delay_s` seconds after the `call`th time that a run comes to `moment`."""

    moment: str
    call: int
    delay_s: float


def _asks_for(purpose: int) -> tuple[Any, str, Callable[..., bool]]:
    return VllmEngine, 'ask', lambda self, prompts, size, sampling, draws: draws[0].purpose == purpose


# What is called, and which of its calls count.
MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    'request': (VllmEngine, '_reply', lambda *_: True),
    'generation': _asks_for(FRESH),  # hard prompts may be asked with the fresh ones
    're-evaluation': _asks_for(REEVALUATION),
    'evaluation': _asks_for(EVALUATION),
    'load': (PolicyLoading, '_call_workers', lambda self, url, method: method == 'load_policy'),
    'publication': (client, 'publish', lambda *_: True),
}


@contextmanager
def striking(at: Strike, strike: Callable[[], Any]) -> Iterator[list[str]]:
    """Inside, `strike` happens at that moment; the list has it then."""
    owner, name, counts = MOMENTS[at.moment]
    original, calls, struck = getattr(owner, name), [], []

    def now() -> None:
        struck.append(at.moment)
        strike()

    def wrapped(*args, **kwargs):
        if counts(*args):
            calls.append(1)
            if len(calls) == at.call:
                threading.Timer(at.delay_s, now).start()
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, wrapped):
        yield struck


@contextmanager
def seeded() -> Iterator[None]:
    """Inside, requests carry seeds. The prompts are short: none is read in two pieces, which vLLM would not survive with a seed."""
    reply = VllmEngine._reply

    async def with_a_seed(self, url, body, *bound):
        what = json.dumps([self._version, body], sort_keys=True).encode()
        seed = int.from_bytes(hashlib.sha256(what).digest()[:3], 'big')
        return await reply(self, url, {**body, 'sampling_params': {**body['sampling_params'], 'seed': seed}}, *bound)

    with mock.patch.object(VllmEngine, '_reply', with_a_seed):
        yield


def served_config(benchmark: Path, urls: tuple[str, ...], deadline_s: float = DEADLINE_S, overlap: bool = False) -> ConfigDict:
    """The harness's run, answered by the servers at `urls`. Without any it starts one itself."""
    config = config_of(benchmark, rollout__overlap=overlap)
    config.rollout.update({
        'engine': 'vllm', 'servers': urls, 'concurrency': 2, 'server': {'args': SERVER_ARGS}, 'deadline_s': deadline_s,
    })  # fmt: skip
    return config


def served_run(folder: Path, benchmark: Path, url: str) -> Sound:
    """The run that nothing happens to."""
    with seeded():
        run(served_config(benchmark, (url,)), folder / 'sound')
    return read_sound(folder, benchmark)


@dataclass
class Served:
    """One injection: a copy of the sound run at a random step, and two servers, of which the second may not run.

    In half of them generation overlaps with training, which changes no number.
    """

    case: Case
    servers: tuple[SupervisedServer, SupervisedServer]

    def __post_init__(self):
        self.sound, self.workdir, self.rng = self.case.sound, self.case.workdir, self.case.rng
        self.urls = (self.servers[0].url,)  # of the servers that answer; without any the run starts one
        self.deadline_s, self.overlap = DEADLINE_S, bool(self.rng.integers(2))

    def config(self) -> ConfigDict:
        return served_config(self.sound.benchmark, self.urls, self.deadline_s, self.overlap)

    def go_on(self) -> None:
        """Continues the run. One that waits for ever is stopped, and has not reached its end."""
        late = threading.Timer(LIMIT_S, os.kill, (os.getpid(), signal.SIGTERM))
        late.start()
        try:
            with seeded():
                run(self.config(), self.workdir)
        finally:
            late.cancel()

    @contextmanager
    def starts(self, servers: int) -> Iterator[None]:
        """Inside, so many servers are the run's, as if it had started them. They stay when it ends."""
        ours, stop = list(self.servers[:servers]), SupervisedServer.stop
        self.urls = ()

        def restart(server: SupervisedServer) -> None:
            stop(server)
            server.start()

        with (
            mock.patch.object(start, 'start_servers', lambda *_: ours),
            mock.patch.multiple(SupervisedServer, stop=lambda _: None, restart=restart),
        ):
            yield

    def strike(self, moment: str, calls: int = 1, within_s: float = 0.0) -> Strike:
        """A random one: at one of the first `calls`, up to `within_s` seconds later."""
        return Strike(moment, int(self.rng.integers(1, calls + 1)), float(self.rng.uniform(0, within_s)))

    def process(self, at: Strike, number: int) -> None:
        """The run in a process of its own, which gets that signal. It must end as it is to, and leave no process behind."""
        setting = {
            'benchmark': str(self.sound.benchmark), 'workdir': str(self.workdir), 'urls': self.urls, 'deadline_s': self.deadline_s,
            'overlap': self.overlap, 'programs': jax.config.jax_compilation_cache_dir, 'strike': at, 'number': number,
        }  # fmt: skip
        path = os.pathsep.join([str(ROOT), str(ROOT / 'tests' / 'helpers')])
        groups: set[int] = set()
        with (self.workdir / 'stderr').open('wb') as said:
            p = subprocess.Popen(
                [sys.executable, '-m', 'tests.faults.served', json.dumps(setting)], cwd=ROOT, stdout=subprocess.DEVNULL,
                stderr=said, env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path}, start_new_session=True,
            )  # fmt: skip
        try:
            give_up = time.monotonic() + LIMIT_S
            while p.poll() is None and time.monotonic() < give_up:
                groups |= groups_of(p.pid)
                time.sleep(0.2)
        finally:
            p.kill()
            p.wait()
        if p.returncode != (-number if number == signal.SIGKILL else stopping.STATUS):
            raise RuntimeError(f'the trainer ended with status {p.returncode}: {(self.workdir / "stderr").read_text()[-800:]}')
        if not self.urls and groups == {p.pid}:
            raise RuntimeError('the trainer started no server')
        until(lambda: not any(members(group) for group in groups), 60.0)


def processes() -> Iterator[tuple[int, int, int]]:
    """(id, parent, process group) of every process that runs."""
    for stat in Path('/proc').glob('[0-9]*/stat'):
        try:
            state, parent, group = stat.read_text().rpartition(')')[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # ended while we looked
            continue
        if state != 'Z':
            yield int(stat.parent.name), int(parent), int(group)


def groups_of(pid: int) -> set[int]:
    """The process groups that the process leads or its children lead."""
    return {group for process, parent, group in processes() if pid in (process, parent)}


def members(group: int) -> list[int]:
    return [process for process, _, of in processes() if of == group]


def engine_of(server: SupervisedServer) -> int:
    """The process of a server that holds its scheduler, without which it answers /health and nothing else."""
    [engine] = [p for p in members(server.pid) if b'EngineCore' in (Path('/proc') / str(p) / 'cmdline').read_bytes()]
    return engine


def main() -> None:
    setting = json.loads(sys.argv[1])
    jax.config.update('jax_compilation_cache_dir', setting['programs'])
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
    config = served_config(Path(setting['benchmark']), tuple(setting['urls']), setting['deadline_s'], setting['overlap'])
    with seeded(), striking(Strike(*setting['strike']), lambda: os.kill(os.getpid(), setting['number'])):
        run(config, Path(setting['workdir']))
    sys.exit(stopping.STATUS if stopping.requested() else 0)


if __name__ == '__main__':
    main()
