"""Two trainer hosts, started as real processes of this machine, which exchange data by gloo. Each has one CPU device."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from recorded_server import RecordedServer
from small_run import ROOT

from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE

TOKEN = 'a token of the tests'
MINUTES = 60.0
TRAIN = [sys.executable, '-m', 'bapo_jax.train']


def free_port() -> int:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def arguments(workdir: Path, server: RecordedServer, benchmark: Path, *changes: str) -> list[str]:
    """The quickstart, small, answered by the recorded server; v=2, m=3: two syncs, and a re-evaluation between them.

    Parameters are split over the hosts, rows fill the parts of both, and the rate is high, so that what one host does wrong shows.
    """
    return [
        '--config=configs/quickstart.py', f'--workdir={workdir}', '--config.steps=4', '--config.task.limit=60',
        '--config.rollout.engine=vllm', f"--config.rollout.servers=('{server.url}',)", '--config.rollout.probe_tolerance=100.0',
        '--config.rollout.sync_every=2', '--config.rollout.group_size=4', '--config.learner.batch_groups=8',
        '--config.learner.mini_batch_groups=4', '--config.learner.micro_batch_rows=4', '--config.learner.learning_rate=2e-3',
        '--config.mesh.data=1', '--config.mesh.fsdp=2', '--config.replay.use_x2=True', '--config.replay.reevaluate_every=3',
        f"--config.evaluate.benchmarks=('{benchmark}',)", '--config.evaluate.samples=2', '--config.evaluate.every=1',
        '--config.evaluate.track_prompts=4',
        '--config.checkpoint.every=2', *changes,
    ]  # fmt: skip


def start(command: list[str], devices: int = 1) -> subprocess.Popen:
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(devices), TOKEN_VARIABLE: TOKEN}
    # Neither hosts nor servers are asked through a proxy: this one takes no connection.
    environment |= {'http_proxy': 'http://127.0.0.1:9', 'https_proxy': 'http://127.0.0.1:9', 'no_proxy': ''}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(*processes: subprocess.Popen) -> list[tuple[int, str]]:
    """(exit status, output) of each; what hangs is killed, and fails."""
    try:
        outputs = [p.communicate(timeout=5 * MINUTES)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, output) for p, output in zip(processes, outputs, strict=True)]


def start_two(arguments: list[str], *of_host_1: str) -> list[subprocess.Popen]:
    command = [*TRAIN, *arguments, '--hosts=2', f'--coordinator=127.0.0.1:{free_port()}']
    return [start([*command, '--host=0']), start([*command, '--host=1', *of_host_1])]
