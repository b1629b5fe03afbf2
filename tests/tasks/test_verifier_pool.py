"""The pool answers every request in order, and survives workers that hang, die, fail or never start."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bapo_jax.machine import events
from bapo_jax.tasks import verifier_pool
from bapo_jax.tasks.verifier_pool import MACHINE_FAILED, OVERRAN, VerifierPool, WorkersFailed

pytestmark = pytest.mark.slow
WORKER = """
import ctypes, os, signal, socket, sys, threading, time
from bapo_jax.tasks.worker_process import serve

os.write(1, b'said at import\\n')

ANSWERS = os.readlink('/proc/self/fd/1')

def say(text):  # where the answers go, as a function may that writes to every file it finds
    for fd in os.listdir('/proc/self/fd'):
        if os.path.exists(f'/proc/self/fd/{fd}') and os.readlink(f'/proc/self/fd/{fd}') == ANSWERS:
            os.write(int(fd), text)

def work(request):
    if request in ('forks', 'forks in C'):
        child = os.fork() if request == 'forks' else ctypes.CDLL(None).fork()
        if child == 0: return 'of the child'
        if request == 'forks': os.waitpid(child, 0)
        else: time.sleep(.5)
        return 'of the parent'
    if request == 'thread': threading.Thread(target=time.sleep, args=(60,)).start()
    if request == 'child': return os.fork() or time.sleep(60)
    if request == 'leaves and ends' and os.fork(): os._exit(3)
    if request == 'nothing': return None
    if isinstance(request, dict) and 'says' in request: say(request['says'].encode())
    if request == 'long': return 'x' * (17 << 20)
    print('this must not reach the pool')
    if request == 'sleep': time.sleep(60)
    if request == 'power': return 9 ** 9 ** 9 ** 9 > 0
    if request == 'freeze': os.kill(os.getpid(), signal.SIGSTOP)
    if request == 'length': return len(sys.stdin.read())
    if request == 'raise': raise KeyError('x')
    if request == 'end': sys.exit(0)
    if request == 'crash': os.abort()
    if request == 'memory': return len(bytearray(10 << 30))
    if request == 'pid': return os.getpid()
    if isinstance(request, dict) and 'port' in request: return socket.socket().connect_ex(('127.0.0.1', request['port'])) == 0
    return {'got': request}

if __name__ == '__main__':
    serve(work)
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / 'work_for_this_test.py').write_text(WORKER)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    # far beyond what a busy machine stalls; the tests of what hangs shorten it
    pool = VerifierPool('work_for_this_test', workers=2, cpu_s=60.0, wall_s=60.0, memory_bytes=2 << 30)
    yield pool
    pool.close()


def got(*requests):
    return [{'got': r} for r in requests]


def gone(pid, within_s):
    """Whether a process ends in time, or has ended: nothing is left of it, or a zombie without threads.

    The main thread of a process that is killed may be a zombie while others, numpy's for one, still hold its pipes open.
    """
    for _ in range(int(within_s * 10)):
        try:
            with open(f'/proc/{pid}/stat') as file:
                state = file.read().rpartition(')')[2].split()[0]
            if state == 'Z' and len(os.listdir(f'/proc/{pid}/task')) == 1:
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def test_answers_come_in_order_and_exact(pool):
    requests = [*range(300), 'é\ud800\n', {'a': [1.5, None]}, 'é' * 1_000_000]  # the last fills a pipe many times over, there and back
    assert pool.run(requests) == got(*requests)
    assert pool.run([]) == []


@pytest.fixture
def reports(tmp_path):
    """The events of a test, each its kind and its fields."""
    with events.recorded(tmp_path):
        yield lambda: [json.loads(line) for line in (tmp_path / events.EVENTS_FILE).read_text().splitlines()]


def test_processor_time_that_is_used_up_is_the_requests_own_fault(pool, tmp_path):
    """`power` computes in one C call, which no Python signal handler interrupts."""
    pool.cpu_s = 1.0
    with events.recorded(tmp_path) as counts:
        assert pool.run([1, 'power', 2, 3, 'power', 'power', 4]) == [*got(1), OVERRAN, *got(2, 3), OVERRAN, OVERRAN, *got(4)]
    assert not counts


