"""The kinds of faults. Each strikes a case, and raises where the run did not say what it must say."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from bapo_jax import train as command
from bapo_jax.run import lock, run as run_module
from bapo_jax.run.checkpoint import Checkpoints, NotSaved
from bapo_jax.run.log import MetricsLog
from tests.faults.cases import STEPS, Case, at, struck, terminate, until


# ---- processes


def killed(**changes) -> Callable[[Case], None]:
    """kill -9 at a random moment of a random step."""

    def strike(case: Case) -> None:
        with case.process(**changes) as process:
            wanted = case.step + 1 + int(case.rng.integers(0, STEPS - case.step - 1))
            until(lambda: case.rows() > wanted or process.poll() is not None)
            time.sleep(float(case.rng.uniform(0, 0.5)))
            process.kill()

    return strike


def killed_in(moment: str) -> Callable[[Case], None]:
    """kill -9 by itself, at that moment of the first step that has it."""

    def strike(case: Case) -> None:
        with case.process(moment) as process:
            assert process.wait(timeout=240) == -signal.SIGKILL

    return strike


def killed_while_writing(case: Case) -> None:
    """kill -9 while a checkpoint's files are half there."""
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


def chain(**changes) -> Callable[[Case], None]:
    """A run from nothing, killed with kill -9 three times, each time a random while later; continued each time."""

    def strike(case: Case) -> None:
        shutil.rmtree(case.workdir)
        for kill in range(3):
            rows = kill * STEPS // 3 + int(case.rng.integers(1, 3))
            with case.process(checkpoint__every=int(case.rng.integers(1, 4)), **changes) as process:
                until(lambda rows=rows: case.rows() >= rows or process.poll() is not None)
                time.sleep(float(case.rng.uniform(0, 0.5)))
                process.kill()

    return strike


# ---- signals


def stopped(moment: str, calls: int = 1, **changes) -> Callable[[Case], None]:
    """SIGTERM at one of the first `calls` times of that moment. Where the run stops is saved then, and at no step before."""

    def strike(case: Case) -> None:
        struck = []

        def signalled() -> None:
            struck.append(1)
            terminate()

        with at(moment, signalled, int(case.rng.integers(1, calls + 1))):
            case.go_on(**{'checkpoint__every': STEPS, **changes})
        assert struck

    return strike


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


def clock_jumps(by_s: float) -> Callable[[Case], None]:
    """In the middle of the run."""

    def strike(case: Case) -> None:
        now, calls = time.time, []

        def jumping() -> float:
            calls.append(1)
            return now() + by_s * (len(calls) > 20)

        with mock.patch.object(time, 'time', jumping):
            case.go_on()

    return strike


# ---- file systems


def on_a_disk(strike: Callable[[Path], None], message: str) -> Callable[[Case], None]:
    """Continues on an ext4 of its own, in a file, which takes no more from a row of metrics on. Then its files are moved back."""

    def struck_there(case: Case) -> None:
        elsewhere, image = (case.workdir.with_name(f'{case.workdir.name}-{name}') for name in ('elsewhere', 'image'))
        case.workdir.rename(elsewhere)
        case.workdir.mkdir()
        with image.open('wb') as file:
            file.truncate(256 << 20)
        subprocess.run(['mkfs.ext4', '-q', image], check=True)
        subprocess.run(['mount', '-o', 'loop,errors=remount-ro', image, case.workdir], check=True)
        try:
            shutil.copytree(elsewhere, case.workdir, dirs_exist_ok=True)
            with struck(MetricsLog, 'write', lambda: strike(case.workdir)), pytest.raises((OSError, NotSaved), match=message):
                case.go_on()
            shutil.rmtree(elsewhere)
            shutil.copytree(case.workdir, elsewhere, ignore=shutil.ignore_patterns('ballast', 'lost+found'))
        finally:
            subprocess.run(['umount', case.workdir], check=True)
        image.unlink()
        case.workdir.rmdir()
        elsewhere.rename(case.workdir)

    return struck_there


def fill(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / 'ballast').open('wb', buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


def fail(directory: Path) -> None:
    """As a disk's error does: the kernel mounts it read-only, files open for writing included."""
    device = subprocess.run(['findmnt', '-no', 'SOURCE', directory], check=True, capture_output=True, text=True).stdout.strip()
    Path(f'/sys/fs/ext4/{Path(device).name}/trigger_fs_error').write_text('1')


KINDS: dict[str, Callable[[Case], None]] = {
    'killed (kill -9) at any moment': killed(),
    'killed, generation overlapping': killed(rollout__overlap=True),
    'killed in generation': killed_in('generation'),
    'killed in a re-evaluation': killed_in('a re-evaluation'),
    'killed in an evaluation': killed_in('an evaluation'),
    'killed in an update': killed_in('an update'),
    'killed in a save': killed_while_writing,
    'killed at its start': killed_at_its_start,
    'frozen for two seconds, then killed': frozen,
    'a second trainer': second_trainer,
    'SIGTERM in generation': stopped('generation', 2),
    'SIGTERM in overlapping generation': stopped('generation', 2, rollout__overlap=True),
    'SIGTERM in a re-evaluation': stopped('a re-evaluation', 2),
    'SIGTERM in an evaluation': stopped('an evaluation'),
    'SIGTERM in an update': stopped('an update'),
    'SIGTERM in a save': stopped('a save', checkpoint__every=1),
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
    'the clock jumps back a day': clock_jumps(-86_400),
    'the clock jumps ahead a day': clock_jumps(86_400),
}
MOUNTED: dict[str, Callable[[Case], None]] = {  # these want root, and a kernel with loop devices and ext4
    'a real disk full': on_a_disk(fill, 'No space left'),
    'a real disk failing: the kernel mounts it read-only': on_a_disk(fail, 'Read-only'),
}
CHAINS: dict[str, Callable[[Case], None]] = {
    'killed three times in a run': chain(),
    'killed three times, generation overlapping': chain(rollout__overlap=True),
}
