"""What a run says and ends with (docs/reference/operations.md): other settings, a second trainer, status 75, and no secret in its files.

What it survives, tests/test_faults.py tries.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from small_run import ROOT, metrics, run, small_config

from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE
from bapo_jax.run.directory import read_run_config

pytestmark = pytest.mark.slow
TOKEN = 'a-token-that-nobody-may-read'


@pytest.fixture(scope='module')
def whole(benchmark, tmp_path_factory):
    """The directory of a run of two steps."""
    workdir = tmp_path_factory.mktemp('whole') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        run(small_config('bapo_tuned', benchmark, steps=2), workdir)
    return workdir


def test_the_servers_token_stands_in_no_file_of_a_run(whole):
    files = [file for file in whole.rglob('*') if file.is_file()]
    assert files and not [file for file in files if TOKEN.encode() in file.read_bytes()]


def test_other_settings_are_amended_on_purpose_and_said(whole, benchmark, tmp_path, caplog):
    workdir = shutil.copytree(whole, tmp_path / 'run')
    longer = small_config('bapo_tuned', benchmark, steps=3, learner__learning_rate=3e-5)
    with pytest.raises(ValueError, match=r'they differ in learner\.learning_rate\. .*or --amend to change learner\.learning_rate'):
        run(longer, workdir)
    run(longer, workdir, amend=True)
    [row] = [json.loads(line) for line in (workdir / 'events.jsonl').read_text().splitlines()]
    assert (row['event'], row['step'], row['changed']['learner.learning_rate'][1]) == ('settings changed', 2, 3e-5)
    assert 'continues after step 2 with changed settings: learner.learning_rate' in row['message']
    assert metrics(workdir)[-1]['actor/lr'] == pytest.approx(3e-5)


def test_a_finished_run_that_is_started_again_stays_as_it_is(whole, benchmark, tmp_path):
    """If its end is missing, since the disk was full or the process died, the same command adds a start with one."""
    workdir = shutil.copytree(whole, tmp_path / 'run')
    path = workdir / 'config.json'
    before, ended = path.read_bytes(), read_run_config(path)
    assert run(small_config('bapo_tuned', benchmark, steps=1, log__rollouts_every=9), workdir).step == 2
    assert path.read_bytes() == before and not (workdir / 'events.jsonl').exists()
    del ended['starts'][0]['end']
    path.write_text(json.dumps(ended))
    run(small_config('bapo_tuned', benchmark, steps=2), workdir)
    [row] = [json.loads(line) for line in (workdir / 'events.jsonl').read_text().splitlines()]
    assert (row['event'], row['step']) == ('continued after a crash', 2)
    first, second = read_run_config(path)['starts']
    assert 'end' not in first and (second['step'], second['end']['step'], second['end']['outcome']) == (2, 2, 'finished')


def test_the_command_ends_with_75_and_a_second_one_is_refused(benchmark, tmp_path):
    flags = [
        '--config=configs/quickstart.py', '--config.steps=200', '--config.task.limit=60', '--config.evaluate.at_start=False',
        '--config.evaluate.track_prompts=0', '--config.checkpoint.every=1', f"--config.evaluate.benchmarks=('{benchmark}',)",
        '--config.learner.batch_groups=8', '--config.learner.mini_batch_groups=4', f'--workdir={tmp_path}/run',
    ]  # fmt: skip
    trainer = [sys.executable, '-m', 'bapo_jax.train', *flags]
    quiet = {'cwd': ROOT, 'text': True, 'env': os.environ | {'JAX_PLATFORMS': 'cpu'}}
    quiet |= {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
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
