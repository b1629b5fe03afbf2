"""Six ways: runs what is missing, one run a core, and goes on where it was stopped.

    python -m studies.six_ways.run --hours=2   # starts no run after two hours

Run from the root of the repository. A row of rows.jsonl is a run of bapo_jax.train with its evaluations.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path

from bapo_jax.run.log.metrics import read_metrics
from benchmarks.cores import on_each_core
from benchmarks.host.load import cpu_name
from studies.first_proof.grid import WEAK_BASE, WEAK_BASE_COMMAND
from studies.second_proof.arms import ROOT, Job
from studies.second_proof.matched import check_base
from studies.second_proof.rows import Row, sealed
from studies.six_ways.ways import (
    CELLS,
    EVALUATED,
    RUNS,
    SAMPLES,
    STEPS,
    base_command,
    command,
    wanted,
    write_problems,
)

FILE = Path(__file__).with_name('rows.jsonl')


def read_rows() -> list[Row]:
    return [json.loads(line) for line in FILE.read_text('utf-8').splitlines()] if FILE.is_file() else []


def measure(job: Job) -> Row:
    """Makes a run, or goes on with it; returns its row."""
    workdir = ROOT / RUNS / f'{job.part}_{job.arm}_{job.rate:g}_{job.seed}'
    workdir.mkdir(parents=True, exist_ok=True)
    words = (
        base_command(str(workdir.relative_to(ROOT)))
        if job.part == 'base'
        else command(job, str(workdir.relative_to(ROOT)))
    )
    call(words, workdir)
    if job.part == 'base':
        found: Row = {'changes': {}, 'correct': {'0': answered(workdir / 'summary.json')}}
    else:
        steps = range(EVALUATED, STEPS + 1, EVALUATED)
        found = {
            'changes': CELLS[job.arm].changes, **costs(workdir),
            'correct': {str(step): answered(workdir / 'evals' / f'{step:06d}.json') for step in steps},
        }  # fmt: skip
        shutil.rmtree(workdir / 'checkpoints')
    commit = subprocess.run(
        ['git', 'rev-parse', 'HEAD'], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return {
        **job._asdict(), **found, 'samples': SAMPLES, 'commit': commit.strip(),
        'base': hashlib.sha256((ROOT / WEAK_BASE / 'model.safetensors').read_bytes()).hexdigest()[:16],
        'cpu': cpu_name(), 'cores': os.cpu_count(), 'jax': importlib.metadata.version('jax'),
        'date': datetime.datetime.now().isoformat(timespec='minutes'),
        'commands': [WEAK_BASE_COMMAND, shlex.join(words).replace(str(workdir.relative_to(ROOT)), 'runs/x')],
    }  # fmt: skip


def call(words: list[str], workdir: Path) -> None:
    """Runs a command; what it prints goes to a file. Raises CalledProcessError where it fails."""
    environment = os.environ | {
        'JAX_PLATFORMS': 'cpu',
        'JAX_COMPILATION_CACHE_DIR': str(ROOT / RUNS / 'cache'),
    }
    with (workdir / 'output.txt').open('a') as output:
        subprocess.run(
            [sys.executable, *words[1:]], cwd=ROOT, env=environment, check=True, stdout=output, stderr=output
        )


def answered(file: Path) -> list[int]:
    """How many of the samples of each problem are right."""
    [scores] = json.loads(file.read_text('utf-8'))['benchmarks'].values()
    return scores['correct']


def costs(workdir: Path) -> Row:
    """What a run had taken after each evaluated step: responses, trained tokens, seconds of its steps."""
    logged = [row for row in read_metrics(workdir) if row['step'] > 0]
    tokens = seconds = 0.0
    found: Row = {'responses': [], 'tokens': [], 'seconds': []}
    for row in logged:
        tokens += row['perf/throughput'] * row['timing_s/step']
        seconds += row['timing_s/step']
        if row['step'] % EVALUATED == 0:
            found['responses'].append(row['rollout/responses_total'])
            found['tokens'].append(round(tokens))
            found['seconds'].append(round(seconds, 1))
    of = [row for row in logged if row['step'] > EVALUATED]
    return found | {
        'updates': sum(row.get('actor/updates', 0) for row in logged),
        'groups': {
            origin: round(sum(row.get(f'bapo/{origin}_groups', 0) for row in of) / len(of), 2)
            for origin in ('x1', 'x2', 'x3', 'replay')
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--hours', type=float, default=24.0, help='start no run after this many hours')
    rows, last_start = read_rows(), time.monotonic() + 3600 * parser.parse_args().hours
    write_problems()
    if not (ROOT / WEAK_BASE / 'model.safetensors').is_file():
        subprocess.run([sys.executable, *WEAK_BASE_COMMAND.split()[1:]], cwd=ROOT, check=True)
    check_base()

    def work(job: Job) -> Row | None:
        return measure(job) if time.monotonic() < last_start else None

    while (jobs := wanted(rows)) and time.monotonic() < last_start:
        print(f'{len(rows)} rows are there, {len(jobs)} runs to go', flush=True)
        for row in on_each_core(work, jobs):
            if row is not None:
                row = sealed(row) if row['part'] in ('common', 'best') else row
                rows.append(row)
                with FILE.open('a', encoding='utf-8') as file:
                    file.write(json.dumps(row) + '\n')
                print(f'{row["part"]} {row["arm"]} {row["rate"]:g}, seed {row["seed"]}: there', flush=True)


if __name__ == '__main__':
    main()
