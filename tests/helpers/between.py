"""What lies between a client and a server."""

import contextlib
import socket
import threading
from collections.abc import Callable


class Proxy:
    """Passes bytes on to a server and back. `spoil` is called with each part of a reply and the client's connection.

    `asked` has the last request of each connection.
    """

    def __init__(self, url: str):
        self.spoil: Callable[[bytes, socket.socket], bytes] = lambda data, _: data
        self.asked: dict[socket.socket, bytes] = {}
        self._swallowed: list[socket.socket] = []
        self._to, self._socket = int(url.rpartition(':')[2]), socket.create_server(('127.0.0.1', 0))
        self.url = f'http://127.0.0.1:{self._socket.getsockname()[1]}'
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self, which: bytes) -> None:
        """From now on: nothing comes of the reply to the first request that has these bytes, not even the end of its connection."""

        def spoil(data: bytes, client: socket.socket) -> bytes:
            if not self._swallowed and which in self.asked[client]:
                self._swallowed.append(client)
            return b'' if client in self._swallowed else data

        self.spoil = spoil

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, server = self._socket.accept()[0], socket.create_connection(('127.0.0.1', self._to))
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, of_server: bool) -> None:
        with contextlib.suppress(OSError):  # either end has closed, or was cut
            while data := source.recv(65_536):
                if not of_server:
                    self.asked[source] = data if data.startswith((b'GET ', b'POST ')) else self.asked[source] + data
                to.sendall(self.spoil(data, to) if of_server else data)
        if to in self._swallowed:  # it is closed once the client closes it
            return
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._socket.close()
