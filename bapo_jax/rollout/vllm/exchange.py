"""One request to a rollout server and its reply, with limits of size and time."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import aiohttp

from bapo_jax.rollout.engine import RolloutError
from bapo_jax.rollout.vllm.replies import BadResponse, seconds_to_wait

_CONNECT_S = 10.0
# A reply may take an hour, during which nothing is sent. Keepalive probes stop the network between from
# dropping the connection, and detect within two minutes that a peer is gone. Each platform has some of these:
# seconds to the first probe (Linux's name, then macOS's) and between probes, how many may go unanswered, and
# milliseconds within which sent data must be acknowledged.
_KEEPALIVE = {
    'TCP_KEEPIDLE': 60,
    'TCP_KEEPALIVE': 60,
    'TCP_KEEPINTVL': 15,
    'TCP_KEEPCNT': 4,
    'TCP_USER_TIMEOUT': 120_000,
}


class Unreachable(RolloutError):
    """A server did not answer or reported that it is broken. Another server may answer."""


class Dropped(Unreachable):
    """The connection to a server broke or could not be made."""


async def open_session(token: str) -> aiohttp.ClientSession:
    """The session of an engine. aiohttp reads a body of 9 MB three times as fast as httpx2."""
    return aiohttp.ClientSession(
        headers={'Authorization': f'Bearer {token}', 'Accept-Encoding': 'identity'},
        auto_decompress=False,  # a decompressed reply has no size limit
        trust_env=False,  # a proxy from the environment would receive the token
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0, socket_factory=_socket),
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that detects when its peer is gone."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


async def exchange(
    session: aiohttp.ClientSession, url: str, body: Any, method: str, limit_s: float, most: int,
    heard: Callable[[], None] = lambda: None,
) -> tuple[int, float, bytes]:  # fmt: skip
    """The reply's status, the seconds that it asks to wait (0 if not stated), and its body.

    `heard` is called for each part of the reply that arrives. Raises Dropped if there is no reply,
    TimeoutError if it takes more than `limit_s` seconds, and BadResponse if its body is compressed or longer
    than `most` bytes.
    """
    timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=_CONNECT_S)
    try:
        async with session.request(method, url, json=body, allow_redirects=False, timeout=timeout) as reply:
            heard()
            return (
                reply.status,
                seconds_to_wait(reply.headers.get('Retry-After', '')),
                await _read(reply, url, most, heard),
            )
    except aiohttp.ClientError as e:
        raise Dropped(f'{url}: no answer ({type(e).__name__}: {e})') from e


async def _read(reply: aiohttp.ClientResponse, url: str, most: int, heard: Callable[[], None]) -> bytes:
    """Reads a body. Raises BadResponse if it is compressed, or once more than `most` bytes have arrived."""
    if encoding := reply.headers.get('Content-Encoding', ''):
        raise BadResponse(
            f'{url}: a reply is compressed ({encoding[:40]!r}); disable compression in the proxy before the '
            'server'
        )
    pieces, size = [], 0
    async for piece in reply.content.iter_any():
        heard()
        size += len(piece)
        if size > most:
            raise BadResponse(
                f'{url}: a reply has more than {most:,} bytes, the limit here; check which server it is'
            )
        pieces.append(piece)
    return b''.join(pieces)
