"""A run directory has one writer at a time, whichever way the last one ended."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bapo_jax.machine import lock

ROOT = Path(__file__).resolve().parents[2]
HOLD = (
    'import pathlib, sys, time; from bapo_jax.machine import lock; lock.RENEW_S = 0.1\n'
    'with lock.held(pathlib.Path(sys.argv[1])): print("held", flush=True); time.sleep(60)'
)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path/run."""
    process = subprocess.Popen([sys.executable, '-c', HOLD, tmp_path / 'run'], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'held\n'
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A function of seconds: a lock file that another machine left, and counts up for so long."""
    monkeypatch.setattr(lock, 'WATCH_S', 0.4)
    path = tmp_path / 'run' / 'lock'
    path.parent.mkdir()

    def write(renewed, token='b' * 16):
        said = {'token': token, 'pid': 7, 'machine': 'node3 b00t', 'host': 'node3', 'renewed': renewed}
        path.write_bytes(json.dumps(said).encode().ljust(512))

    write(1)
    return write


def test_a_second_process_is_refused_and_told_who_has_the_directory(holder, tmp_path):
    before = sorted((tmp_path / 'run').iterdir())
    with pytest.raises(lock.DirectoryInUse, match=rf'run is in use by process {holder.pid} on \S+; wait until it ends, or give'):
        with lock.held(tmp_path / 'run'):
            pass
    assert sorted((tmp_path / 'run').iterdir()) == before


def test_kill_9_frees_the_directory_at_once(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    started = time.monotonic()
    with lock.held(tmp_path / 'run'):
        assert json.loads((tmp_path / 'run' / 'lock').read_text())['pid'] == os.getpid()
    assert time.monotonic() - started < lock.WATCH_S and not (tmp_path / 'run').joinpath('lock').exists()


def test_a_path_that_the_checkpoint_library_cannot_write_to_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(ValueError, match=r"x.udcff' is not valid UTF-8 in this locale, .* give another directory, or set a locale"):
        with lock.held(tmp_path / 'x\udcff'):
            pass
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_behind_but_what_was_written(tmp_path):
    with lock.held(tmp_path / 'a' / 'empty'):
        pass
    assert not (tmp_path / 'a' / 'empty').exists()
    with lock.held(tmp_path / 'used'):
        (tmp_path / 'used' / 'config.json').write_text('{}')
    assert [f.name for f in (tmp_path / 'used').iterdir()] == ['config.json']


def test_the_lock_has_the_permissions_of_the_umask_so_that_a_group_may_continue_a_run(tmp_path):
    before = os.umask(0o002)
    try:
        with lock.held(tmp_path / 'run'):
            assert (tmp_path / 'run' / 'lock').stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def test_another_machine_that_counts_on_keeps_the_directory(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(lock.time, 'sleep', lambda _: elsewhere(2))
    with pytest.raises(lock.DirectoryInUse, match='in use by process 7 on node3'):
        with lock.held(tmp_path / 'run'):
            pass


def test_a_reader_sees_at_once_that_a_process_here_holds_the_directory_and_takes_nothing(holder, tmp_path, capsys):
    assert lock.is_held(tmp_path / 'run') and capsys.readouterr().out == ''
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    left = (tmp_path / 'run' / 'lock').read_bytes()
    assert not lock.is_held(tmp_path / 'run') and capsys.readouterr().out == ''
    assert (tmp_path / 'run' / 'lock').read_bytes() == left
    assert not lock.is_held(tmp_path)


def test_a_reader_watches_the_lock_of_another_machine(elsewhere, tmp_path, monkeypatch, capsys):
    assert not lock.is_held(tmp_path / 'run')
    assert 'belongs to process 7 on node3; waiting' in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(lock.time, 'sleep', lambda _: elsewhere(2))
        assert lock.is_held(tmp_path / 'run')
    monkeypatch.setattr(lock.time, 'sleep', lambda _: (tmp_path / 'run' / 'lock').unlink())
    assert not lock.is_held(tmp_path / 'run')  # it ended meanwhile


def test_a_process_with_the_number_of_a_holder_that_crashed_holds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, 'WATCH_S', 0.4)
    said = {'token': 'b' * 16, 'pid': os.getpid(), 'machine': lock._machine(), 'host': 'here', 'renewed': 1}
    (tmp_path / 'lock').write_bytes(json.dumps(said).encode().ljust(512))
    assert not lock.is_held(tmp_path)


@pytest.mark.parametrize('pids', ['pid:[7]', '', None])
def test_a_number_that_is_free_here_may_be_a_live_process_of_another_container(pids, tmp_path, monkeypatch):
    """Containers may share the machine's name and boot, and each has its own numbers of processes."""
    monkeypatch.setattr(lock, 'WATCH_S', 0.4)
    if pids == '':
        monkeypatch.setattr(lock, '_pids', str)  # this kernel does not tell

    def write(renewed):
        said = {'token': 'b' * 16, 'pid': 2**30, 'machine': lock._machine(), 'host': 'here', 'pids': pids, 'renewed': renewed}
        (tmp_path / 'lock').write_bytes(json.dumps(said).encode().ljust(512))

    write(1)
    assert not lock.is_held(tmp_path)
    monkeypatch.setattr(lock.time, 'sleep', lambda _: write(2))
    assert lock.is_held(tmp_path)


def test_another_machine_that_stands_still_has_lost_it(elsewhere, tmp_path, capsys):
    with lock.held(tmp_path / 'run'):
        assert json.loads((tmp_path / 'run' / 'lock').read_text())['pid'] == os.getpid()
    assert 'belongs to process 7 on node3; waiting' in capsys.readouterr().out


def test_a_file_system_without_flock_is_watched_even_on_one_machine(holder, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOTSUP, 'not supported')

    monkeypatch.setattr(fcntl, 'flock', unsupported)
    monkeypatch.setattr(lock, 'WATCH_S', 5.0)  # it renews every .1 s
    with pytest.raises(lock.DirectoryInUse, match=f'process {holder.pid}'):
        with lock.held(tmp_path / 'run'):
            pass


def test_a_disk_that_fails_under_the_lock_hides_no_error(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.EROFS, 'Read-only file system')

    with pytest.raises(ZeroDivisionError):
        with lock.held(tmp_path / 'run'):
            monkeypatch.setattr(Path, 'unlink', fails)
            monkeypatch.setattr(lock, '_read', fails)
            1 / 0


def test_who_loses_the_directory_writes_nothing_more(tmp_path):
    """Another machine took it, since this process slept."""
    process = subprocess.Popen(
        [sys.executable, '-c', HOLD, tmp_path / 'run'], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'held\n'
    path = tmp_path / 'run' / 'lock'
    said = json.dumps({'token': 'b' * 16, 'pid': 7, 'host': 'node3'}).encode().ljust(512)
    for _ in range(50):  # a renewal under way may come after the first
        with path.open('r+b') as f:
            f.write(said)
        if process.poll() is not None:
            break
        time.sleep(0.1)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 1 and 'was taken over by process 7 on node3, so this process stops; wait' in err
    assert json.loads(path.read_text())['pid'] == 7


def removed(workdir):
    (workdir / 'lock').unlink()


def renamed(workdir):
    workdir.rename(workdir.with_name('elsewhere'))


def deleted(workdir):
    removed(workdir)
    workdir.rmdir()


def replaced(workdir):
    """By a directory that another process holds."""
    renamed(workdir)
    workdir.mkdir()
    (workdir / 'lock').write_bytes(json.dumps({'token': 'b' * 16, 'pid': 7, 'host': 'node3'}).encode().ljust(512))


GONE = 'run or its file lock was removed or renamed, so this process stops; restore the directory'


@pytest.mark.parametrize('change, told, heard', [
    (removed, GONE, True), (renamed, GONE, True), (deleted, GONE, True), (renamed, GONE, False),
    (replaced, 'run was taken over by process 7 on node3, so this process stops; wait', True),
])  # fmt: skip
def test_who_holds_a_directory_or_lock_that_is_not_there_any_more_ends(change, told, heard, tmp_path):
    """Also where its standard error is a pipe that is full, and nobody reads."""
    full = '' if heard else 'import fcntl, os; fcntl.fcntl(2, 1031, 4096); os.write(2, bytes(4096))\n'  # F_SETPIPE_SZ
    process = subprocess.Popen(
        [sys.executable, '-c', full + HOLD, tmp_path / 'run'], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'held\n'
    change(tmp_path / 'run')
    before = {file: file.read_bytes() for file in tmp_path.rglob('*') if file.is_file() and file.parent.name == 'run'}
    assert process.wait(timeout=30) == 1
    assert (told in process.communicate()[1]) == heard
    assert {file: file.read_bytes() for file in tmp_path.rglob('*') if file.is_file() and file.parent.name == 'run'} == before


def test_a_disk_that_fails_at_the_end_hides_no_error_and_anothers_lock_stays(tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, 'Read-only file system')

    for name in ('unlink', 'stat'):
        with pytest.raises(ZeroDivisionError), monkeypatch.context() as patch, lock.held(tmp_path / 'run'):
            patch.setattr(Path, name, read_only)
            1 / 0
    with lock.held(tmp_path / 'run'):
        replaced(tmp_path / 'run')
    assert json.loads((tmp_path / 'run' / 'lock').read_text())['pid'] == 7


def test_a_directory_that_cannot_be_made_is_named():
    with pytest.raises(OSError, match=r"/proc/runs/x cannot be created \(No such file or directory\); give another directory"):
        with lock.held(Path('/proc/runs/x')):
            pass
