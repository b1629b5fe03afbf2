"""A server's process from start to stop; a small HTTP server stands in for vLLM. Real servers: test_real_server.py."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from http_stub import HttpStub
from proxied import proxy  # noqa: F401  (a fixture)
from small_run import ROOT

from bapo_jax.rollout.vllm.supervise import ServerFailed, SupervisedServer, free_port

# Takes the place of vLLM's interpreter, so it is given vLLM's command line. It answers /health to whoever has the token.
SERVES = f"""#!{sys.executable}
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        sound = self.headers['Authorization'] == 'Bearer ' + os.environ['BAPO_ROLLOUT_TOKEN']
        self.send_response(200 if sound and self.path == '/health' else 401)
        self.end_headers()

HTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), Handler).serve_forever()
"""
DIES = '#!/bin/sh\necho no memory left\nexit 3\n'
HANGS = '#!/bin/sh\necho loading\nexec sleep 60\n'


@pytest.fixture
def make(tmp_path):
    """A function: a supervised server whose interpreter is that script."""
    made = []

    def server(script, deadline_s=30.0, **fields):
        python = tmp_path / 'python'
        python.write_text(script)
        python.chmod(0o755)
        made.append(SupervisedServer(
            'model', tmp_path / 'logs' / 'server.log', dtype='float32', max_tokens=64, deadline_s=deadline_s, python=python, **fields
        ))  # fmt: skip
        return made[-1]

    yield server
    for one in made:
        one.stop()


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_starts_restarts_under_its_url_and_stops(make):
    server = make(SERVES)
    server.start()
    first, url = server.pid, server.url
    assert os.getpgid(first) == first != os.getpgid(0)
    assert httpx.get(f'{url}/health', headers={'Authorization': f'Bearer {server.token}'}, trust_env=False).status_code == 200
    server.restart()
    assert server.url == url and not running(first) and running(server.pid)
    last = server.pid
    server.stop()
    assert not running(last)
    server.stop()  # again: nothing happens


def test_a_server_is_ready_though_the_environment_names_a_proxy_which_is_never_asked(make, proxy):  # noqa: F811
    make(SERVES).start()
    assert proxy == []


def test_a_health_check_sends_the_token_nowhere_else(make):
    """Neither to where a reply points, nor again where a reply is none of HTTP."""
    asked = []
    other = HttpStub(lambda path, headers, _: asked.append(headers['Authorization']) or (200, {}))
    points = HttpStub(lambda *_: (302, {}, {'Location': other.url}))
    server = make(DIES)
    server.url = points.url
    assert not server._answers() and asked == []
    with socket.create_server(('127.0.0.1', 0)) as listener:
        server.url = f'http://127.0.0.1:{listener.getsockname()[1]}'
        threading.Thread(target=lambda: listener.accept()[0].sendall(b'\0garbage\r\n' * 9), daemon=True).start()
        assert not server._answers()
    for stub in (other, points):
        stub.stop()


# Starts a server that has a process of its own, as vLLM's engine is, which SIGTERM does not end. Says their ids, and waits.
STARTS = f"""
import sys, time
from pathlib import Path
from bapo_jax.rollout.vllm.supervise import SupervisedServer
server = SupervisedServer('model', Path(sys.argv[1]), dtype='float32', max_tokens=64, deadline_s=60.0, python=sys.argv[2])
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""
WITH_ENGINE = SERVES.replace(
    'HTTPServer((', "import subprocess\nsubprocess.Popen(['sh', '-c', 'trap : TERM; while :; do sleep 1; done'])\n\nHTTPServer((", 1
)


def members(group):
    """The running processes of a process group."""
    alive = []
    for stat in Path('/proc').glob('[0-9]*/stat'):
        try:
            state, _, its_group = stat.read_text().rpartition(')')[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # ended while we looked
            continue
        if int(its_group) == group and state != 'Z':
            alive.append(int(stat.parent.name))
    return alive


def test_a_server_and_its_engine_end_when_who_started_them_is_killed(tmp_path):
    python = tmp_path / 'python'
    python.write_text(WITH_ENGINE)
    python.chmod(0o755)
    starter = subprocess.Popen(
        [sys.executable, '-c', STARTS, str(tmp_path / 'server.log'), str(python)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        group = int(starter.stdout.readline())
        assert len(members(group)) >= 3  # leash, server, engine
    finally:
        starter.kill()
        starter.wait(10)
    deadline = time.monotonic() + 60
    while members(group):
        assert time.monotonic() < deadline, members(group)
        time.sleep(0.05)


def test_a_server_sees_the_gpus_that_are_its_own_and_is_told_all(make, tmp_path):
    script = f'#!/bin/sh\necho $CUDA_VISIBLE_DEVICES "$*" > {tmp_path}/seen\nexit 3\n'
    server = make(script, gpus=('5', '6'), memory=0.35, extra=['--enforce-eager'])
    with pytest.raises(ServerFailed):
        server.start()
    seen = (tmp_path / 'seen').read_text()
    told = ('--tensor-parallel-size 2', '--gpu-memory-utilization 0.35', '--dtype float32', '--max-model-len 64', '--enforce-eager')
    assert seen.startswith('5,6 ') and [words for words in told if words not in seen] == []
    assert '--max-num-seqs' not in seen


def test_a_server_that_ends_is_an_error_with_the_end_of_its_log(make):
    with pytest.raises(ServerFailed, match=r'ended with status 3; the end of .*server\.log:\nno memory left'):
        make(DIES).start()


def test_a_server_that_is_not_ready_in_time_is_stopped_and_an_error(make):
    with pytest.raises(ServerFailed, match=r'was not ready in 1 s; .* The end of .*server\.log:\nloading'):
        make(HANGS, deadline_s=1.0).start()


def test_a_free_port_is_one():
    assert 1024 <= free_port() < 65536
