"""How hosts, one process each, work together. Host 0 runs the loop of train.py; the others follow its announcements (follow.py).

Host 0 owns prompts, verification, the buffer and the rollout servers. Before work that all devices share, it announces a small plan
through JAX's coordination service. All hosts then meet at a barrier of that service, which has a deadline. So no host waits in a
collective for a host that does not come.

Between two announcements host 0 may work for hours, in an evaluation for one. So it says from time to time, from a thread beside the
loop, that it is alive, what it does, and since when the loop stands still. The others wait while it says so and goes on.

A run of one process announces nothing and waits for no host.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
from jax._src import distributed  # the only access to JAX's coordination service; Orbax uses it too

from bapo_jax.parallel import present

_STOP_S = 30  # most seconds that host 0 waits for the others to hear of its end
_SHUTDOWN_S = 60  # most seconds that each host waits for the others to end
_WORK_S = 3600.0  # most seconds of one piece of work on the devices, of reading a model, or of a checkpoint
_BEATS = 20  # signs of life in the time in which one is expected
_ALIVE = 'bapo/alive'  # the key of the newest one
_BROKEN_OFF = ('Gloo', 'NCCL', 'UNAVAILABLE', 'ABORTED')  # in messages of JAX


class HostError(RuntimeError):
    """The hosts cannot work together: one has other settings, or is lost."""


class HostLost(HostError):
    """A host missed the deadline of a meeting, or broke off in work that all share."""


@contextlib.contextmanager
def naming_losses() -> Iterator[None]:
    """Inside, what JAX says where another host breaks off is HostLost."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if _hosts() == 1 or not any(word in str(e) for word in _BROKEN_OFF):
            raise
        raise HostLost(
            f'host {_host()} lost another host in the middle of their work; its output may say why: '
            f'{str(e).splitlines()[0]}'
        ) from e


def _hosts() -> int:
    """How many hosts have joined. JAX's own count starts its devices, which may be what has failed."""
    return distributed.global_state.num_processes


def _host() -> int:
    """Which of them this is."""
    return distributed.global_state.process_id


def leave(message: str) -> NoReturn:
    """Ends the process with status 1. After a loss JAX's own end would wait a minute for that host, then abort with a trace."""
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def join(coordinator: str, hosts: int, host: int, timeout_s: int) -> None:
    """Makes this process host number `host` of `hosts`. Call it before any device is used.

    `coordinator` is host 0's 'address:port'. Where a host is missing after `timeout_s` seconds, the process ends with status 1 and
    a message. JAX alone would abort with a stack trace.
    """
    if not 0 <= host < hosts:
        sys.exit(f'error: --host={host} must be from 0 to --hosts={hosts} minus 1')
    if ':' not in coordinator:
        sys.exit(f'error: --coordinator={coordinator!r} must be ADDRESS:PORT of host 0')

    def give_up() -> None:
        leave(
            f'error: host {host} waited {timeout_s} s at {coordinator}, and not all {hosts} hosts came. Start each with '
            f'--hosts={hosts}, a --host of its own from 0 to {hosts - 1} and the same --coordinator, an address of host 0 that the '
            'others reach. A longer --join_timeout waits for slow hosts'
        )

    os.environ['grpc_proxy'] = ''  # JAX's coordination service would go through http_proxy or https_proxy, also to loopback
    jax.config.update('jax_enable_preemption_service', False)  # it would swallow SIGTERM, which follow.py and train.py handle
    watchdog = threading.Timer(timeout_s, give_up)
    watchdog.daemon = True
    watchdog.start()
    jax.distributed.initialize(
        coordinator, hosts, host, cluster_detection_method='deactivate', initialization_timeout=timeout_s + 60,
        shutdown_timeout_seconds=_SHUTDOWN_S,
    )  # fmt: skip
    watchdog.cancel()
    try:
        devices = present()
    except ValueError as e:
        leave(f'error: {e}')
    print(f'host {host} of {hosts}: {jax.local_device_count()} of {len(devices)} devices', flush=True)


def part() -> None:
    """Waits for the other hosts to end too, _SHUTDOWN_S at most: one that is gone before them would count as lost."""
    if _hosts() > 1:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.distributed.shutdown()


