"""A run's config.json lists its starts: command, code, hardware and how each ended, and nothing of it makes the run another one."""

import errno
import json
import subprocess

import pytest
from test_directory import HERE, PRINTS, config

import bapo_jax
from bapo_jax.run import directory
from bapo_jax.run import starts as module
from bapo_jax.run.starts import (
    CRASHED, WITH_ERROR, FINISHED, NOT_BEGUN, RUNNING, STOPPED, UNKNOWN, as_typed, commit_of, outcome, record_end, records_finish, with_start,
)  # fmt: skip


def begin(workdir, step, **changes):
    """A start that succeeds. Returns the settings that it recorded."""
    claimed = directory.claim(workdir, config(**changes), PRINTS, HERE)
    settings = with_start(claimed.settings, step, 60, ['/venv/bin/bapo-train', '--config=quickstart', f'--workdir={workdir.name}'])
    directory.record(workdir, settings)
    return settings


def starts(workdir):
    return json.loads((workdir / 'config.json').read_text('utf-8'))['starts']


def test_each_start_adds_an_entry_and_one_that_ends_in_order_says_how(tmp_path):
    record_end(tmp_path, begin(tmp_path, 0), 7, finished=False)
    begin(tmp_path, 7, log__rollouts_every=3)  # crashes
    record_end(tmp_path, begin(tmp_path, 5), 60, finished=True)
    stopped, crashed, finished = starts(tmp_path)
    assert [start['step'] for start in (stopped, crashed, finished)] == [0, 7, 5]
    assert (stopped['end']['step'], stopped['end']['outcome']) == (7, STOPPED)
    assert 'end' not in crashed
    assert (finished['end']['step'], finished['end']['outcome']) == (60, FINISHED)
    for start in (stopped, crashed, finished):
        assert start['command'] == f'bapo-train --config=quickstart --workdir={tmp_path.name}'
        assert start['version'] == bapo_jax.__version__ and start['steps'] == 60 and start['host']
        assert start.keys() - {'end'} == {'time', 'step', 'steps', 'command', 'version', 'commit', 'host', *directory.environment()}
        assert start['time'].endswith('+00:00') and len(start['time']) == 25


