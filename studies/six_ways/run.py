"""Six ways: runs what is missing, one run a core, and goes on where it was stopped.

    python -m studies.six_ways.run --hours=2   # starts no run after two hours

Run from the root of the repository. A row of rows.jsonl is a run of bapo_jax.train with its evaluations.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import time
from pathlib import Path

import numpy as np

from bapo_jax.run.log.metrics import read_metrics
from studies.first_proof.grid import WEAK_BASE, WEAK_BASE_COMMAND
from studies.lib.rows import ROOT, Job, Row, answered, rows_in, sealed
from studies.lib.runner import call, hash_of, made_by, make_policy, measure_all, on_each_core
from studies.second_proof.matched import check_base
from studies.six_ways.ways import (
    CELLS, EVALUATED, RUNS, SAMPLES, SPEED_STEPS, STEPS, base_command, command, speed_command, wanted, write_problems,
)  # fmt: skip

FILE = Path(__file__).with_name('rows.jsonl')


def seconds_a_step() -> float:
    """Of G, on this machine and now, every core at work: machines of one name differ by more than two."""

    def of_core(i: int) -> float:
        workdir = ROOT / RUNS / f'speed_{i}'
        shutil.rmtree(workdir, ignore_errors=True)
        call(speed_command(f'{RUNS}/speed_{i}'), workdir)
        timed = [row['timing_s/step'] for row in read_metrics(workdir) if row['step'] > SPEED_STEPS // 2]
        return float(np.mean(timed))

    return float(np.mean(list(on_each_core(of_core, range(len(os.sched_getaffinity(0)))))))


def measure(job: Job, a_step: float) -> Row:
    """Makes a run, or goes on with it; returns its row. `a_step` is what `seconds_a_step` found."""
    name = f'{RUNS}/{job.part}_{job.arm}_{job.rate:g}_{job.seed}'
    workdir, command_of = ROOT / name, base_command if job.part == 'base' else lambda x: command(job, x)
    call(command_of(name), workdir)
    if job.part == 'base':
        found: Row = {'changes': {}, 'correct': {'0': answered(workdir / 'summary.json')}}
    else:
        steps = range(EVALUATED, STEPS + 1, EVALUATED)
        found = {
            'changes': CELLS[job.arm].changes, **costs(workdir),
            'correct': {str(step): answered(workdir / 'evals' / f'{step:06d}.json') for step in steps},
            'a_step': a_step,
        }  # fmt: skip
    row = {
        **job._asdict(), **found, 'samples': SAMPLES, **made_by(), 'base': hash_of(WEAK_BASE),
        'commands': [WEAK_BASE_COMMAND, shlex.join(command_of('runs/x'))],
    }  # fmt: skip
    shutil.rmtree(workdir / 'checkpoints', ignore_errors=True)
    return sealed(row) if job.part in ('common', 'best') else row


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
    rows, last_start = rows_in(FILE), time.monotonic() + 3600 * parser.parse_args().hours
    write_problems()
    make_policy(WEAK_BASE, WEAK_BASE_COMMAND)
    check_base()
    a_step = seconds_a_step()
    print(f'a step of G takes {a_step:.2f} s', flush=True)
    while (jobs := wanted(rows)) and time.monotonic() < last_start:
        print(f'{len(rows)} rows are there, {len(jobs)} runs to go', flush=True)
        rows += measure_all(FILE, jobs, lambda job: measure(job, a_step), last_start)


if __name__ == '__main__':
    main()
