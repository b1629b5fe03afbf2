"""The engine that a config names."""

import pytest

from bapo_jax.config import default_config
from bapo_jax.parallel import make_mesh
from bapo_jax.rollout import engines as module
from bapo_jax.rollout.engines import start_engine
from bapo_jax.rollout.jax_engine import JaxEngine
from bapo_jax.rollout.token_guard import TOKEN_VARIABLE
from bapo_jax.config import resolve
from bapo_jax.rollout import engines


@pytest.fixture
def start(tmp_path):
    """A function of changes to config.rollout: the engine that is started."""

    def engine_of(**changes):
        config = default_config()
        config.rollout.update(changes)
        return start_engine(config, None, None, (3,), make_mesh(1, 1, 1), tmp_path)

    return engine_of


class Noted:
    """Stands for a class: notes what it is made of."""

    token = 'the token of a server of our own'

    def __init__(self, *args, **options):
        self.args, self.options, self.started = args, options, False

    def start(self):
        self.started = True


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setattr(module, 'VllmEngine', Noted)
    monkeypatch.setattr(module, 'SupervisedServer', Noted)
    monkeypatch.setenv(TOKEN_VARIABLE, 'the token of the environment')


def test_jax_is_the_engine_in_this_process(start):
    engine = start(engine='jax')
    assert isinstance(engine, JaxEngine) and engine.servers == 0


def test_vllm_asks_the_servers_that_are_listed_with_the_token_of_the_environment(start, vllm):
    engine = start(engine='vllm', servers=('http://a', 'http://b'))
    assert engine.args[0] == ['http://a', 'http://b'] and engine.options['token'] == 'the token of the environment'


def test_vllm_without_a_listed_server_starts_one_and_asks_it_with_its_own_token(start, vllm, tmp_path):
    engine = start(engine='vllm', max_prompt_tokens=100, max_response_tokens=20)
    server, policies, *_ = engine.args
    assert server.started and server.options['max_tokens'] == 120
    assert policies == tmp_path / 'policy'
    assert engine.options['token'] == Noted.token


def config(policy, **fields):
    c = default_config()
    c.model.path = str(policy.path)
    c.rollout.update(fields)
    return resolve(c)


def test_the_in_process_engine_starts_nothing_and_has_no_servers(policy, tmp_path):
    engine = start(config(policy), policy, tmp_path)
    assert isinstance(engine, JaxEngine) and engine.servers == 0
    assert list(tmp_path.iterdir()) == []


def test_listed_servers_are_asked_with_the_token_of_the_environment(policy, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, 'a token')
    monkeypatch.setattr(engines, 'SupervisedServer', lambda *_, **__: pytest.fail('a server was started'))
    made = []
    monkeypatch.setattr(engines, 'VllmEngine', lambda *args, **fields: made.append((args, fields)) or 'engine')
    urls = ('http://127.0.0.1:9', 'http://127.0.0.1:10')
    assert start(config(policy, engine='vllm', servers=urls, concurrency=3), policy, tmp_path) == 'engine'
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

        def start(self):
            started.append('started')

    monkeypatch.setattr(engines, 'SupervisedServer', Started)
    monkeypatch.setattr(engines, 'VllmEngine', lambda servers, *_, token, **__: made.append((type(servers), token)) or 'engine')
    c = config(policy, engine='vllm', max_prompt_tokens=20, max_response_tokens=30, server_args=('--enforce-eager',))
    assert start(c, policy, tmp_path) == 'engine'
    (model, log, fields), last = started
    assert (model, log, last) == (str(policy.path), tmp_path / 'server.log', 'started')
    assert fields['max_tokens'] == 50 and fields['extra'] == ('--enforce-eager',)
    assert made == [(Started, 'its own')] and 'starting a vLLM server' in capsys.readouterr().out
