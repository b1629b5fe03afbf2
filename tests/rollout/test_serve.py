"""How a rollout server is started. Real servers: test_real_server.py."""

import functools
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_jax.rollout import serve
from bapo_jax.rollout.token_guard import TOKEN_VARIABLE

BASE = Path(__file__).resolve().parents[2] / 'configs' / 'quickstart_base'


def test_the_command_guards_every_route_and_samples_from_the_whole_distribution():
    words = serve.command('configs/quickstart_base', port=1234, python='python', dtype='float32', max_tokens=64)
    options = dict(zip(words, words[1:], strict=False))
    assert options['--host'] == '127.0.0.1' and options['--port'] == '1234'
    assert options['--middleware'] == 'bapo_jax.rollout.token_guard.TokenGuard'
    assert options['--worker-extension-cls'] == 'bapo_jax.rollout.worker.PolicyLoader'
    assert options['--generation-config'] == 'vllm' and options['--logprobs-mode'] == 'processed_logprobs'
    assert Path(options['--model']).is_absolute()


def test_a_model_that_reads_images_is_served_without_videos_and_one_of_text_as_ever(vl_directory):
    command = functools.partial(serve.command, port=1234, python='python', extra=['--enforce-eager'])
    for_images = ['--limit-mm-per-prompt', '{"video": 0}', '--mm-processor-cache-gb', '1']
    assert command(vl_directory)[-5:] == [*for_images, '--enforce-eager']
    assert not {'--limit-mm-per-prompt', '--mm-processor-cache-gb'} & set(command(BASE))


def run_serve(*flags, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    words = [sys.executable, '-m', 'bapo_jax.rollout.serve', *flags]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_a_generated_token_is_shown_on_a_terminal_and_handed_to_the_server(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    python = tmp_path / 'python'
    python.write_text(f'#!/bin/sh\necho served with ${TOKEN_VARIABLE}\n')
    python.chmod(0o755)
    ours, its = pty.openpty()
    words = [sys.executable, '-m', 'bapo_jax.rollout.serve', f'--model={BASE}', f'--python={python}']
    assert subprocess.run(words, stdout=its, timeout=60).returncode == 0
    said = os.read(ours, 10_000).decode()
    token = re.search(rf'export {TOKEN_VARIABLE}=(\S+)', said)[1]
    assert len(token) >= 32 and f'served with {token}' in said


@pytest.mark.slow
@pytest.mark.parametrize(
    'flags, message',
    [
        ((f'--model={BASE}', '--host=0.0.0.0'), f'error: --host=0.0.0.0 is no loopback address.*set {TOKEN_VARIABLE}'),
        ((f'--model={BASE}', '--host=example.org'), 'no loopback address'),
        ((f'--model={BASE}', '--python=/nowhere/python'), 'error: --python=/nowhere/python does not exist.*make vllm-env'),
        (('--model=/nowhere', f'--python={sys.executable}'), "error: --model='/nowhere' is not a directory; give a Hugging Face model directory"),
        ((f'--model={BASE}', f'--python={sys.executable}'), f'error: standard output is no terminal.* set {TOKEN_VARIABLE}'),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_remedy(flags, message, monkeypatch):
    done = run_serve(*flags, monkeypatch=monkeypatch)
    assert done.returncode != 0 and TOKEN_VARIABLE + '=' not in done.stdout
    assert re.search(message, done.stderr)


def test_from_an_installed_package_the_server_imports_it_and_none_of_the_libraries_beside_it(tmp_path, monkeypatch):
    assert serve.environment('token')['PYTHONPATH'].split(os.pathsep)[0] == str(BASE.parents[1])  # a checkout has no others
    site = tmp_path / 'site-packages'
    for name in ('bapo_jax', 'transformers'):
        (site / name).mkdir(parents=True)
        (site / name / '__init__.py').touch()
    monkeypatch.setattr(serve, 'ROOT', site)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    for _ in range(2):  # a second server uses the same folder
        path = serve.environment('token')['PYTHONPATH'].split(os.pathsep)
        assert str(site) not in path
        assert [p.name for p in Path(path[0]).iterdir()] == ['bapo_jax'] and (Path(path[0]) / 'bapo_jax' / '__init__.py').is_file()
