"""How a rollout server is started. Real servers: test_real_server.py."""

import functools
import json
import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags
from launched import free_ports

from bapo_jax.rollout import serve
from bapo_jax.rollout.vllm import gpus
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE

BASE = Path(__file__).resolve().parents[2] / 'configs' / 'quickstart_base'


def test_the_command_guards_every_route_and_samples_from_the_whole_distribution():
    words = serve.command('configs/quickstart_base', port=1234, python='python', dtype='float32', max_tokens=64)
    options = dict(zip(words, words[1:], strict=False))
    assert options['--host'] == '127.0.0.1' and options['--port'] == '1234'
    assert options['--middleware'] == 'bapo_jax.rollout.vllm.token_guard.TokenGuard'
    assert options['--worker-extension-cls'] == 'bapo_jax.rollout.vllm.worker.PolicyLoader'
    assert options['--generation-config'] == 'vllm' and options['--logprobs-mode'] == 'processed_logprobs'
    assert Path(options['--model']).is_absolute()


def test_no_flag_that_the_command_gives_is_given_again_behind_its_back():
    """Of two vLLM takes the last. Those left to the user take several, or are checked by nobody."""
    words = serve.command(BASE, port=1, max_tokens=64, sequences=8, memory=0.4)
    free = {'--max-num-seqs', '--middleware', '--enable-scale-out', '--disable-uvicorn-access-log', '--hf-overrides'}
    for name in {word for word in words if word.startswith('--')} - free:
        with pytest.raises(ValueError, match=f"vLLM's {name} is set by"):
            serve.command(BASE, port=1, extra=[name, '2'])


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
    serve.check_python('said', 'rollout.server.python')
    said.unlink()
    with pytest.raises(ValueError, match=rf'^rollout.server.python={said} is not an executable file; run `bapo-vllm-env DIR` .* set rollout.server.python=DIR/bin/python'):
        serve.check_python('said', 'rollout.server.python')  # what is named and lacks is no reason to take another
    serve.check_python('', 'rollout.server.python')
    variable.chmod(0o644)
    with pytest.raises(ValueError, match=f'^{serve.PYTHON_VARIABLE}={variable} is not an executable file'):
        serve.check_python('', 'rollout.server.python')


@pytest.mark.parametrize('checkout', [True, False])
def test_without_an_interpreter_the_message_says_how_to_make_one(checkout, pythons, tmp_path):
    if checkout:
        (tmp_path / 'pyproject.toml').touch()
    serve.check_python('', 'rollout.server.python')
    pythons['.venv-vllm/bin/python'].unlink()
    with pytest.raises(ValueError, match=f'^rollout.server.python and {serve.PYTHON_VARIABLE} are not set.* `bapo-vllm-env DIR`') as told:
        serve.check_python('', 'rollout.server.python')
    assert ('make vllm-env' in str(told.value)) == checkout


@pytest.mark.parametrize('extra, overrides, others', [
    ((), {'head_dtype': 'float32'}, []),  # logits as the trainer computes them
    (('--a', '--hf-overrides={"rope_theta": 4e4}', '-b'), {'head_dtype': 'float32', 'rope_theta': 4e4}, ['--a', '-b']),
    (('--hf_overrides', '{"head_dtype": "model"}'), {'head_dtype': 'model'}, []),
    (
        ('--hf-overrides', '{"text_config": {"a": 1, "b": 2}}', '--other', '--hf-overrides', '{"text_config": {"b": 3}}'),
        {'head_dtype': 'float32', 'text_config': {'a': 1, 'b': 3}}, ['--other'],
    ),
])  # fmt: skip
def test_all_overrides_of_a_models_config_are_one_flag(extra, overrides, others):
    name, value, *rest = serve.with_float32_head(extra)
    assert (name, json.loads(value), rest) == ('--hf-overrides', overrides, others)


@pytest.mark.parametrize('value', ['', '[1]', 'rope_theta=1'])
def test_an_override_that_is_no_object_is_refused(value):
    with pytest.raises(ValueError, match='--hf-overrides .*: give a JSON object, such as'):
        serve.with_float32_head(['--hf-overrides', value])


def flag(word):
    """The value of a flag as the command reads it, from --NAME=VALUE."""
    values = flags.FlagValues()
    serve.define_flags(values)
    values(['serve', '--model=DIR', word])
    return values[word[2:].partition('=')[0]].value


