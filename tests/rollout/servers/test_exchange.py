"""The connections to rollout servers."""

import asyncio
import socket
import sys
import threading

import pytest
from http_stub import HttpStub

from bapo_jax.rollout.vllm import exchange

pytestmark = pytest.mark.slow


def test_a_connection_notices_that_its_peer_is_gone():
    """The system sends the probes; that they are asked for is all that can be seen of a connection that lives."""
    ended = threading.Event()
    stub = HttpStub(lambda *_: (200, iter(lambda: b'' if ended.wait(0.01) else b' ', b'')))

    async def connected():
        session = await exchange.open_session('secret')
        async with session.get(stub.url) as reply:
            client = reply.connection.transport.get_extra_info('socket')
            options = {name: client.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in exchange._KEEPALIVE
                       if hasattr(socket, name)}  # fmt: skip
            options['SO_KEEPALIVE'] = client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        await session.close()
        return options

    options = asyncio.run(connected())
    ended.set()
    stub.stop()
    assert options.pop('SO_KEEPALIVE')  # 1, of macOS 8
    assert options == {name: exchange._KEEPALIVE[name] for name in options}
    assert {'TCP_KEEPINTVL', 'TCP_KEEPCNT'} < options.keys()
    idle = options.get('TCP_KEEPIDLE') or options['TCP_KEEPALIVE']
    assert idle + options['TCP_KEEPINTVL'] * options['TCP_KEEPCNT'] <= 120
    assert sys.platform != 'linux' or 0 < options['TCP_USER_TIMEOUT'] <= 120_000
