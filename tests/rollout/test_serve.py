"""How a rollout server is started. Real servers: test_real_server.py."""

import functools
import json
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
    head = ['--hf-overrides', '{"head_dtype": "float32"}']
    assert command(vl_directory)[-7:] == [*for_images, *head, '--enforce-eager']
    assert not {'--limit-mm-per-prompt', '--mm-processor-cache-gb'} & set(command(BASE))


@pytest.fixture
def pythons(tmp_path, monkeypatch):
    """Interpreters by name, in a folder that is no checkout until it has a pyproject.toml."""
    monkeypatch.setattr(serve, 'ROOT', tmp_path)
    monkeypatch.delenv(serve.PYTHON_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    made = {name: tmp_path / name for name in ('said', 'variable', '.venv-vllm/bin/python')}
    for file in made.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o755)
    return made


def test_the_interpreter_is_what_is_said_else_the_variables_else_the_checkouts(pythons, monkeypatch):
    said, variable, checkouts = pythons.values()
    assert serve.python_of() == checkouts and serve.command(BASE, port=1)[0] == str(checkouts)
    monkeypatch.setenv(serve.PYTHON_VARIABLE, str(variable))
    assert serve.python_of() == variable and serve.python_of('said') == said
    assert serve.command(BASE, port=1, python='said')[0] == str(said)
    serve.check_python('said', 'rollout.python')
    said.unlink()
    with pytest.raises(ValueError, match=rf'^rollout.python={said} is no interpreter; `bapo-vllm-env DIR` makes .* rollout.python=DIR/bin/python'):
        serve.check_python('said', 'rollout.python')  # what is named and lacks is no reason to take another
    serve.check_python('', 'rollout.python')
    variable.chmod(0o644)
    with pytest.raises(ValueError, match=f'^{serve.PYTHON_VARIABLE}={variable} is no interpreter'):
        serve.check_python('', 'rollout.python')


@pytest.mark.parametrize('checkout', [True, False])
def test_without_an_interpreter_the_message_says_how_to_make_one(checkout, pythons, tmp_path):
    if checkout:
        (tmp_path / 'pyproject.toml').touch()
    serve.check_python('', 'rollout.python')
    pythons['.venv-vllm/bin/python'].unlink()
    with pytest.raises(ValueError, match=f'^rollout.python and {serve.PYTHON_VARIABLE} are not set.* `bapo-vllm-env DIR`') as told:
        serve.check_python('', 'rollout.python')
    assert ('make vllm-env' in str(told.value)) == checkout


@pytest.mark.parametrize('extra, overrides, others', [
    ((), {'head_dtype': 'float32'}, []),  # logits as the trainer computes them
    (('--a', '--hf-overrides={"rope_theta": 4e4}', '-b'), {'head_dtype': 'float32', 'rope_theta': 4e4}, ['--a', '-b']),
    (('--hf_overrides', '{"head_dtype": "model"}'), {'head_dtype': 'model'}, []),
    (
        ('--hf-overrides', '{"text_config": {"a": 1, "b": 2}}', '--c', '--hf-overrides', '{"text_config": {"b": 3}}'),
        {'head_dtype': 'float32', 'text_config': {'a': 1, 'b': 3}}, ['--c'],
    ),
])  # fmt: skip
def test_all_overrides_of_a_models_config_are_one_flag(extra, overrides, others):
    name, value, *rest = serve.with_float32_head(extra)
    assert (name, json.loads(value), rest) == ('--hf-overrides', overrides, others)


@pytest.mark.parametrize('value', ['', '[1]', 'rope_theta=1'])
def test_an_override_that_is_no_object_is_refused(value):
    with pytest.raises(ValueError, match='--hf-overrides .*: give a JSON object, such as'):
        serve.with_float32_head(['--hf-overrides', value])


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
        ((f'--model={BASE}', '--python=/nowhere/python'), 'error: --python=/nowhere/python is no interpreter; `bapo-vllm-env DIR`'),
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
