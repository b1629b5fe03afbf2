"""Coordinates hosts, one process each: host 0 runs the loop of train.py, the others follow it (follow.py).

Host 0 owns prompts, verification, the buffer and the rollout servers. Before work that all devices share, it
announces a small plan through JAX's coordination service. All hosts then meet at a barrier of that service,
which has a deadline. So no host waits in a collective for a host that does not arrive.

Between two announcements host 0 may work for hours, for example in an evaluation. So a thread beside the loop
sends heartbeats: that host 0 is alive, what it is doing, and how long the loop has stood still. The others
wait as long as heartbeats arrive and show progress.

A run with one process announces nothing and waits for no host.
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
from typing import Any

import jax
from jax._src import distributed  # the only access to JAX's coordination service; Orbax uses it too

from bapo_jax.cluster.devices import present
from bapo_jax.machine.ending import CONTINUES, Ending, leave

_STOP_S = 30  # timeout in seconds for the others to hear that host 0 ends
_SHUTDOWN_S = 60  # timeout in seconds for each host to wait for the others to end
_WORK_S = 3600.0  # timeout in seconds of one piece of work on the devices, a model load or a checkpoint
_BEATS = 20  # heartbeats per deadline
_ALIVE = 'bapo/alive'  # key of the latest heartbeat
_BROKEN_OFF = ('Gloo', 'NCCL', 'UNAVAILABLE', 'ABORTED')  # in JAX's messages if another host breaks off


class HostError(Ending, RuntimeError):
    """The hosts cannot work together: one has different settings, or is lost."""

    remedy = CONTINUES
    of_all_hosts = True


class HostLost(HostError):
    """A host missed the deadline of a barrier, or broke off during shared work."""

    remedy = '\nStart all hosts again: the same command continues from the last checkpoint.'
    at_once = True  # JAX's own shutdown would wait a minute for that host, then abort with a stack trace


@contextlib.contextmanager
def naming_losses() -> Iterator[None]:
    """Raises HostLost in place of the JAX error if another host breaks off."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if _hosts() == 1 or not any(word in str(e) for word in _BROKEN_OFF):
            raise
        raise HostLost(
            f'host {_host()} lost another host during shared work; the output of that host may say why: '
            f'{str(e).splitlines()[0]}'
        ) from e


def _hosts() -> int:
    """Returns the number of hosts that have joined.

    JAX's own count would start its devices, which may be what has failed.
    """
    return distributed.global_state.num_processes


def _host() -> int:
    """Returns the number of this host."""
    return distributed.global_state.process_id


def join(coordinator: str, hosts: int, host: int, timeout_s: int) -> None:
    """Makes this process host number `host` of `hosts`. Call it before any device is used.

    `coordinator` is host 0's 'address:port'. If a host is missing after `timeout_s` seconds, the process
    exits with status 1 and a message. JAX itself would abort with a stack trace.
    """
    if not 0 <= host < hosts:
        sys.exit(f'error: --host={host}: give a number from 0 to {hosts - 1}, as --hosts={hosts}')
    if ':' not in coordinator:
        sys.exit(f'error: --coordinator={coordinator!r}: give the ADDRESS:PORT of host 0')

    def give_up() -> None:
        leave(
            f'error: host {host} waited {timeout_s} s at {coordinator}, but not all {hosts} hosts joined. '
            f'Start each with --hosts={hosts}, its own --host from 0 to {hosts - 1} and the same '
            '--coordinator, an address of host 0 that the others can reach. If hosts start slowly, raise '
            '--join_timeout'
        )

    # JAX's coordination service would otherwise go through http_proxy or https_proxy, even to loopback.
    os.environ['grpc_proxy'] = ''
    # The preemption service would swallow SIGTERM, which command.py handles.
    jax.config.update('jax_enable_preemption_service', False)
    watchdog = threading.Timer(timeout_s, give_up)
    watchdog.daemon = True
    watchdog.start()
    jax.distributed.initialize(
        coordinator, hosts, host, cluster_detection_method='deactivate',
        initialization_timeout=timeout_s + 60, shutdown_timeout_seconds=_SHUTDOWN_S,
    )  # fmt: skip
    watchdog.cancel()
    try:
        devices = present()
    except ValueError as e:
        leave(f'error: {e}')
    print(f'host {host} of {hosts}: {jax.local_device_count()} of {len(devices)} devices', flush=True)


def part() -> None:
    """Waits up to _SHUTDOWN_S for the other hosts to end; a host that exits earlier would count as lost."""
    if _hosts() > 1:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.distributed.shutdown()


