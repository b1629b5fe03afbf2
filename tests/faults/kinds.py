"""The kinds of faults. Each strikes a case: a trainer in a process of its own (trainer.py). It raises where that one did not end as it
is to, or did not say what it must say. It returns the seconds from its last word to its end; None where there was none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from bapo_jax.machine.stopping import STATUS
from tests.faults.cases import AHEAD, STEPS, Case
from tests.faults.trainer import Trainer, behind_tee

Kind = Callable[[Case], float | None]
NEVER = {'checkpoint__every': 10 * STEPS}  # a checkpoint where the run is stopped, and at no step before


# ---- processes


def while_it_trains(case: Case, trainer: Trainer) -> None:
    """A random moment of a random step, not of the last ones."""
    wanted = case.step + 1 + int(case.rng.integers(0, max(1, STEPS - case.step - AHEAD)))
    trainer.until(lambda: case.rows() <= case.step + 1)  # rows that no checkpoint holds, of a strike before, are dropped
    trainer.until(lambda: case.rows() > wanted)
    time.sleep(float(case.rng.uniform(0, 0.2)))


def killed(case: Case) -> None:
    """kill -9; in half of the injections generation overlaps with training."""
    with case.trainer(rollout__overlap=bool(case.rng.integers(2))) as trainer:
        while_it_trains(case, trainer)
        trainer.kill()


def killed_in(*moments: str) -> Kind:
    """kill -9 by itself, at such a moment of the first step that has it."""

    def strike(case: Case) -> None:
        moment = moments[case.rng.integers(len(moments))]
        with case.trainer({'moment': moment, 'signal': signal.SIGKILL}) as trainer:
            trainer.ends(-signal.SIGKILL, heard=False)

    return strike


def killed_while_writing(case: Case) -> None:
    """kill -9 while a checkpoint's files are half there."""
    with case.trainer() as trainer:
        trainer.until(lambda: any((case.workdir / 'checkpoints').glob('*tmp*')))
        time.sleep(float(case.rng.uniform(0, 0.05)))
        trainer.kill()


def killed_at_its_start(case: Case) -> None:
    with case.trainer() as trainer:
        trainer.until((case.workdir / 'lock').exists)
        time.sleep(float(case.rng.uniform(0, 3)))
        trainer.kill()


def frozen(case: Case) -> None:
    """SIGSTOP for two seconds, then SIGCONT, then kill -9."""
    with case.trainer() as trainer:
        while_it_trains(case, trainer)
        trainer.send(signal.SIGSTOP)
        time.sleep(2.0)
        trainer.send(signal.SIGCONT)
        time.sleep(float(case.rng.uniform(0, 1)))
        trainer.kill()


def second_trainer(case: Case) -> float:
    with case.trainer() as trainer:
        trainer.until(lambda: (case.workdir / 'lock').exists() and bool((case.workdir / 'lock').read_bytes()))
        with case.trainer() as second:
            seconds = second.ends(1, f'in use by process {trainer.pid}')
        trainer.kill()
    return seconds


def chain(case: Case) -> None:
    """A run from nothing, killed with kill -9 three times, each time a random while later; continued each time."""
    shutil.rmtree(case.workdir)
    overlap = bool(case.rng.integers(2))
    for kill in range(3):
        rows = kill * STEPS // 3 + int(case.rng.integers(1, 3))
        with case.trainer(checkpoint__every=int(case.rng.integers(1, 4)), rollout__overlap=overlap) as trainer:
            trainer.until(lambda rows=rows: case.rows() >= rows)
            time.sleep(float(case.rng.uniform(0, 0.5)))
            trainer.kill()


# ---- signals


def stopped(case: Case, trainer: Trainer, heard: bool = True) -> float:
    """It ends as a run that a signal stopped, and where it stopped is saved."""
    seconds = trainer.ends(STATUS, heard=heard)
    rows = [json.loads(line)['step'] for line in (case.workdir / 'metrics.jsonl').read_text().splitlines()]
    if case.saved() < rows[-1]:
        raise RuntimeError(f'it wrote rows up to step {rows[-1]}, and stopped with a checkpoint of step {case.saved()}')
    return seconds


