"""Worker processes that can be killed, for work on untrusted text, which may hang, exhaust memory or crash.

A worker is a fresh interpreter that runs a module calling `serve` (worker_process.py). The alternatives do
not work:

    threads                    a power tower cannot be interrupted, and math-verify's timeouts need signals
    fork                       the trainer holds threads and devices
    multiprocessing's spawn    every worker would import the trainer's main module again
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from bapo_jax.machine import events
from bapo_jax.machine.ending import CONTINUES, Ending
from bapo_jax.tasks.worker_process import READY, READY_IN_NETWORK

# Outcome of a request that used up its CPU time. A worker may also return it if it cannot go on.
OVERRAN = 'overran'
# Outcome of a request that the machine failed: its worker ended or was late twice, or the budget was used up.
MACHINE_FAILED = 'failed'

START_S = 120.0  # most seconds for a worker to start: importing sympy takes long on a busy machine
_STARTS = 3  # it is an error if this many workers in a row end before they are ready

# What Python and its libraries need. The rest holds secrets, such as the rollout servers' token.
_INHERITED = (
    'PATH',
    'HOME',
    'TMPDIR',
    'LANG',
    'LC_ALL',
    'LC_CTYPE',
    'LD_LIBRARY_PATH',
    'PYTHONHOME',
    'PYTHONUTF8',
    'VIRTUAL_ENV',
)

_WITHOUT_NETWORK = str(Path(__file__).with_name('without_network.py'))
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_AT_ONCE = 65_536  # most bytes per read from a worker
_MOST = 2**24  # most bytes of an outcome as JSON: 16 MiB
_TICKS = os.sysconf('SC_CLK_TCK')  # clock ticks per second in /proc
_LOOK_S = 0.1  # least seconds between two checks of a worker's CPU time


class WorkersFailed(Ending, ChildProcessError):
    """Workers do not start; the message says what to check."""

    remedy = CONTINUES


class VerifierPool:
    """Up to `workers` processes that run `python -m module`, each judging one request at a time.

    cpu_s          CPU seconds per request, over all threads; a stopped process uses none
    wall_s         wall-clock seconds per request, generous: a worker that takes longer was kept from working
    memory_bytes   a worker's address space
    arguments      command-line arguments of the module, after wall_s and memory_bytes
    environment    a worker's environment; None: only what Python needs of the trainer's
    network        whether workers may use the network; warns if not, but the kernel cannot isolate them

    Workers start with the first requests and stay until `close`, or until this process ends in any way.
    Threads may share a pool: they take turns.
    """

    def __init__(
        self, module: str, *arguments: str, workers: int, wall_s: float, cpu_s: float = math.inf,
        memory_bytes: int = resource.RLIM_INFINITY, environment: Mapping[str, str] | None = None,
        network: bool = True,
    ):  # fmt: skip
        self.wall_s, self.cpu_s = wall_s, cpu_s
        self._module, self._environment = module, environment
        runs = '-m' if network else _WITHOUT_NETWORK
        self._command = [sys.executable, runs, module, str(wall_s), str(memory_bytes), *arguments]
        self._limit = workers
        self._workers: list[_Worker] = []
        self._failed_starts = 0  # in a row
        self._unsaid = not network  # no warning yet that workers can use the network although they should not
        self._lock = threading.Lock()

    def run(self, requests: Sequence[Any], budget_s: float = math.inf) -> list[Any]:
        """Returns each request's outcome: the worker function's result, or `OVERRAN` or `MACHINE_FAILED`.

        A worker that ends, is late, or writes anything but an outcome of its request is replaced, and the
        request is retried once. After `budget_s` seconds for all requests together, the rest are
        MACHINE_FAILED. An event counts these failures and their reasons. Raises WorkersFailed if workers do
        not start.
        """
        lines = [
            json.dumps(request, ensure_ascii=False).encode('utf-8', 'surrogatepass') + b'\n'
            for request in requests
        ]
        with self._lock:
            try:
                outcomes, failures = self._run(lines, time.monotonic() + budget_s)
            finally:  # a worker left busy by an interruption would answer the next run with an old outcome
                self._drop([w for w in self._workers if w.job is not None])
        if failures:
            reasons = ', '.join(f'{count} {reason}' for reason, count in failures.items())
            times = (
                f'{self.wall_s:g} s for each of two attempts'
                + f', {budget_s:g} s for all requests' * math.isfinite(budget_s)
            )
            message = (
                f'{failures.total()} of {len(lines)} requests to {self._module} failed: {reasons} '
                f'(time limits: {times})'
            )
            events.report('verifier failed', message, module=self._module, requests=len(lines), **failures)
        return outcomes

    def close(self) -> None:
        """Ends the workers; a later `run` starts new ones."""
        with self._lock:
            self._drop(list(self._workers))

    def _run(self, lines: Sequence[bytes], until: float) -> tuple[list[Any], collections.Counter[str]]:
        """Returns the outcomes, and counts the failures by reason: late, unjudged, or the `_Worker.fault`."""
        outcomes: list[Any] = [MACHINE_FAILED] * len(lines)
        failures: collections.Counter[str] = collections.Counter()
        waiting, tried_before = collections.deque(range(len(lines))), set()

        def put_back(job: int, reason: str) -> None:
            if job in tried_before:
                failures[reason] += 1
            else:
                tried_before.add(job)
                waiting.append(job)

        self._drop([w for w in self._workers if w.gone()])  # ended while idle
        while busy := len(waiting) + sum(w.job is not None for w in self._workers):
            if time.monotonic() >= until:
                failures['unjudged'] += busy
                break
            while len(self._workers) < min(self._limit, busy):
                self._workers.append(_Worker(self._command, self._environment))
            for worker in self._workers:
                if waiting and worker.ready and worker.job is None:
                    job = waiting.popleft()
                    worker.give(job, lines[job], self.wall_s, self.cpu_s)
            for worker in _with_news(self._workers, until):
                if worker.answered:
                    job, outcome = worker.take()
                    outcomes[job] = outcome
                elif worker.fault:
                    self._drop([worker])
                    if worker.job is not None:
                        put_back(worker.job, worker.fault)
                    elif not worker.ready:
                        self._count_failed_start(worker)
                elif worker.ready:
                    self._failed_starts = 0
                    if self._unsaid and worker.in_network:
                        self._unsaid = False
                        logging.warning(
                            'workers of %s can use the network: the kernel refuses them a namespace',
                            self._module,
                        )
            for worker in [w for w in self._workers if w.look_at <= time.monotonic()]:
                if not worker.ready:
                    self._drop([worker])
                    raise WorkersFailed(
                        f'a worker of {self._module} was not ready in {START_S:.0f} s; '
                        'check whether the machine is overloaded'
                    )
                if worker.has_overrun():
                    self._drop([worker])
                    outcomes[worker.job] = OVERRAN
                elif worker.is_late():
                    self._drop([worker])
                    put_back(worker.job, 'late')
                else:
                    worker.look_later()
        return outcomes, failures

    def _count_failed_start(self, worker: _Worker) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _STARTS:
            self._failed_starts = 0
            raise WorkersFailed(
                f'{_STARTS} workers of {self._module} in a row ended before they were ready, the last with '
                f'status {worker.status}; see their messages on standard error. Status -9 without a message '
                'usually means that memory ran out'
            )

    def _drop(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.kill()
            self._workers.remove(worker)


class _Worker:
    """One process: starting, then idle, or busy with request number `job`. At `look_at` its time may be over.

    Each request has its own number, which its outcome repeats. Lines without it are ignored: a process that a
    function forked or left behind may write them. `fault` says why the process can no longer be used: it
    'ended', or its outcome is 'garbled' or longer than _MOST.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None):
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=bare_environment() if environment is None else environment,
            start_new_session=True,  # only the trainer handles Ctrl-C
        )
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)  # a stopped worker reads nothing, and requests can overfill a pipe
        self._read, self.unsent = bytearray(), b''
        self._asked = 0  # number of the last request
        self.ready = self.in_network = self.answered = False
        self.fault = ''
        self.job: int | None = None
        self.outcome: Any = None
        self.look_at = time.monotonic() + START_S

    @property
    def status(self) -> int | None:
        """The exit status, once the process was waited for; -9 if signal 9 ended it."""
        return self._process.returncode

    def gone(self) -> bool:
        return self._process.poll() is not None

    def give(self, job: int, line: bytes, wall_s: float, cpu_s: float) -> None:
        self._asked += 1
        self.job, self.unsent = job, b'%d %b' % (self._asked, line)
        self._until, self._cpu_until = time.monotonic() + wall_s, _cpu_seconds(self._process.pid) + cpu_s
        self.look_later()
        self.send()

    def send(self) -> None:
        """Writes as much of the request as the pipe takes."""
        try:
            self.unsent = self.unsent[os.write(self.input, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # its output ends too, which `listen` notices
            self.unsent = b''

    def has_overrun(self) -> bool:
        return _cpu_seconds(self._process.pid) >= self._cpu_until

    def is_late(self) -> bool:
        return time.monotonic() >= self._until

    def look_later(self) -> None:
        """Sets `look_at` to the earliest time at which the CPU time or the wall-clock time can be used up."""
        left = self._cpu_until - _cpu_seconds(self._process.pid)
        self.look_at = min(self._until, time.monotonic() + max(left, _LOOK_S))

    def listen(self) -> None:
        """Reads the available output; call it only if there is some."""
        data = os.read(self.output, _AT_ONCE)
        self._read += data
        if b'\n' in data:
            *lines, self._read = self._read.split(b'\n')
            for line in lines:
                self._hear(bytes(line))
        if not data:
            self.fault = 'ended'
        elif len(self._read) > _MOST:
            self.fault = f'longer than {_MOST >> 20} MiB'

    def _hear(self, line: bytes) -> None:
        if not self.ready:
            if line in (READY, READY_IN_NETWORK):  # ignores what a module writes during its import
                self.ready, self.in_network, self.look_at = True, line == READY_IN_NETWORK, math.inf
            return
        number, _, outcome = line.partition(b' ')
        if self.job is None or self.answered or self.fault or number != b'%d' % self._asked:
            return
        try:
            self.outcome, self.answered = json.loads(outcome), True
        except (ValueError, RecursionError):
            self.fault = 'garbled'

    def take(self) -> tuple[int, Any]:
        job, outcome = self.job, self.outcome
        self.job, self.outcome, self.answered, self.look_at = None, None, False, math.inf
        return job, outcome

    def kill(self) -> None:
        if self.fault == 'ended':  # the output ends a moment before the process
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
        with contextlib.suppress(ProcessLookupError):  # already gone
            os.killpg(self._process.pid, signal.SIGKILL)  # includes processes that its function started
        self._process.wait(timeout=10)
        self._process.stdin.close()
        self._process.stdout.close()


def bare_environment() -> dict[str, str]:
    """What Python needs of the trainer's environment, and the path of this package."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    path = os.pathsep.join(filter(None, (_PACKAGE_PARENT, os.environ.get('PYTHONPATH'))))
    return {**inherited, 'PYTHONPATH': path}


def _cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds used by all threads of a process, including C code that holds the GIL."""
    after_name = Path(f'/proc/{pid}/stat').read_text('utf-8', 'replace').rpartition(')')[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS  # utime and stime


def _with_news(workers: Sequence[_Worker], until: float) -> list[_Worker]:
    """Waits for a worker's output, end or next check, or the deadline. Returns those that wrote or ended."""
    news = []
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.output, selectors.EVENT_READ, worker)
            if worker.unsent:
                selector.register(worker.input, selectors.EVENT_WRITE, worker)
        wait_s = min(until, *(w.look_at for w in workers)) - time.monotonic()
        for key, _ in selector.select(max(wait_s, 0.0)):
            if key.fd == key.data.output:
                key.data.listen()
                news.append(key.data)
            else:
                key.data.send()
    return news
