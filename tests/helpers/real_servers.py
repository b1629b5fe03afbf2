"""Real vLLM servers, started once a session, and what they serve: the quickstart's policy, or a tiny one that reads images."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx2 as httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from small_run import ROOT

from bapo_jax.config import default_config
from bapo_jax.groups import Prompt
from bapo_jax.learner.logprobs import token_logprobs
from bapo_jax.learner.mini_batch import Sequences
from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.tokenizer import load_tokenizer, stop_tokens
from bapo_jax.rollout.start import start_servers
from bapo_jax.rollout.vllm.client import VllmEngine
from bapo_jax.rollout.vllm.supervise import SupervisedServer
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE
from bapo_jax.tasks import encode_prompts
from bapo_jax.tasks.images import file_image
from bapo_jax.tasks.sight import Sight

BASE = ROOT / 'configs' / 'quickstart_base'
TOKEN = 'a token of the tests'


class Base(NamedTuple):
    config: ModelConfig
    params: dict  # numpy, by nested name
    moved: dict  # the same architecture with every tensor moved, so that a tensor left behind shows
    prompts: list[Prompt]
    stop_tokens: tuple[int, ...]
    sight: Sight | None = None


@pytest.fixture(scope='session')
def base():
    config, tokenizer = hf.read_config(BASE, 'float32'), load_tokenizer(BASE)
    params = jax.tree.map(np.array, hf.load_params(BASE, config))
    problems = [{'numbers': [3, 5, 2 + i], 'target': 16 + i} for i in range(24)]
    prompts = encode_prompts('countdown', problems, tokenizer, template='compact')
    return Base(config, params, moved(params), prompts, stop_tokens(BASE, tokenizer))


def moved(params):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.asarray(x * (1 + 0.1 * rng.standard_normal(x.shape)), np.float32), params)


@pytest.fixture(scope='session')
def two_servers(tmp_path_factory):
    """Both serve the quickstart's base in float32 on this machine; 512 tokens at most."""
    before = os.environ.get(TOKEN_VARIABLE)
    os.environ[TOKEN_VARIABLE] = TOKEN
    logs = tmp_path_factory.mktemp('servers')
    # Compiling takes 20 s a start.
    options = {'dtype': 'float32', 'max_tokens': 512, 'deadline_s': 400, 'extra': ['--enforce-eager']}
    servers = [SupervisedServer(str(BASE), logs / f'{i}.log', **options) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(SupervisedServer.start, servers))
    yield servers
    for server in servers:
        server.stop()
    os.environ.pop(TOKEN_VARIABLE)
    if before:
        os.environ[TOKEN_VARIABLE] = before


@pytest.fixture(scope='session')
def server(two_servers):
    return two_servers[0]


