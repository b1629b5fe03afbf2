"""An HTTP server in a thread, for tests that stand in for a rollout server."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # who asked may have gone
            super().handle_error(request, client_address)


class HttpStub:
    """Answers every request with `answer(path, headers, body)`, bodies being JSON: (status, what to say).

    Bytes are sent as they are, and a generator's pieces of bytes as they come. A third member of the answer has headers to send.
    """

    def __init__(self, answer: Callable[[str, Any, Any], tuple[int, Any]]):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers['Content-Length'] or 0)) or 'null')
                status, said, *headers = answer(self.path, self.headers, body)
                pieces = said if isinstance(said, Iterator) else [said if isinstance(said, bytes) else json.dumps(said).encode()]
                self.send_response(status)
                for name, value in headers[0].items() if headers else ():
                    self.send_header(name, value)
                if not isinstance(said, Iterator):  # its end is the connection's
                    self.send_header('Content-Length', str(len(pieces[0])))
                self.end_headers()
                for piece in pieces:
                    self.wfile.write(piece)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self._server = QuietServer(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self._server.server_address[1]}'
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()
