"""A sound run, copies of it at any step, and the judgement on a copy that was struck and then continued."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict
from small_run import metrics, small_config

from tests.faults.trainer import Trainer, flags_of

STEPS = 12
AHEAD = 6  # steps that are left where a fault strikes: on a busy machine they pass while a signal is on its way


def config_of(benchmark: Path, **changes: Any) -> ConfigDict:
    """BAPO with all its parts: a sync every 3 steps, hard prompts and those that failed every 2, an evaluation every 4, a checkpoint a step."""
    parts = {
        'steps': STEPS, 'rollout__sync_every': 3, 'replay__use_x2': True, 'replay__reevaluate_every': 2, 'evaluate__every': 4,
        'log__failed_again__prompts': 4, 'log__failed_again__every': 2,
        'rollout__overlap': False, 'checkpoint__every': 1, 'checkpoint__keep': STEPS, 'mesh__data': 1,
    }  # fmt: skip
    return small_config('bapo_tuned', benchmark, **parts | changes)


class Sound(NamedTuple):
    """The run that nothing happens to."""

    folder: Path  # of this run and its copies
    benchmark: Path
    metrics: list[dict[str, Any]]
    sums: dict[str, int]
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

    def flags(self, **changes: Any) -> list[str]:
        """The command that continues; `changes` are of settings that are free to change."""
        return [*flags_of(config_of(self.sound.benchmark, **changes)), f'--workdir={self.workdir}']

    def trainer(self, inside: dict[str, Any] | None = None, streams: dict[str, Any] | None = None, **changes: Any) -> Trainer:
        """That command under way."""
        return Trainer(self.flags(**changes), self.sound.folder, inside, **streams or {})

    def go_on(self, **changes: Any) -> None:
        """That command to its end."""
        with self.trainer(**changes) as trainer:
            trainer.ends(0)

    def rows(self) -> int:
        """Rows of metrics.jsonl up to now."""
        file = self.workdir / 'metrics.jsonl'
        return file.read_bytes().count(b'\n') if file.exists() else 0

    def newest(self) -> Path:
        return self.workdir / 'checkpoints' / str(self.step)

    def saved(self) -> int:
        """The step of the newest checkpoint that is there."""
        return max(int(path.name) for path in (self.workdir / 'checkpoints').iterdir() if path.name.isdigit())


def sound_run(folder: Path, benchmark: Path) -> Sound:
    sound = Sound(folder, benchmark, [], {}, [])
    Case(sound, sound.workdir, 0, np.random.default_rng(0)).go_on()
    return read_sound(folder, benchmark)


def read_sound(folder: Path, benchmark: Path) -> Sound:
    return Sound(folder, benchmark, metrics(folder / 'sound'), sums_of(folder / 'sound'), ledger_of(folder / 'sound'))


def ledger_of(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / 'ledger.jsonl').read_text().splitlines()]


def sums_of(workdir: Path) -> dict[str, int]:
    """The checksum of every array of the last checkpoint: weights, moments, buffer. Equal arrays alone have equal ones."""
    return json.loads((workdir / 'checkpoints' / str(STEPS) / 'host' / 'metadata').read_text())['checksums']


def differing(rows: list[Any], others: list[Any]) -> int:
    """How many rows are not the same, missing ones included."""
    return sum(a != b for a, b in zip(rows, others)) + abs(len(rows) - len(others))


def case_of(sound: Sound, seed: int, number: int) -> Case:
    """The injection `number` of a seed. Its moment is random, and the same for the same numbers."""
    rng = np.random.default_rng([seed, number])
    workdir, step = sound.folder / f'case{number}', int(rng.integers(2, STEPS - AHEAD))
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
    end_s: float | None = None  # from the last word of the trainer that was struck to its end; None where it was killed


# (seed, number) -> what became of the run. Raises where it was not survived.
Injection = Callable[[int, int], Outcome]


def outcome_of(case: Case) -> Outcome:
    """Continues the run and compares it with the sound one."""
    started = time.monotonic()
    case.go_on()
    seconds = time.monotonic() - started
    lost = differing(ledger_of(case.workdir), case.sound.ledger)
    why = '' if metrics(case.workdir) == case.sound.metrics else 'other metrics'
    why += '' if sums_of(case.workdir) == case.sound.sums else ' other weights'
    return Outcome(not why and not lost, lost, seconds, why.strip())


def struck(case: Case, strike: Callable[[Case], float | None]) -> Outcome:
    """What becomes of a case once a kind of kinds.py has struck it."""
    end_s = strike(case)
    return outcome_of(case)._replace(end_s=end_s)


def until(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError('the moment to strike did not come')
        time.sleep(0.01)
