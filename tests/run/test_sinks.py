"""trackio and Weights & Biases, the real packages: they hold what metrics.jsonl holds, and training never waits for them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from claims import claim
from proxied import name_proxy
from wandb_server import WandbServer

from bapo_jax.config import default_config, resolve
from bapo_jax.machine import events
from bapo_jax.run.log import sinks
from bapo_jax.run.log.metrics import MetricsLog, read_metrics

ROWS = [{'critic/score/mean': step / 7, 'accuracy_bins': [step, 2], 'bapo/r_tot': None, 'bapo/x1_groups': 1} for step in range(8)]
KEY = 'c0ffee' * 7
CONFIG = {'seed': 3, 'replay': {'c2': [0.5, 0.125]}, 'log': {'sinks': ['wandb']}}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A run directory; what the packages keep elsewhere goes beside it, and no account of this machine counts."""
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('TRACKIO_DIR', str(tmp_path / 'trackio'))
    for name in ('WANDB_PROJECT', 'WANDB_API_KEY', 'TRACKIO_SPACE_ID', 'TRACKIO_SERVER_URL'):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / 'my runs' / 'first'
    path.mkdir(parents=True)
    (path / 'config.json').write_text(json.dumps(CONFIG | {'starts': [{'host': 'here'}]}))
    return path


def trained(directory, steps, names, continue_after=-1):
    log = MetricsLog(directory, continue_after, names)
    for step in steps:
        log.write(step, ROWS[step])
    log.close()


def sent(directory):
    """(step, numbers) of each row of metrics.jsonl, as a sink should hold them."""
    return [
        (r['step'], {
            'critic/score/mean': r['critic/score/mean'], 'accuracy_bins/0': r['accuracy_bins'][0],
            'accuracy_bins/1': r['accuracy_bins'][1], 'bapo/x1_groups': r['bapo/x1_groups'],
        }) for r in read_metrics(directory)
    ]  # fmt: skip


def of_wandb(directory):
    """What each start of a run left, oldest first: (project, name, id, config) and (step, numbers) of every row."""
    found = []
    for folder in sorted((directory / 'sinks' / 'wandb').glob('offline-run-*')):
        command = [str(Path(sys.executable).with_name('wandb')), 'leet', 'inspect', '--json', str(folder)]
        records = [json.loads(x) for x in subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.splitlines()]
        [run] = [r['run'] for r in records if r['type'] == 'run']
        config = {name: value for name, value in run['config']['update'].items() if name != '_wandb'}
        rows = [(r['history']['step'].get('num', 0), r['history']['item']) for r in records if r['type'] == 'history']
        rows = [(step, {name: x for name, x in row.items() if name[0] != '_'}) for step, row in rows]
        found.append(((run['project'], run['display_name'], run['run_id'], config), rows))
    return found


def of_trackio(directory):
    """(project, names of its runs) and (step, numbers) of every row."""
    code = (
        'import json, sys, trackio; store, project = trackio.SQLiteStorage, sys.argv[1]; runs = [r.name for r in '
        'trackio.Api().runs(project)]; print(json.dumps([runs, store.get_logs(project, runs[0]), store.get_run_config(project, '
        'runs[0])], default=str))'
    )
    command = [sys.executable, '-c', code, sinks.names_of(directory)['project']]
    runs, rows, config = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    rows = [(row['step'], {name: x for name, x in row.items() if name not in ('step', 'timestamp')}) for row in rows]
    return runs, {name: value for name, value in config.items() if name[0] != '_'}, rows


def until_wandb_runs(directory):
    """Until W&B's own process has begun to write."""
    until = time.monotonic() + 60
    while not list((directory / 'sinks').rglob('*.wandb')):
        assert time.monotonic() < until
        time.sleep(0.05)


def lost(directory):
    file = directory / events.EVENTS_FILE
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert all(row['event'] == 'sink lost' for row in rows)
    return [(row['sink'], row['message']) for row in rows]


