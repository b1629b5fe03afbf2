"""The kinds of faults. Each strikes a case, and raises where the run did not say what it must say."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from unittest import mock

import pytest

from bapo_jax import train as command
from bapo_jax.learner.learner import Learner
from bapo_jax.rollout.engine import EVALUATION, FRESH, REEVALUATION
from bapo_jax.rollout.jax_engine import JaxEngine
from bapo_jax.run import lock, run as run_module
from bapo_jax.run.checkpoint import Checkpoints, NotSaved
from bapo_jax.run.log import MetricsLog
from tests.faults.cases import STEPS, Case, struck, until


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# ---- processes


def killed(case: Case, overlap: bool = False) -> None:
    """kill -9 at a random moment of a random step."""
    with case.process(overlap) as process:
        wanted = case.step + 1 + int(case.rng.integers(0, STEPS - case.step - 1))
        until(lambda: case.rows() > wanted or process.poll() is not None)
        time.sleep(float(case.rng.uniform(0, 0.5)))
        process.kill()


def killed_with_overlap(case: Case) -> None:
    killed(case, overlap=True)


def killed_in_a_save(case: Case) -> None:
    with case.process() as process:
        until(lambda: any((case.workdir / 'checkpoints').glob('*tmp*')) or process.poll() is not None)
        time.sleep(float(case.rng.uniform(0, 0.05)))
        process.kill()


def killed_at_its_start(case: Case) -> None:
    with case.process() as process:
        until(lambda: (case.workdir / 'lock').exists())
        time.sleep(float(case.rng.uniform(0, 3)))
        process.kill()


def frozen(case: Case) -> None:
    """SIGSTOP for two seconds, then SIGCONT, then kill -9."""
    with case.process() as process:
        until(lambda: case.rows() > case.step + 1 or process.poll() is not None)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        process.send_signal(signal.SIGCONT)
        time.sleep(float(case.rng.uniform(0, 1)))
        process.kill()


def second_trainer(case: Case) -> None:
    with case.process() as process:
        until(lambda: (case.workdir / 'lock').exists() or process.poll() is not None)
        until(lambda: (case.workdir / 'lock').read_bytes())
        with pytest.raises(lock.DirectoryInUse, match=f'in use by process {process.pid}'):
            case.go_on()
        process.kill()


# ---- signals


def stopped(purpose: int, overlap: bool = False) -> Callable[[Case], None]:
    """SIGTERM while the engine answers prompts of that purpose."""

    def strike(case: Case) -> None:
        ask, calls, wanted = JaxEngine.ask, [], int(case.rng.integers(1, 3 if purpose == FRESH else 2))

        def asked(self, prompts, group_size, sampling, draws):
            calls.extend([1] * (draws[-1].purpose == purpose))
            if len(calls) == wanted:
                calls.append(1)
                terminate()
            return ask(self, prompts, group_size, sampling, draws)

        with mock.patch.object(JaxEngine, 'ask', asked):
            assert case.go_on(overlap).step <= STEPS

    return strike


def stopped_in_an_update(case: Case) -> None:
    with struck(Learner, 'update', terminate):
        assert case.go_on().step == case.step + 1


def stopped_in_a_save(case: Case) -> None:
    with struck(Checkpoints, 'save', terminate):
        assert case.go_on().step < STEPS


# ---- disks


def disk(number: int, owner, name: str, calls: int = 2) -> Callable[[Case], None]:
    """The disk takes no more at one of the first calls of owner.name, which writes."""

    def strike(case: Case) -> None:
        def full() -> None:
            raise OSError(number, os.strerror(number), str(case.workdir))

        with struck(owner, name, full, int(case.rng.integers(1, calls + 1))), pytest.raises(OSError, match=os.strerror(number)):
            case.go_on()

    return strike


def full_in_a_checkpoint(case: Case) -> None:
    """Orbax says ValueError."""

    def full(*_, **__):
        raise ValueError('RESOURCE_EXHAUSTED: No space left on device')

    init = Checkpoints.__init__

    def begun(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._manager.save = full

    with mock.patch.object(Checkpoints, '__init__', begun), pytest.raises(NotSaved, match='No space left'):
        case.go_on()


# ---- files


@contextmanager
def said(case: Case, event: str):
    """The run goes on, and events.jsonl has the event."""
    yield
    assert case.step > 0
    file = case.workdir / 'events.jsonl'
    with mock.patch.object(run_module.Run, 'steps_left', lambda self: iter(())):  # it only opens the run
        case.go_on()
    assert event in [json.loads(line)['event'] for line in file.read_text().splitlines()]


def flipped(part: str) -> Callable[[Case], None]:
    """One bit of the newest checkpoint, in a file of that part's arrays."""

    def strike(case: Case) -> None:
        files = [f for f in (case.newest() / part).rglob('*') if f.is_file() and f.stat().st_size > 100 and f.parent.name == 'd']
        files = files or [f for f in (case.newest() / part).rglob('*') if f.is_file() and b'selector' in f.read_bytes()]
        file = max(files, key=lambda f: f.stat().st_size)
        data = bytearray(file.read_bytes())
        data[case.rng.integers(len(data))] ^= 1 << case.rng.integers(8)
        file.write_bytes(data)

    return strike


