"""The Dockerfiles, as far as they can be tried without a container daemon: what they copy is there, what they run is a target."""

import re
import shutil
import subprocess

import pytest
from small_run import ROOT

FILES = ('Dockerfile', 'Dockerfile.vllm')


@pytest.mark.parametrize('name', FILES)
def test_what_an_image_copies_is_there_and_is_all_that_its_set_up_needs(name, tmp_path):
    steps = re.findall(r'^(COPY|RUN|ENTRYPOINT) (.+)$', (ROOT / 'launch' / name).read_text('utf-8'), re.MULTILINE)
    for what, rest in steps:
        if what == 'COPY':
            *sources, target = rest.split()
            assert target == './' or [target] == sources
            for source in sources:
                assert (ROOT / source).exists(), source
                (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, tmp_path / source, dirs_exist_ok=True)
                else:
                    shutil.copy(ROOT / source, tmp_path / source)
        elif what == 'RUN' and rest.startswith('make '):
            # What make would do in a folder that has the copied files alone: a missing one is an error.
            command = re.sub(r'\$\w+', 'cpu', rest).replace('PYTHON=python3.11', 'PYTHON=python3')
            planned = subprocess.run(['make', '-n', *command.split()[1:]], cwd=tmp_path, capture_output=True, text=True)
            assert planned.returncode == 0 and re.search('-m venv|vllm_env.py', planned.stdout), planned.stderr
    assert any(what == 'ENTRYPOINT' and '-m", "bapo_jax.' in rest for what, rest in steps)
