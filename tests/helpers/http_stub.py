"""An HTTP server in a thread, for tests that stand in for a rollout server."""

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # who asked may have gone
            super().handle_error(request, client_address)


class HttpStub:
    """Answers every POST with `answer(path, headers, body)`, bodies being JSON: (status, what to say). Bytes are sent as they are."""

    def __init__(self, answer: Callable[[str, Any, Any], tuple[int, Any]]):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers['Content-Length'] or 0)) or 'null')
                status, said = answer(self.path, self.headers, body)
                data = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header('Content-Length', str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._server = _Server(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self._server.server_address[1]}'
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()
