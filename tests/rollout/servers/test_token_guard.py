"""No route of a rollout server answers without the token. Real servers: test_real_server.py."""

import asyncio

import httpx2 as httpx
import pytest

from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE, TokenGuard


async def inner(scope, receive, send):
    await send({'type': 'http.response.start', 'status': 200, 'headers': []})
    await send({'type': 'http.response.body', 'body': b'inside'})


def ask(route, headers, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, 'secret')

    async def request():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(TokenGuard(inner)), base_url='http://server') as client:
            return await client.post(route, headers=headers)

    return asyncio.run(request())


@pytest.mark.parametrize(
    'route', ['/health', '/v1/completions', '/inference/v1/generate', '/collective_rpc', '/pause?mode=keep', '/resume']
)
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
