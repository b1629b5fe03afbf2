"""Does training through vLLM track training with the in-process engine? The quickstart, 60 steps, three seeds
each.

    python -m benchmarks.engine.compare            # 25 minutes on 2 cores

The two draw different samples of the same policy, so their runs agree only within the noise between seeds.
Prints cd34 mean@8 and pass@8 of every run, and the training reward of the last 20 steps.
"""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from absl import app, flags
from benchmarks.host.load import cpu_name
from rich.console import Console
from rich.table import Table

from bapo_jax.run.log.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / 'runs' / 'engines'
ENGINES = {
    'in-process': ['--config.rollout.engine=jax'],
    'vLLM': ['--config.rollout.engine=vllm', "--config.rollout.server.args=('--enforce-eager',)"],
}


def measure(engine: str, seed: int) -> dict[str, float]:
    """Trains once; scores in percent, and what the steps cost."""
    workdir = RUNS / f'{engine}_{seed}'
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir(parents=True)
    words = [
        sys.executable, '-m', 'bapo_jax.train', '--config=configs/quickstart.py:bapo_tuned', f'--workdir={workdir}',
        *ENGINES[engine], f'--config.seed={seed}', f'--config.steps={FLAGS.steps}', "--config.evaluate.benchmarks=('cd34',)",
        '--config.evaluate.track_prompts=0', '--config.log.rollouts_every=0',
    ]  # fmt: skip
    with (workdir / 'output.txt').open('w') as output:
        environment = {**os.environ, 'JAX_NUM_CPU_DEVICES': '2'}
        subprocess.run(words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=True)
    rows = read_metrics(workdir)
    return {
        'base mean@8': 100 * rows[0]['val-core/cd34/acc/mean@8'],
        'mean@8': 100 * rows[-1]['val-core/cd34/acc/mean@8'],
        'pass@8': 100 * rows[-1]['val-core/cd34/acc/pass@8'],
        'reward, last 20 steps': 100 * float(np.mean([row['critic/score/mean'] for row in rows[-20:]])),
        's/step, median': float(np.median([row['timing_s/step'] for row in rows[1:]])),
        'largest |Δ log-prob|': max(row.get('mismatch/logprob_abs_max', 0.0) for row in rows[1:]),
    }


def main(_) -> None:
    seeds = [int(seed) for seed in FLAGS.seeds]
    results = {engine: [] for engine in ENGINES}
    for seed in seeds:
        for engine in ENGINES:
            results[engine].append(measure(engine, seed))
            print(f'{engine}, seed {seed}: {results[engine][-1]}', flush=True)
    title = f'{FLAGS.steps} steps, 2 × {cpu_name()}, jax {version("jax")}, {datetime.date.today()}'
    table = Table('engine', 'seed', *results['vLLM'][0], title=title)
    for engine, rows in results.items():
        for seed, row in zip(seeds, rows, strict=True):
            table.add_row(
                engine,
                str(seed),
                *(f'{x:.2g}' if name.startswith('largest') else f'{x:.1f}' for name, x in row.items()),
            )
        table.add_section()
    Console(width=132).print(table)
    a, b = ([row['mean@8'] for row in results[engine]] for engine in ENGINES)
    print(
        f'mean@8: in-process {np.mean(a):.1f} ± {np.std(a, ddof=1):.1f}, vLLM {np.mean(b):.1f} ± '
        f'{np.std(b, ddof=1):.1f} (mean and standard deviation over {len(seeds)} seeds)'
    )


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_integer('steps', 60, 'Training steps of every run.', lower_bound=20)
    flags.DEFINE_list('seeds', ['1', '2', '3'], 'Seeds; at least two.')
    app.run(main)
