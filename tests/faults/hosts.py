"""Two trainer hosts. If one is lost at a random step, the other ends by itself, and both started again end as the sound pair did.

If an evaluation takes forty times as long as the hosts' deadline, both go on and end so, too.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from recorded_server import RecordedServer
from small_run import metrics
from two_hosts import arguments, finish, start_two

from bapo_jax.run.log.metrics import read_metrics
from tests.faults.cases import Injection, Outcome, differing, ledger_of, until

STEPS = 4
ENDS_S = 240.0  # most seconds until the host that is left has ended: JAX calls a host lost after a hundred
OUTLASTS_S, DEADLINE_S = 120.0, 3.0  # how long the evaluation before the first step takes, and mesh.deadline_s
KINDS = {
    'host 0 of 2 killed': (0, signal.SIGKILL),
    'host 1 of 2 killed': (1, signal.SIGKILL),
    'host 1 of 2 frozen': (1, signal.SIGSTOP),
}


class SoundPair(NamedTuple):
    """The run of two hosts that nothing happens to, and who answers it."""

    server: RecordedServer
    benchmark: Path
    metrics: list[dict[str, Any]]
    ledger: list[dict[str, Any]]
    policy: dict[str, np.ndarray]  # the last one that was shipped

    def command(self, workdir: Path) -> list[str]:
        return arguments(workdir, self.server, self.benchmark, '--config.checkpoint.every=1', '--config.log.ledger=True')


def ended(pair: list[subprocess.Popen]) -> None:
    for status, output in finish(*pair):
        if status:
            raise RuntimeError(f'status {status}: {output[-300:]}')


def injections(folder: Path, benchmark: Path) -> dict[str, Injection]:
    blank = SoundPair(RecordedServer(), benchmark, [], [], {})
    ended(start_two(blank.command(folder / 'sound')))
    shipped = blank.server.loaded[STEPS]
    sound = blank._replace(metrics=metrics(folder / 'sound'), ledger=ledger_of(folder / 'sound'), policy=shipped)
    kinds = {name: partial(inject, sound, folder, *of) for name, of in KINDS.items()}
    return kinds | {f'an evaluation of {OUTLASTS_S:g} s, a deadline of {DEADLINE_S:g} s': partial(outlast, sound, folder)}


def inject(sound: SoundPair, folder: Path, lost: int, number: signal.Signals, seed: int, case: int) -> Outcome:
    rng, workdir = np.random.default_rng([seed, case]), folder / f'case{case}'
    command, rows = sound.command(workdir), int(rng.integers(2, STEPS))
    pair = start_two(command)
    try:
        until(lambda: len(read_metrics(workdir)) >= rows, seconds=240)
        time.sleep(float(rng.uniform(0, 2)))
        pair[lost].send_signal(number)
        output, _ = pair[1 - lost].communicate(timeout=ENDS_S)
    finally:
        for process in pair:
            process.kill()
    if not pair[1 - lost].returncode:
        raise RuntimeError(f'the host that was left ended with status 0: {output[-300:]}')
    started = time.monotonic()
    sound.server.loaded.clear()
    ended(start_two(command))
    seconds = time.monotonic() - started
    return judged(sound, workdir, seconds)


def outlast(sound: SoundPair, folder: Path, seed: int, case: int) -> Outcome:
    """Nothing is random here. The first replies, to the probe and to the evaluation, come once the time is over."""
    workdir, answer, asked = folder / f'case{case}', sound.server._answer, []

    def slow_at_first(path: str, body: dict[str, Any]) -> Any:
        if path == '/inference/v1/generate':
            asked.append(time.monotonic())
            time.sleep(max(0.0, asked[0] + OUTLASTS_S - asked[-1]))
        return answer(path, body)

    sound.server._answer, started = slow_at_first, time.monotonic()
    sound.server.loaded.clear()
    try:
        ended(start_two([*sound.command(workdir), f'--config.mesh.deadline_s={DEADLINE_S}']))
    finally:
        sound.server._answer = answer
    return judged(sound, workdir, time.monotonic() - started)


def judged(sound: SoundPair, workdir: Path, seconds: float) -> Outcome:
    """Whether the pair of `workdir` ended as the sound one did."""
    lost_rows, shipped = differing(ledger_of(workdir), sound.ledger), sound.server.loaded[STEPS]
    why = '' if metrics(workdir) == sound.metrics else 'other metrics'
    why += '' if all(np.array_equal(shipped[name], tensor) for name, tensor in sound.policy.items()) else ' other weights'
    shutil.rmtree(workdir)
    return Outcome(not why and not lost_rows, lost_rows, seconds, why.strip())
