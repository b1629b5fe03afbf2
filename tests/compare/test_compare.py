"""bapo-compare: which runs a comparison has, which of them are trained, and how it is refused, stopped and continued."""

import os
import signal
import subprocess
import sys
import time

import pytest
from small_run import ROOT

from bapo_jax.compare import jobs as jobs_lib
from bapo_jax.compare.__main__ import main
from bapo_jax.compare.arms import Arm, arm_name, arms_of, jobs_of, values_in
from bapo_jax.compare.jobs import LOG, RunFailed, check_begun, finish, has_finished
from bapo_jax.machine import stopping

TWO = ['quickstart:grpo', 'quickstart:bapo']


def test_every_config_has_every_combination_of_settings():
    arms = arms_of(TWO, ['learner.learning_rate=1e-5,2e-5', 'config.learner.clip_low=0.1,0.2'], ['--config.task.limit=99'])
    assert len(arms) == 8 and len({arm.name for arm in arms}) == 8
    assert arms[1] == Arm(
        'quickstart grpo learner.learning_rate=1e-5 learner.clip_low=0.2',
        ('--config=quickstart:grpo', '--config.task.limit=99', '--config.learner.learning_rate=1e-5', '--config.learner.clip_low=0.2'),
    )


@pytest.mark.parametrize('text, values', [
    ('1,2', ['1', '2']), ('(1,2),(3,4)', ['(1,2)', '(3,4)']), ("'a,b', c", ["'a,b'", 'c']), ('[1,2]', ['[1,2]']), ('x', ['x']),
])  # fmt: skip
def test_a_comma_inside_brackets_or_quotes_separates_no_values(text, values):
    assert values_in(text) == values


@pytest.mark.parametrize('config, name', [('quickstart:grpo', 'quickstart grpo'), ('configs/math.py', 'math'), ('/a/mine.py:dapo', 'mine dapo')])
def test_an_arm_is_named_by_its_config(config, name):
    assert arm_name(config) == name


def test_runs_come_seed_by_seed_with_directories_of_their_own(tmp_path):
    jobs = jobs_of(arms_of(TWO, ['learner.learning_rate=1e-5'], []), 2, 7, tmp_path)
    assert [(job.arm.split()[1], job.seed) for job in jobs] == [('grpo', 0), ('bapo', 0), ('grpo', 1), ('bapo', 1)]
    assert len({job.workdir for job in jobs}) == 4 and {job.steps for job in jobs} == {7}
    assert jobs[0].workdir == tmp_path / 'quickstart_grpo_learner.learning_rate=1e-5_seed0'
    assert jobs[0].flags[-2:] == ('--config.steps=7', '--config.seed=0')
    [own] = jobs_of(arms_of(['quickstart'], [], ['--config.steps=9']), 1, None, tmp_path)
    assert own.steps == 9 and own.code == {}


def test_a_function_of_the_users_is_a_setting_whose_source_belongs_to_the_run(tmp_path, monkeypatch):
    (tmp_path / 'my_compared.py').write_text('def half(rewards): return rewards / 2')
    monkeypatch.syspath_prepend(tmp_path)
    builtin, mine = jobs_of(arms_of(['quickstart:grpo'], ['learner.advantage=group_std,my_compared:half'], []), 1, 3, tmp_path)
    assert builtin.code == {} and mine.code.keys() == {'my_compared'} and mine.workdir.name.endswith('my_compared_half_seed0')


