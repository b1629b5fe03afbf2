"""What overlapping generation and training saves: the quickstart with a real vLLM server, in turn and overlapped.

    python benchmarks/overlap.py

Server and trainer have one core each, in both arms. In the arm in turn, a step takes G seconds for generation and T for all else. A
step with overlap costs at least max(T + G/v, G + T/v) on average: the first generation after a sync has nothing to hide behind. The
first two cycles of v steps compile and are left out.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from absl import app, flags
from host_load import cpu_name
from rich.console import Console
from rich.table import Table

from bapo_jax.rollout.supervise import SupervisedServer
from bapo_jax.rollout.token_guard import TOKEN_VARIABLE
from bapo_jax.run.log import read_metrics

ROOT = Path(__file__).resolve().parents[1]


def arm(overlap: bool, server: SupervisedServer, core: int, workdir: Path) -> list[dict]:
    """Trains on one core; the metrics of the steps that count."""
    v = FLAGS.sync_every
    words = [
        sys.executable, '-m', 'bapo_jax.train', '--config=configs/quickstart.py', f'--workdir={workdir}',
        '--config.rollout.engine=vllm', f'--config.rollout.servers=({server.url!r},)', f'--config.rollout.overlap={overlap}',
        f'--config.rollout.sync_every={v}', f'--config.steps={v * (2 + FLAGS.cycles)}', '--config.evaluate.benchmarks=()',
        '--config.evaluate.track_prompts=0', '--config.rollouts.every=0', '--config.checkpoint.every=1000',
    ]  # fmt: skip
    environment = {**os.environ, TOKEN_VARIABLE: server.token, 'JAX_NUM_CPU_DEVICES': '1'}
    with (workdir.parent / f'{workdir.name}.log').open('w') as output:
        subprocess.run(
            ['taskset', '-c', str(core), *words], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=True
        )
    # Cycles begin at the syncs, steps v, 2v, …
    return [row for row in read_metrics(workdir) if 2 * v <= row['step'] < v * (2 + FLAGS.cycles)]


def mean(rows: list[dict], *phases: str) -> float:
    return float(np.mean([sum(row.get(f'timing_s/{phase}', 0.0) for phase in phases) for row in rows]))


def main(_) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit('error: needs two cores, one for the server and one for the trainer')
    with tempfile.TemporaryDirectory() as directory:
        os.environ['VLLM_CPU_OMP_THREADS_BIND'] = str(cores[1])
        os.sched_setaffinity(0, {cores[1]})  # the server inherits it
        server = SupervisedServer(
            str(ROOT / 'configs' / 'quickstart_base'), Path(directory) / 'server.log', dtype='float32', max_tokens=64, deadline_s=600,
            extra=['--enforce-eager'],
        )  # fmt: skip
        try:
            server.start()
            turn, lapped = (arm(overlap, server, cores[0], Path(directory) / name) for overlap, name in ((False, 'a'), (True, 'b')))
        finally:
            server.stop()
    v = FLAGS.sync_every
    table = Table(
        'seconds a step', 'in turn', 'overlapped',
        title=f'v = {v}, {len(turn)} steps of 64 × 8 responses, a core each; {cpu_name()}, jax {version("jax")}, {datetime.date.today()}',
    )  # fmt: skip
    for phase in ('gen', 'reward', 'wait_rollouts', 'weight_sync', 'update_actor', 'step'):
        table.add_row(phase, f'{mean(turn, phase):.2f}', f'{mean(lapped, phase):.2f}')
    Console().print(table)
    step = mean(lapped, 'step')
    T, G = mean(turn, 'step') - mean(turn, 'wait_rollouts'), mean(turn, 'wait_rollouts')
    print(f'overlapped: {mean(turn, "step") / step:.2f} × as fast as in turn')
    print(against_limit('in turn (target 1.1)', step, T, G, v))
    print(against_limit('overlapped', step, step - mean(lapped, 'wait_rollouts'), mean(lapped, 'gen', 'reward'), v))


def against_limit(arm_name: str, step: float, T: float, G: float, v: int) -> str:
    limit = max(T + G / v, G + T / v)
    return f'with T = {T:.2f} s and G = {G:.2f} s, {arm_name}: max(T + G/v, G + T/v) = {limit:.2f} s, and {step:.2f} s is {step / limit:.2f} × that'


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_integer('sync_every', 5, 'v.', lower_bound=2)
    flags.DEFINE_integer('cycles', 4, 'Cycles of v steps measured.', lower_bound=1)
    app.run(main)
