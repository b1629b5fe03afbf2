"""One request to a rollout server and its reply, whose size and time are bounded."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import aiohttp

from bapo_jax.rollout.engine import RolloutError
from bapo_jax.rollout.replies import BadResponse, seconds_to_wait

_CONNECT_S = 10.0
# A reply may take an hour, in which nothing is sent. Probes keep what lies between from forgetting the connection. They tell within
# two minutes that a peer is gone. A platform has some of these: seconds to the first probe (Linux's name, then macOS's) and between
# probes, how many may go unanswered, and milliseconds in which what is sent must be acknowledged.
_KEEPALIVE = {'TCP_KEEPIDLE': 60, 'TCP_KEEPALIVE': 60, 'TCP_KEEPINTVL': 15, 'TCP_KEEPCNT': 4, 'TCP_USER_TIMEOUT': 120_000}


class Unreachable(RolloutError):
    """A server gave no answer or reported that it is broken. Another server may answer."""


class Dropped(Unreachable):
    """The connection to a server broke, or none was made."""


async def open_session(token: str) -> aiohttp.ClientSession:
    """The connections of an engine. aiohttp reads a body of 9 MB three times as fast as httpx2 does."""
    return aiohttp.ClientSession(
        headers={'Authorization': f'Bearer {token}', 'Accept-Encoding': 'identity'},
        auto_decompress=False,  # what a compressed reply becomes has no bound
        trust_env=False,  # a proxy of the environment would be given the token
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0, socket_factory=_socket),
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """One that notices when its peer is gone."""
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
    """The reply's status, the seconds that it asks to wait (0: none are stated), and its body, of `most` bytes, within `limit_s` s.

    `heard` is called for each part of it that comes. Raises Dropped where there is no reply, TimeoutError, and BadResponse where
    its body is longer, or compressed.
    """
    timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=_CONNECT_S)
    try:
        async with session.request(method, url, json=body, allow_redirects=False, timeout=timeout) as reply:
            heard()
            return reply.status, seconds_to_wait(reply.headers.get('Retry-After', '')), await _read(reply, url, most, heard)
    except aiohttp.ClientError as e:
        raise Dropped(f'{url}: no answer ({type(e).__name__}: {e})') from e


async def _read(reply: aiohttp.ClientResponse, url: str, most: int, heard: Callable[[], None]) -> bytes:
    """Raises BadResponse where a reply is compressed, or once more than `most` bytes have come."""
    if encoding := reply.headers.get('Content-Encoding', ''):
        raise BadResponse(f'{url}: a reply is compressed ({encoding[:40]!r}), which was not asked for; let nothing between do that')
    pieces, size = [], 0
    async for piece in reply.content.iter_any():
        heard()
        size += len(piece)
        if size > most:
            raise BadResponse(f'{url}: a reply has more than {most:,} bytes, and what was asked for takes fewer')
        pieces.append(piece)
    return b''.join(pieces)