@pytest.mark.parametrize(
    'wrong, wanted',
    [
        (('--port=0', '--port=-1', '--port=65536', '--port=abc', '--port=', '--port=8000.0', '--port=1e3'), 'vLLM does not accept it; give a port, 1 to 65535'),
        (('--memory=-1', '--memory=1.5', '--memory=nan', '--memory=40%'), "vLLM does not accept it; give a fraction of the GPU's memory, from 0 to 1"),
        (('--max_tokens=-1', '--max_tokens=many', '--max_tokens=inf'), 'vLLM does not accept it; give a number of tokens, or 0'),
        (('--sequences=-1', '--sequences=0.5'), 'vLLM does not accept it; give a number of responses, or 0'),
        (('--dtype=foo', '--dtype=float16', '--dtype='), 'value should be one of <auto|float32|bfloat16>'),
    ],
)
def test_numbers_that_vllm_would_not_take_are_refused_by_flag(wrong, wanted):
    for word in wrong:
        with pytest.raises(flags.IllegalFlagValueError, match=f'^{re.escape(f"flag {word}: {wanted}")}$'):
            flag(word)


def test_numbers_that_it_takes_or_chooses_are_read():
    for word, value in (('--port=65535', 65535), ('--memory=1', 1.0), ('--memory=0', 0.0), ('--max_tokens=0', 0), ('--sequences=8', 8)):
        assert flag(word) == value


@pytest.mark.parametrize('config, extra, most', [
    ({'max_position_embeddings': 512}, (), 512),
    ({'text_config': {'max_position_embeddings': 512}}, (), 512),
    ({'max_position_embeddings': 512}, ('--hf-overrides={"max_position_embeddings": 900}',), 900),
    ({'text_config': {'max_position_embeddings': 512}}, ('--hf-overrides', '{"text_config": {"max_position_embeddings": 900}}'), 900),
    ({'max_position_embeddings': 512, 'rope_scaling': {'rope_type': 'linear', 'factor': 4}}, (), None),  # vLLM multiplies, or not
    ({}, (), None),
])  # fmt: skip
def test_more_tokens_than_positions_are_refused_unless_vllm_is_told_of_more(config, extra, most, tmp_path, monkeypatch):
    (tmp_path / 'config.json').write_text(json.dumps(config))
    serve.check_length(tmp_path, most or 10**6, extra)
    if most:
        with pytest.raises(ValueError, match=rf'^--max_tokens={most + 1}: the model has only {most} positions .*; give at most {most}'):
            serve.check_length(tmp_path, most + 1, extra)
        monkeypatch.setenv('VLLM_ALLOW_LONG_MAX_MODEL_LEN', '1')
        serve.check_length(tmp_path, most + 1, extra)


def test_an_address_at_which_no_server_can_listen_is_refused():
    with socket.create_server(('127.0.0.1', 0)) as others:
        port = others.getsockname()[1]
        for host in ('127.0.0.1', '192.0.2.1', 'no host', ''):  # taken; of no machine; no name; all addresses, of which one is taken
            with pytest.raises(ValueError, match=f'^--host={host} --port={port}: .*; give an address of this machine and a free port'):
                serve.check_address(host, port)
    serve.check_address('127.0.0.1', port)


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
    words = [sys.executable, '-m', 'bapo_jax.rollout.serve', f'--model={BASE}', f'--python={python}', f'--port={free_ports(1)}']
    assert subprocess.run(words, stdout=its, timeout=60).returncode == 0
    said = os.read(ours, 10_000).decode()
    token = re.search(rf'export {TOKEN_VARIABLE}=(\S+)', said)[1]
    assert len(token) >= 32 and f'served with {token}' in said


@pytest.fixture
def served(monkeypatch):
    """A function: the command line and environment that the command of these flags becomes, on a machine of eight GPUs."""

    def of(*words):
        values, became = flags.FlagValues(), []
        serve.define_flags(values)
        monkeypatch.setattr(serve, 'FLAGS', values)
        monkeypatch.setattr(serve.os, 'execve', lambda python, *rest: became.extend(rest))
        serve.main(values(['serve', f'--model={BASE}', f'--python={sys.executable}', f'--port={free_ports(1)}', *words]))
        return became

    monkeypatch.setenv(TOKEN_VARIABLE, 'ours')
    monkeypatch.setattr(gpus, '_listed', lambda: list('01234567'))
    return of


