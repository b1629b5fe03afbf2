"""What the stub commands of launched.py do: `launch_stub.py NAME ARGS…` writes down how it was called, then stands in for NAME.

srun and gcloud really run the commands they are given, once a task or host, here on this machine; python is a small server where a
rollout server is started, and a trainer that ends at once. Only the standard library, to start quickly.
"""

import ast
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME, ARGS = sys.argv[1], sys.argv[2:]
RECORDS, HOSTS = Path(os.environ['STUB_RECORDS']), int(os.environ['STUB_HOSTS'])


def record(**more):
    entry = {'name': NAME, 'argv': ARGS, 'env': dict(os.environ), 'pid': os.getpid(), **more}
    path = RECORDS / f'{time.time_ns()}_{os.getpid()}'
    path.with_suffix('.tmp').write_text(json.dumps(entry))
    path.with_suffix('.tmp').rename(path.with_suffix('.json'))


def options(*names):
    given = dict(a.split('=', 1) for a in ARGS if a.startswith('--') and '=' in a)
    return [given.get(f'--{name}') for name in names]


def run_all(tasks):
    """Starts (command, env, stdout) each in a session of its own; hands SIGTERM on; returns the highest exit status."""
    running = []
    signal.signal(signal.SIGTERM, lambda *_: [os.killpg(p.pid, signal.SIGTERM) for p in running if p.poll() is None])
    for command, env, stdout in tasks:
        running.append(subprocess.Popen(command, env=os.environ | env, stdout=stdout, start_new_session=True))
    return max(abs(p.wait()) for p in running)


def srun():
    start = next(i for i, a in enumerate(ARGS) if not a.startswith('--'))
    nodelist, ntasks, per_node, output = options('nodelist', 'ntasks', 'ntasks-per-node', 'output')
    nodes, tasks = nodelist.split(','), []
    for i in range(int(ntasks)):
        node, local = divmod(i, int(per_node))
        env = {'SLURM_PROCID': str(i), 'SLURM_LOCALID': str(local), 'SLURM_NODEID': str(node), 'SLURMD_NODENAME': nodes[node]}
        tasks.append((ARGS[start:], env, Path(output.replace('%t', str(i))).open('w') if output else None))
    sys.exit(run_all(tasks))


def gcloud():
    words, (command, worker) = [a for a in ARGS if not a.startswith('--')], options('command', 'worker')
    homes = [RECORDS / f'home{i}' for i in range(HOSTS)]
    if words[:4] == ['compute', 'tpus', 'tpu-vm', 'describe']:
        print(';'.join(f'127.0.0.{1 + i}' for i in range(HOSTS)))
    elif words[:3] == ['compute', 'instances', 'describe']:
        print(f'127.0.0.{101 + os.environ["SERVERS"].split().index(words[3])}')
    elif words[:2] == ['compute', 'ssh']:
        sys.exit(run_all([(['bash', '-c', command], {}, None)]))
    elif words[:4] == ['compute', 'tpus', 'tpu-vm', 'scp'] and worker == 'all':
        for home in homes:
            home.mkdir(exist_ok=True)
            shutil.copy(words[4], home / words[5].partition(':')[2])
    elif words[:4] == ['compute', 'tpus', 'tpu-vm', 'ssh'] and worker == 'all':
        sys.exit(run_all([(['bash', '-c', command], {'HOME': str(h), 'STUB_WORKER': str(i)}, None) for i, h in enumerate(homes)]))
    else:
        sys.exit(f'gcloud: no stub for {ARGS}')


def kubectl():
    if ARGS[0] == 'get':
        sys.exit(0 if os.environ.get('STUB_SECRET_EXISTS') else 1)


def curl():
    if 'http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number' in ARGS:
        assert 'Metadata-Flavor:Google' in ARGS
        print(os.environ['STUB_WORKER'])
    else:
        os.execv(os.environ['STUB_CURL'], ['curl', *ARGS])


def serve():
    behaviour = os.environ.get('STUB_SERVERS')
    if behaviour == 'die':
        sys.exit(3)
    if behaviour == 'are silent':
        time.sleep(600)

    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.headers['Authorization'] == f'Bearer {os.environ["BAPO_ROLLOUT_TOKEN"]}'
            self.send_response(401 if not known or behaviour == 'refuse' else 200 if self.path == '/health' else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    host, port = options('host', 'port')
    server = ThreadingHTTPServer((host, int(port)), Health)
    for number in (signal.SIGTERM, signal.SIGINT):  # as vLLM does
        signal.signal(number, lambda *_: sys.exit(0))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        time.sleep(600)


def listens(url):
    host, port = url.removeprefix('http://').split(':')
    with socket.socket() as s:
        return s.connect_ex((host, int(port))) == 0


def train():
    if os.environ.get('STUB_TRAINER') == 'waits':

        def finish_the_step(*_):
            time.sleep(1)
            record(after='SIGTERM', servers_there=[listens(url) for url in ast.literal_eval(options('config.rollout.servers')[0])])
            sys.exit(7)

        signal.signal(signal.SIGTERM, finish_the_step)
        record(after='start')
        while True:
            time.sleep(600)
    sys.exit(int(os.environ.get('STUB_STATUS', '0')))


record(stdin=sys.stdin.read() if NAME == 'kubectl' and ('-' in ARGS or '/dev/stdin' in ' '.join(ARGS)) else None)
if NAME == 'scontrol' and ARGS[0] == 'show':
    print('\n'.join(os.environ['SLURM_JOB_NODELIST'].split(',')))
elif NAME == 'scontrol':
    assert ARGS == ['requeue', os.environ['SLURM_JOB_ID']]
elif NAME == 'python':
    {'bapo_jax.rollout.serve': serve, 'bapo_jax.train': train}[ARGS[1]]()
else:
    {'srun': srun, 'gcloud': gcloud, 'kubectl': kubectl, 'curl': curl}[NAME]()
