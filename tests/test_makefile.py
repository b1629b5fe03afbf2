"""What make would do: which environments it makes, from which locks, and which it leaves."""

import re
import shutil
import subprocess

import pytest
from small_run import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def planned(tmp_path):
    """A function of make's words, and of the finished environments that are there: the commands that it would run."""
    shutil.copy(ROOT / 'Makefile', tmp_path)
    shutil.copytree(ROOT / 'locks', tmp_path / 'locks')
    (tmp_path / 'bapo_jax' / 'rollout' / 'vllm').mkdir(parents=True)
    shutil.copy(ROOT / 'bapo_jax' / 'rollout' / 'vllm' / 'environment.py', tmp_path / 'bapo_jax' / 'rollout' / 'vllm')

    def plan(*words, there=()):
        for marker in there:
            (tmp_path / marker).parent.mkdir(exist_ok=True)
            (tmp_path / marker).touch()
        done = subprocess.run(['make', '-n', 'PYTHON=python3', *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return plan


@pytest.mark.parametrize('word, said', [('JAX=gpu', 'JAX=gpu: choose one of cpu, cuda, cuda12 and tpu'), ('VLLM=gpu', 'VLLM=gpu: choose cpu or cuda')])
def test_a_build_that_does_not_exist_is_refused(word, said):
    make = ['make', '-n', '--no-print-directory', 'PYTHON=python3', 'train-vllm', word]  # a make in a make names its folder
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and said in done.stderr and not done.stdout


CUDA = ('.venv/ready-cuda', '.venv/ready-test', '.venv-vllm/ready-cuda')


@pytest.mark.parametrize(
    'words, there, trainer, vllm',
    [
        ((), (), r'-r locks/py3\d+\.txt *$', 'cpu'),
        (('JAX=cuda', 'VLLM=cuda'), (), r'-r locks/(py3\d+)\.txt -r locks/cuda-\1\.txt$', 'cuda'),
        ((), CUDA, None, None),
        (('JAX=cuda12', 'VLLM=cpu'), CUDA, r'-r locks/(py3\d+)\.txt -r locks/cuda12-\1\.txt$', 'cpu'),
    ],
)
def test_an_environment_that_is_there_is_kept_unless_another_is_asked_for(words, there, trainer, vllm, planned):
    said = planned('train-vllm', *words, there=there)
    assert 'bapo_jax.train' in said
    assert re.search(trainer, said, re.MULTILINE) and 'venv --clear .venv\n' in said if trainer else 'venv --clear' not in said
    assert f'environment.py .venv-vllm --build={vllm}\n' in said if vllm else 'environment.py' not in said
