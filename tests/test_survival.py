"""What a run survives (docs/operations.md): a stop in the middle of a wait, a full disk, a second trainer, other settings."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest
from small_run import ROOT, metrics, run, small_config

from bapo_jax.rollout.engine import EVALUATION, FRESH, REEVALUATION
from bapo_jax.rollout.jax_engine import JaxEngine
from bapo_jax.run.log import MetricsLog

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('compile_once')]


def config(benchmark, **changes):
    """Hard prompts are re-evaluated between syncs, so the engine changes its policy within a step."""
    parts = {'rollout__sync_every': 3, 'replay__use_x2': True, 'replay__reevaluate_every': 2, 'mesh__data': 1, 'evaluate__every': 3}
    return small_config('bapo_tuned', benchmark, **parts | changes)


@pytest.fixture(scope='module')
def whole(benchmark, tmp_path_factory):
    """(directory, last state) of a run that nothing happened to."""
    workdir = tmp_path_factory.mktemp('whole') / 'run'
    return workdir, run(config(benchmark), workdir)


def signalled_at(monkeypatch, purpose, number):
    """SIGTERM comes while the engine answers the `number`th of its calls for that purpose."""
    ask, calls = JaxEngine.ask, []

    def asked(self, prompts, group_size, sampling, draws):
        if draws[-1].purpose == purpose:
            calls.append(1)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGTERM)
        return ask(self, prompts, group_size, sampling, draws)

    monkeypatch.setattr(JaxEngine, 'ask', asked)


@pytest.mark.parametrize(
    ('purpose', 'number', 'saved', 'overlap'),
    [(FRESH, 3, 2, False), (FRESH, 5, None, True), (REEVALUATION, 1, 1, False), (EVALUATION, 2, 3, False)],
    ids=['generation', 'overlapping generation', 're-evaluation', 'evaluation'],
)  # fmt: skip
def test_a_stop_in_a_wait_saves_what_is_whole_and_shows_in_nothing(
    purpose, number, saved, overlap, whole, benchmark, monkeypatch, tmp_path, capsys
):
    with monkeypatch.context() as patch:
        signalled_at(patch, purpose, number)
        stopped = run(config(benchmark, rollout__overlap=overlap), tmp_path / 'run')
    out = capsys.readouterr().out
    assert stopped.step < 6 and f'stopped after step {stopped.step} of 6; the same command continues' in out
    assert (tmp_path / 'run' / 'checkpoints' / str(stopped.step)).is_dir() and saved in (None, stopped.step)
    last = run(config(benchmark, rollout__overlap=overlap), tmp_path / 'run')
    assert metrics(tmp_path / 'run') == metrics(whole[0])
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), last.theta.params, whole[1].theta.params)))


def test_a_full_disk_ends_the_run_which_goes_on_when_there_is_room(whole, benchmark, monkeypatch, tmp_path):
    write = MetricsLog.write

    def full(self, step, row):
        if step == 3:
            raise OSError(errno.ENOSPC, 'No space left on device', 'metrics.jsonl')
        write(self, step, row)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, 'write', full)
        with pytest.raises(OSError, match='No space left'):
            run(config(benchmark), tmp_path / 'run')
    run(config(benchmark), tmp_path / 'run')
    assert metrics(tmp_path / 'run') == metrics(whole[0])


def test_other_settings_are_amended_on_purpose_and_said(whole, benchmark, tmp_path, caplog):
    workdir = shutil.copytree(whole[0], tmp_path / 'run')
    longer = config(benchmark, steps=7, learner__learning_rate=3e-5)
    with pytest.raises(ValueError, match=r'they differ in learner\.learning_rate\. .*or --amend to change learner\.learning_rate'):
        run(longer, workdir)
    run(longer, workdir, amend=True)
    [row] = [json.loads(line) for line in (workdir / 'events.jsonl').read_text().splitlines()]
    assert (row['event'], row['step'], row['changed']['learner.learning_rate'][1]) == ('settings changed', 6, 3e-5)
    assert 'goes on after step 6 with other settings: learner.learning_rate' in row['message']
    assert metrics(workdir)[-1]['actor/lr'] == pytest.approx(3e-5)


def test_the_command_ends_with_75_and_a_second_one_is_refused(benchmark, tmp_path):
    flags = [
        '--config=configs/quickstart.py', '--config.steps=200', '--config.task.limit=60', '--config.evaluate.at_start=False',
        '--config.evaluate.track_prompts=0', '--config.checkpoint.every=1', f"--config.evaluate.benchmarks=('{benchmark}',)",
        '--config.learner.batch_groups=8', '--config.learner.mini_batch_groups=4', f'--workdir={tmp_path}/run',
    ]  # fmt: skip
    trainer = [sys.executable, '-m', 'bapo_jax.train', *flags]
    quiet = {'cwd': ROOT, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True, 'env': os.environ | {'JAX_PLATFORMS': 'cpu'}}
    with subprocess.Popen(trainer, **quiet) as first:
        deadline = time.monotonic() + 240
        while not (tmp_path / 'run' / 'checkpoints' / '1').is_dir():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        second = subprocess.run(trainer, timeout=240, **quiet)
        assert second.returncode == 1 and f'run is in use by process {first.pid} on ' in second.stderr
        first.send_signal(signal.SIGTERM)
        out, err = first.communicate(timeout=240)
    assert first.returncode == 75 and 'the same command continues' in out and 'Traceback' not in err
    assert not (tmp_path / 'run' / 'lock').exists()

