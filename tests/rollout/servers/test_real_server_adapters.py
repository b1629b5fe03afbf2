"""Adapters on a real vLLM server: several answer at once, each as the trainer computes it, and none is ever stale."""

import dataclasses
import shutil

import httpx2 as httpx
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from group_builders import begun, version_of
from real_servers import BASE, TOKEN, trainer_logp

from bapo_jax.config import default_config
from bapo_jax.models import hf
from bapo_jax.models.layers import Adapter
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.start import server_options
from bapo_jax.rollout.vllm.client import VllmEngine
from bapo_jax.rollout.vllm.loading import PolicyRefused
from bapo_jax.rollout.vllm.supervise import SupervisedServer
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE
from bapo_jax.weights.publish import path_of

pytestmark = pytest.mark.slow
G = 4


@pytest.fixture(scope='module')
def adapted(base):
    """The base with an adapter that servers get alone."""
    config = dataclasses.replace(base.config, adapter=Adapter(4, 8.0, 'all'))
    return base._replace(config=config)


def version(adapted, number):
    """The parameters of a policy whose adapter is drawn by `number`; that of 0 is the base itself."""
    rng, params = np.random.default_rng(number), flatten_dict(adapted.params)
    for path, shape in flatten_dict(hf.abstract_params(adapted.config)[1]).items():
        if path not in params:
            drawn = 0.05 * (number > 0) * rng.standard_normal(shape.shape)
            params[path] = drawn.astype(np.float32)
    return unflatten_dict(params)


@pytest.fixture(scope='module')
def server(adapted, tmp_path_factory):
    """As a run with such an adapter starts it."""
    config = default_config()
    config.model.path = str(BASE)
    config.model.adapter.update({'rank': 4, 'alpha': 8.0})
    tokens = {'max_prompt_tokens': 256, 'max_response_tokens': 256}
    config.evaluate.update(tokens)
    config.rollout.update({'dtype': 'float32', 'server': {'args': ('--enforce-eager',)}, **tokens})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        started = SupervisedServer(str(BASE), tmp_path_factory.mktemp('adapters') / 'log', deadline_s=400, **server_options(config))
        started.start()
        yield started
        started.stop()


@pytest.fixture
def connect(adapted, server, tmp_path):
    engines = []

    def make():
        engines.append(VllmEngine(
            [server.url], tmp_path / f'policy{len(engines)}', adapted.config, token=TOKEN, dtype='float32',
            stop_tokens=adapted.stop_tokens, concurrency=64, deadline_s=120.0, base=str(BASE),
        ))  # fmt: skip
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def ask(engine, prompts, max_tokens=48):
    return engine.ask(begun(prompts), G, Sampling(1.0, max_tokens), [Draw(0, 1, FRESH)] * len(prompts))


def names(server):
    """By what names the server says that it serves its base and its adapters."""
    said = httpx.get(f'{server.url}/v1/models', headers={'Authorization': f'Bearer {TOKEN}'}, timeout=60, trust_env=False)
    return {model['id'] for model in said.json()['data']}


def assert_trainers(adapted, futures, prompts, number):
    """The answers are of policy `number`, token by token, with the trainer's log-probs within 1e-4."""
    answers = [future.result(300) for future in futures]
    responses = [r for group in answers for r in group]
    assert {version_of(r) for r in responses} == {number}
    asked = [p for p in prompts for _ in range(G)]
    want = trainer_logp(adapted, version(adapted, number), asked, [r.tokens for r in responses], 1.0)
    for response, logp in zip(responses, want, strict=True):
        np.testing.assert_allclose(response.logp, logp, rtol=0, atol=1e-4)


def test_adapters_answer_side_by_side_each_with_the_trainers_log_probs(adapted, connect):
    engine, prompts, asked = connect(), adapted.prompts[:4], {}
    for number in (0, 1, 2):
        engine.load(version(adapted, number), number)
        asked[number] = ask(engine, prompts)
    for number, futures in asked.items():
        assert_trainers(adapted, futures, prompts, number)
    engine.load(version(adapted, 1), 1)
    assert_trainers(adapted, ask(engine, prompts), prompts, 1)


def test_over_fifty_syncs_with_requests_under_way_no_answer_is_stale(adapted, connect, server):
    """Each group is completed by the policy that it was requested from; nothing that is no longer needed stays."""
    engine, prompts, waiting = connect(), adapted.prompts[:2], []
    for number in range(50):
        engine.load(version(adapted, number % 3), number)
        waiting.append((number, ask(engine, prompts, max_tokens=8)))
        if len(waiting) > 2:
            before, futures = waiting.pop(0)
            answers = [r for future in futures for r in future.result(300)]
            assert {version_of(r) for r in answers} == {before}
            asked = [p for p in prompts for _ in range(G)]
            want = trainer_logp(adapted, version(adapted, before % 3), asked, [r.tokens for r in answers])
            for response, logp in zip(answers, want, strict=True):
                np.testing.assert_allclose(response.logp, logp, rtol=0, atol=1e-4)
    published = sorted(int(path.name) for path in engine._policies.iterdir())
    assert published[-2:] == [48, 49] and published[0] >= 46
    assert {name.split('-')[0] for name in names(server) - {'policy'}} == set(map(str, published))
    engine.close()
    assert names(server) == {'policy'}


def test_two_trainers_share_a_server_and_one_that_ends_leaves_the_others_adapters(adapted, connect):
    one, two, prompts = connect(), connect(), adapted.prompts[:2]
    for engine in (one, two):  # the same weights by the same number
        engine.load(version(adapted, 1), 1)
    two.load(version(adapted, 2), 2)
    of_one, of_two = ask(one, prompts), ask(two, prompts)
    assert_trainers(adapted, of_two, prompts, 2)
    two.close()
    assert_trainers(adapted, of_one, prompts, 1)
    assert_trainers(adapted, ask(one, prompts), prompts, 1)


def test_a_damaged_adapter_is_refused_before_the_server_changes(adapted, connect, server):
    engine = connect()
    engine.load(version(adapted, 1), 1)
    before, path = names(server), path_of(engine._policies, 1)
    damaged = path.with_name('000007')
    shutil.copytree(path, damaged)
    manifest = damaged / 'manifest.json'
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 7'))
    with (damaged / 'adapter_model.safetensors').open('r+b') as file:
        file.seek(-3, 2)
        file.write(b'xyz')
    with pytest.raises(PolicyRefused, match=r'adapter_model\.safetensors is damaged'):
        engine._run(engine._serving.take_up(damaged))
    assert names(server) == before
