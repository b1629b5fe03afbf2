"""A vLLM server that the trainer starts, restarts when it dies, and stops at the end of the run."""

from __future__ import annotations

import atexit
import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bapo_jax.machine.stopping import Stopped
from bapo_jax.rollout.engine import RolloutError
from bapo_jax.rollout.serve import command, server_environment
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE

LEASH = Path(__file__).with_name('leash.py')


class ServerFailed(RolloutError):
    """The server process ended or was not ready in time. The message shows the end of its log."""


class SupervisedServer:
    """One server process on this machine. Its `url` stays the same after restarts; its output goes to `log`.

    It ends when this process ends, even if that is killed (`rollout/vllm/leash.py`).
    """

    def __init__(
        self, model: str, log: Path, *, dtype: str, max_tokens: int, deadline_s: float, memory: float = 0.0,
        gpus: Sequence[str] = (), token: str = '', python: str = '', extra: Sequence[str] = (),
    ):  # fmt: skip
        """`gpus` are CUDA's names of the GPUs that it sees, all used for one copy of the model.

        `token` defaults to the environment's, or to a new one. Raises ValueError if the model cannot be split
        over these GPUs.
        """
        self.token = token or os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        self._gpus = gpus
        port = free_port()
        self.url = f'http://127.0.0.1:{port}'
        self._command = command(
            model,
            port=port,
            python=python,
            dtype=dtype,
            max_tokens=max_tokens,
            memory=memory,
            gpus=gpus,
            extra=extra,
        )
        self._log, self._deadline_s, self._process, self._leash = log, deadline_s, None, None
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        """The process id of the server's leash, which is also the process group's id."""
        return self._process.pid

    def start(self, given_up: threading.Event | None = None) -> None:
        """Starts the process; returns once it answers. Raises ServerFailed, and Stopped after `given_up`."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._let_go()
        reading, self._leash = os.pipe()
        with self._log.open('ab') as log:
            # In its own process group, the server survives a Ctrl-C during a step, and stop() also ends the
            # engine process.
            process = self._process = subprocess.Popen(
                [sys.executable, '-I', str(LEASH), str(reading), *self._command],
                env=server_environment(self.token, self._gpus), stdout=log, stderr=subprocess.STDOUT,
                pass_fds=[reading], start_new_session=True,
            )  # fmt: skip
        os.close(reading)
        late = time.monotonic() + self._deadline_s
        while not self._answers():
            if process.poll() is not None:
                raise ServerFailed(
                    f'the server ended with status {process.returncode}; the end of '
                    f'{self._log}:\n{self._tail()}'
                )
            if given_up and given_up.is_set():
                self.stop()
                raise Stopped
            if time.monotonic() > late:
                self.stop()
                raise ServerFailed(
                    f'the server was not ready in {self._deadline_s:.0f} s; if it only loads slowly, raise '
                    f'rollout.deadline_s. The end of {self._log}:\n{self._tail()}'
                )
            time.sleep(0.2)

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        """Ends the process group: SIGTERM first, then SIGKILL."""
        if self._process is None:
            return
        for number, wait_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(wait_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._process = None
        self._let_go()

    def _let_go(self) -> None:
        """Closes the pipe that keeps the server alive."""
        if self._leash is not None:
            os.close(self._leash)
            self._leash = None

    def _answers(self) -> bool:
        """Uses http.client, which follows no redirects and uses no proxy: either would receive the token."""
        connection = http.client.HTTPConnection(self.url.removeprefix('http://'), timeout=2.0)
        try:
            connection.request('GET', '/health', headers={'Authorization': f'Bearer {self.token}'})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):  # no answer, or not HTTP
            return False
        finally:
            connection.close()

    def _tail(self) -> str:
        with self._log.open('rb') as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 3000))
            return log.read().decode('utf-8', 'replace')


def free_port() -> int:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]
