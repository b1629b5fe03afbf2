"""launch/copy_runs.sh: a copy is whole before the one before it goes, whatever ends its making.

tests/test_train.py continues a real run from one.
"""

import os
import signal
import subprocess
import tarfile
import time

import pytest
from launched import COPY_RUNS, copy_runs

pytestmark = pytest.mark.slow


def step(directory, number, text='weights'):
    """Puts a checkpoint there as Orbax does, and a row of metrics."""
    directory.mkdir(exist_ok=True)
    partial = directory / 'checkpoints' / f'{number}.orbax-checkpoint-tmp'
    partial.mkdir(parents=True)
    (partial / 'weights').write_text(f'{text} of {number}')
    partial.rename(partial.with_name(str(number)))
    with (directory / 'metrics.jsonl').open('a') as f:
        f.write(f'{{"step": {number}}}\n')


def names(copies):
    return sorted(path.name for path in copies.iterdir())


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, 'it did not happen'
        time.sleep(0.05)


@pytest.fixture
def other_tar(tmp_path):
    """A function of a shell script that takes tar's place, and finds the real one: the environment for it."""

    def stand_in(script):
        (tmp_path / 'bin').mkdir(exist_ok=True)
        (tmp_path / 'bin' / 'tar').write_text(f'#!/bin/bash\nPATH=${{PATH#*:}}\n{script}\n')
        (tmp_path / 'bin' / 'tar').chmod(0o755)
        return {'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}'}

    return stand_in


@pytest.fixture
def copied(tmp_path):
    """A run at step 5, and the folder with its copy."""
    step(tmp_path / 'run', 5)
    assert copy_runs(tmp_path / 'run', tmp_path / 'copies').returncode == 0
    assert names(tmp_path / 'copies') == ['1.5.tar', '1.5.whole']
    return tmp_path / 'run', tmp_path / 'copies'


def test_a_copy_has_the_newest_checkpoint_and_what_goes_with_it(tmp_path):
    directory = tmp_path / 'run'
    for number in (5, 10):
        step(directory, number)
    left = ('policy/7/model.safetensors', 'servers/8000.log', 'lock', 'checkpoints/15.orbax-checkpoint-tmp/a')
    for name in ('rollouts/000010.jsonl.zst', *left):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()
    assert copy_runs(directory, tmp_path / 'copies').returncode == 0
    with tarfile.open(tmp_path / 'copies' / '1.10.tar') as tar:
        files = {os.path.normpath(m.name) for m in tar if m.isfile()}
    assert files == {'metrics.jsonl', 'checkpoints/10/weights', 'rollouts/000010.jsonl.zst'}
    assert not (tmp_path / 'run.copying').exists()


def test_an_empty_run_is_put_back_and_another_left(copied, tmp_path):
    directory, copies = copied
    (directory / 'metrics.jsonl').rename(tmp_path / 'metrics.jsonl')
    done = copy_runs(directory, copies, 'test', '!', '-e', str(directory / 'metrics.jsonl'))
    assert done.returncode == 0 and 'was empty' not in done.stdout  # it is as it was
    other = tmp_path / 'other'
    other.mkdir()
    done = copy_runs(other, copies, 'cat', str(other / 'checkpoints' / '5' / 'weights'))
    assert f'{other} was empty; restored the copy of step 5' in done.stdout and done.stdout.endswith('weights of 5')


def test_a_run_behind_its_copy_is_refused(copied, tmp_path):
    _, copies = copied
    step(tmp_path / 'behind', 4)
    done = copy_runs(tmp_path / 'behind', copies, 'touch', str(tmp_path / 'begun'))
    assert done.returncode == 1 and 'is older than its copy of step 5' in done.stderr
    assert names(copies) == ['1.5.tar', '1.5.whole'] and not (tmp_path / 'begun').exists()


@pytest.mark.parametrize(
    'script',
    [
        'echo half >"$3" && kill -KILL $PPID',  # with the script: the machine is gone
        'echo half >"$3" && kill -KILL $$',
        'echo half >"$3" && echo "tar: $3: No space left on device" >&2 && exit 2',
    ],
)
def test_a_copy_that_is_cut_short_leaves_the_one_before(copied, script, other_tar, tmp_path):
    directory, copies = copied
    step(directory, 6)
    assert copy_runs(directory, copies, **other_tar(script)).returncode != 0
    assert names(copies) == ['1.5.tar', '1.5.whole', '2.6.tar']
    assert copy_runs(tmp_path / 'other', copies, 'grep', 'weights of 5', '-r', str(tmp_path / 'other')).returncode == 0
    assert copy_runs(directory, copies).returncode == 0
    assert names(copies) == ['4.6.tar', '4.6.whole']


