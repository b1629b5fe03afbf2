"""What the client of vLLM servers takes at full size: 256 groups of 8 responses of 8,192 tokens, 2.4 GB of
JSON a step.

    python -m benchmarks.engine.client_load

A server in another process replays replies, byte for byte as vLLM 0.32 writes them (`replaying_server.py`).
The real engine asks for all groups at once and receives, reads and checks them. The table has the best of
--repeats, and beside it

    sockets     the same bytes received by blocking sockets, and dropped
    reading     the same bytes read and checked, from memory

Both together are the least that one process can take whose interpreter has one lock. The target is 5 s on two
cores.

A stall is how late the engine's event loop runs what is due. Peak memory is over that of the process before
it asked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import http.client
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from bapo_jax.groups import Prompt, Response
from bapo_jax.models import hf
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.vllm.client import VllmEngine
from bapo_jax.rollout.vllm.replies import ROUTE, Asked, read_group
from benchmarks.engine.replaying_server import encode, random_group, reply, running, unnamed
from benchmarks.host.load import cpu_name, peak_memory

BASE = Path(__file__).resolve().parents[2] / 'configs' / 'quickstart_base'
GROUP_SIZE = 8
VOCABULARY = 151_936  # Qwen2.5's: token ids of up to six digits
POLICY = 0
REPLIES = 4  # different ones
TARGET_S = 5.0


class Load(NamedTuple):
    groups: list[tuple[Response, ...]]  # the last ones received
    bytes: int
    seconds: float
    stall_s: float  # the longest
    peak_bytes: int
    sockets_s: float
    reading_s: float


def measure(groups: int, tokens: int, concurrency: int, repeats: int) -> Load:
    """The best of `repeats`, and the longest stall of all."""
    prompts = [Prompt(i, 'countdown', np.array([i, 1, 2, 3], np.int32), {}) for i in range(groups)]
    asked = Asked(GROUP_SIZE, tokens, (unnamed(POLICY),), VOCABULARY, stop_tokens=())
    bodies = [
        encode(reply(random_group(i, GROUP_SIZE, tokens, VOCABULARY), unnamed(POLICY)))
        for i in range(REPLIES)
    ]
    seconds, stalls, sockets, reading = [], [], [], []
    with (
        running(REPLIES, GROUP_SIZE, tokens, VOCABULARY, POLICY) as url,
        tempfile.TemporaryDirectory() as directory,
    ):
        engine = start_engine(url, Path(directory), concurrency)
        before = peak_memory()
        for _ in range(repeats):
            with Stalls(engine) as late:
                started = time.perf_counter()
                received = engine.generate(
                    prompts, GROUP_SIZE, Sampling(1.0, tokens), [Draw(0, 1, FRESH)] * groups
                )
                seconds.append(time.perf_counter() - started)
            stalls.append(late.longest_s)
        peak = peak_memory() - before
        engine.close()
        for _ in range(repeats):
            sockets.append(from_sockets(url, groups, concurrency))
    for _ in range(repeats):
        started = time.perf_counter()
        for i in range(groups):
            read_group(bodies[i % REPLIES], asked, 'memory')
        reading.append(time.perf_counter() - started)
    size = sum(len(bodies[i % REPLIES]) for i in range(groups))
    return Load(received, size, min(seconds), max(stalls), peak, min(sockets), min(reading))


def start_engine(url: str, directory: Path, concurrency: int) -> VllmEngine:
    """An engine that holds a small policy of zeros with a full vocabulary."""
    model = dataclasses.replace(hf.read_config(BASE, 'float32'), vocab_size=VOCABULARY)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), hf.abstract_params(model)[1])
    engine = VllmEngine(
        [url], directory, model, token='', dtype='float32', stop_tokens=(), concurrency=concurrency, deadline_s=600.0
    )  # fmt: skip
    engine.load(params, POLICY)
    return engine


class Stalls:
    """Asks the engine's event loop for something every millisecond, and keeps how late it came at the latest."""

    def __init__(self, engine: VllmEngine):
        self._loop, self.longest_s = engine._loop, 0.0

    def __enter__(self) -> Stalls:
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)
        return self

    def __exit__(self, *_) -> None:
        self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.perf_counter() - due)


def from_sockets(url: str, requests: int, concurrency: int) -> float:
    """Seconds to receive as many replies by blocking sockets."""
    connections = threading.local()

    def one(number: int) -> None:
        if not hasattr(connections, 'open'):
            connections.open = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
        connections.open.request('POST', ROUTE, encode({'token_ids': [number]}))
        connections.open.getresponse().read()

    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(one, range(requests)))
    return time.perf_counter() - started


def table(load: Load) -> Table:
    tokens = sum(len(r.tokens) for group in load.groups for r in group)
    packages = ', '.join(f'{name} {version(name)}' for name in ('aiohttp', 'msgspec', 'numpy'))
    title = f'{len(load.groups)} groups, {tokens:,} tokens, {load.bytes / 1e9:.2f} GB of JSON'
    where = f'{cpu_name()}, {os.cpu_count()} cores, {packages}, {datetime.date.today()}'
    rows = Table('part', 'seconds', 'GB/s', 'what', title=f'{title}\n{where}')
    least = load.sockets_s + load.reading_s
    for part, seconds, what in (
        ('ask', load.seconds, f'target: under {TARGET_S:g} s; longest stall {1e3 * load.stall_s:.0f} ms, '
                              f'peak {load.peak_bytes / 2**30:.2f} GiB'),
        ('sockets', load.sockets_s, f'ask / sockets = {load.seconds / load.sockets_s:.1f}'),
        ('reading', load.reading_s, f'ask / reading = {load.seconds / load.reading_s:.1f}'),
        ('sockets + reading', least, f'ask / both = {load.seconds / least:.2f}'),
    ):  # fmt: skip
        rows.add_row(part, f'{seconds:.2f}', f'{load.bytes / 1e9 / seconds:.2f}', what)
    return rows


def main(argv: Sequence[str]) -> None:
    Console(width=132).print(table(measure(FLAGS.groups, FLAGS.tokens, FLAGS.concurrency, FLAGS.repeats)))


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_integer('groups', 256, 'Groups a step.', lower_bound=1)
    flags.DEFINE_integer('tokens', 8192, 'Tokens of each response.', lower_bound=1)
    flags.DEFINE_integer('concurrency', 64, 'Groups under way (rollout.concurrency).', lower_bound=1)
    flags.DEFINE_integer('repeats', 3, 'Measurements of each part.', lower_bound=1)
    app.run(main)
