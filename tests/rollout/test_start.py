"""Which engine a config names. Real servers: test_real_server.py."""

import os
import re
import signal
import threading
import time
import types

import pytest

from bapo_jax.cluster.devices import POOL
from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.config import default_config, resolve
from bapo_jax.machine import stopping
from bapo_jax.rollout import start
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import room_for
from bapo_jax.rollout.schedule import Schedule
from bapo_jax.rollout.vllm.supervise import ServerFailed
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE
from bapo_jax.tasks.sight import Sight


def config(policy, **fields):
    c = default_config()
    c.model.path = str(policy.path)
    c.rollout.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
    return resolve(c)


def engine_of(c, policy, workdir):
    return start.start_engine(c, policy.config, policy.graph, (3,), make_mesh(1, 1, 1), workdir)


def test_the_in_process_engine_starts_nothing_and_has_no_servers(policy, tmp_path):
    engine = engine_of(config(policy), policy, tmp_path)
    assert isinstance(engine, JaxEngine) and engine.servers == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('share, said', [(0.3, ''), (1e-6, 'rollout.cache_memory=1e-06 holds the KV cache of only {} of rollout.rows=256 .* set rollout.rows={},')])
def test_slots_that_do_not_fit_are_said_before_the_first_step(share, said, policy, tmp_path, monkeypatch, capsys):
    """A share of a megabyte."""
    monkeypatch.setattr(start, 'device_memory', lambda _: 10**12)
    c = config(policy, cache_memory=share)
    engine_of(c, policy, tmp_path)
    limits = start.cache_limits(c, 1, 'cpu', 10**12)
    fit = room_for(policy.config, limits, 256, c.rollout.group_size, limits.prompt_tokens, c.rollout.max_response_tokens).slots
    assert 0 < fit < 256 if said else fit == 256
    assert re.fullmatch(said.format(fit, fit) and f'{said.format(fit, fit)}.*\n', capsys.readouterr().err)


def test_listed_servers_are_asked_with_the_token_of_the_environment(policy, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, 'a token')
    monkeypatch.setattr(start, 'SupervisedServer', lambda *_, **__: pytest.fail('a server was started'))
    made = []
    monkeypatch.setattr(start, 'VllmEngine', lambda *args, **fields: made.append((args, fields)) or 'engine')
    urls = ('http://127.0.0.1:9', 'http://127.0.0.1:10')
    assert engine_of(config(policy, engine='vllm', servers=urls, concurrency=3), policy, tmp_path) == 'engine'
    [((servers, directory, model), fields)] = made
    assert (servers, directory, model) == (list(urls), tmp_path / 'policy', policy.config)
    assert (fields['token'], fields['concurrency'], fields['stop_tokens']) == ('a token', 3, (3,))