@pytest.mark.slow
def test_each_sink_holds_the_rows_of_metrics_jsonl_and_a_resumed_run_sends_no_step_twice(directory, monkeypatch):
    monkeypatch.setenv('WANDB_API_KEY', KEY)
    with events.recorded(directory):
        trained(directory, range(6), ('trackio', 'wandb'))
        first = sent(directory)
        assert [step for step, _ in first] == [0, 1, 2, 3, 4, 5]
        trained(directory, range(3, 8), ('trackio', 'wandb'), continue_after=2)  # killed in step 6; its checkpoint was of step 2
    assert lost(directory) == []
    name = sinks.names_of(directory)
    before, after = of_wandb(directory)
    assert before == (('my-runs', 'first', name['id'], CONFIG), first)
    assert after == (('my-runs', 'first', name['id'], CONFIG), sent(directory))  # one W&B run; the newest directory has all of it
    assert of_trackio(directory) == ([f'first-{name["id"]}'], CONFIG, sent(directory))
    assert len(sent(directory)) == 8
    written = [file.read_bytes() for file in directory.rglob('*') if file.is_file()]
    assert len(written) > 10 and not any(KEY.encode() in data for data in written)


@pytest.mark.slow
def test_a_server_of_wandb_is_sent_what_it_lacks_through_the_environments_proxy(directory, monkeypatch):
    server = WandbServer()  # which is the proxy, too: no such host as the address names exists
    name_proxy(server.url, monkeypatch)
    monkeypatch.setenv('WANDB_MODE', 'online')
    monkeypatch.setenv('WANDB_API_KEY', KEY)
    monkeypatch.setenv('WANDB_BASE_URL', 'http://wandb.invalid')
    with events.recorded(directory):
        trained(directory, range(6), ('wandb',))
        trained(directory, range(3, 8), ('wandb',), continue_after=2)
    server.stop()
    assert lost(directory) == [] and server.run_id == sinks.names_of(directory)['id']
    assert [(row['_step'], {name: x for name, x in row.items() if name[0] != '_'}) for row in server.rows] == sent(directory)
    assert [line for lines in server.stored for line in lines] == list(range(8))  # each row was sent once


@pytest.mark.slow
def test_a_sink_that_comes_later_is_sent_the_steps_before(directory):
    trained(directory, range(4), ())
    assert not (directory / 'sinks').exists()
    trained(directory, range(4, 6), ('trackio',), continue_after=3)
    assert of_trackio(directory)[2] == sent(directory) and len(sent(directory)) == 6


@pytest.mark.slow
def test_a_run_that_is_killed_has_sent_what_it_wrote(directory):
    """The process that sends outlives the trainer, and ends by itself."""
    code = (
        f'import os, sys; sys.path[:0] = {sys.path[:3]!r}\nfrom pathlib import Path\nfrom bapo_jax.run.log.metrics import MetricsLog\n'
        f'log = MetricsLog(Path({str(directory)!r}), -1, ("wandb",))\nfor step in range(3): log.write(step, {ROWS[1]!r})\n'
        'os.kill(os.getpid(), 9)'
    )
    assert subprocess.run([sys.executable, '-c', code], timeout=60).returncode == -signal.SIGKILL
    until_wandb_runs(directory)
    with (directory / 'sinks' / 'wandb.lock').open('ab') as lock:
        sinks._wait_for(lock)  # as the next trainer's process does
    [(_, rows)] = of_wandb(directory)
    assert rows == sent(directory) and len(rows) == 3


@pytest.mark.slow
def test_a_sink_that_fails_is_reported_once_and_left_out(directory, monkeypatch):
    """W&B without an account ends at once; trackio without a place for its rows says so in a warning. The rest goes on."""
    monkeypatch.setenv('WANDB_MODE', 'online')
    monkeypatch.setenv('HOME', str(directory))  # no account there
    (directory.parents[1] / 'trackio').write_text('a file where its directory should be')
    with events.recorded(directory):
        log = MetricsLog(directory, -1, ('trackio', 'wandb'))
        started = time.monotonic()
        for step in range(8):
            log.write(step, ROWS[step])
        assert time.monotonic() - started < 1.0
        log._sinks['wandb'].wait(60)
        for step in range(8, 10):
            log.write(step, ROWS[0])
        assert [name for name, _ in lost(directory)] == ['wandb']
        log.close()
    (_, wandb), (name, trackio) = lost(directory)
    assert 'its process ended with status 1: wandb.errors.errors.UsageError: No API key configured' in wandb
    assert name == 'trackio' and 'its process ended with status 1: RuntimeError: trackio failed to flush' in trackio
    assert 'metrics.jsonl has every row' in trackio
    assert [row['step'] for row in read_metrics(directory)] == list(range(10))


