"""Mixtures of experts on a real vLLM server, which loads other weights of all experts.

vLLM's CPU build (0.32) serves no adapters of such a model: with --enable-lora it needs Triton.
"""

import jax
import numpy as np
import pytest
from group_builders import begun, version_of
from real_servers import TOKEN, Base, moved, trainer_logp
from tiny import expert_files

from bapo_jax.config import default_config
from bapo_jax.models import hf
from bapo_jax.models.tokenizer import load_tokenizer, stop_tokens
from bapo_jax.rollout.engine import FRESH, Draw, Sampling
from bapo_jax.rollout.start import server_options
from bapo_jax.rollout.vllm.client import VllmEngine
from bapo_jax.rollout.vllm.supervise import SupervisedServer
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE
from bapo_jax.tasks import encode_prompts

pytestmark = pytest.mark.slow
G = 4


@pytest.fixture(scope='module')
def experts(tmp_path_factory):
    """A random policy of two layers with six experts of 24, of which a token has two; and its directory."""
    path = expert_files(tmp_path_factory.mktemp('experts') / 'base', num_hidden_layers=2, head_dim=32)
    config, tokenizer = hf.read_config(path, 'float32'), load_tokenizer(path)
    params = jax.tree.map(np.array, hf.load_params(path, config))
    problems = [{'numbers': [3, 5, 2 + i], 'target': 16 + i} for i in range(6)]
    prompts = encode_prompts('countdown', problems, tokenizer, template='compact')
    return path, Base(config, params, moved(params), prompts, stop_tokens(path, tokenizer))


@pytest.fixture(scope='module')
def server(experts, tmp_path_factory):
    """As a run starts it."""
    config = default_config()
    config.model.path = str(experts[0])
    tokens = {'max_prompt_tokens': 256, 'max_response_tokens': 256}
    config.evaluate.update(tokens)
    config.rollout.update({'dtype': 'float32', 'server': {'args': ('--enforce-eager',)}, **tokens})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        log = tmp_path_factory.mktemp('server') / 'log'
        started = SupervisedServer(str(experts[0]), log, deadline_s=400, **server_options(config))
        started.start()
        yield started
        started.stop()


def ask(engine, base):
    return engine.ask(begun(base.prompts), G, Sampling(1.0, 48), [Draw(0, 1, FRESH)] * len(base.prompts))


def assert_trainers(base, params, futures, number):
    """The answers are of policy `number`, with the trainer's log-probs within 1e-4."""
    responses = [r for future in futures for r in future.result(300)]
    assert {version_of(r) for r in responses} == {number}
    prompts = [p for p in base.prompts for _ in range(G)]
    want = trainer_logp(base, params, prompts, [r.tokens for r in responses], 1.0)
    for response, logp in zip(responses, want, strict=True):
        np.testing.assert_allclose(response.logp, logp, rtol=0, atol=1e-4)


def test_each_policy_of_other_weights_answers_as_the_trainer_computes(experts, server, tmp_path):
    """All tensors of the second differ from the first's; then the first again. vLLM pads an expert's width on a CPU."""
    path, base = experts
    engine = VllmEngine(
        [server.url], tmp_path / 'policy', base.config, token=TOKEN, dtype='float32', stop_tokens=base.stop_tokens,
        concurrency=64, deadline_s=120.0, base=str(path),
    )  # fmt: skip
    try:
        for number, params in enumerate((base.params, base.moved, base.params)):
            engine.load(params, number)
            assert_trainers(base, params, ask(engine, base), number)
    finally:
        engine.close()
