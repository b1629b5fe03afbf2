"""Worker processes that can be killed: they work on text from outside, which may hang, exhaust memory or crash.

A worker is a fresh interpreter running a module that calls `serve`. The alternatives fail:

    threads                    nothing interrupts the one call that computes a power tower, and math-verify keeps time with signals
    fork                       the trainer holds threads and devices
    multiprocessing's spawn    every worker would import the trainer's main module again
"""

from __future__ import annotations

import collections
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

OVERRAN = 'overran'  # the outcome of a request that exceeded the deadline; a worker may also answer it where memory is short
FAILED = 'failed'  # the outcome of a request during which the worker raised or ended

START_S = 120.0  # how long a worker may take to start: importing sympy on a busy machine
MAX_REQUEST = 65_536  # bytes: the size of a pipe, so that writing to an idle worker never waits

# What Python and its libraries need. The rest of the trainer's environment has secrets, such as the rollout servers' token.
_INHERITED = ('PATH', 'HOME', 'TMPDIR', 'LANG', 'LC_ALL', 'LC_CTYPE', 'LD_LIBRARY_PATH', 'PYTHONHOME', 'PYTHONUTF8', 'VIRTUAL_ENV')

_READY = b'ready\n'
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


class VerifierPool:
    """Up to `workers` processes running `python -m module`, each judging one request at a time for at most `deadline_s` seconds.

    The deadline is wall-clock time. `memory_bytes` bounds the address space of a worker. Workers start with the first requests and
    stay until `close`, or until this process ends, however it ends. Threads may share a pool: they take turns.
    """

    def __init__(self, module: str, *, workers: int, deadline_s: float, memory_bytes: int):
        self.deadline_s = deadline_s
        self._command = [sys.executable, '-m', module, str(deadline_s), str(memory_bytes)]
        self._limit = workers
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()

    def run(self, requests: Sequence[Any]) -> list[Any]:
        """The outcome of each request: the result of the worker's function, by way of JSON; or `OVERRAN`, or `FAILED`.

        A worker that overruns or ends is killed and replaced. Raises RuntimeError where workers do not start, and ValueError on a
        request of more than `MAX_REQUEST` bytes of JSON.
        """
        lines = [json.dumps(request, ensure_ascii=False).encode('utf-8', 'surrogatepass') + b'\n' for request in requests]
        if too_long := [i for i, line in enumerate(lines) if len(line) > MAX_REQUEST]:
            raise ValueError(f'request {too_long[0]} has {len(lines[too_long[0]])} bytes, a worker takes {MAX_REQUEST}')
        with self._lock:
            try:
                return self._run(lines)
            finally:  # a worker that an interruption leaves busy would answer the next run with this run's outcome
                self._drop([w for w in self._workers if w.job is not None])

    def close(self) -> None:
        """Ends the workers; a later `run` starts new ones."""
        with self._lock:
            self._drop(list(self._workers))

    def _run(self, lines: Sequence[bytes]) -> list[Any]:
        outcomes: list[Any] = [FAILED] * len(lines)
        waiting = collections.deque(range(len(lines)))
        self._drop([w for w in self._workers if w.gone()])  # ended while idle
        while waiting or any(w.job is not None for w in self._workers):
            while len(self._workers) < min(self._limit, len(waiting) + sum(w.job is not None for w in self._workers)):
                self._workers.append(_Worker(self._command))
            for worker in self._workers:
                if waiting and worker.ready and worker.job is None:
                    worker.give(waiting.popleft(), lines, self.deadline_s)
            for worker in _with_news(self._workers):
                if worker.ended and not worker.ready:
                    self._drop([worker])
                    raise RuntimeError('a verifier worker ended before it was ready; its messages are on standard error')
                if worker.outcome is not None:
                    job, outcome = worker.take()
                    outcomes[job] = outcome
                elif worker.ended:  # its request keeps FAILED
                    self._drop([worker])
            late = [w for w in self._workers if w.until < time.monotonic()]
            self._drop(late)
            for worker in late:
                if not worker.ready:
                    raise RuntimeError(f'a verifier worker was not ready after {START_S:.0f} s; is the machine overloaded?')
                outcomes[worker.job] = OVERRAN
        return outcomes

    def _drop(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.kill()
            self._workers.remove(worker)


class _Worker:
    """One process: starting, then idle, or busy with request number `job` until the time `until` at the latest."""

    def __init__(self, command: Sequence[str]):
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        path = os.pathsep.join(filter(None, (_PACKAGE_PARENT, os.environ.get('PYTHONPATH'))))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**inherited, 'PYTHONPATH': path},
            start_new_session=True,  # Ctrl-C is the trainer's to handle
        )
        self.output = self._process.stdout.fileno()
        self._read = b''
        self.ready = False
        self.ended = False
        self.job: int | None = None
        self.outcome: Any = None
        self.until = time.monotonic() + START_S

    def gone(self) -> bool:
        return self._process.poll() is not None

    def give(self, job: int, lines: Sequence[bytes], deadline_s: float) -> None:
        self.job = job
        self.until = time.monotonic() + deadline_s
        try:
            os.write(self._process.stdin.fileno(), lines[job])
        except BrokenPipeError:
            self.ended = True

    def listen(self) -> None:
        """Reads the available output; call it when there is some."""
        data = os.read(self.output, MAX_REQUEST)
        self.ended = not data
        self._read += data
        if not self._read.endswith(b'\n'):
            return
        if not self.ready:
            self.ready, self.until = True, float('inf')
        else:
            self.outcome = json.loads(self._read)
        self._read = b''

    def take(self) -> tuple[int, Any]:
        job, outcome = self.job, self.outcome
        self.job, self.outcome, self.until = None, None, float('inf')
        return job, outcome

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)
        self._process.stdin.close()
        self._process.stdout.close()


def _with_news(workers: Sequence[_Worker]) -> list[_Worker]:
    """Waits until a worker writes, ends or is late. Returns those that wrote or ended."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.output, selectors.EVENT_READ, worker)
        wait_s = min(w.until for w in workers) - time.monotonic()
        news = [key.data for key, _ in selector.select(max(wait_s, 0.0))]
    for worker in news:
        worker.listen()
    return news


def serve(function: Callable[[Any], Any]) -> None:
    """Runs a worker: answers each line of JSON from stdin with `function`'s result as a line of JSON.

    The command line gives the deadline in seconds and the address space in bytes. An exception in `function` ends the worker. Its
    prints are lost, since stdout carries the answers alone.
    """
    deadline_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), 'wb')
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    sys.setrecursionlimit(10_000)  # parsers recurse some twenty calls a bracket
    try:
        answers.write(_READY)
        answers.flush()
    except BrokenPipeError:  # the pool ended while this worker started
        os._exit(0)
    os.dup2(1, 2)  # parsers print warnings about every odd answer
    for line in sys.stdin.buffer:
        # the pool kills a late worker; should the pool be gone, the alarm does, since its default is to end the process
        signal.alarm(int(deadline_s) + 5)
        outcome = function(json.loads(line))
        signal.alarm(0)
        answers.write(json.dumps(outcome).encode() + b'\n')
        answers.flush()
