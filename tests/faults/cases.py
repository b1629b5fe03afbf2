"""A sound run, copies of it at any step, and the judgement on a copy that was struck and then continued."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from ml_collections import ConfigDict
from small_run import ROOT, metrics, run, small_config

from bapo_jax.run.checkpoint import RunState

STEPS = 8
PROGRAM = '''
import sys; sys.path[:0] = [{root!r}, {helpers!r}]
import jax, json
jax.config.update('jax_compilation_cache_dir', {programs!r})
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
from pathlib import Path
from tests.faults.cases import config_of
from small_run import run
run(config_of(Path({benchmark!r}), overlap={overlap!r}), Path({workdir!r}))
'''


def config_of(benchmark: Path, overlap: bool = False) -> ConfigDict:
    """BAPO with all its parts: a sync every 3 steps, hard prompts every 2, an evaluation every 4, a checkpoint a step."""
    return small_config(
        'bapo_tuned', benchmark, steps=STEPS, rollout__sync_every=3, rollout__overlap=overlap, replay__use_x2=True,
        replay__reevaluate_every=2, evaluate__every=4, checkpoint__every=1, checkpoint__keep=STEPS, mesh__data=1,
    )  # fmt: skip


class Sound(NamedTuple):
    """The run that nothing happens to."""

    folder: Path  # of this run and its copies
    benchmark: Path
    metrics: list[dict[str, Any]]
    state: RunState
    ledger: list[dict[str, Any]]

    @property
    def workdir(self) -> Path:
        return self.folder / 'sound'


class Case(NamedTuple):
    """One injection: a copy of the sound run at a random step."""

    sound: Sound
    workdir: Path
    step: int  # its newest checkpoint; there is one before it
    rng: np.random.Generator

    def config(self, overlap: bool = False) -> ConfigDict:
        return config_of(self.sound.benchmark, overlap)

    def go_on(self, overlap: bool = False) -> RunState:
        return run(self.config(overlap), self.workdir)

    @contextmanager
    def process(self, overlap: bool = False) -> Iterator[subprocess.Popen]:
        """The same run in a process of its own, which is killed in the end."""
        code = PROGRAM.format(
            root=str(ROOT), helpers=str(ROOT / 'tests' / 'helpers'), programs=str(self.sound.folder / 'programs'),
            benchmark=str(self.sound.benchmark), overlap=overlap, workdir=str(self.workdir),
        )  # fmt: skip
        quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL, 'env': os.environ | {'JAX_PLATFORMS': 'cpu'}}
        with subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, **quiet) as p:
            try:
                yield p
            finally:
                p.kill()
            if p.wait() not in (0, -signal.SIGKILL):  # it was to be struck, not to fail by itself
                raise RuntimeError(f'the process ended with status {p.returncode} before it was struck')

    def rows(self) -> int:
        """Rows of metrics.jsonl up to now."""
        return (self.workdir / 'metrics.jsonl').read_bytes().count(b'\n')

    def newest(self) -> Path:
        return self.workdir / 'checkpoints' / str(self.step)


def sound_run(folder: Path, benchmark: Path) -> Sound:
    state = run(config_of(benchmark), folder / 'sound')
    ledger = [json.loads(line) for line in (folder / 'sound' / 'ledger.jsonl').read_text().splitlines()]
    return Sound(folder, benchmark, metrics(folder / 'sound'), state, ledger)


def case_of(sound: Sound, seed: int, number: int) -> Case:
    """The injection `number` of a seed. Its moment is random, and the same for the same numbers."""
    rng = np.random.default_rng([seed, number])
    workdir, step = sound.folder / f'case{number}', int(rng.integers(2, STEPS - 2))
    shutil.copytree(sound.workdir, workdir)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(workdir / 'checkpoints' / str(later))
    for name in ('metrics.jsonl', 'ledger.jsonl'):
        lines = (workdir / name).read_text().splitlines(keepends=True)
        (workdir / name).write_text(''.join(line for line in lines if json.loads(line)['step'] <= step))
    return Case(sound, workdir, step, rng)


class Outcome(NamedTuple):
    survived: bool
    lost: int  # rows of the ledger that differ: a prompt or an entry of the buffer is lost, doubled, or had another outcome
    recovery_s: float  # from the start of the command that continues to its end
    why: str = ''


def outcome_of(case: Case) -> Outcome:
    """Continues the run and compares it with the sound one."""
    started = time.monotonic()
    state = case.go_on()
    seconds = time.monotonic() - started
    ledger = [json.loads(line) for line in (case.workdir / 'ledger.jsonl').read_text().splitlines()]
    lost = sum(a != b for a, b in zip(ledger, case.sound.ledger)) + abs(len(ledger) - len(case.sound.ledger))
    differing = jax.tree.map(lambda a, b: not np.array_equal(a, b), state.theta.params, case.sound.state.theta.params)
    same_rows = metrics(case.workdir) == case.sound.metrics
    why = '' if same_rows else 'other metrics'
    why += ' other weights' if any(jax.tree.leaves(differing)) else ''
    return Outcome(not why and not lost, lost, seconds, why.strip())


def until(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError('the moment to strike did not come')
        time.sleep(0.01)


def struck(owner: Any, name: str, strike, call: int = 1):
    """A patch: before the `call`th call of owner.name, `strike` happens."""
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            strike()
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, wrapped)
