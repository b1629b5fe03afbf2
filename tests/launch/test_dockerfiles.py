"""The Dockerfiles, as far as they can be tried without a container daemon: what they copy is there, what they run is a target."""

import re
import shutil
import subprocess

import pytest
from small_run import ROOT

FILES = ('Dockerfile', 'Dockerfile.vllm', 'Dockerfile.cluster')


@pytest.mark.slow
@pytest.mark.parametrize('name', FILES)
def test_what_an_image_copies_is_there_and_is_all_that_its_set_up_needs(name, tmp_path):
    file = (ROOT / 'launch' / name).read_text('utf-8')
    steps = re.findall(r'^(COPY|RUN|ENTRYPOINT|CMD) (.+)$', file, re.MULTILINE)
    builds = dict(re.findall(r'^ARG (\w+)=(\w+)$', file, re.MULTILINE))
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
            command = re.sub(r'\$(\w+)', lambda found: builds[found[1]], rest).replace('PYTHON=python3.11', 'PYTHON=python3')
            planned = subprocess.run(['make', '-n', *command.split()[1:]], cwd=tmp_path, capture_output=True, text=True)
            assert planned.returncode == 0 and re.search('-m venv|environment.py', planned.stdout), planned.stderr
    if name == 'Dockerfile.cluster':  # Kubernetes names the command
        assert steps[-1] == ('CMD', '["bash"]')
    else:
        assert any(what == 'ENTRYPOINT' and '-m", "bapo_jax.' in rest for what, rest in steps)


def test_the_image_of_a_cluster_has_what_its_pods_run():
    """Both environments, and the folder that kubernetes.sh takes for the repository."""
    file = (ROOT / 'launch' / 'Dockerfile.cluster').read_text('utf-8')
    assert re.findall(r'^RUN make (.+) PYTHON=python3\.11$', file, re.MULTILINE) == ['vllm-env VLLM=$VLLM', 'env JAX=$JAX']
    assert re.findall('^ARG (.+)$', file, re.MULTILINE) == ['JAX=cuda', 'VLLM=cuda']
    folder = re.search('^WORKDIR (.+)$', file, re.MULTILINE)[1]
    copied = {word for words in re.findall('^COPY (.+) ', file, re.MULTILINE) for word in words.split()}
    assert {'launch', 'configs', 'bapo_jax', 'locks', 'Makefile'} <= copied
    installed = re.search('install -y --no-install-recommends (.+?) &&', file)[1].split()
    assert {'bash', 'curl', 'make', 'gcc', 'g++'} <= set(installed)
    script = (ROOT / 'launch' / 'kubernetes.sh').read_text('utf-8')
    assert re.search(r'REPO=\$\{REPO:-(.+?)\}', script)[1] == folder
    assert 'Dockerfile.cluster' in script.partition('set -euo')[0]


def test_the_commands_of_trainer_and_server_go_together():
    """They share the machine's network, the token and the folders; no GPU is in both; the trainer asks where the server listens."""
    trainer, server = (
        re.sub(r'\\\n# *', '', re.search(r'docker run (?:.*\\\n)*.*', (ROOT / 'launch' / name).read_text('utf-8'))[0]).split()
        for name in ('Dockerfile', 'Dockerfile.vllm')
    )
    for command in (trainer, server):
        assert '--network=host' in command and command[command.index('-e') + 1] == 'BAPO_ROLLOUT_TOKEN'
    assert [w for w in trainer if w.startswith('$PWD')] == [w for w in server if w.startswith('$PWD')] != []
    gpus = [set(re.search(r'device=([\d,]+)', ' '.join(command))[1].split(',')) for command in (trainer, server)]
    assert all(gpus) and not gpus[0] & gpus[1]
    assert "--config.rollout.servers=\"('http://127.0.0.1:8000',)\"" in trainer and not [w for w in server if w.startswith(('--port', '--host'))]


@pytest.mark.parametrize('name', FILES)
def test_containers_share_more_memory_than_docker_gives(name):
    head = (ROOT / 'launch' / name).read_text('utf-8').partition('FROM ')[0]
    assert re.findall(r'docker run --gpus=\S+ --shm-size=(\w+)', head) == ['16g'] * head.count('docker run')