class Hosts:
    """Gathers all hosts whenever host 0 has work for their devices. With one host it does nothing."""

    def __init__(self, deadline_s: float = 0.0, waits_s: float = 0.0):
        """`deadline_s` is the longest wait for a sign of life of host 0; `waits_s` bounds its waits for what is no host, in seconds."""
        self._deadline_s, self._patience_s, self._meetings = deadline_s, waits_s + _WORK_S, 0
        self._progress = time.monotonic(), 'begins'
        self._heart, self._ended = threading.Thread(target=self._beat, name='alive', daemon=True), threading.Event()

    def __enter__(self) -> Hosts:
        """On host 0: from now on it gives signs of life."""
        if _hosts() > 1:
            self._heart.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Tells the other hosts to stop, unless a HostError ended host 0: then they are lost."""
        self._ended.set()
        if kind is None or not issubclass(kind, HostError):
            self._patience_s = min(self._patience_s, _STOP_S)
            with contextlib.suppress(HostError):  # the same error may have ended another host
                self.tell('stop')
        if self._heart.is_alive():
            self._heart.join(_STOP_S)  # before JAX's client is taken away from it

    def progress(self, doing: str) -> None:
        """Notes that host 0 goes on, and with what. Any thread of it may: its work is bounded by deadlines of its own."""
        self._progress = time.monotonic(), doing

    def tell(self, do: str, **what: Any) -> None:
        """Announces work to the other hosts, and returns when all are ready for it. Raises HostLost."""
        if _hosts() == 1:
            return
        client = distributed.global_state.client
        client.key_value_set(self._name(), json.dumps({'do': do, **what}))
        self._meet(f'to {do}')
        self.progress(f'begins to {do}')
        client.key_value_delete(self._name())
        self._meetings += 1

    def hear(self) -> dict[str, Any]:
        """Returns host 0's next announcement when all hosts are ready for it. Raises HostLost."""
        last, heard = None, time.monotonic()
        while (said := self._get(self._name())) is None:
            if (beat := self._get(_ALIVE)) not in (None, last):
                last, heard = beat, time.monotonic()
                doing, still_s = json.loads(beat)[1:]
                if still_s > self._patience_s:
                    raise HostLost(f'host 0 is alive, and its loop has stood still for {still_s:.0f} s. The last it said: {doing}')
            if time.monotonic() - heard > self._deadline_s:
                raise HostLost(
                    f'host {_host()} heard nothing from host 0 for {self._deadline_s:g} s (mesh.deadline_s): its process hangs or '
                    'is gone, or its machine cannot be reached'
                )
        plan = json.loads(said)
        self._meet(f'to {plan["do"]}')
        self._meetings += 1
        return plan

    def agree(self, problem: str) -> None:
        """Exchanges the hosts' problems, '' for none. Raises HostError on every host where any host has a problem."""
        if _hosts() == 1:
            return
        client = distributed.global_state.client
        client.key_value_set(f'{self._name()}/{_host()}', problem)
        self._meet('to begin')
        said = [client.blocking_key_value_get(f'{self._name()}/{i}', int(1000 * self._patience_s)) for i in range(_hosts())]
        self._meetings += 1
        if any(said):
            raise HostError('\n'.join(f'host {i}: {text}' for i, text in enumerate(said) if text))

    def collect(self, text: str) -> list[str]:
        """Returns every host's text, by host, on host 0, and nothing on the others; all have given theirs. Raises HostLost."""
        if _hosts() == 1:
            return [text]
        client, said = distributed.global_state.client, []
        client.key_value_set(f'{self._name()}/{_host()}', text)
        self._meet('to collect')
        if _host() == 0:
            keys = [f'{self._name()}/{i}' for i in range(_hosts())]
            said = [client.blocking_key_value_get(key, int(1000 * self._patience_s)) for key in keys]
            for key in keys:
                client.key_value_delete(key)
        self._meetings += 1
        return said

    def _name(self) -> str:
        return f'bapo/{self._meetings}'

    def _beat(self) -> None:
        """Gives signs of life until the end, each in the place of the one before: (its number, what the loop does, since when)."""
        for number in itertools.count():
            since, doing = self._progress
            beat = json.dumps([number, doing, time.monotonic() - since])
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                distributed.global_state.client.key_value_set(_ALIVE, beat, allow_overwrite=True)
            if self._ended.wait(self._deadline_s / _BEATS):
                return

    def _get(self, key: str) -> str | None:
        """What host 0 said, or None where it says nothing for a while. Raises HostLost."""
        try:
            return distributed.global_state.client.blocking_key_value_get(key, int(1000 * self._deadline_s / _BEATS))
        except jax.errors.JaxRuntimeError as e:
            if 'DEADLINE_EXCEEDED' in str(e):
                return None
            raise HostLost(f'host {_host()} has lost host 0: {str(e).splitlines()[0]}') from e

    def _meet(self, purpose: str) -> None:
        """Waits as long as a host may be behind another: by a piece of work. JAX itself finds one whose process or machine is gone."""
        try:
            distributed.global_state.client.wait_at_barrier(self._name(), int(1000 * self._patience_s))
        except jax.errors.JaxRuntimeError as e:
            raise HostLost(
                f'host {_host()} waited {self._patience_s:.0f} s at most for all hosts to meet {purpose}: {str(e).splitlines()[0]}'
            ) from e
