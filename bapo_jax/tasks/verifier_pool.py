"""Worker processes that can be killed: they work on text from outside, which may hang, exhaust memory or crash.

A worker is a fresh interpreter running a module that calls `serve`. The alternatives fail:

    threads                    nothing interrupts the one call that computes a power tower, and math-verify keeps time with signals
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
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from bapo_jax import events, output, terminal

OVERRAN = 'overran'  # the outcome of a request that used up its processor time; a worker may also answer it where it cannot go on
FAILED = 'failed'  # the outcome of a request that the machine failed: twice its worker ended or was late, or the time was over

START_S = 120.0  # how long a worker may take to start: importing sympy on a busy machine
_STARTS = 3  # this many workers in a row that ended before they were ready are an error

# What Python and its libraries need. The rest of the trainer's environment has secrets, such as the rollout servers' token.
_INHERITED = ('PATH', 'HOME', 'TMPDIR', 'LANG', 'LC_ALL', 'LC_CTYPE', 'LD_LIBRARY_PATH', 'PYTHONHOME', 'PYTHONUTF8', 'VIRTUAL_ENV')

_READY, _READY_IN_NETWORK = b'ready', b'ready, in a network'
_WITHOUT_NETWORK = str(Path(__file__).with_name('without_network.py'))
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_AT_ONCE = 65_536  # bytes read from a worker at once
_MOST = 2**24  # bytes of an outcome; 16 MiB, as JSON
_TICKS = os.sysconf('SC_CLK_TCK')  # of /proc, a second
_LOOK_S = 0.1  # least seconds between two looks at a worker's processor time


class WorkersFailed(ChildProcessError):
    """Workers do not start; the message says what to look at."""


class VerifierPool:
    """Up to `workers` processes running `python -m module`, each judging one request at a time.

    cpu_s          a request's seconds of processor time, all threads together. A process that is stopped uses none
    wall_s         a request's seconds of wall clock, generous: a worker that is later was kept from working
    memory_bytes   a worker's address space
    arguments      what the module finds behind these on its command line
    environment    a worker's environment; None: what Python needs, without the rest of the trainer's
    network        whether workers may use the network; where not, and the kernel does not part them from it, a warning says so

    Workers start with the first requests and stay until `close`, or until this process ends, however it ends. Threads may share a
    pool: they take turns.
    """

    def __init__(
        self, module: str, *arguments: str, workers: int, wall_s: float, cpu_s: float = math.inf,
        memory_bytes: int = resource.RLIM_INFINITY, environment: Mapping[str, str] | None = None, network: bool = True,
    ):  # fmt: skip
        self.wall_s, self.cpu_s = wall_s, cpu_s
        self._module, self._environment = module, environment
        runs = '-m' if network else _WITHOUT_NETWORK
        self._command = [sys.executable, runs, module, str(wall_s), str(memory_bytes), *arguments]
        self._limit = workers
        self._workers: list[_Worker] = []
        self._failed_starts = 0  # in a row
        self._unsaid = not network  # that workers are in a network against our will
        self._lock = threading.Lock()

    def run(self, requests: Sequence[Any], budget_s: float = math.inf) -> list[Any]:
        """The outcome of each request: the result of the worker's function, by way of JSON; or `OVERRAN`, or `FAILED`.

        A worker that ends, is late, or writes what is no outcome of its request, is replaced, and its request tried once more.
        `budget_s` seconds are for all requests together; what is unjudged then is FAILED. An event counts what FAILED, and why.
        Raises WorkersFailed where workers do not start.
        """
        lines = [json.dumps(request, ensure_ascii=False).encode('utf-8', 'surrogatepass') + b'\n' for request in requests]
        with self._lock:
            try:
                outcomes, failures = self._run(lines, time.monotonic() + budget_s)
            finally:  # a worker that an interruption leaves busy would answer the next run with this run's outcome
                self._drop([w for w in self._workers if w.job is not None])
        if failures:
            reasons = ', '.join(f'{count} {reason}' for reason, count in failures.items())
            times = f'{self.wall_s:g} s of wall clock for a request, twice' + f'; {budget_s:g} s for all' * math.isfinite(budget_s)
            message = f'{failures.total()} of {len(lines)} requests to {self._module} have no outcome: {reasons} ({times})'
            events.report('verifier failed', message, module=self._module, requests=len(lines), **failures)
        return outcomes

    def close(self) -> None:
        """Ends the workers; a later `run` starts new ones."""
        with self._lock:
            self._drop(list(self._workers))

    def _run(self, lines: Sequence[bytes], until: float) -> tuple[list[Any], collections.Counter[str]]:
        """The outcomes, and of those that failed how many were late, lost their worker (`_Worker.fault`), or were left unjudged."""
        outcomes: list[Any] = [FAILED] * len(lines)
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
                        logging.warning('workers of %s can use the network: the kernel grants them no namespace', self._module)
            for worker in [w for w in self._workers if w.look_at <= time.monotonic()]:
                if not worker.ready:
                    self._drop([worker])
                    raise WorkersFailed(f'a worker of {self._module} was not ready in {START_S:.0f} s; is the machine overloaded?')
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
                f'{_STARTS} workers of {self._module} in a row ended before they were ready, the last with status {worker.status}. '
                'Their messages are on standard error; status -9 without one is a kill, as where memory is short'
            )

    def _drop(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.kill()
            self._workers.remove(worker)


class _Worker:
    """One process: starting, then idle, or busy with request number `job`. At `look_at` its time may be over.

    Each request has a number of its own, which its outcome repeats: lines without it are passed over. A process that a function
    forked may write them, or one that it left behind. `fault` says why the process is of no use: it 'ended', its outcome is
    'garbled', or longer than _MOST.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None):
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        path = os.pathsep.join(filter(None, (_PACKAGE_PARENT, os.environ.get('PYTHONPATH'))))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**inherited, 'PYTHONPATH': path} if environment is None else environment,
            start_new_session=True,  # Ctrl-C is the trainer's to handle
        )
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)  # a worker that is stopped reads nothing, and a request may exceed what a pipe holds
        self._read, self.unsent = bytearray(), b''
        self._asked = 0  # the number of the last request
        self.ready = self.in_network = self.answered = False
        self.fault = ''
        self.job: int | None = None
        self.outcome: Any = None
        self.look_at = time.monotonic() + START_S

    @property
    def status(self) -> int | None:
        """The exit status of a process that was waited for; -9 where signal 9 ended it."""
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
        """Writes what the pipe takes of the request."""
        try:
            self.unsent = self.unsent[os.write(self.input, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # its output ends too, which is news
            self.unsent = b''

    def has_overrun(self) -> bool:
        return _cpu_seconds(self._process.pid) >= self._cpu_until

    def is_late(self) -> bool:
        return time.monotonic() >= self._until

    def look_later(self) -> None:
        """When the processor time left could be used up at the earliest, or the wall clock's is."""
        left = self._cpu_until - _cpu_seconds(self._process.pid)
        self.look_at = min(self._until, time.monotonic() + max(left, _LOOK_S))

    def listen(self) -> None:
        """Reads the available output; call it when there is some."""
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
            if line in (_READY, _READY_IN_NETWORK):  # not what a module writes while it is imported
                self.ready, self.in_network, self.look_at = True, line == _READY_IN_NETWORK, math.inf
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
        if self.fault == 'ended':  # its output, a moment before the process
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
        with contextlib.suppress(ProcessLookupError):  # nothing is left of it
            os.killpg(self._process.pid, signal.SIGKILL)  # the processes that its function started, too, which may outlive it
        self._process.wait(timeout=10)
        self._process.stdin.close()
        self._process.stdout.close()


def _cpu_seconds(pid: int) -> float:
    """The processor time that a process has used, all its threads together. C code that holds the interpreter counts as well."""
    after_name = Path(f'/proc/{pid}/stat').read_text('utf-8', 'replace').rpartition(')')[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS  # utime and stime


def _with_news(workers: Sequence[_Worker], until: float) -> list[_Worker]:
    """Waits until a worker writes, ends or is to be looked at, or the time is over. Returns those that wrote or ended."""
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


def serve(function: Callable[[Any], Any], *, quiet: bool = True) -> None:
    """Runs a worker: answers each line from stdin, a number and a request in JSON, with the number and `function`'s result in JSON.

    The command line gives a request's seconds of wall clock and the address space in bytes. An exception in `function` ends the
    worker. stdout carries the answers alone: prints are lost, or go to standard error where the worker is not `quiet`. A process
    that `function` forks neither hears requests nor answers them.
    """
    wall_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    requests, answers = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb')
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing if quiet else 2, 1)
    if not quiet:
        output.guard('stdout')
        terminal.guard()
    pipes = requests.fileno(), answers.fileno()
    os.register_at_fork(after_in_child=lambda: [os.dup2(nothing, pipe, inheritable=False) for pipe in pipes])
    if memory_bytes != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    sys.setrecursionlimit(10_000)  # parsers recurse some twenty calls a bracket
    try:
        in_network = len(socket.if_nameindex()) > 1  # every network has a loopback interface
        answers.write((_READY_IN_NETWORK if in_network else _READY) + b'\n')
        answers.flush()
    except BrokenPipeError:  # the pool ended while this worker started
        os._exit(0)
    if quiet:
        os.dup2(nothing, 2)  # parsers print warnings about every odd answer
    for line in requests:
        # the pool kills a late worker; should the pool be gone, the alarm does, since its default is to end the process
        signal.alarm(math.ceil(wall_s) + 5)
        number, _, request = line.partition(b' ')
        outcome = function(json.loads(request))
        signal.alarm(0)
        answers.write(b'%b %b\n' % (number, json.dumps(outcome).encode()))
        answers.flush()
    sys.stdout.flush()
    os._exit(0)  # threads that `function` left would keep the process