def test_without_servers_one_is_started_and_its_token_used(policy, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    started, made = [], []

    class Started:
        token = 'its own'

        def __init__(self, model, log, **fields):
            started.append((model, log, fields))

        def start(self, given_up):
            started.append('started')

    monkeypatch.setattr(start, 'SupervisedServer', Started)
    monkeypatch.setattr(start, 'VllmEngine', lambda servers, *_, token, **__: made.append(([type(s) for s in servers], token)) or 'engine')
    c = config(
        policy, engine='vllm', max_prompt_tokens=20, max_response_tokens=30, server__args=('--enforce-eager',), server__python='/its/python',
        server__memory=0.35, dtype='float32', deadline_s=77.0,
    )  # fmt: skip
    assert engine_of(c, policy, tmp_path) == 'engine'
    (model, log, fields), last = started
    assert fields['gpus'] == () and fields['python'] == '/its/python'
    assert (fields['memory'], fields['dtype'], fields['deadline_s']) == (0.35, 'float32', 77.0)
    assert (model, log, last) == (str(policy.path), tmp_path / 'server.log', 'started')
    assert fields['max_tokens'] == 50 and fields['extra'] == ('--enforce-eager',)
    assert made == [([Started], 'its own')] and 'starting a vLLM server' in capsys.readouterr().out

    c.model.max_positions, c.evaluate.max_response_tokens = 64, 44
    engine_of(c, policy, tmp_path)
    fields = started[-2][2]
    assert fields['max_tokens'] == 64 and fields['extra'] == ('--hf-overrides', '{"max_position_embeddings": 64}', '--enforce-eager')


def test_only_servers_that_are_started_want_an_interpreter(policy, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, 'a token')
    missing = {'server__python': '/nowhere/python'}
    start.check_start(config(policy, **missing))
    start.check_start(config(policy, engine='vllm', servers=('http://127.0.0.1:9',), **missing))
    with pytest.raises(ValueError, match='rollout.server.python=/nowhere/python is not an executable file'):
        start.check_start(config(policy, engine='vllm', **missing))


def test_what_a_server_would_refuse_is_refused_before_any_is_started(policy, monkeypatch):
    monkeypatch.setattr(start, 'check_python', lambda *_: None)
    there = {'engine': 'vllm', 'gpus': ('0', '1')}
    start.check_start(config(policy, **there))
    for wrong, message in (
        ({'server__args': ('--hf-overrides', 'x=1')}, '--hf-overrides x=1: give a JSON object'),
        ({'gpus': ('0', '1,2,3')}, f'{policy.config.num_heads} attention heads cannot be split over 3 GPUs'),
    ):
        with pytest.raises(ValueError, match=message):
            start.check_start(config(policy, **{**there, **wrong}))
    start.check_start(config(policy, server__args=('--hf-overrides', 'x=1')))  # nobody is given them


def test_a_server_that_is_started_has_the_trainers_sizes_of_images(vl_directory, tmp_path, monkeypatch):
    started = []

    class Started:
        def __init__(self, model, log, *, extra, **fields):
            started.append(extra)

        def start(self, given_up):
            pass

    monkeypatch.setattr(start, 'SupervisedServer', Started)
    c = default_config()
    c.model.update({'path': str(vl_directory), 'max_positions': 2048})
    start.start_servers(c, tmp_path, Sight(vl_directory, 265, most_pixels=28 * 28 * 20))
    assert started == [(
        '--hf-overrides', '{"text_config": {"max_position_embeddings": 2048}}',
        '--mm-processor-kwargs', '{"size": {"shortest_edge": 3136, "longest_edge": 15680}}',
    )]  # fmt: skip


def test_every_word_of_gpus_gets_a_server_and_all_have_one_token(policy, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    together = threading.Barrier(2)  # both start at once

    class Started:
        def __init__(self, model, log, *, gpus, token, **fields):
            self.log, self.gpus, self.token = log, gpus, token

        def start(self, given_up):
            together.wait(10)

    monkeypatch.setattr(start, 'SupervisedServer', Started)
    servers = start.start_servers(config(policy, engine='vllm', gpus=(1, '6,7')), tmp_path)
    assert [(s.gpus, s.log.name) for s in servers] == [(('1',), 'server1.log'), (('6', '7'), 'server6-7.log')]
    assert len({s.token for s in servers}) == 1 and servers[0].token
    assert 'starting 2 vLLM servers' in capsys.readouterr().out


@pytest.fixture
def starting(policy, tmp_path):
    """A config of two servers that are always starting, unless `dies` of them is 1: then that one ends. Each leaves a file of its name."""
    python = tmp_path / 'python'
    python.write_text(
        f'#!/bin/sh\ncd {tmp_path}\ntouch begun$CUDA_VISIBLE_DEVICES\n[ ! -e dies$CUDA_VISIBLE_DEVICES ] || exit 3\n'
        'sleep 20 &\nwait\ntouch ended$CUDA_VISIBLE_DEVICES\n'
    )
    python.chmod(0o755)
    return config(policy, engine='vllm', gpus=('0', '1'), server__python=str(python), deadline_s=600.0)


def test_a_signal_while_servers_start_ends_them_and_the_run(starting, tmp_path, capfd):
    def both_start():
        while len([*tmp_path.glob('begun*')]) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=both_start, daemon=True).start()
    with pytest.raises(SystemExit) as ended, stopping.on_signal(600.0):
        start.start_servers(starting, tmp_path)
    assert ended.value.code == stopping.STATUS and 'stopped while starting, before any new step; the same command continues' in capfd.readouterr().err
    assert not [*tmp_path.glob('ended*')]  # they were not waited for


def test_of_two_servers_one_that_ends_ends_the_start_of_the_other(starting, tmp_path):
    (tmp_path / 'dies0').touch()
    with pytest.raises(ServerFailed, match='the server ended with status 3'):
        start.start_servers(starting, tmp_path)
    assert not [*tmp_path.glob('ended*')]


@pytest.mark.parametrize(
    'visible, gpus, memory, taken',
    [
        (None, ('2', '3'), 0.0, None),  # JAX has 0 and 1
        (None, ('2,3',), 0.0, None),
        (None, ('1', '2'), 0.0, '0, 1'),
        (None, ('2', '3,1'), 0.0, '0, 1'),
        (None, ('',), 0.0, '0, 1'),
        ('4,5', ('0', '1'), 0.0, None),  # numbers are CUDA's, whatever this process sees
        ('4,5', ('5',), 0.0, '4, 5'),
        (None, ('',), 0.4, None),  # a share of the card is set aside for the server
        (None, ('',), 0.5, 'together more than all of it'),  # beside JAX's
        (None, ('1',), 0.5, 'together more than all of it'),
        (None, ('2', '3'), 0.9, None),  # of cards that JAX does not have
    ],
)
def test_a_gpu_that_jax_has_taken_is_refused(visible, gpus, memory, taken, monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    monkeypatch.setattr(start.jax, 'default_backend', lambda: 'gpu')
    monkeypatch.setattr(start.jax, 'local_devices', lambda: [types.SimpleNamespace(local_hardware_id=i) for i in range(2)])
    of_servers = [tuple(filter(None, word.split(','))) for word in gpus]
    monkeypatch.setenv(POOL, '.6')
    if taken:
        says = taken if memory else rf'rollout\.gpus names .* JAX has already reserved memory on GPU {taken}\.'
        with pytest.raises(ValueError, match=says):
            start.check_gpus(of_servers, memory)
    else:
        start.check_gpus(of_servers, memory)


def test_on_a_cpu_nothing_is_taken():
    start.check_gpus([()], 0.0)


@pytest.mark.parametrize('v, behind, mixed', [(1, 0, 0), (1, 1, 0), (1, 4, 0), (2, 3, 0), (5, 4, 0), (1, 0, 3)])
def test_a_server_holds_an_adapter_for_each_policy_under_way(v, behind, mixed):
    c = default_config()
    c.rollout.sync_every, c.rollout.most_behind = v, behind
    c.rollout.mixture.share, c.rollout.mixture.policies = (0.4, mixed) if mixed else (0.0, 3)
    schedule, alpha, asked, most = Schedule(60, v, 0, 0, most_behind=behind), 0, {}, 0
    for step in range(1, 41):
        alpha = step - 1 if schedule.sync_due(step) else alpha
        for ahead in range(step, schedule.last_ahead(step) + 1):
            asked.setdefault(ahead, alpha)
        pending = {policy for of_step, policy in asked.items() if of_step >= step}
        most = max(most, len(pending | {alpha}) + 1 + mixed)  # π_θ evaluates
    assert start.adapters_under_way(c) == most
