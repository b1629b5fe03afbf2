"""Runs the scripts of launch/ under stub commands, and says which commands they would start on which host."""

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / 'configs' / 'quickstart_base'
SCRIPTS = ('one_machine', 'slurm', 'kubernetes', 'tpu_pod')
STUBS = ('srun', 'scontrol', 'gcloud', 'kubectl', 'curl', 'python')
COPY_RUNS = ROOT / 'launch' / 'copy_runs.sh'
COORDINATOR_PORT = 8476  # the scripts' default


class Command(NamedTuple):
    """What one process was, or would be, started with."""

    argv: list[str]
    env: dict[str, str]


class Launched(NamedTuple):
    status: int
    output: str  # stdout and stderr
    trainers: list[Command]  # by host; their argv starts with -m
    servers: list[Command]  # by address; likewise
    calls: list[dict]  # of every stub, in order: name, argv, env, pid, stdin


def start(script: str, tmp_path: Path, *train_args: str, hosts: int = 2, servers: int = 2, **env: str | None) -> subprocess.Popen:
    """Starts launch/SCRIPT.sh with stubs first on the PATH; `env` is added to what it needs, None takes a variable away."""
    stubs, records = tmp_path / 'stubs', tmp_path / 'records'
    stubs.mkdir(exist_ok=True)
    records.mkdir(exist_ok=True)
    for name in STUBS:
        path = stubs / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{ROOT}/tests/helpers/launch_stub.py" {name} "$@"\n')
        path.chmod(0o755)
    needed = {
        'PATH': f'{stubs}:{os.environ["PATH"]}', 'PYTHON': str(stubs / 'python'), 'MODEL': str(BASE), 'SERVER_DEADLINE': '20',
        'STUB_RECORDS': str(records), 'STUB_HOSTS': str(hosts), 'STUB_CURL': shutil.which('curl'),
        'PORT': str(free_ports(servers)), 'PLATFORM': 'cpu',
    }  # fmt: skip
    needed |= {
        'one_machine': {'SERVER_GPUS': ' '.join(map(str, range(servers))), 'TRAINER_GPUS': '6,7'},
        'slurm': {
            'SLURM_JOB_NODELIST': ','.join(f'127.0.0.{i}' for i in [*range(1, 1 + hosts), *range(101, 101 + servers)]),
            'SERVER_NODES': str(servers), 'SLURM_SUBMIT_DIR': str(ROOT),
        },
        'kubernetes': {
            'NAME': 'math', 'IMAGE': 'registry/bapo:1', 'CLAIM': 'disk', 'MOUNT': str(tmp_path), 'TRAINERS': str(hosts),
            'SERVERS': str(servers),
        },
        'tpu_pod': {
            'TPU': 'pod', 'ZONE': 'here', 'SERVERS': ' '.join(f'gpu-{i}' for i in range(servers)), 'SERVER_ZONE': 'there',
            'REPO': str(ROOT),
        },
    }[script]  # fmt: skip
    whole = {k: v for k, v in {**os.environ, 'BAPO_ROLLOUT_TOKEN': None, **needed, **env}.items() if v is not None}
    words = [str(ROOT / 'launch' / f'{script}.sh'), '--', *train_args]
    # A process started in the background may have Ctrl-C ignored, and hand that on to what it starts.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        words, env=whole, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=heed,
    )  # fmt: skip


def launch(script: str, tmp_path: Path, *train_args: str, **options) -> Launched:
    """`start`, waited for; the run directory is 'tmp_path/a run' unless `train_args` say otherwise."""
    process = start(script, tmp_path, *(train_args or plain_args(tmp_path)), **options)
    output, _ = process.communicate(timeout=120)
    calls = recorded(tmp_path)
    trainers, servers = ([c for c in calls if c['name'] == 'python' and c['argv'][1] == m and 'after' not in c] for m in MODULES)
    if manifest := applied(calls):
        trainers, servers = (pods(yaml.safe_load(manifest), job, calls) for job in ('trainer', 'server'))
    trainers, servers = ([Command(c['argv'], c['env']) for c in commands] for commands in (trainers, servers))
    by_host = sorted(trainers, key=lambda c: int(flag(c, 'host') or 0))
    return Launched(process.returncode, output, by_host, sorted(servers, key=lambda c: (flag(c, 'host'), flag(c, 'port'))), calls)