def test_putting_back_is_whole_or_not_at_all(copied, other_tar, tmp_path):
    _, copies = copied
    other = tmp_path / 'other'
    done = copy_runs(other, copies, **other_tar('tar "$@" && exit 2'))
    assert done.returncode == 1 and 'cannot be unpacked' in done.stderr and not other.exists()
    assert copy_runs(other, copies).returncode == 0 and (other / 'checkpoints' / '5' / 'weights').exists()


def test_a_checkpoint_that_goes_meanwhile_is_copied_whole(tmp_path, other_tar):
    directory = tmp_path / 'run'
    step(directory, 5)
    env = other_tar(f'rm -rf {directory}/checkpoints/5; tar "$@"')
    assert copy_runs(directory, tmp_path / 'copies', **env).returncode == 0
    with tarfile.open(tmp_path / 'copies' / '1.5.tar') as tar:
        assert tar.extractfile('checkpoints/5/weights').read() == b'weights of 5'


def test_new_checkpoints_are_copied_while_the_command_runs_and_a_signal_reaches_it(tmp_path):
    directory, copies = tmp_path / 'run', tmp_path / 'copies'
    (tmp_path / 'command.sh').write_text('trap "exit 75" TERM; touch "$1"; while :; do sleep 0.05; done')
    words = [COPY_RUNS, directory, copies, 'bash', tmp_path / 'command.sh', tmp_path / 'begun']
    process = subprocess.Popen(words, env=os.environ | {'COPY_EVERY': '0.1'}, stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / 'begun').exists)
    for number, files in ((3, ['1.3.tar', '1.3.whole']), (6, ['2.6.tar', '2.6.whole'])):
        step(directory, number)
        wait_until(lambda files=files: copies.exists() and names(copies) == files)
    with (directory / 'metrics.jsonl').open('a') as f:
        f.write('{"step": 7}\n')
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == '' and process.returncode == 75
    assert names(copies) == ['3.6.tar', '3.6.whole']
    with tarfile.open(copies / '3.6.tar') as tar:
        assert tar.extractfile('./metrics.jsonl').read() == b'{"step": 3}\n{"step": 6}\n{"step": 7}\n'


def test_a_signal_in_the_middle_of_a_copy_ends_it_without_a_word_and_the_last_one_is_whole(tmp_path, other_tar):
    directory, copies = tmp_path / 'run', tmp_path / 'copies'
    step(directory, 3)
    env = other_tar(f'mkdir {tmp_path}/slow 2>/dev/null && exec sleep 60; exec tar "$@"')  # the first one alone
    words = [COPY_RUNS, directory, copies, 'bash', '-c', 'trap "exit 75" TERM; while :; do sleep 0.05; done']
    process = subprocess.Popen(words, env=os.environ | env | {'COPY_EVERY': '0.1'}, stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / 'slow').exists)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == '' and process.returncode == 75
    assert names(copies) == ['1.3.tar', '1.3.whole']


def test_a_last_copy_that_fails_is_said(copied, other_tar):
    directory, copies = copied
    done = copy_runs(directory, copies, 'bash', '-c', 'exit 75', **other_tar('exit 2'))
    assert done.returncode == 75 and 'is incomplete, the previous one is kept' in done.stderr
    assert not directory.with_name('run.copying').exists()  # its links would hold the disk of checkpoints that are gone
    assert copy_runs(directory, copies, **other_tar('exit 2')).returncode == 1


def test_a_time_between_looks_that_is_none_is_refused(tmp_path):
    done = copy_runs(tmp_path / 'run', tmp_path / 'copies', 'touch', str(tmp_path / 'begun'), COPY_EVERY='1m')
    assert (done.returncode, done.stderr) == (1, 'error: COPY_EVERY=1m: give a number of seconds, such as 60\n') and not (tmp_path / 'begun').exists()
