"""What a command computes on: the devices that are wanted, or an error in place of hours on the CPU."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest
from in_dry_runs import config
from small_run import ROOT, small_config

from bapo_jax import evaluate
from configs.making import sft
from bapo_jax.cluster import devices
from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.dry_run import command as dry_run
from bapo_jax.evaluate import load_for_evaluation
from bapo_jax.learner.build import build_learner
from bapo_jax.models import hf
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE
from bapo_jax.weights.publish import publish

BASE = ROOT / 'configs' / 'quickstart_base'


@pytest.fixture
def jax_finds(monkeypatch):
    """Has JAX find devices of that platform, asked for `platforms`, with these packages installed."""

    def finds(platform, platforms=None, installed=()):
        monkeypatch.setattr(jax, 'devices', lambda: [types.SimpleNamespace(platform=platform)])
        monkeypatch.setattr(devices, '_folder_of', lambda package: Path('/packages') if package in installed else None)
        jax.config.update('jax_platforms', platforms)

    before = jax.config.jax_platforms
    yield finds
    jax.config.update('jax_platforms', before)


@pytest.mark.parametrize('package', ['jax-cuda13-plugin', 'jax-cuda12-plugin', 'libtpu'])
def test_an_accelerators_jax_does_not_fall_back_on_the_cpu(package, jax_finds):
    jax_finds('cpu', installed=[package])
    with pytest.raises(ValueError, match=f'{package} is installed, but .* fell back on the CPU; .*nvidia-smi.*JAX_PLATFORMS=cpu'):
        make_mesh(1, -1, 1)
    for asked in ({'platforms': 'cpu'}, {'platforms': 'cuda,cpu'}):  # JAX itself refuses to start without the first of several
        jax_finds('cpu', installed=[package], **asked)
        assert len(devices.present()) == 1
    jax_finds('cpu', installed=[package])
    assert len(devices.present('cpu')) == 1
    jax_finds('gpu', installed=[package])
    assert len(devices.present()) == 1


def test_a_compiler_for_absent_devices_that_stays_in_pythonpath_is_named(jax_finds, monkeypatch):
    monkeypatch.setenv('PYTHONPATH', 'elsewhere::/packages')
    jax_finds('cpu', installed=['jax-cuda13-plugin'])
    with pytest.raises(ValueError, match='PYTHONPATH names /packages, where JAX finds jax-cuda13-plugin, .* remove it from PYTHONPATH'):
        make_mesh(1, -1, 1)
    jax_finds('cpu', 'cpu', installed=['jax-cuda13-plugin'])
    assert len(devices.present()) == 1


def test_a_platform_that_is_asked_for_is_the_one_or_an_error(jax_finds):
    jax_finds('cpu')
    assert len(devices.present('cpu')) == len(devices.present()) == 1
    with pytest.raises(ValueError, match='mesh.platform=gpu, but JAX computes on the cpu; .*driver 580 or newer'):
        devices.present('gpu')


@pytest.mark.parametrize(
    'raised, said',
    [
        (RuntimeError('Unable to initialize backend cuda: no driver\nmore of it\n'), r'\(Unable to initialize backend cuda: no driver\)'),
        (RuntimeError(), r'\(no such device\)'),
        (AssertionError(), r'\(no such device\)'),  # of a platform whose plugin is not installed
    ],
)
def test_a_platform_that_does_not_start_is_one_line_that_names_it(raised, said, jax_finds, monkeypatch):
    def fails():
        raise raised

    jax_finds('cpu', platforms='cuda')
    monkeypatch.setattr(jax, 'devices', fails)
    with pytest.raises(ValueError, match=f'^JAX_PLATFORMS=cuda: JAX cannot start this platform {said}; .*nvidia-smi.*driver 580 or newer.*$'):
        devices.present()


def test_the_cpu_is_meant_only_if_it_is_named(jax_finds):
    """Whole words of JAX_PLATFORMS count. An accelerator that mesh.platform asks for is named first."""
    for asked in ('cuda', 'notcpu'):
        jax_finds('cpu', platforms=asked, installed=['libtpu'])
        with pytest.raises(ValueError, match='libtpu is installed, but JAX found no such device and fell back on the CPU'):
            devices.present()
    with pytest.raises(ValueError, match='mesh.platform=tpu, but JAX computes on the cpu'):
        devices.present('tpu')
    jax_finds('cpu', installed=[])
    assert len(devices.present()) == 1


def test_an_installed_package_is_one_that_pip_knows():
    assert (devices._folder_of('jax') / 'jax' / '__init__.py').is_file() and devices._folder_of('no-such-package') is None


def test_a_learner_and_a_dry_run_are_made_on_the_configs_platform_alone(benchmark):
    c = small_config('bapo_tuned', benchmark)
    for c.mesh.platform in ('gpu', 'tpu'):
        for make in (build_learner, lambda c: dry_run.dry_run(c, '')):
            with pytest.raises(ValueError, match=f'mesh.platform={c.mesh.platform}, but JAX computes on the cpu'):
                make(c)
    c = config(1)
    c.mesh.platform = 'cpu'
    assert dry_run.find_target('', c).platform == 'cpu'


@pytest.mark.parametrize(('engine', 'asked', 'wanted'), [
    ('jax', None, 'gpu'),
    ('jax', 'cpu', ''),  # whoever asks for the CPU knows
    ('vllm', None, ''),  # servers answer, and the CPU hands them the policy
])  # fmt: skip
def test_a_runs_policy_answers_on_the_runs_platform_or_on_that_asked_for(engine, asked, wanted, tmp_path, jax_finds, monkeypatch):
    """As evaluate and sample load it."""
    (tmp_path / 'config.json').write_text(json.dumps({'model': {'path': str(BASE)}, 'mesh': {'platform': 'gpu'}}))
    model, devices, seen = hf.read_config(BASE), jax.devices(), []
    policy = publish(tmp_path / 'policy', 7, hf.load_params(BASE, model), model, 'float32')
    monkeypatch.setenv(TOKEN_VARIABLE, 'x')
    jax_finds('cpu', platforms=asked)
    if wanted:
        with pytest.raises(ValueError, match='mesh.platform=gpu, but JAX computes on the cpu; .*To evaluate .*JAX_PLATFORMS=cpu'):
            load_for_evaluation(policy, None, engine, None)
    monkeypatch.setattr(evaluate, 'present', lambda platform='': seen.append(platform) or devices)
    load_for_evaluation(policy, None, engine, ['http://there:8000'] if engine == 'vllm' else None)
    assert seen == [wanted]


def test_a_base_is_not_trained_on_the_cpu_by_an_accelerators_jax(tmp_path, jax_finds, monkeypatch):
    monkeypatch.setattr(sft, 'FLAGS', types.SimpleNamespace(output=str(tmp_path / 'base')))
    jax_finds('cpu', installed=['jax-cuda13-plugin'])
    with pytest.raises(SystemExit, match='error: jax-cuda13-plugin is installed, but .* fell back on the CPU'):
        sft.main(None)
    assert not (tmp_path / 'base').exists()


@pytest.mark.slow
def test_a_run_on_a_missing_platform_ends_in_one_line_before_it_claims_its_directory(tmp_path):
    words = [sys.executable, '-m', 'bapo_jax.train', '--config=configs/quickstart.py', f'--workdir={tmp_path / "run"}']
    environment = {**os.environ, 'JAX_PLATFORMS': 'cuda', 'CUDA_VISIBLE_DEVICES': ''}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    assert 'error: JAX_PLATFORMS=cuda: JAX cannot start this platform' in done.stderr and not (tmp_path / 'run' / 'config.json').exists()


@pytest.mark.parametrize(('flag', 'level'), [('--dry_run', '3'), ('--workdir=x', 'None')])
def test_xlas_notes_on_a_step_that_does_not_fit_stay_out_of_a_dry_run(flag, level):
    """They come in the middle of its table, of settings that it only tries. XLA reads the variable when JAX is imported."""
    told = 'import os, bapo_jax; print(os.environ.get("TF_CPP_MIN_LOG_LEVEL"))'
    environment = {name: value for name, value in os.environ.items() if name != 'TF_CPP_MIN_LOG_LEVEL'}
    done = subprocess.run([sys.executable, '-c', told, flag], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == level, done.stderr
