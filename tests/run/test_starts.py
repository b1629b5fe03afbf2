"""A run's config.json lists its starts: command, code, hardware and how each ended, and nothing of it makes the run another one."""

import json
import subprocess

import pytest
from test_directory import HERE, PRINTS, config

import bapo_jax
from bapo_jax.run import directory
from bapo_jax.run.starts import CRASHED, FINISHED, NOT_BEGUN, RUNNING, STOPPED, UNKNOWN, as_typed, commit_of, outcome, record_end, with_start


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
    ([{'steps': 80}], 60, 40, False, (CRASHED, 'crashed after step 40 of 80')),
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
