"""The trainer as people start it: a process, in a folder of no meaning, its output through pipes. What it says, and how it ends."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict
from small_run import ROOT

ENDS_S = 10.0  # most seconds between the last word of a trainer and its end (docs/reference/operations.md)
LIMIT_S = 500.0  # most seconds that a trainer may take to come to a moment, or to its last word


def flags_of(config: ConfigDict) -> list[str]:
    """The command line that makes this config of the quickstart's."""
    told = dict(_flat(importlib.import_module('configs.quickstart').get_config('bapo_tuned')))
    return ['--config=quickstart:bapo_tuned', *(f'--config.{k}={v}' for k, v in _flat(config) if told[k] != v)]


def _flat(config: ConfigDict, place: str = '') -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _flat(value, f'{place}{name}.')
        else:
            yield f'{place}{name}', value


class Trainer:
    """A process under way. `with` ends it, whatever comes."""

    def __init__(self, flags: list[str], folder: Path, inside: dict[str, Any] | None = None, **streams: Any):
        """`inside` is a fault that strikes in the process (inside.py). `streams` are other arguments of Popen."""
        module = ['tests.faults.inside', json.dumps(inside)] if inside else ['bapo_jax.train']
        environment = {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
        if programs := jax.config.jax_compilation_cache_dir:
            environment['JAX_COMPILATION_CACHE_DIR'] = programs
        (folder / 'a strange folder, ü').mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, '-m', *module, *flags], cwd=folder / 'a strange folder, ü', env=os.environ | environment,
            **{'stdin': subprocess.DEVNULL, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE} | streams,
        )  # fmt: skip
        self.pid, self.send, self.kill, self.poll = (getattr(self.process, n) for n in ('pid', 'send_signal', 'kill', 'poll'))
        self.said, self._last, self._readers = {'stdout': '', 'stderr': ''}, time.monotonic(), {}
        for name in self.said:
            if getattr(self.process, name):
                left = threading.Event()
                self._readers[name] = threading.Thread(target=self._read, args=(name, left), daemon=True), left
                self._readers[name][0].start()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()
        for name in self.said:
            self.leave(name)

    def _read(self, name: str, left: threading.Event) -> None:
        stream = getattr(self.process, name).fileno()
        while not left.is_set():
            if select.select([stream], [], [], 0.05)[0]:
                data = os.read(stream, 65_536)
                if not data:
                    return
                self.said[name] += data.decode('utf-8', 'replace')
                self._last = time.monotonic()

    def leave(self, name: str) -> None:
        """That stream's reader ends."""
        self._stop_reading(name)
        if stream := getattr(self.process, name):
            stream.close()

    def fill(self, name: str) -> None:
        """That stream's reader reads no more, and the pipe is full."""
        self._stop_reading(name)
        stream = os.open(f'/proc/{self.pid}/fd/{("stdout", "stderr").index(name) + 1}', os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while os.write(stream, bytes(4096)):
                pass
        os.close(stream)

    def _stop_reading(self, name: str) -> None:
        if name in self._readers:
            thread, left = self._readers.pop(name)
            left.set()
            thread.join()

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits until it holds. Raises where the process ends before, with what it said."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if self.poll() is not None:
                raise RuntimeError(f'it ended with status {self.poll()} before it was struck: {self.said["stderr"][-300:]}')
            if time.monotonic() > deadline:
                raise TimeoutError('the moment to strike did not come')
            time.sleep(0.01)

    def ends(self, status: int, said: str = '', heard: bool = True) -> float:
        """The seconds from its last word to its end. Raises where it ends otherwise, late, or without having said that.

        Where its last word was not `heard`, the seconds say nothing.
        """
        try:
            self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f'it hangs: no end after {LIMIT_S:.0f} s') from None
        now = time.monotonic()
        for thread, _ in self._readers.values():
            thread.join(5.0)
        text = ''.join(self.said.values())
        seconds = max(0.0, now - self._last)
        if self.process.returncode != status or said not in text or 'Traceback' in text and status == 75:
            raise RuntimeError(f'status {self.process.returncode}, not {status} and {said!r}: {text[-600:]}')
        if heard and seconds > ENDS_S:
            raise RuntimeError(f'it ended {seconds:.1f} s after its last word')
        return seconds


@contextlib.contextmanager
def behind_tee(flags: list[str], folder: Path) -> Iterator[Trainer]:
    """`train … 2>&1 | tee log`, as a shell starts it: the two are one process group, which Ctrl-C is sent to."""
    with (folder / 'log').open('wb') as log:
        tee = subprocess.Popen(['tee'], stdin=subprocess.PIPE, stdout=log, process_group=0)
    with Trainer(flags, folder, stdout=tee.stdin, stderr=subprocess.STDOUT, process_group=tee.pid) as trainer:
        tee.stdin.close()
        try:
            yield trainer
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tee.pid, signal.SIGKILL)
            tee.wait()