def applied(calls: list[dict]) -> str | None:
    """What kubectl was given to apply."""
    return next((c['stdin'] for c in calls if c['argv'] == ['apply', '-f', '-']), None)


MODULES = ('bapo_jax.train', 'bapo_jax.rollout.serve')


def trainer_commands(script: str, tmp_path: Path, *train_args: str, **options) -> list[Command]:
    """The trainer command of each host (one for one_machine), ready to be started as processes of this machine.

    The first word is this Python; names of pods are loopback addresses, 127.0.0.1 for host 0 and 127.0.0.101, … for the servers,
    as the other scripts' stubs have it (one_machine: 127.0.0.1 for all); of the environment, the stubs are taken out. `options` as
    of `start`: hosts, servers, COORDINATOR_PORT='…', PORT='…' (of the servers, of which none is left running).
    """
    done = launch(script, tmp_path, *train_args, **options)
    assert done.status == 0, done.output
    commands = []
    for trainer in done.trainers:
        words = [re.sub(r'math-trainer-0-0\.math\b', '127.0.0.1', word) for word in trainer.argv]
        words = [re.sub(r'math-server-0-(\d+)\.math\b', lambda m: f'127.0.0.{101 + int(m[1])}', word) for word in words]
        env = {k: v for k, v in trainer.env.items() if not k.startswith('STUB_')}
        env |= {k: os.environ[k] for k in ('PATH', 'HOME') if k in os.environ}
        commands.append(Command([sys.executable, *words], env))
    return commands


def plain_args(tmp_path: Path) -> list[str]:
    return ['--config=configs/quickstart.py', f'--workdir={tmp_path}/a run']


def recorded(tmp_path: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((tmp_path / 'records').glob('*.json'))]


def flag(command: Command, name: str) -> str | None:
    """A flag's value, the last if it was given more than once."""
    return next((a.split('=', 1)[1] for a in reversed(command.argv) if a.startswith(f'--{name}=')), None)


def pods(manifest: dict, job: str, calls: list[dict]) -> list[dict]:
    """Argv and environment of each pod of a replicated job, as Kubernetes makes them of the manifest; of the first container."""
    spec = next(j for j in manifest['spec']['replicatedJobs'] if j['name'] == job)['template']['spec']
    container = spec['template']['spec']['containers'][0]
    secrets = {c['argv'][3]: c['stdin'] for c in calls if c['argv'][:3] == ['create', 'secret', 'generic']}
    made = []
    for index in range(spec['completions']):
        env = {'JOB_COMPLETION_INDEX': str(index)}
        for variable in container['env']:
            source = variable.get('valueFrom', {})
            if 'value' in variable:
                env[variable['name']] = variable['value']
            elif 'secretKeyRef' in source:
                env[variable['name']] = secrets[source['secretKeyRef']['name']]
            elif source == {'fieldRef': {'fieldPath': 'status.podIP'}}:
                env[variable['name']] = f'10.0.{["trainer", "server"].index(job)}.{index}'
        made.append({'argv': [expand(word, env) for word in container['command'][1:]], 'env': env})
    return made


def expand(word: str, env: dict[str, str]) -> str:
    """Kubernetes' rule for a container's command: $(NAME) is a variable of it, or stays where there is none; $$ is $."""
    return re.sub(r'\$(?:\$|\((.*?)\))', lambda m: '$' if m[1] is None else env.get(m[1], m[0]), word)


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on."""
    while True:
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            first = s.getsockname()[1]
        try:
            for port in range(first, first + count):
                with socket.socket() as s:
                    s.bind(('127.0.0.1', port))
        except (OSError, OverflowError):
            continue
        return first


def copy_runs(directory: Path, copies: Path, *command: str, **env: str) -> subprocess.CompletedProcess:
    """launch/copy_runs.sh around a command, by default one that does nothing; `env` is added to the environment."""
    words = [str(COPY_RUNS), str(directory), str(copies), *(command or ('true',))]
    return subprocess.run(words, env=os.environ | env, capture_output=True, text=True, timeout=60)