@pytest.mark.parametrize('words, message', [
    (('--max_tokens=4097',), '--max_tokens=4097: the model has only 4096 positions .*; give at most 4096, .*'),
    (('--port={taken}',), '--host=127.0.0.1 --port=.*: .*; give an address of this machine and a free port'),
    (('--gpus=8',), 'GPU 8: this machine has 8, .*'),
    (('8000',), "8000: only vLLM's own flags are allowed here.*"),
    (('--gpus=0,1', '--', '--tensor-parallel', '2'), '--tensor-parallel: .* write the name of the flag in full'),
    (('--', '--hf-overrides.rope_theta', '40000'), '--hf-overrides.rope_theta: a dotted flag replaces all others.*'),
    (('--', '--config', 'x.yaml'), '--config: flags in a file are not checked.*'),
    (('--gpus=0,1,2',), '4 attention heads cannot be split over 3 GPUs; give the server 1 or 2'),
])  # fmt: skip
def test_what_its_flags_cannot_mean_is_said_before_vllm_is_started(words, message, served):
    with socket.create_server(('127.0.0.1', 0)) as others:
        words = [word.format(taken=others.getsockname()[1]) for word in words]
        with pytest.raises(SystemExit, match=f'^error: {message}$'):
            served(*words)


def test_the_command_hands_its_flags_and_gpus_to_vllm(served, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,1')
    words, environment = served('--gpus=6,7', '--dtype=bfloat16', '--max_tokens=64', '--memory=.4', '--', '--enforce-eager')
    assert words[:3] == [sys.executable, '-m', 'vllm.entrypoints.launchers.api_server.entry']
    assert words[-1] == '--enforce-eager' and environment['CUDA_VISIBLE_DEVICES'] == '6,7' and environment[TOKEN_VARIABLE] == 'ours'
    given = {name: words[words.index(name) + 1] for name in words if name.startswith('--') and name != '--enforce-eager'}
    assert given['--tensor-parallel-size'] == '2' and given['--dtype'] == 'bfloat16' and given['--max-model-len'] == '64'
    assert given['--gpu-memory-utilization'] == '0.4' and '--max-num-seqs' not in words
    words, environment = served('--gpus=all', '--sequences=8')
    assert words[words.index('--tensor-parallel-size') + 1] == '2' and environment['CUDA_VISIBLE_DEVICES'] == '0,1'
    assert words[words.index('--max-num-seqs') + 1] == '8'


def test_what_is_not_said_is_left_to_vllm(served, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3')
    words, environment = served()
    assert words[words.index('--dtype') + 1] == 'auto' and environment['CUDA_VISIBLE_DEVICES'] == '3'
    assert not {'--tensor-parallel-size', '--max-num-seqs', '--max-model-len', '--gpu-memory-utilization'} & {*words}


@pytest.mark.slow
@pytest.mark.parametrize(
    'flags, message',
    [
        ((f'--model={BASE}', '--memory=1.5'), "error: --memory=1.5: vLLM does not accept it; give a fraction of the GPU's memory, from 0 to 1; see `"),
        ((f'--model={BASE}', '--host=0.0.0.0'), f'error: --host=0.0.0.0 is not a loopback address.*set {TOKEN_VARIABLE}'),
        ((f'--model={BASE}', '--host=example.org'), 'not a loopback address'),
        ((f'--model={BASE}', '--python=/nowhere/python'), 'error: --python=/nowhere/python is not an executable file; run `bapo-vllm-env DIR`'),
        (('--model=/nowhere', f'--python={sys.executable}'), "error: --model='/nowhere' is not a directory; give a Hugging Face model directory"),
        ((f'--model={BASE}', f'--python={sys.executable}'), f'error: standard output is not a terminal.* set {TOKEN_VARIABLE}'),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_remedy(flags, message, monkeypatch):
    done = run_serve(*flags, monkeypatch=monkeypatch)
    assert done.returncode == 1 and TOKEN_VARIABLE + '=' not in done.stdout
    assert re.search(message, done.stderr)


def test_from_an_installed_package_the_server_imports_it_and_none_of_the_libraries_beside_it(tmp_path, monkeypatch):
    assert serve.server_environment('token')['PYTHONPATH'].split(os.pathsep)[0] == str(BASE.parents[1])  # a checkout has no others
    site = tmp_path / 'site-packages'
    for name in ('bapo_jax', 'transformers'):
        (site / name).mkdir(parents=True)
        (site / name / '__init__.py').touch()
    monkeypatch.setattr(serve, 'ROOT', site)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    for _ in range(2):  # a second server uses the same folder
        path = serve.server_environment('token')['PYTHONPATH'].split(os.pathsep)
        assert str(site) not in path
        assert [p.name for p in Path(path[0]).iterdir()] == ['bapo_jax'] and (Path(path[0]) / 'bapo_jax' / '__init__.py').is_file()
