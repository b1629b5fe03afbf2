"""The part of a W&B server that the client of the tests needs: it keeps a run's rows, and says which it holds."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Keeps the rows of one run. `rows` are in the order of the server's file; `stored` has the lines that each request wrote."""

    def __init__(self):
        self.rows: list[dict[str, Any]] = []
        self.stored: list[range] = []
        self.run_id, server = '', self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers['Content-Length'] or 0))
                if self.headers.get('Content-Encoding') == 'gzip':
                    body = gzip.decompress(body)
                said = {}
                if self.path.endswith('/graphql'):
                    asked = json.loads(body)
                    said = {'data': server.answer(asked['query'], asked.get('variables') or {})}
                elif self.path.endswith('/file_stream'):
                    server.keep(json.loads(body).get('files', {}).get('wandb-history.jsonl'))
                reply = json.dumps(said).encode()
                self.send_response(200)
                self.send_header('Content-Length', str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_PUT = do_POST  # what is uploaded is not kept

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.url = f'http://127.0.0.1:{self._server.server_address[1]}'
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def keep(self, chunk: dict[str, Any] | None) -> None:
        if chunk:
            end = chunk['offset'] + len(chunk['content'])
            self.stored.append(range(chunk['offset'], end))
            self.rows[chunk['offset'] : end] = map(json.loads, chunk['content'])

    def answer(self, query: str, said: dict[str, Any]) -> dict[str, Any]:
        if 'RunResumeStatus' in query:
            return {'model': {'id': 'p', 'name': said['project'], 'entity': {'id': 'e', 'name': 'me'}, 'bucket': self._held(said)}}
        if 'UpsertBucket' in query:
            self.run_id = said['name']
            project = {'id': 'p', 'name': said['project'], 'entity': {'id': 'e', 'name': 'me'}}
            names = {'id': 'b', 'name': said['name'], 'displayName': said['displayName'], 'description': None, 'sweepName': None}
            return {'upsertBucket': {'bucket': names | {'config': '{}', 'project': project}, 'inserted': True}}
        if 'CreateRunFiles' in query:
            files = [{'name': name, 'uploadUrl': f'{self.url}/files/{name}'} for name in said['files']]
            return {'createRunFiles': {'runID': 'b', 'uploadHeaders': [], 'files': files}}
        return {'entity': {'organization': None}}

    def _held(self, said: dict[str, Any]) -> dict[str, Any] | None:
        if said['name'] != self.run_id:
            return None
        tail = json.dumps([json.dumps(row) for row in self.rows[-1:]])
        return {
            'id': 'b', 'name': self.run_id, 'displayName': 'x', 'config': '{}', 'tags': [], 'notes': None,
            'wandbConfig': '{"t": {}}', 'summaryMetrics': json.dumps(self.rows[-1]),
            'historyTail': tail, 'historyLineCount': len(self.rows),
            'eventsTail': '[]', 'eventsLineCount': 0, 'logLineCount': 0,
        }  # fmt: skip

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