@pytest.mark.slow
def test_the_end_of_a_run_waits_for_a_stuck_sink_no_longer_than_its_deadline(directory, monkeypatch):
    monkeypatch.setattr(sinks, 'FINISH_S', 1.0)
    monkeypatch.setenv('BAPO_ROLLOUT_TOKEN', KEY)
    with events.recorded(directory):
        log = MetricsLog(directory, -1, ('wandb',))
        log.write(0, ROWS[0])
        group = log._sinks['wandb'].pid
        until_wandb_runs(directory)
        assert KEY.encode() not in Path(f'/proc/{group}/environ').read_bytes()
        os.killpg(group, signal.SIGSTOP)
        started = time.monotonic()
        log.close()
        assert 1.0 <= time.monotonic() - started < 5.0
    [(name, message)] = lost(directory)
    assert name == 'wandb' and 'it had not accepted the last rows after 1 s' in message
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # W&B's own process is gone too, once its new parent has seen to it
            os.killpg(group, 0)
            time.sleep(0.05)
    [row] = read_metrics(directory)
    assert {'time': row['time'], 'step': 0, **ROWS[0]} == row


def test_rows_are_read_as_they_are_written(tmp_path):
    """Half a row is none yet, and what was written before the end is read."""
    path, looks = tmp_path / 'metrics.jsonl', iter(['"a": [1, null]}\n{"step"', ': 4, "b": 2.5, "c": null}\n', '{"step": 5'])
    path.write_text('{"step": 3, ')

    def ended(seconds):
        more = next(looks)
        with path.open('a') as f:
            f.write(more)
        return more == '{"step": 5'

    assert list(sinks.rows_as_they_come(path, ended)) == [(3, {'a/0': 1}), (4, {'b': 2.5})]


def test_what_is_not_installed_or_not_known_is_named_before_work_starts(tmp_path):
    with pytest.raises(ValueError, match=r"log\.sinks has 'clearml', which is not installed; run `pip install clearml`, or"):
        sinks.check_sinks(('wandb', 'clearml'))
    c = default_config()
    c.model.path, c.log.sinks = 'x', ('wandb', 'clearml', 'wandb')
    with pytest.raises(ValueError, match=r"(?s)log\.sinks has 'clearml', which is unknown.*names a sink twice"):
        resolve(c)


@pytest.mark.parametrize('text', ['', '{"project": "a", "name": "b"}', '[]', '{"project": "a", "name": "b", "id": 3}', '[' * 9999])
def test_a_damaged_name_of_the_run_is_named(text, tmp_path):
    (tmp_path / 'sinks').mkdir()
    (tmp_path / 'sinks' / 'run.json').write_text(text)
    with pytest.raises(ValueError, match=r'sinks/run\.json is damaged \(.*restore it, or remove it to start a new run'):
        sinks.check_sinks(('wandb',), tmp_path)


def test_a_run_keeps_its_name_where_its_directory_moves_and_two_of_a_name_differ(tmp_path):
    a, b = (tmp_path / folder / 'runs' / 'x' for folder in 'ab')
    kept, other = sinks.names_of(a), sinks.names_of(b)
    assert kept['project'] == other['project'] == 'runs' and kept['name'] == other['name'] == 'x' and kept['id'] != other['id']
    a.rename(tmp_path / 'moved')
    assert sinks.names_of(tmp_path / 'moved') == kept


def test_a_run_goes_on_with_other_sinks(tmp_path):
    c = default_config()
    claim(tmp_path, c, {}, {})
    c.log.sinks = ('trackio',)
    assert claim(tmp_path, c, {}, {}) == {'log.sinks': ([], ['trackio'])}
