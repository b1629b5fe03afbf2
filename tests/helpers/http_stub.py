"""An HTTP server in a thread, for tests that stand in for a rollout server."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HttpStub:
    """Answers every POST with `answer(path, headers, body)`, bodies being JSON: (status, what to say)."""

    def __init__(self, answer: Callable[[str, Any, Any], tuple[int, Any]]):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers['Content-Length'] or 0)) or 'null')
                status, said = answer(self.path, self.headers, body)
                data = json.dumps(said).encode()
                self.send_response(status)
                self.send_header('Content-Length', str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self._server.server_address[1]}'
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()