def test_an_end_that_cannot_be_written_is_reported_and_a_finished_run_has_not_failed(tmp_path, monkeypatch, caplog):
    settings = begin(tmp_path, 0)

    def full(*_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(module, 'record', full)
        record_end(tmp_path, settings, 60, finished=True)
    [said] = caplog.records
    assert said.row['event'] == 'end not recorded' and 'finished after step 60' in said.message and 'make room' in said.message
    assert 'end' not in starts(tmp_path)[0]


def test_only_an_end_of_the_same_step_says_that_the_run_has_finished_and_it_stays(tmp_path):
    record_end(tmp_path, begin(tmp_path, 0), 7, finished=True)
    assert records_finish(starts(tmp_path), 7) and not records_finish(starts(tmp_path), 6)
    before = (tmp_path / 'config.json').read_bytes()
    record_end(tmp_path, directory.claim(tmp_path, config(), PRINTS, HERE).settings, 8, finished=True)
    assert (tmp_path / 'config.json').read_bytes() == before
    record_end(tmp_path, begin(tmp_path, 7), 9, finished=False)
    for other in (starts(tmp_path), [], [{}], [{'end': 3}]):
        assert not records_finish(other, 9)


@pytest.mark.parametrize('environment, starts, number', [
    ({'devices': '2 cpu', 'hosts': '1'}, [], 2), ({'devices': '2 cpu'}, [], 2), ({'devices': '2 cpu', 'hosts': '2'}, [], 0),
    ({'devices': '1 NVIDIA H200', 'hosts': '1'}, [], 0), ({'devices': 7}, [], 0), (None, [], 0),
    ({'devices': '2 cpu'}, [{'devices': '2 cpu', 'hosts': '1'}, {'devices': '8 cpu', 'hosts': '1'}], 8),
])  # fmt: skip
def test_the_devices_of_a_run_are_those_of_its_newest_start(environment, starts, number, tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps({'environment': environment, 'starts': starts}))
    assert directory.recorded_devices(tmp_path) == number
    assert directory.recorded_devices(tmp_path / 'new') == 0


def test_starts_do_not_make_a_run_another_one_and_an_earlier_run_has_none(tmp_path):
    begin(tmp_path, 0)
    assert directory.claim(tmp_path, config(), PRINTS, HERE).changed == {}
    path = tmp_path / 'config.json'
    written = json.loads(path.read_text('utf-8'))
    assert 'starts' not in directory.settings_of(written)
    del written['starts']
    path.write_text(json.dumps(written))
    assert directory.claim(tmp_path, config(), PRINTS, HERE) == ({}, written | {'starts': []})
    begin(tmp_path, 3)
    assert [start['step'] for start in starts(tmp_path)] == [3]


@pytest.mark.parametrize('starts, planned, step, held, told', [
    ([{'end': {'step': 60, 'outcome': 'finished'}}], 60, 60, False, (FINISHED, 'finished, 60 steps')),
    ([{'end': {'step': 39, 'outcome': 'stopped'}}], 60, 40, None, (STOPPED, 'stopped after step 39 of 60')),
    ([{'end': {'step': 40, 'outcome': 'failed', 'error': 'no reply'}}], 60, 41, False, (WITH_ERROR, 'failed after step 41 of 60: no reply')),
    ([{'steps': 80}], 60, 40, False, (CRASHED, 'crashed after step 40 of 80, or copied while it ran')),
    ([{'time': ''}], 60, 40, None, (CRASHED, 'crashed after step 40 of 60, or still running')),
    ([{'time': ''}], 'many', 0, True, (RUNNING, 'running, before the first step')),
    ([], 60, 0, None, (NOT_BEGUN, 'not begun: its start failed')),
    (None, 60, 60, None, (FINISHED, 'finished, 60 steps')),
    (None, 0, 40, None, (UNKNOWN, 'ended after step 40; its version did not record how')),
])  # fmt: skip
def test_the_outcome_is_told_by_the_newest_start(starts, planned, step, held, told):
    assert outcome(starts, planned, step, held) == told


@pytest.mark.parametrize('damaged', [{}, 'once', [1], None])
def test_damaged_starts_are_named_and_left_as_they_are(damaged, tmp_path):
    begin(tmp_path, 0)
    path = tmp_path / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text('utf-8')) | {'starts': damaged}))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r'config\.json is damaged \(starts is not a list of objects\); restore it, or give another'):
        begin(tmp_path, 0)
    assert path.read_bytes() == before


@pytest.mark.parametrize('arguments, command', [
    (['/venv/bin/bapo-train', '--config=quickstart'], 'bapo-train --config=quickstart'),
    (['/home/x/bapo_jax/train.py', "--config.evaluate.benchmarks=('a', 'b')"], "bapo-train '--config.evaluate.benchmarks=('\"'\"'a'\"'\"', '\"'\"'b'\"'\"')'"),
    (['sweep.py', '--config.task.train=https://me:secret@host/x.jsonl'], 'sweep.py --config.task.train=https://…@host/x.jsonl'),
    ([''], "''"),
])  # fmt: skip
def test_a_command_can_be_typed_again_and_holds_no_password(arguments, command):
    assert as_typed(arguments) == command


def test_the_commit_is_that_of_the_checkout_and_of_no_folder_above(tmp_path, monkeypatch):
    def git(*words):
        who = ('-c', 'user.name=x', '-c', 'user.email=x@example.com')
        return subprocess.run(['git', *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / 'file').write_text('a')
    assert commit_of(tmp_path) is None
    git('init', '-q')
    git('add', 'file')
    git('commit', '-qm', 'x')
    git('tag', 'v1')
    commit = git('rev-parse', 'HEAD')
    monkeypatch.setenv('GIT_DIR', '/nowhere')  # as in a hook
    assert commit_of(tmp_path) == commit and len(commit) == 40
    (tmp_path / 'file').write_text('b')
    assert commit_of(tmp_path) == f'{commit}-dirty'
    (tmp_path / 'site-packages').mkdir()
    assert commit_of(tmp_path / 'site-packages') is None
    monkeypatch.setenv('PATH', '')
    assert commit_of(tmp_path) is None