def stopped_in(moment: str, calls: int = 1, **changes) -> Kind:
    """SIGTERM at one of the first `calls` times of that moment; in half of the injections generation overlaps with training."""

    def strike(case: Case) -> float:
        fault = {'moment': moment, 'call': int(case.rng.integers(1, calls + 1)), 'signal': signal.SIGTERM}
        with case.trainer(fault, **NEVER | {'rollout__overlap': bool(case.rng.integers(2))} | changes) as trainer:
            return stopped(case, trainer)

    return strike


def stopped_by(*numbers: int) -> Kind:
    """One of these signals, while it trains."""

    def strike(case: Case) -> float:
        with case.trainer(**NEVER) as trainer:
            while_it_trains(case, trainer)
            trainer.send(numbers[case.rng.integers(len(numbers))])
            return stopped(case, trainer)

    return strike


def beyond_its_grace(case: Case) -> float:
    """SIGTERM in an update that does not end: the last checkpoint counts."""
    fault = {'moment': 'an update', 'call': 2, 'signal': signal.SIGTERM, 'hangs': 600.0}
    with case.trainer(fault, checkpoint__grace_s=2.0) as trainer:
        return trainer.ends(STATUS, 'did not stop within 2 s')


def second_signal(case: Case) -> None:
    """Ctrl-C in an update that does not end, and again two seconds later."""
    fault = {'moment': 'an update', 'call': 2, 'signal': signal.SIGINT, 'hangs': 600.0}
    with case.trainer(fault) as trainer:
        trainer.until(lambda: 'SIGINT: saving a checkpoint and stopping' in trainer.said['stderr'])
        time.sleep(2.0)
        trainer.send(signal.SIGINT)
        trainer.ends(STATUS, heard=False)


def hung_up_under_nohup(case: Case) -> None:
    """It goes on, and is killed."""
    with case.trainer(streams={'preexec_fn': lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}) as trainer:
        trainer.until(lambda: case.rows() > case.step + 1)
        trainer.send(signal.SIGHUP)
        rows = case.rows()
        trainer.until(lambda: case.rows() > rows)
        trainer.kill()


# ---- what is printed


def ctrl_c_behind_tee(case: Case) -> None:
    """`train … 2>&1 | tee log`: the signal goes to both, and tee is gone first."""
    with behind_tee(case.flags(**NEVER), case.sound.folder) as trainer:
        while_it_trains(case, trainer)
        os.killpg(os.getpgid(trainer.pid), signal.SIGINT)
        stopped(case, trainer, heard=False)


def unread(change: Callable[[Trainer], None]) -> Kind:
    """SIGTERM once something has become of the readers of the output."""

    def strike(case: Case) -> None:
        with case.trainer(**NEVER) as trainer:
            trainer.until((case.workdir / 'lock').exists)
            change(trainer)
            while_it_trains(case, trainer)
            trainer.send(signal.SIGTERM)
            stopped(case, trainer, heard=False)

    return strike


def readers_leave(trainer: Trainer) -> None:
    trainer.leave('stdout')
    trainer.leave('stderr')


def printed_into(name: str) -> Kind:
    """Output that takes nothing from the start: the disk is full, or it is closed (none)."""

    def strike(case: Case) -> None:
        with open(name or os.devnull, 'wb') as file:
            closed = {} if name else {'preexec_fn': lambda: (os.close(1), os.close(2))}
            with case.trainer(streams={'stdout': file, 'stderr': file, **closed}, **NEVER) as trainer:
                while_it_trains(case, trainer)
                trainer.send(signal.SIGTERM)
                stopped(case, trainer, heard=False)

    return strike


# ---- disks


def disk(*numbers: int, moment: str, calls: int = 2) -> Kind:
    """One of these errors at one of the first `calls` times of that moment, which writes."""

    def strike(case: Case) -> float:
        number = numbers[case.rng.integers(len(numbers))]
        with case.trainer({'moment': moment, 'call': int(case.rng.integers(1, calls + 1)), 'errno': number}) as trainer:
            return trainer.ends(1, os.strerror(number))

    return strike


def full_in_a_checkpoint(case: Case) -> float:
    with case.trainer({'moment': 'a checkpoint'}) as trainer:
        return trainer.ends(1, 'No space left')