@pytest.mark.parametrize('arguments, message', [
    (['quickstart:grpp'], "method 'grpp' is unknown"),
    (['quickstrat'], "'quickstrat' is neither a config"),
    ([*TWO, '--set=learner.lr=1'], r'--config\.learner\.lr=1: no such field'),
    ([*TWO, '--set=learner.learning_rate=fast'], 'could not convert'),
    ([*TWO, '--set=learner.learning_rate=-1'], r'learner\.learning_rate=-1\.0'),
    ([*TWO, '--set=learner.learning_rate'], r'--set=learner\.learning_rate: write --set=FIELD=VALUE'),
    ([*TWO, '--seeds=0'], '--seeds and --steps must be at least 1'),
    ([*TWO, '--steps=0'], '--seeds and --steps must be at least 1'),
    ([*TWO, '--config.steps=0'], 'quickstart grpo: steps=0, so the length is epochs=3; give --steps=N'),
    (['quickstart:bapo', 'quickstart:bapo'], 'quickstart bapo is given twice'),
    ([*TWO, '--config.stepz=3'], r'--config\.stepz=3: no such field'),
    ([*TWO, '--config.seed=3'], 'seed: every run has a seed of its own; give --seeds=N'),
    ([*TWO, '--set=seed=3,4'], 'seed: every run has a seed of its own'),
    ([*TWO, '--steps=3', '--config.steps=5'], '--steps and --config.steps are both given'),
    ([*TWO, '--learning_rate=3'], '--learning_rate=3: unknown flag'),
])  # fmt: skip
def test_what_cannot_run_is_refused_before_any_run(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setattr('bapo_jax.compare.__main__.train_missing', lambda _: pytest.fail('trained'))
    with pytest.raises(SystemExit, match=message):
        main([*arguments, f'--workdir={tmp_path / "runs"}'])
    assert not (tmp_path / 'runs').exists()


@pytest.fixture
def job(tmp_path):
    [made] = jobs_of(arms_of(['quickstart:grpo'], [], []), 1, 3, tmp_path)
    return made


def pretend(job, monkeypatch, script: str) -> None:
    """The run's command is `script`, a program of the shell in the run directory."""
    real = subprocess.Popen
    monkeypatch.setattr(jobs_lib.subprocess, 'Popen', lambda command, **how: real(['sh', '-c', script], cwd=job.workdir, **how))


def test_a_run_that_has_finished_is_not_trained_again_unless_its_command_changed(job, monkeypatch):
    pretend(job, monkeypatch, "mkdir -p evals; touch evals/000003.json; echo '{\"step\": 1, \"critic/score/mean\": 0}' > metrics.jsonl; sleep .1")
    assert not has_finished(job)
    seen = []
    finish(job, seen.append)
    assert has_finished(job) and seen and jobs_lib.steps_done(job) == 1
    assert not has_finished(job._replace(flags=(*job.flags, '--config.learner.clip_low=0.1')))
    assert not has_finished(job._replace(steps=4))
    assert not has_finished(job._replace(code={'my_method': '0123456789abcdef'}))


def test_a_signal_while_a_run_is_started_stops_it_too(job, monkeypatch):
    """Else the command would end, and its run go on alone."""
    pretend(job, monkeypatch, 'exec sleep 60')
    pretended = subprocess.Popen

    def start(command, **how):
        os.kill(os.getpid(), signal.SIGTERM)
        return pretended(command, **how)

    monkeypatch.setattr(jobs_lib.subprocess, 'Popen', start)
    began = time.monotonic()
    with pytest.raises(stopping.Stopped):
        finish(job, lambda done: None)
    assert time.monotonic() - began < 30


def test_a_run_of_another_comparison_is_not_continued(job, monkeypatch):
    """Else a comparison of 200 steps would train the runs of one of 3 further, and no page would tell."""
    check_begun(job)
    pretend(job, monkeypatch, 'echo {} > config.json')
    finish(job, lambda done: None)
    check_begun(job)
    for other in (job._replace(flags=(*job.flags, '--config.evaluate.every=2')), job._replace(code={'my_method': '0123456789abcdef'})):
        with pytest.raises(ValueError, match=r'was begun with other settings, or another version of your code; .*\n    bapo-train'):
            check_begun(other)


def test_a_run_that_fails_ends_the_comparison_with_what_it_said(job, monkeypatch):
    pretend(job, monkeypatch, 'echo no such file; exit 1')
    with pytest.raises(RunFailed, match=r'failed with status 1; mend what its train\.log says.*\n(.*\n)*    no such file'):
        finish(job, lambda done: None)
    assert not has_finished(job)


def test_a_signal_goes_on_to_the_run(job, monkeypatch):
    pretend(job, monkeypatch, f"trap 'echo saved; exit {stopping.STATUS}' TERM; for i in 1 2 3 4 5 6 7 8 9; do sleep 1; done")
    sent = []

    def send(done):
        if not sent:
            time.sleep(0.3)  # until the shell has its trap
            sent.append(os.kill(os.getpid(), signal.SIGTERM))

    with pytest.raises(stopping.Stopped):
        finish(job, send)
    assert 'saved' in (job.workdir / LOG).read_text()


@pytest.mark.slow
def test_a_comparison_is_stopped_continued_and_reported(tmp_path, benchmark):
    """As people start it, in an empty folder: two methods, one seed, stopped in the first run."""
    small = ('task.limit=60', 'learner.batch_groups=8', 'learner.mini_batch_groups=8', 'evaluate.samples=2', 'evaluate.track_prompts=0')
    command = [
        sys.executable, '-m', 'bapo_jax.compare', 'quickstart:grpo', 'quickstart:bapo_tuned', '--seeds=1', '--steps=2',
        f"--config.evaluate.benchmarks=('{benchmark}',)", *(f'--config.{field}' for field in small),
    ]  # fmt: skip
    env = os.environ | {'PYTHONPATH': str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as started:
        log = tmp_path / 'runs' / 'compare' / 'quickstart_grpo_seed0' / LOG
        deadline = time.monotonic() + 120
        while not (log.is_file() and 'prompts' in log.read_text().partition('\n')[2]) and time.monotonic() < deadline:
            time.sleep(0.2)
        started.send_signal(signal.SIGTERM)
        said = started.communicate(timeout=120)[0]
    assert started.returncode == stopping.STATUS and 'stopped; the same command continues' in said
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert '2 runs of 2 steps, 2 of them to train' in done.stdout
    page = (tmp_path / 'runs' / 'compare' / 'compare.html').read_text()
    assert 'grpo' in page and 'bapo_tuned' in page
    again = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert '2 runs of 2 steps, 0 of them to train' in again.stdout