def file_of_a_checkpoint(change: Callable) -> Callable[[Case], None]:
    def strike(case: Case) -> None:
        files = sorted(f for f in (case.newest() / 'policy' / 'ocdbt.process_0' / 'd').iterdir())
        with said(case, 'checkpoint damaged'):
            change(max(files, key=lambda f: f.stat().st_size))

    return strike


def half_a_row(case: Case) -> None:
    with (case.workdir / 'metrics.jsonl').open('a') as f:
        f.write('{"step": 99, "x": 0.')


def refused_then_restored(name: str, change: Callable, message: str) -> Callable[[Case], None]:
    """A file is spoilt: the run says so and writes nothing. Then it is put back."""

    def strike(case: Case) -> None:
        file = case.workdir / name
        before = file.read_bytes()
        change(file)
        with pytest.raises(ValueError, match=message):
            case.go_on()
        file.write_bytes(before)

    return strike


def cut(file) -> None:
    os.truncate(file, file.stat().st_size // 2)


def spoilt(file) -> None:
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(''.join(['{"step": \n', *lines[1:]]))


def left_lock(case: Case) -> None:
    """Of another machine, whose trainer is gone."""
    said_by = {'token': 'x', 'pid': 1, 'machine': 'gone', 'host': 'gone', 'renewed': 3}
    (case.workdir / 'lock').write_bytes(json.dumps(said_by).encode().ljust(512))
    with mock.patch.object(lock, 'WATCH_S', 0.3), mock.patch.object(run_module.Run, 'steps_left', lambda self: iter(())):
        case.go_on()


def clock_jumps(case: Case) -> None:
    """A day back in the middle of the run."""
    now, calls = time.time, []

    def jumping() -> float:
        calls.append(1)
        return now() - 86_400 * (len(calls) > 20)

    with mock.patch.object(time, 'time', jumping):
        case.go_on()


KINDS: dict[str, Callable[[Case], None]] = {
    'killed (kill -9) at any moment': killed,
    'killed, generation overlapping': killed_with_overlap,
    'killed in a save': killed_in_a_save,
    'killed at its start': killed_at_its_start,
    'frozen for two seconds, then killed': frozen,
    'a second trainer': second_trainer,
    'SIGTERM in generation': stopped(FRESH),
    'SIGTERM in overlapping generation': stopped(FRESH, overlap=True),
    'SIGTERM in a re-evaluation': stopped(REEVALUATION),
    'SIGTERM in an evaluation': stopped(EVALUATION),
    'SIGTERM in an update': stopped_in_an_update,
    'SIGTERM in a save': stopped_in_a_save,
    'disk full at a row of metrics': disk(errno.ENOSPC, MetricsLog, 'write'),
    'disk full at an evaluation': disk(errno.ENOSPC, command, 'write_text', calls=1),
    'disk full at a file of rollouts': disk(errno.ENOSPC, run_module, 'write_rollouts'),
    'disk read-only at a row of metrics': disk(errno.EROFS, MetricsLog, 'write'),
    'disk full in a checkpoint': full_in_a_checkpoint,
    'a bit flipped in the policy': flipped('policy'),
    'a bit flipped in the buffer': flipped('replay'),
    'a bit flipped in the host part': flipped('host'),
    'a file of a checkpoint missing': file_of_a_checkpoint(os.unlink),
    'a file of a checkpoint cut': file_of_a_checkpoint(cut),
    'half a row of metrics': half_a_row,
    'a row of metrics damaged': refused_then_restored('metrics.jsonl', spoilt, 'line 1 is damaged'),
    'config.json cut': refused_then_restored('config.json', cut, 'is damaged'),
    'config.json missing': refused_then_restored('config.json', os.unlink, 'checkpoints and no config.json'),
    'a lock left by another machine': left_lock,
    'the clock jumps back a day': clock_jumps,
}