def on_a_disk(strike: Callable[[Path], None], message: str) -> Kind:
    """Continues on an ext4 of its own, in a file, which takes no more from some moment on. Then its files are moved back."""

    def struck_there(case: Case) -> float:
        elsewhere, image = (case.workdir.with_name(f'{case.workdir.name}-{name}') for name in ('elsewhere', 'image'))
        case.workdir.rename(elsewhere)
        case.workdir.mkdir()
        with image.open('wb') as file:
            file.truncate(256 << 20)
        subprocess.run(['mkfs.ext4', '-q', image], check=True)
        subprocess.run(['mount', '-o', 'loop,errors=remount-ro', image, case.workdir], check=True)
        try:
            shutil.copytree(elsewhere, case.workdir, dirs_exist_ok=True)
            with case.trainer() as trainer:
                trainer.until(lambda: case.rows() > case.step + 1)
                time.sleep(float(case.rng.uniform(0, 0.5)))
                strike(case.workdir)
                seconds = trainer.ends(1, message)
            shutil.rmtree(elsewhere)
            shutil.copytree(case.workdir, elsewhere, ignore=shutil.ignore_patterns('ballast', 'lost+found'))
        finally:
            subprocess.run(['umount', case.workdir], check=True)
        image.unlink()
        case.workdir.rmdir()
        elsewhere.rename(case.workdir)
        return seconds

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


# ---- files


def flipped(part: str) -> Kind:
    """One bit of the newest checkpoint, in a file of that part's arrays."""

    def strike(case: Case) -> None:
        files = [f for f in (case.newest() / part).rglob('*') if f.is_file() and f.stat().st_size > 100 and f.parent.name == 'd']
        files = files or [f for f in (case.newest() / part).rglob('*') if f.is_file() and b'selector' in f.read_bytes()]
        file = max(files, key=lambda f: f.stat().st_size)
        data = bytearray(file.read_bytes())
        data[case.rng.integers(len(data))] ^= 1 << case.rng.integers(8)
        file.write_bytes(data)

    return strike


def file_of_a_checkpoint(change: Callable[[Path], None]) -> Kind:
    """The run goes on before it, and says so; here it is killed then."""

    def strike(case: Case) -> None:
        files = (case.newest() / 'policy' / 'ocdbt.process_0' / 'd').iterdir()
        change(max(files, key=lambda f: f.stat().st_size))
        events = case.workdir / 'events.jsonl'
        with case.trainer() as trainer:
            trainer.until(lambda: events.exists() and '"checkpoint damaged"' in events.read_text())
            trainer.kill()

    return strike


def half_a_row(case: Case) -> None:
    with (case.workdir / 'metrics.jsonl').open('a') as f:
        f.write('{"step": 99, "x": 0.')


def refused_then_restored(name: str, change: Callable[[Path], None], message: str) -> Kind:
    """A file is spoilt: the run says so and writes nothing. Then it is put back."""

    def strike(case: Case) -> float:
        file = case.workdir / name
        before = file.read_bytes()
        change(file)
        with case.trainer() as trainer:
            seconds = trainer.ends(1, message)
        file.write_bytes(before)
        return seconds

    return strike


def checkpoints_lost(case: Case) -> float:
    """The run says so, and keeps its record. Then they are put back."""
    there, elsewhere, rows = case.workdir / 'checkpoints', case.workdir / 'elsewhere', case.rows()
    there.rename(elsewhere)
    with case.trainer() as trainer:
        seconds = trainer.ends(1, 'there is no checkpoint')
    if case.rows() != rows:
        raise RuntimeError(f'there were {rows} rows of metrics, and now there are {case.rows()}')
    elsewhere.rename(there)
    return seconds


def renamed(name: str) -> Kind:
    """The run directory, or its lock, gets another name in a long update, and the old one again once the run has ended."""

    def strike(case: Case) -> float:
        there = case.workdir / name
        elsewhere = there.with_name(f'{there.name}-elsewhere')
        with case.trainer({'moment': 'an update', 'call': 2, 'hangs': 30.0}) as trainer:
            trainer.until(lambda: case.rows() == case.step + 2)
            there.rename(elsewhere)
            seconds = trainer.ends(1, 'removed or renamed')
        if there.exists():
            raise RuntimeError(f'it was made anew, with {sorted(str(path.relative_to(there)) for path in there.rglob("*"))}')
        elsewhere.rename(there)
        return seconds

    return strike


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def spoilt(file: Path) -> None:
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(''.join(['{"step": \n', *lines[1:]]))