class Hosts:
    """Gathers all hosts when host 0 has work for their devices. With one host it does nothing."""

    def __init__(self, deadline_s: float = 0.0, waits_s: float = 0.0):
        """Sets the deadlines in seconds.

        `deadline_s` is the longest wait for a heartbeat of host 0; `waits_s` bounds host 0's waits for
        anything other than hosts.
        """
        self._deadline_s, self._patience_s, self._meetings = deadline_s, waits_s + _WORK_S, 0
        self._progress = time.monotonic(), 'starting'
        self.run_finished = False  # host 0 sets it, and tells it to the others at the end
        self._heart, self._ended = (
            threading.Thread(target=self._beat, name='alive', daemon=True),
            threading.Event(),
        )

    def __enter__(self) -> Hosts:
        """Starts host 0's heartbeats; only host 0 enters."""
        if _hosts() > 1:
            self._heart.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Tells the other hosts to stop, unless a HostError ended host 0: in that case they are lost."""
        self._ended.set()
        if kind is None or not issubclass(kind, HostError):
            self._patience_s = min(self._patience_s, _STOP_S)
            with contextlib.suppress(HostError):  # the same error may have ended another host
                self.tell('stop', finished=self.run_finished)
        if self._heart.is_alive():
            self._heart.join(_STOP_S)  # before the JAX client that it uses is gone

    def progress(self, doing: str) -> None:
        """Records that host 0 makes progress, and with what.

        Any of its threads may call this, since their work has deadlines of its own.
        """
        self._progress = time.monotonic(), doing

    def tell(self, do: str, **what: Any) -> None:
        """Announces work to the other hosts; returns when all are ready. Raises HostLost if one is lost."""
        if _hosts() == 1:
            return
        client = distributed.global_state.client
        client.key_value_set(self._name(), json.dumps({'do': do, **what}))
        self._meet(f'to {do}')
        self.progress(f'starting to {do}')
        client.key_value_delete(self._name())
        self._meetings += 1

    def hear(self) -> dict[str, Any]:
        """Returns host 0's next announcement when all hosts are ready for it.

        Raises HostLost if host 0 is silent or makes no progress, or another host is lost.
        """
        last, heard = None, time.monotonic()
        while (said := self._get(self._name())) is None:
            if (beat := self._get(_ALIVE)) not in (None, last):
                last, heard = beat, time.monotonic()
                doing, still_s = json.loads(beat)[1:]
                if still_s > self._patience_s:
                    raise HostLost(
                        f'host 0 is alive, but has made no progress for {still_s:.0f} s; its last activity: '
                        f'{doing}'
                    )
            if time.monotonic() - heard > self._deadline_s:
                raise HostLost(
                    f'host {_host()} got no heartbeat from host 0 for {self._deadline_s:g} s '
                    '(mesh.deadline_s): its process hangs or has ended, or its machine cannot be reached'
                )
        plan = json.loads(said)
        self._meet(f'to {plan["do"]}')
        self._meetings += 1
        return plan

    def agree(self, problem: str) -> None:
        """Exchanges the hosts' problems, '' for no problem. Raises HostError on all hosts if any has one."""
        if _hosts() == 1:
            return
        client = distributed.global_state.client
        client.key_value_set(f'{self._name()}/{_host()}', problem)
        self._meet('to begin')
        said = [
            client.blocking_key_value_get(f'{self._name()}/{i}', int(1000 * self._patience_s))
            for i in range(_hosts())
        ]
        self._meetings += 1
        if any(said):
            raise HostError('\n'.join(f'host {i}: {text}' for i, text in enumerate(said) if text))

    def collect(self, text: str) -> list[str]:
        """Returns all hosts' texts, in host order, on host 0, and [] on the others.

        Waits until every host has given its text. Raises HostLost if a host is lost.
        """
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
        """Sends heartbeats until the end, each overwriting the one before.

        A heartbeat is its number, what the loop is doing, and the seconds since its last progress.
        """
        for number in itertools.count():
            since, doing = self._progress
            beat = json.dumps([number, doing, time.monotonic() - since])
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                distributed.global_state.client.key_value_set(_ALIVE, beat, allow_overwrite=True)
            if self._ended.wait(self._deadline_s / _BEATS):
                return

    def _get(self, key: str) -> str | None:
        """Returns host 0's value of `key`, or None after a timeout. Raises HostLost if host 0 is lost."""
        try:
            return distributed.global_state.client.blocking_key_value_get(
                key, int(1000 * self._deadline_s / _BEATS)
            )
        except jax.errors.JaxRuntimeError as e:
            if 'DEADLINE_EXCEEDED' in str(e):
                return None
            raise HostLost(f'host {_host()} lost its connection to host 0: {str(e).splitlines()[0]}') from e

    def _meet(self, purpose: str) -> None:
        """Waits at a barrier for as long as one host may lag behind another, which is one piece of work.

        JAX itself detects a host whose process or machine is gone. Raises HostLost if a host is lost.
        """
        try:
            distributed.global_state.client.wait_at_barrier(self._name(), int(1000 * self._patience_s))
        except jax.errors.JaxRuntimeError as e:
            raise HostLost(
                f'host {_host()} waited up to {self._patience_s:.0f} s for the other hosts {purpose}: '
                f'{str(e).splitlines()[0]}'
            ) from e
