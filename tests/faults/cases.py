"""A sound run, copies of it at any step, and the judgement on a copy that was struck and then continued."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from ml_collections import ConfigDict
from small_run import ROOT, metrics, run, small_config

from bapo_jax.learner.learner import Learner
from bapo_jax.rollout.engine import EVALUATION, FRESH, REEVALUATION
from bapo_jax.rollout.jax_engine import JaxEngine
from bapo_jax.run.checkpoint import Checkpoints, RunState

STEPS = 8
PROGRAM = '''
import sys; sys.path[:0] = [{root!r}, {helpers!r}]
import jax
jax.config.update('jax_compilation_cache_dir', {programs!r})
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
from pathlib import Path
from tests.faults.cases import at, config_of, kill
from small_run import run
with at({moment!r}, kill):
    run(config_of(Path({benchmark!r}), **{changes!r}), Path({workdir!r}))
'''


def config_of(benchmark: Path, **changes: Any) -> ConfigDict:
    """BAPO with all its parts: a sync every 3 steps, hard prompts every 2, an evaluation every 4, a checkpoint a step."""
    parts = {
        'steps': STEPS, 'rollout__sync_every': 3, 'replay__use_x2': True, 'replay__reevaluate_every': 2, 'evaluate__every': 4,
        'rollout__overlap': False, 'checkpoint__every': 1, 'checkpoint__keep': STEPS, 'mesh__data': 1,
    }  # fmt: skip
    return small_config('bapo_tuned', benchmark, **parts | changes)


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

    def go_on(self, **changes: Any) -> RunState:
        """The command that continues; `changes` are of settings that are free to change."""
        return run(config_of(self.sound.benchmark, **changes), self.workdir)

    @contextmanager
    def process(self, moment: str = '', **changes: Any) -> Iterator[subprocess.Popen]:
        """The same in a process of its own, which kills itself at a `moment` of MOMENTS, and is killed in the end."""
        code = PROGRAM.format(
            root=str(ROOT), helpers=str(ROOT / 'tests' / 'helpers'), programs=jax.config.jax_compilation_cache_dir,
            benchmark=str(self.sound.benchmark), changes=changes, workdir=str(self.workdir), moment=moment,
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
        file = self.workdir / 'metrics.jsonl'
        return file.read_bytes().count(b'\n') if file.exists() else 0

    def newest(self) -> Path:
        return self.workdir / 'checkpoints' / str(self.step)


def sound_run(folder: Path, benchmark: Path) -> Sound:
    state = run(config_of(benchmark), folder / 'sound')
    return Sound(folder, benchmark, metrics(folder / 'sound'), state, ledger_of(folder / 'sound'))


def ledger_of(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / 'ledger.jsonl').read_text().splitlines()]


def differing(rows: list[Any], others: list[Any]) -> int:
    """How many rows are not the same, missing ones included."""
    return sum(a != b for a, b in zip(rows, others)) + abs(len(rows) - len(others))


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


# (seed, number) -> what became of the run. Raises where it was not survived.
Injection = Callable[[int, int], Outcome]


def outcome_of(case: Case) -> Outcome:
    """Continues the run and compares it with the sound one."""
    started = time.monotonic()
    state = case.go_on()
    seconds = time.monotonic() - started
    lost = differing(ledger_of(case.workdir), case.sound.ledger)
    others = jax.tree.map(lambda a, b: not np.array_equal(a, b), state.theta.params, case.sound.state.theta.params)
    same_rows = metrics(case.workdir) == case.sound.metrics
    why = '' if same_rows else 'other metrics'
    why += ' other weights' if any(jax.tree.leaves(others)) else ''
    return Outcome(not why and not lost, lost, seconds, why.strip())


def until(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError('the moment to strike did not come')
        time.sleep(0.01)


# ---- moments


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def struck(owner: Any, name: str, strike: Callable[[], None], call: int = 1) -> AbstractContextManager:
    """A patch: before the `call`th call of owner.name, `strike` happens."""
    original, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            strike()
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, wrapped)


def asked(purpose: int, strike: Callable[[], None], call: int = 1) -> AbstractContextManager:
    """A patch: before the in-process engine is asked for the `call`th time for that purpose, `strike` happens."""
    ask, calls = JaxEngine.ask, []

    def wrapped(self, prompts, group_size, sampling, draws):
        if draws[-1].purpose == purpose:
            calls.append(1)
            if len(calls) == call:
                strike()
        return ask(self, prompts, group_size, sampling, draws)

    return mock.patch.object(JaxEngine, 'ask', wrapped)


# Where in a step: a function of what happens there, and of which time it does.
MOMENTS: dict[str, Callable[..., AbstractContextManager]] = {
    'generation': functools.partial(asked, FRESH),
    'a re-evaluation': functools.partial(asked, REEVALUATION),
    'an evaluation': functools.partial(asked, EVALUATION),
    'an update': functools.partial(struck, Learner, 'update'),
    'a save': functools.partial(struck, Checkpoints, 'save'),
}


def at(moment: str, strike: Callable[[], None], call: int = 1) -> AbstractContextManager:
    return MOMENTS[moment](strike, call) if moment else nullcontext()