def left_lock(case: Case) -> None:
    """Of another machine, whose trainer is gone. The command that continues watches it first."""
    said_by = {'token': 'x', 'pid': 1, 'machine': 'gone', 'host': 'gone', 'renewed': 3}
    (case.workdir / 'lock').write_bytes(json.dumps(said_by).encode().ljust(512))


def clock_jumps(case: Case) -> None:
    """By a day, back or ahead, in the middle of a run that is killed later."""
    by_s = 86_400 * float(case.rng.choice([-1, 1]))
    with case.trainer({'moment': 'an update', 'jump': by_s}) as trainer:
        trainer.until(lambda: case.rows() > case.step + 2)
        trainer.kill()


CHAIN = 'killed three times in a run'
KINDS: dict[str, Kind] = {
    'killed (kill -9) at any moment': killed,
    'killed in generation': killed_in('generation', 'a re-evaluation'),
    'killed in an evaluation': killed_in('an evaluation'),
    'killed in an update': killed_in('an update'),
    'killed in a save': killed_while_writing,
    'killed at its start': killed_at_its_start,
    'frozen for two seconds, then killed': frozen,
    'a second trainer': second_trainer,
    CHAIN: chain,
    'SIGTERM in generation': stopped_in('generation', 2),
    'SIGTERM in a re-evaluation': stopped_in('a re-evaluation'),
    'SIGTERM in an evaluation': stopped_in('an evaluation'),
    'SIGTERM in an update': stopped_in('an update'),
    'SIGTERM in a save': stopped_in('a save', checkpoint__every=1),
    'SIGHUP: the terminal closes': stopped_by(signal.SIGHUP),
    'SIGUSR1 or SIGUSR2, of a scheduler': stopped_by(signal.SIGUSR1, signal.SIGUSR2),
    'SIGHUP under nohup': hung_up_under_nohup,
    'SIGTERM in a step that does not end': beyond_its_grace,
    'Ctrl-C twice': second_signal,
    'Ctrl-C of `train … \\| tee log`': ctrl_c_behind_tee,
    'SIGTERM, and the readers of its output are gone': unread(readers_leave),
    'SIGTERM, and standard output is read no more': unread(lambda trainer: trainer.fill('stdout')),
    'SIGTERM, and standard error is read no more': unread(lambda trainer: trainer.fill('stderr')),
    'SIGTERM, and its output is closed from the start': printed_into(''),
    'SIGTERM, and the disk of its output is full': printed_into('/dev/full'),
    'disk full at a row of metrics': disk(errno.ENOSPC, moment='a row of metrics'),
    'disk full at an evaluation': disk(errno.ENOSPC, moment='a file of an evaluation', calls=1),
    'disk full at a file of rollouts': disk(errno.ENOSPC, moment='a file of rollouts'),
    'disk read-only, failing or over its quota': disk(errno.EROFS, errno.EIO, errno.EDQUOT, moment='a row of metrics'),
    'disk full in a checkpoint': full_in_a_checkpoint,
    'disk failing as a checkpoint begins': disk(errno.EROFS, errno.EIO, moment='a directory of a checkpoint'),
    'a bit flipped in the policy': flipped('policy'),
    'a bit flipped in the buffer': flipped('replay'),
    'a bit flipped in the host part': flipped('host'),
    'a file of a checkpoint missing': file_of_a_checkpoint(os.unlink),
    'a file of a checkpoint cut': file_of_a_checkpoint(cut),
    'half a row of metrics': half_a_row,
    'a row of metrics damaged': refused_then_restored('metrics.jsonl', spoilt, 'line 1 is damaged'),
    'config.json cut': refused_then_restored('config.json', cut, 'is damaged'),
    'config.json missing': refused_then_restored('config.json', os.unlink, 'checkpoints but no config.json'),
    'checkpoints lost': checkpoints_lost,
    'the run directory renamed': renamed(''),
    'the lock renamed': renamed('lock'),
    'a lock left by another machine': left_lock,
    'the clock jumps by a day': clock_jumps,
}
MOUNTED: dict[str, Kind] = {  # these want root, and a kernel with loop devices and ext4
    'a real disk full': on_a_disk(fill, 'No space left'),
    'a real disk failing: the kernel mounts it read-only': on_a_disk(fail, 'Read-only'),
}
