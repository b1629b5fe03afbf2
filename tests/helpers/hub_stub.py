"""A stand-in of the Hugging Face hub's HTTP interface, as far as huggingface_hub uses it: commits, lists of files, and files.

`repos` maps the name of a repository ('owner/name', 'datasets/owner/name') to its branches: {'main': {path: bytes}}. A commit's
hash is made of its files, so a branch that is given other files has moved. What goes wrong is said by attributes.

Uploads are taken, too: a repository is made, files come in the commit itself or, weights, by LFS before it.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

import pytest
from http_stub import QuietServer

API = re.compile(r'/api/(?:models/|(datasets/))([\w.-]+/[\w.-]+)(?:/(revision|tree)/([^/?]+))?')
SENT = re.compile(r'/api/(repos/create|validate-yaml)|/api/models/([\w.-]+/[\w.-]+)/(preupload|commit)/main|/([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch|/lfs/(\w+)')
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
        self.made = {}  # repository that was made -> its visibility
        self.by_lfs = False  # whether weights come by LFS
        self.objects = {}  # sha256 -> bytes that came so
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def do_GET(self):
                stub.answer(self)

            do_HEAD = do_GET

            def do_POST(self):
                stub.take(self)

            do_PUT = do_POST

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

    def take(self, request):
        """Answers a request that sends something."""
        body = request.rfile.read(int(request.headers.get('Content-Length') or 0))
        path = urlsplit(request.path).path
        self.asked.append((request.command, path))
        if token := request.headers.get('Authorization'):
            self.tokens.add(token)
        if self.hangs == request.command:
            self.ended.wait(5)
        act, repo, kind, of_batch, oid = SENT.fullmatch(path).groups()
        if act == 'repos/create':
            said = json.loads(body)
            repo = f'{said["organization"]}/{said["name"]}'
        if repo in self.refuses:
            status, code = self.refuses[repo]
            return send(request, status, b'', {'X-Error-Code': code} if code else {})
        reply = {}
        if act == 'repos/create':
            if repo in self.repos:
                return send(request, 409, b'{"url": "%s"}' % f'{self.url}/{repo}'.encode())
            self.repos[repo], self.made[repo] = {'main': {'.gitattributes': b''}}, said['visibility']
            reply = {'url': f'{self.url}/{repo}'}
        elif kind == 'preupload':
            modes = {file['path']: 'lfs' if self.by_lfs and file['path'].endswith('.safetensors') else 'regular' for file in json.loads(body)['files']}
            reply = {'files': [{'path': p, 'uploadMode': mode, 'shouldIgnore': False} for p, mode in modes.items()]}
        elif of_batch:
            objects = json.loads(body)['objects']
            reply = {'objects': [{**o, 'actions': {'upload': {'href': f'{self.url}/lfs/{o["oid"]}'}}} for o in objects]}
        elif oid:
            self.objects[oid] = body
        elif kind == 'commit':
            self.repos[repo]['main'] = self.after(self.repos[repo]['main'], [json.loads(line) for line in body.splitlines()])
            reply = {'commitUrl': f'{self.url}/{repo}/commit/1', 'commitOid': self.commit(repo)}
        send(request, 200, json.dumps(reply).encode())

    def after(self, files, operations):
        """The files of a branch after a commit's operations."""
        files = dict(files)
        for operation in operations:
            of = operation['value']
            if operation['key'] == 'file':
                files[of['path']] = base64.b64decode(of['content'])
            elif operation['key'] == 'lfsFile':
                files[of['path']] = self.objects[of['oid']]
            elif operation['key'] == 'deletedFile':
                del files[of['path']]
        return files


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
