"""Second proof, part 1 (plan.md): runs what is missing, one run a core, and goes on where it was stopped.

    python -m studies.second_proof.run               # all of it
    python -m studies.second_proof.run --hours=2     # starts no run after two hours
    python -m studies.second_proof.analysis          # the numbers and verdicts, once no run is missing

Run from the root of the repository. A row of rows.jsonl is a run of bapo_jax.train and an evaluation; it holds its commands.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from absl import app, flags

from bapo_jax.run.log import read_metrics
from benchmarks.cores import on_each_core
from benchmarks.host_load import cpu_name
from studies.first_proof.grid import WEAK_BASE, WEAK_BASE_COMMAND
from studies.second_proof.arms import ARMS, ROOT, RUNS, SAMPLES, Job, commands, evaluation, keeps_rollouts, write_problems
from studies.second_proof.moves import moves
from studies.second_proof.rows import FILE, Row, earlier_steps, of_today, read_rows, wanted

FLAGS = flags.FLAGS
flags.DEFINE_float('hours', 24.0, 'Start no run after this many hours.')


def measure(job: Job, earlier: Mapping[str, int]) -> Row:
    """Trains and evaluates; returns the row. `earlier` are the steps at which the run is scored, too (rows.earlier_steps)."""
    workdir = ROOT / RUNS / f'{job.part}_{job.arm}_{job.rate:g}_{job.seed}'
    workdir.mkdir(parents=True, exist_ok=True)  # a run that was interrupted is continued
    name, made_by = str(workdir.relative_to(ROOT)), commands(job, 'runs/x')
    for words in commands(job, name):
        call(words, workdir)
    row = {
        **job._asdict(), 'changes': ARMS[job.arm].changes, 'samples': SAMPLES[job.part], 'correct': answered(workdir, job),
        'commit': subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip(),
        'base': hashlib.sha256((ROOT / WEAK_BASE / 'model.safetensors').read_bytes()).hexdigest()[:16],
        'cpu': cpu_name(), 'jax': importlib.metadata.version('jax'), 'date': datetime.datetime.now().isoformat(timespec='minutes'),
    }  # fmt: skip
    if job.part != 'base':
        row |= spent(workdir)
        row['earlier'] = {}
        for other, step in sorted(earlier.items(), key=lambda of_other: -of_other[1]):  # falling: what is later is deleted
            for saved in (workdir / 'checkpoints').iterdir():
                if int(saved.name) > step:
                    shutil.rmtree(saved)
            call(evaluation(job, name, SAMPLES['scan']), workdir)
            row['earlier'][other] = {'step': step, 'samples': SAMPLES['scan'], 'correct': answered(workdir, job, step)}
            shorter = commands(job, 'runs/x')[0]
            made_by += [[*shorter, f'--config.steps={step}'], evaluation(job, 'runs/x', SAMPLES['scan'])]
        if keeps_rollouts(job):
            row['moves'] = moves(workdir)
            shutil.rmtree(workdir / 'rollouts')
        shutil.rmtree(workdir / 'checkpoints')
    return {**row, 'commands': [WEAK_BASE_COMMAND, *map(shlex.join, made_by)]}


def call(words: list[str], workdir: Path) -> None:
    """Runs a command; what it prints goes to a file. Raises CalledProcessError where it fails."""
    environment = os.environ | {'JAX_COMPILATION_CACHE_DIR': str(ROOT / RUNS / 'cache'), 'JAX_PLATFORMS': 'cpu'}
    with (workdir / 'output.txt').open('a') as output:
        subprocess.run([sys.executable, *words[1:]], cwd=ROOT, env=environment, check=True, stdout=output, stderr=output)


def answered(workdir: Path, job: Job, step: int | None = None) -> list[int]:
    """How many of the samples of each problem are right; after `step`, or after the last."""
    folder = workdir if job.part == 'base' else workdir / 'evaluation' / f'{step or ARMS[job.arm].steps:06d}'
    [scores] = json.loads((folder / 'summary.json').read_text('utf-8'))['benchmarks'].values()
    return scores['correct']


def spent(workdir: Path) -> Row:
    """What a run took, and its entropy and sources on the way."""
    logged = [row for row in read_metrics(workdir) if row['step'] > 0]
    return {
        'updates': sum(row['actor/updates'] for row in logged),
        'responses': logged[-1]['rollout/responses_total'],
        'tokens': round(sum(row['perf/throughput'] * row['timing_s/step'] for row in logged)),
        'seconds': round(sum(row['timing_s/step'] for row in logged)),
        'entropy': [round(float(np.mean([row['actor/entropy'] for row in part])), 4) for part in (logged[:24], logged[-24:])],
        **{origin: round(float(np.mean([row[f'bapo/{origin}_groups'] for row in logged])), 2) for origin in ('x1', 'x2', 'x3')},
    }


def main(_) -> None:
    (ROOT / RUNS).mkdir(parents=True, exist_ok=True)
    write_problems()
    if not (ROOT / WEAK_BASE / 'model.safetensors').is_file():
        environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
        subprocess.run([sys.executable, *WEAK_BASE_COMMAND.split()[1:]], cwd=ROOT, check=True, env=environment)
    rows = read_rows()
    last_start = time.monotonic() + 3600 * FLAGS.hours

    def work(job: Job) -> Row | None:
        if time.monotonic() >= last_start:
            return None
        return measure(job, earlier_steps(of_today(rows), job.arm) if job.part == 'final' else {})

    while (jobs := wanted(of_today(rows))) and time.monotonic() < last_start:
        print(f'{len(rows)} rows are there, {len(jobs)} runs to go before the next decision', flush=True)
        for row in on_each_core(work, jobs):
            if row is not None:
                rows.append(row)
                with FILE.open('a', encoding='utf-8') as f:
                    f.write(json.dumps(row) + '\n')
                print(f'{row["part"]} {row["arm"]} {row["rate"]:g}, seed {row["seed"]}: there', flush=True)


if __name__ == '__main__':
    app.run(main)