@pytest.fixture(scope='session')
def seeing(vl_directory, tmp_path_factory):
    """A tiny policy that reads images, with positions and sizes of images that are not its directory's.

    Its prompts have one image each, of several sizes, two images, or none.
    """
    stated = hf.overrides(SEEING)
    config, tokenizer = hf.read_config(vl_directory, 'float32', stated), load_tokenizer(vl_directory)
    params = jax.tree.map(np.array, hf.load_params(vl_directory, config))
    sight = Sight(vl_directory, config.vision.image_token, least_pixels=6 * 28 * 28, most_pixels=32 * 28 * 28)
    directory, rng, images = tmp_path_factory.mktemp('images'), np.random.default_rng(0), []
    for width, height in ((90, 120), (400, 60), (300, 301), (28, 28)):
        pixels = rng.integers(0, 256, (-(-height // 10), -(-width // 10), 3), np.uint8).repeat(10, 0).repeat(10, 1)
        Image.fromarray(pixels[:height, :width]).save(directory / f'{width}.png')
        images.append(file_image(directory / f'{width}.png'))
    questions = [([image], '<image>What is $x$?') for image in images]
    questions += [([images[1], images[0]], 'Is <image> more than <image>?'), ([], 'What is $x$?')]
    truths = [{'problem': text, 'answers': ['5'], 'images': images} for images, text in questions]
    prompts = encode_prompts('geometry', truths, tokenizer, template='plain', sight=sight)
    return Base(config, params, moved(params), prompts, stop_tokens(vl_directory, tokenizer), sight)


SEEING = {'max_positions': 2048, 'rope_theta': 20_000.0}


@pytest.fixture(scope='session')
def seeing_server(seeing, vl_directory, tmp_path_factory):
    """A server of that policy in float32, as the trainer starts one; 1,200 tokens at most, more than its directory allows."""
    config = default_config()
    config.model.update({'path': str(vl_directory), **SEEING})
    tokens = {'max_prompt_tokens': 600, 'max_response_tokens': 600}
    config.evaluate.update(tokens)
    config.rollout.update({'dtype': 'float32', 'deadline_s': 400.0, 'server': {'args': ('--enforce-eager',)}, **tokens})
    [server] = start_servers(config, tmp_path_factory.mktemp('seeing'), seeing.sight)
    yield server
    server.stop()


@pytest.fixture
def connect(base, tmp_path):
    """A function: an engine for these servers, holding the base as policy 0."""
    yield from _connecting(base, tmp_path)


@pytest.fixture
def connect_seeing(seeing, tmp_path):
    """The same of the policy that reads images."""
    yield from _connecting(seeing, tmp_path)


def _connecting(base, tmp_path):
    engines = []

    def make(*servers, sight=base.sight):
        engine = VllmEngine(
            [s.url for s in servers], tmp_path / f'policy{len(engines)}', base.config, token=servers[0].token, dtype='float32',
            stop_tokens=base.stop_tokens, concurrency=64, deadline_s=120.0, sight=sight,
        )  # fmt: skip
        engines.append(engine)
        engine.load(base.params, 0)
        return engine

    yield make
    for engine in engines:
        engine.close()


def ask(server, prompt: Prompt, **sampling) -> list[dict]:
    """The server's own choices for one prompt, unchecked."""
    parameters = {'logprobs': 0, 'detokenize': False, 'temperature': 1.0, **sampling}
    body = {'token_ids': prompt.tokens.tolist(), 'sampling_params': parameters}
    headers = {'Authorization': f'Bearer {TOKEN}'}
    reply = httpx.post(f'{server.url}/inference/v1/generate', json=body, headers=headers, timeout=120, trust_env=False)
    reply.raise_for_status()
    return reply.json()['choices']


def tokens_written(server) -> float:
    """Response tokens a server has sampled since it started, those of requests under way included."""
    lines = metrics(server).decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith('vllm:generation_tokens_total'))


def metrics(server) -> bytes:
    return httpx.get(f'{server.url}/metrics', headers={'Authorization': f'Bearer {TOKEN}'}, timeout=60, trust_env=False).content


def trainer_logp(base: Base, params, prompts, responses, temperature=1.0) -> list[np.ndarray]:
    """The trainer's log-probs of each response's tokens after its prompt."""
    length = -(-max(len(p.tokens) + len(r) for p, r in zip(prompts, responses, strict=True)) // 64) * 64
    tokens, segment = (np.zeros((len(prompts), length), np.int32) for _ in range(2))
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        sequence = np.concatenate([prompt.tokens, response])
        tokens[i, : len(sequence)], segment[i, : len(sequence)] = sequence, 1
    position = np.tile(np.arange(length, dtype=np.int32), (len(prompts), 1))
    logp = np.asarray(_score(hf.abstract_params(base.config)[0], params, tokens, segment, position, temperature))
    return [logp[i, len(p.tokens) : len(p.tokens) + len(r)] for i, (p, r) in enumerate(zip(prompts, responses, strict=True))]


@functools.partial(jax.jit, static_argnames='graph')
def _score(graph, params, tokens, segment, position, temperature):
    sequences = Sequences(tokens, segment, position, response=jnp.where(position > 0, segment, 0))
    return token_logprobs(nnx.merge(graph, params), sequences, temperature)[0]


def memory_bytes(server: SupervisedServer) -> int:
    """Resident memory of a server's processes."""
    total = 0
    for status in Path('/proc').glob('[0-9]*/status'):
        try:
            if os.getpgid(int(status.parent.name)) == server.pid:
                total += next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith('VmRSS')) * 1024
        except (ProcessLookupError, FileNotFoundError, StopIteration):  # ended while we looked
            continue
    return total
