"""Requires a token on every route of a rollout server, as ASGI middleware in its process (`--middleware`).

vLLM's own API key protects only some routes, and none that control the policy.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

TOKEN_VARIABLE = 'BAPO_ROLLOUT_TOKEN'


class TokenGuard:
    """Answers 401 to requests without `Authorization: Bearer TOKEN`. Raises RuntimeError if it is not set."""

    def __init__(self, app: Any):
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise RuntimeError(
                f'{TOKEN_VARIABLE} is not set; start the server with python -m bapo_jax.rollout.serve'
            )
        self._app, self._expected = app, f'Bearer {token}'.encode()

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope['type'] in ('http', 'websocket') and not self._authorised(scope):
            if scope['type'] == 'websocket':
                await send({'type': 'websocket.close', 'code': 1008})
                return
            await send(
                {'type': 'http.response.start', 'status': 401, 'headers': [(b'content-type', b'text/plain')]}
            )
            await send(
                {
                    'type': 'http.response.body',
                    'body': b'this server requires its token; set BAPO_ROLLOUT_TOKEN\n',
                }
            )
            return
        await self._app(scope, receive, send)

    def _authorised(self, scope: dict) -> bool:
        sent = [value for name, value in scope['headers'] if name.lower() == b'authorization']
        return len(sent) == 1 and hmac.compare_digest(sent[0], self._expected)
