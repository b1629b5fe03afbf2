"""How a rollout server is started, and that nothing of it answers without the token. Real servers: test_real_server.py."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest

from bapo_jax.rollout import serve
from bapo_jax.rollout.token_guard import TOKEN_VARIABLE, TokenGuard

BASE = Path(__file__).resolve().parents[2] / 'configs' / 'quickstart_base'


async def inner(scope, receive, send):
    await send({'type': 'http.response.start', 'status': 200, 'headers': []})
    await send({'type': 'http.response.body', 'body': b'inside'})


def ask(route, headers, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, 'secret')

    async def request():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(TokenGuard(inner)), base_url='http://server') as client:
            return await client.post(route, headers=headers)

    return asyncio.run(request())


@pytest.mark.parametrize('route', ['/health', '/v1/completions', '/inference/v1/generate', '/collective_rpc', '/pause?mode=keep', '/resume'])
@pytest.mark.parametrize('sent', [None, 'Bearer other', 'Bearer ', 'secret', 'Bearer secret2'])
def test_no_route_answers_without_the_token(route, sent, monkeypatch):
    reply = ask(route, {'Authorization': sent} if sent else {}, monkeypatch)
    assert reply.status_code == 401 and reply.text != 'inside'


def test_with_the_token_the_request_goes_through(monkeypatch):
    assert ask('/collective_rpc', {'Authorization': 'Bearer secret'}, monkeypatch).text == 'inside'


def test_a_guard_without_a_token_does_not_start(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=f'{TOKEN_VARIABLE} is not set'):
        TokenGuard(inner)


def test_the_command_guards_every_route_and_samples_from_the_whole_distribution():
    words = serve.command('configs/quickstart_base', port=1234, python='python', dtype='float32', max_tokens=64)
    options = dict(zip(words, words[1:], strict=False))
    assert options['--host'] == '127.0.0.1' and options['--port'] == '1234'
    assert options['--middleware'] == 'bapo_jax.rollout.token_guard.TokenGuard'
    assert options['--worker-extension-cls'] == 'bapo_jax.rollout.worker.PolicyLoader'
    assert options['--generation-config'] == 'vllm' and options['--logprobs-mode'] == 'processed_logprobs'
    assert Path(options['--model']).is_absolute()


def run_serve(*flags, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    words = [sys.executable, '-m', 'bapo_jax.rollout.serve', *flags]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    'flags, message',
    [
        ((f'--model={BASE}', '--host=0.0.0.0'), f'error: --host=0.0.0.0 is no loopback address.*set {TOKEN_VARIABLE}'),
        ((f'--model={BASE}', '--host=example.org'), 'no loopback address'),
        ((f'--model={BASE}', '--python=/nowhere/python'), 'error: --python=/nowhere/python does not exist.*make vllm-env'),
        (('--model=/nowhere', f'--python={sys.executable}'), 'error: --model=/nowhere has no config.json'),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_remedy(flags, message, monkeypatch):
    done = run_serve(*flags, monkeypatch=monkeypatch)
    assert done.returncode != 0
    assert re.search(message, done.stderr)
