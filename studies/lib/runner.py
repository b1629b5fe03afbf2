"""Runs a study: many jobs of one core on a machine of several, a row each. A policy this small gains next to
nothing from a second core.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.host.load import cpu_name
from studies.lib.rows import ROOT, Row, append_row

NAMED = ('part', 'pool', 'name', 'arm', 'rate', 'seed')  # of a row, where it ends


def call(words: Sequence[str], workdir: Path, environment: dict[str, str] | None = None) -> None:
    """Runs `python ...` from the root on the CPU, or as `environment` says; what it prints goes to
    workdir/output.txt. The runs of a folder share their compiled programs.

    Raises CalledProcessError where it fails.
    """
    workdir.mkdir(parents=True, exist_ok=True)  # a run that was interrupted is continued
    cache = {'JAX_COMPILATION_CACHE_DIR': str(workdir.parent / 'cache')}
    environment = os.environ | cache | (environment or {'JAX_PLATFORMS': 'cpu'})
    with (workdir / 'output.txt').open('a') as output:
        subprocess.run(
            [sys.executable, *words[1:]], cwd=ROOT, env=environment, check=True, stdout=output, stderr=output
        )


def make_policy(policy: str, command: str, environment: dict[str, str] | None = None) -> None:
    """Makes a policy's folder by a command of `python ...`, if it is not there."""
    if not (ROOT / policy / 'model.safetensors').is_file():
        environment = os.environ | (environment or {'JAX_PLATFORMS': 'cpu'})
        subprocess.run([sys.executable, *command.split()[1:]], cwd=ROOT, check=True, env=environment)


def hash_of(policy: str) -> str:
    """The first 16 digits of the hash of a policy's weights."""
    return hashlib.sha256((ROOT / policy / 'model.safetensors').read_bytes()).hexdigest()[:16]


def made_by() -> Row:
    """What a row says of the code and the machine: its cores, and those that the run may use. To repeat a run
    of one core, bit for bit, run its commands after `taskset -c 0`.
    """
    asked = ['git', 'rev-parse', 'HEAD']
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return {
        'commit': commit, 'cpu': cpu_name(), 'cores': os.cpu_count(), 'run_cores': len(os.sched_getaffinity(0)),
        'jax': importlib.metadata.version('jax'), 'date': datetime.datetime.now().isoformat(timespec='minutes'),
    }  # fmt: skip


def measure_all(
    file: Path, jobs: Iterable[Any], measure: Callable[[Any], Row], last_start: float, cores: int = 1
) -> list[Row]:
    """The rows of jobs, appended to `file` as each ends. None is begun after `last_start`, by
    time.monotonic().
    """

    def work(job: Any) -> Row | None:
        return measure(job) if time.monotonic() < last_start else None

    rows = []
    for row in on_each_core(work, jobs, cores):
        if row is not None:
            append_row(file, row)
            rows.append(row)
            print(*(row[name] for name in NAMED if name in row), 'there', flush=True)
    return rows


def on_each_core(work: Callable[[Any], Any], items: Iterable[Any], cores: int = 1) -> Iterator[Any]:
    """Yields `work(item)` as each ends, as many under way as that allows: a process that `work` starts has
    `cores` cores alone.

    After a failure no further item is begun. Its error is raised once the items under way have ended and been
    yielded.
    """
    free: queue.Queue[set[int]] = queue.Queue()
    failed = threading.Event()
    there = sorted(os.sched_getaffinity(0))
    for first in range(
        0, max(cores, len(there) - cores + 1), cores
    ):  # one set where the machine has fewer cores
        free.put(set(there[first : first + cores]))

    def pinned(item: Any) -> Any:
        if failed.is_set():
            raise CancelledError
        taken = free.get()
        try:
            os.sched_setaffinity(0, taken)  # of this thread; the process it starts inherits it
            return work(item)
        except BaseException:
            failed.set()  # here, not where results are taken: this thread would begin another item first
            raise
        finally:
            free.put(taken)

    error, pool = None, ThreadPoolExecutor(free.qsize())
    try:
        for done in as_completed([pool.submit(pinned, item) for item in items]):
            if not done.exception():
                yield done.result()
            elif not isinstance(done.exception(), CancelledError):
                error = error or done.exception()
    finally:  # also where the caller stops taking results
        pool.shutdown(cancel_futures=True)
    if error:
        raise error