def test_a_worker_that_is_late_without_working_is_no_verdict(pool, reports):
    """Twice: the second time on another worker."""
    pool.wall_s, pool.cpu_s = 2.0, 1.9
    assert pool.run([1, 'freeze', 2, 3]) == [*got(1), MACHINE_FAILED, *got(2, 3)]
    [event] = reports()
    assert (event['event'], event['late'], event['requests']) == ('verifier failed', 1, 4)
    assert '1 of 4 requests to work_for_this_test failed: 1 late' in event['message']
    assert pool.run([4, 5]) == got(4, 5)


def test_a_worker_that_is_stopped_from_outside_loses_no_answer(pool, tmp_path):
    """As by SIGSTOP, or on a machine that has no time for it: another one gives the answer."""
    pool._limit = 1
    [pid] = pool.run(['pid'])
    os.kill(pid, signal.SIGSTOP)
    pool.wall_s = 2.0
    with events.recorded(tmp_path) as counts:
        assert pool.run(['x' * 200_000, 1]) == got('x' * 200_000, 1)
    assert gone(pid, 10) and not counts


def test_what_is_unjudged_when_the_time_for_all_is_over_failed(pool, reports):
    pool.run([0])
    assert pool.run([1, *['sleep'] * 20], budget_s=1.0) == [*got(1), *[MACHINE_FAILED] * 20]
    [event] = reports()
    assert event['unjudged'] == 20 and '1 s for all' in event['message']
    assert pool.run([1], budget_s=0.0) == [MACHINE_FAILED]
    assert pool.run([2]) == got(2)


@pytest.mark.parametrize('death', ['raise', 'end', 'crash', 'memory'])
def test_a_worker_that_ends_fails_its_request_only(pool, death):
    assert pool.run([1, death, 2, death, 3]) == [*got(1), MACHINE_FAILED, *got(2), MACHINE_FAILED, *got(3)]


def test_workers_are_kept_and_one_that_ended_while_idle_harms_no_request(pool):
    pool._limit = 1  # a second worker may be ready only after the first has answered everything
    (first,) = set(pool.run(['pid'] * 20))
    assert set(pool.run(['pid'] * 20)) == {first}
    os.kill(first, signal.SIGKILL)
    assert gone(first, 10)
    (again,) = set(pool.run(['pid'] * 4))
    assert again not in (first, OVERRAN, MACHINE_FAILED)


def test_closing_ends_the_workers_and_running_starts_them_again(pool):
    pids = set(pool.run(['pid'] * 4))
    pool.close()
    assert all(gone(pid, 10) for pid in pids)
    assert pool.run([1]) == got(1)


def test_threads_take_turns(pool):
    results = {}

    def ask(k):
        results[k] = pool.run([(k, i) for i in range(50)])

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(4)]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert results == {k: got(*([k, i] for i in range(50))) for k in range(4)}


@pytest.mark.parametrize('forks', ['forks', 'forks in C'])
def test_a_process_that_a_function_forked_answers_nothing(forks, pool):
    """In C, Python does not see it: only the number of a request tells its answers from others."""
    pool._limit = 1
    for _ in range(2):
        assert pool.run([1, forks, 2, 3, 4]) in ([*got(1), answer, *got(2, 3, 4)] for answer in ('of the parent', 'of the child'))
    assert pool.run(['forks']) == ['of the parent']


def test_a_line_that_is_no_answer_of_the_request_is_passed_over_or_fails_it(pool, reports):
    pool._limit = 1
    for said in ('0 {"got": "other"}\n', 'words\n', '9 7\n\n'):
        assert pool.run([{'says': said}, 2]) == got({'says': said}, 2)
    spoils = {'says': '1 {"got": 1} 2\n'}  # for whoever asks a new worker first
    pool.close()
    assert pool.run([spoils]) == [MACHINE_FAILED] and pool.run([3]) == got(3)
    assert [(event['event'], event['garbled']) for event in reports()] == [('verifier failed', 1)]


def test_an_outcome_that_is_too_long_fails_its_request_only_and_nothing_is_an_outcome(pool, reports):
    assert pool.run([1, 'long', 'nothing']) == [*got(1), MACHINE_FAILED, None]
    assert '1 longer than 16 MiB' in reports()[0]['message']


def test_what_a_function_leaves_behind_ends_with_its_worker(pool, tmp_path):
    pool._limit = 1
    [child] = pool.run(['child'])
    pool.run(['thread'])
    [worker] = pool.run(['pid'])
    os.kill(worker, signal.SIGKILL)  # its child still holds what it held
    assert pool.run([1]) == got(1)
    assert gone(child, 10.0)


