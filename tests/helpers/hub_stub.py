"""A stand-in of the Hugging Face hub's HTTP interface, as far as huggingface_hub uses it: commits, lists of files, and files.

`repos` maps the name of a repository ('owner/name', 'datasets/owner/name') to its branches: {'main': {path: bytes}}. A commit's
hash is made of its files, so a branch that is given other files has moved. What goes wrong is said by attributes.
"""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

import pytest
from http_stub import QuietServer

API = re.compile(r'/api/(?:models/|(datasets/))([\w.-]+/[\w.-]+)(?:/(revision|tree)/([^/?]+))?')
RESOLVE = re.compile(r'/((?:datasets/)?[\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)')


class HubStub:
    def __init__(self):
        self.repos = {}
        self.asked = []  # (method, path) of each request
        self.tokens = set()  # those that were sent
        self.refuses = {}  # repository -> (status, X-Error-Code)
        self.hangs = ''  # such requests are answered after 5 s: 'revision', 'tree', 'HEAD' or 'GET' of a file
        self.ended = threading.Event()
        self.cuts = 0  # so many next transfers end in their middle; -1: all
        self.commits = {}  # hash -> files
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def do_GET(self):
                stub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self.server = QuietServer(('127.0.0.1', 0), Handler)
        self.server.daemon_threads = True
        self.url = f'http://127.0.0.1:{self.server.server_port}'
        threading.Thread(target=self.server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True).start()

    def close(self):
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()

    def commit(self, repo, revision='main'):
        """The hash that a branch, or a hash, stands for; None for neither."""
        if revision in self.commits:
            return revision
        if revision not in self.repos[repo]:
            return None
        files = self.repos[repo][revision]
        digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[digest] = files
        return digest

    def files_asked(self):
        """The files whose contents were asked for."""
        return [found[3] for method, path in self.asked if method == 'GET' and (found := RESOLVE.fullmatch(path))]

    def answer(self, request):
        path = unquote(urlsplit(request.path).path)
        self.asked.append((request.command, path))
        if token := request.headers.get('Authorization'):
            self.tokens.add(token)
        api, file = API.fullmatch(urlsplit(request.path).path), RESOLVE.fullmatch(path)
        kind = (api[3] or 'revision') if api else request.command
        if self.hangs == kind:
            self.ended.wait(5)
        repo = f'{api[1] or ""}{api[2]}' if api else file[1] if file else ''
        if repo in self.refuses or repo not in self.repos:
            status, code = self.refuses.get(repo, (404, 'RepoNotFound'))
            return send(request, status, b'', {'X-Error-Code': code} if code else {})
        commit = self.commit(repo, unquote(api[4] or 'main') if api else unquote(file[2]))
        if commit is None:
            return send(request, 404, b'', {'X-Error-Code': 'RevisionNotFound'})
        files = self.commits[commit]
        if kind == 'revision':
            said = {'id': repo.removeprefix('datasets/'), 'sha': commit, 'siblings': [], 'tags': [], 'private': False}
            return send(request, 200, json.dumps(said).encode())
        if api:
            tree = [{'type': 'file', 'path': p, 'size': len(data), 'oid': etag(data)} for p, data in files.items()]
            return send(request, 200, json.dumps(tree).encode())
        if file[3] not in files:
            return send(request, 404, b'', {'X-Error-Code': 'EntryNotFound'})
        data = files[file[3]]
        start = int(re.match(r'bytes=(\d+)-', request.headers.get('Range', 'bytes=0-'))[1])
        headers = {'ETag': f'"{etag(data)}"', 'X-Repo-Commit': commit, 'Accept-Ranges': 'bytes'}
        if start:
            headers['Content-Range'] = f'bytes {start}-{len(data) - 1}/{len(data)}'
        cut = None
        if request.command == 'GET' and self.cuts and len(data) - start > 1000:
            self.cuts -= self.cuts > 0
            cut = (len(data) - start) // 2
        send(request, 206 if start else 200, data[start:], headers, cut)


def send(request, status, body, headers=(), cut=None):
    """Sends all of the body, or `cut` bytes of it and the end of the connection."""
    request.send_response(status)
    for name, value in dict(headers).items():
        request.send_header(name, value)
    request.send_header('Content-Length', str(len(body)))
    request.end_headers()
    if request.command != 'HEAD':
        request.wfile.write(body if cut is None else body[:cut])
    if cut is not None:
        request.close_connection = True
        request.connection.close()


def etag(data):
    return hashlib.sha1(b'blob %d\0' % len(data) + data).hexdigest()


def folder_files(folder):
    """{path: bytes} of a directory."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in sorted(folder.rglob('*')) if file.is_file()}


@pytest.fixture
def hub_stub(tmp_path, monkeypatch):
    """A running stand-in that huggingface_hub asks in this process, with an empty cache, and 5 s for each wait."""
    stub = HubStub()
    monkeypatch.delenv('HF_TOKEN', raising=False)
    for name, value in {
        'ENDPOINT': stub.url, 'HUGGINGFACE_CO_URL_TEMPLATE': stub.url + '/{repo_id}/resolve/{revision}/{filename}',
        'HF_HUB_CACHE': str(tmp_path / 'hub_cache'), 'HF_HUB_OFFLINE': False,
        'HF_HUB_DOWNLOAD_TIMEOUT': 5, 'HF_HUB_ETAG_TIMEOUT': 5,
    }.items():  # fmt: skip
        monkeypatch.setattr(f'huggingface_hub.constants.{name}', value)
    yield stub
    stub.close()
