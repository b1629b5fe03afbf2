"""Which signals stop a command, when a second one ends it, and that a process is gone once it has said its last word."""

import signal
import subprocess
import sys

import pytest
from small_run import ROOT

from bapo_jax.machine import stopping


def run(code, before=''):
    """A process that runs `code`."""
    program = f'import os, signal, sys, threading, time\n{before}\nfrom bapo_jax.machine import stopping\n{code}'
    return subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, timeout=60)


HANG = 'threading.Thread(target=time.sleep, args=(300,)).start()\nstopping.END_S = 0.2\n'  # as Orbax's threads do on a failing disk


@pytest.mark.parametrize('end, status, said', [
    ('sys.exit("error: the disk is full")', 1, 'error: the disk is full\n'),
    ('sys.exit(75)', 75, ''),
    ('pass', 0, ''),
    ('raise KeyboardInterrupt', 130, None),
    ('1 / 0', 1, None),
])  # fmt: skip
def test_after_its_last_word_a_process_is_gone_whatever_its_threads_wait_for(end, status, said):
    done = run(f'{HANG}with stopping.ending():\n    {end}')
    assert done.returncode == status
    assert said is None or done.stderr == said


def test_what_is_registered_for_the_end_is_done():
    code = 'import atexit\nwith stopping.ending():\n    atexit.register(print, "the server has ended", flush=True)\n    sys.exit(3)'
    done = run(code)
    assert (done.returncode, done.stdout) == (3, 'the server has ended\n')


def test_a_signal_while_it_ends_leaves_the_status_as_it_is():
    done = run(f'{HANG}stopping.END_S = 30\nthreading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()\n'
               'with stopping.ending():\n    sys.exit(75)')  # fmt: skip
    assert done.returncode == 75


@pytest.fixture
def ends(monkeypatch):
    """The statuses with which the process would have ended at once."""
    statuses = []
    monkeypatch.setattr(stopping.os, '_exit', statuses.append)
    return statuses


@pytest.mark.parametrize('first, second, apart_s, at_once', [
    (signal.SIGINT, signal.SIGINT, 5.0, True),
    (signal.SIGINT, signal.SIGTERM, 5.0, True),
    (signal.SIGTERM, signal.SIGTERM, 0.1, False),  # `timeout` sends it to the process and to its group
    (signal.SIGHUP, signal.SIGHUP, 5.0, False),
    (signal.SIGUSR1, signal.SIGTERM, 5.0, False),  # of a scheduler: a warning, then the time limit
    (signal.SIGTERM, signal.SIGUSR2, 5.0, False),
])  # fmt: skip
def test_a_second_ctrl_c_or_sigterm_ends_at_once_and_nothing_else_does(first, second, apart_s, at_once, ends, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stopping.time, 'monotonic', lambda: now[0])
    with stopping.on_signal(600.0):
        signal.raise_signal(first)
        assert stopping.requested() and not ends
        now[0] += apart_s
        signal.raise_signal(second)
        assert ends == [stopping.STATUS] * at_once


def test_under_nohup_a_terminal_that_closes_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping.on_signal(600.0):
            signal.raise_signal(signal.SIGHUP)
            assert not stopping.requested()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_grace_is_over_for_a_run_that_can_print_nothing():
    """Standard error is a pipe that takes no more and whose reader lives."""
    guard = 'from bapo_jax.machine import output\nr, w = os.pipe(); os.dup2(w, 2); os.set_blocking(2, False)\n' \
            'try:\n    while os.write(2, bytes(4096)): pass\nexcept BlockingIOError: os.set_blocking(2, True)\noutput.guard_streams()'  # fmt: skip
    done = run('with stopping.on_signal(0.3):\n    signal.raise_signal(signal.SIGTERM)\n    time.sleep(50)', guard)
    assert done.returncode == stopping.STATUS