def test_an_interrupted_run_leaves_nothing_to_the_next(pool, monkeypatch):
    pool._limit = 1
    listen, heard = verifier_pool._Worker.listen, []

    def interrupted(worker):
        heard.append(worker)
        if len(heard) == 4:  # ready, 1, 2, and the third request is under way
            raise KeyboardInterrupt
        listen(worker)

    monkeypatch.setattr(verifier_pool._Worker, 'listen', interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.run([1, 2, 'lost'])
    assert pool.run([3]) == got(3)  # and not the outcome of 'lost'


def test_a_request_reads_nothing_of_the_next(pool):
    pool._limit = 1
    assert pool.run(['length', 1, 2]) == [0, *got(1, 2)]


def test_a_worker_inherits_no_secret(pool, monkeypatch):
    for name in ('BAPO_ROLLOUT_TOKEN', 'HF_TOKEN', 'AWS_SECRET_ACCESS_KEY', 'OF_MINE'):
        monkeypatch.setenv(name, 'a secret')
    [pid] = pool.run(['pid'])
    with open(f'/proc/{pid}/environ') as file:
        inherited = file.read()
    assert 'a secret' not in inherited and f'PATH={os.environ["PATH"]}' in inherited


@pytest.mark.parametrize('refused', [False, True], ids=['as the kernel does', 'refused'])
def test_a_worker_reaches_no_network_or_a_warning_says_that_it_does(refused, pool, tmp_path, monkeypatch, caplog):
    if refused:  # as in a container that grants no namespaces
        (tmp_path / 'without_network.py').write_text(Path(verifier_pool._WITHOUT_NETWORK).read_text().replace('.unshare(', '.abs('))
        monkeypatch.setattr(verifier_pool, '_WITHOUT_NETWORK', str(tmp_path / 'without_network.py'))
    with socket.create_server(('127.0.0.1', 0)) as server:
        connect = {'port': server.getsockname()[1]}
        assert pool.run([connect]) == [True]
        apart = VerifierPool('work_for_this_test', workers=2, wall_s=60.0, network=False)
        reached = apart.run([connect, connect])
        apart.close()
    warnings = [r.message for r in caplog.records if 'can use the network' in r.message]
    assert (reached, len(warnings)) in ([([True, True], 1)] if refused else [([True, True], 1), ([False, False], 0)])


def test_a_worker_that_is_killed_at_its_start_is_replaced(pool, monkeypatch):
    start, pids = subprocess.Popen, []

    def killed_once(*args, **kwargs):
        process = start(*args, **kwargs)
        if not pids:
            process.kill()
        pids.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, 'Popen', killed_once)
    pool._limit = 1
    assert pool.run([1]) == got(1) and len(pids) == 2


def test_workers_that_do_not_start_are_an_error(capfd):
    pool = VerifierPool('no_such_module_here', workers=1, wall_s=1.0)
    with pytest.raises(WorkersFailed, match='3 workers of no_such_module_here in a row ended before they were ready.* status 1.'):
        pool.run([1])
    assert 'no_such_module_here' in capfd.readouterr().err


def test_a_worker_that_never_gets_ready_is_an_error(tmp_path, monkeypatch):
    (tmp_path / 'slow_for_this_test.py').write_text('import time; time.sleep(60)')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    monkeypatch.setattr(verifier_pool, 'START_S', 0.5)
    pool = VerifierPool('slow_for_this_test', workers=1, wall_s=1.0)
    with pytest.raises(WorkersFailed, match='not ready in'):
        pool.run([1])
    assert pool._workers == []


@pytest.mark.parametrize('last', ['1', "'power'"])  # idle, and in the midst of what never ends
def test_workers_do_not_outlive_a_process_that_is_killed(pool, last):
    program = (
        'from bapo_jax.tasks.verifier_pool import VerifierPool\n'
        "pool = VerifierPool('work_for_this_test', workers=1, wall_s=5.0, memory_bytes=2 << 30)\n"
        "print(pool.run(['pid'])[0], flush=True)\n"
        'pool.wall_s = 60\n'  # the worker's own alarm was set by the pool's first deadline
        f'pool.run([{last}])\n'
        'import time; time.sleep(60)'
    )
    path = os.pathsep.join([verifier_pool._PACKAGE_PARENT, os.environ['PYTHONPATH'], *filter(None, sys.path)])
    parent = subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, env={**os.environ, 'PYTHONPATH': path})
    try:
        pid = int(parent.stdout.readline())
    finally:
        time.sleep(0.5)  # into the last request
        parent.kill()
        parent.wait(10)
        parent.stdout.close()
    assert gone(pid, 30)
