"""Second proof: runs what is missing of a part, one run a core, and goes on where it was stopped.

    python -m studies.second_proof.run                       # part 1, plan.md
    python -m studies.second_proof.run --part=2 --hours=2  # part 2, plan_2.md; starts no run after two hours
    python -m studies.second_proof.run --part=3              # part 3, plan_3.md; --part=4: plan_4.md
    # part 5, plan_5.md, on a GPU; a run for every two cores
    python -m studies.second_proof.run --part=5 --cores=2
    python -m studies.second_proof.run --part=6 --cores=2    # part 6, plan_6.md: the same
    python -m studies.second_proof.run --part=7              # part 7, plan_7.md: part 4 once more
    python -m studies.second_proof.run --part=8              # part 8, plan_8.md: rates matched
    python -m studies.second_proof.analysis          # the numbers and verdicts, once no run is missing

Run from the root of the repository. A row of rows.jsonl is a run of bapo_jax.train and an evaluation; it
holds its commands.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from absl import app, flags

from bapo_jax.run.log.metrics import read_metrics
from studies.lib.rows import ROOT, Job, Row, answered, sealed
from studies.lib.runner import call, hash_of, made_by, make_policy, measure_all
from studies.second_proof.arms import (
    ARMS,
    BASE_COMMANDS,
    GUARD_STEPS,
    RUNS,
    SAMPLES,
    commands,
    evaluation,
    keeps_rollouts,
    write_problems,
)  # fmt: skip
from studies.second_proof.guard import wanted_again, wanted_guard
from studies.second_proof.hard import wanted_hard
from studies.second_proof.large import wanted_large, wanted_own
from studies.second_proof.matched import check_base, wanted_matched
from studies.second_proof.moves import moves
from studies.second_proof.rows import FILE, earlier_steps, of_today, read_rows, wanted
from studies.second_proof.table import wanted_table

WANTED = {  # runs of a part
    '1': wanted, '2': wanted_hard, '3': wanted_table, '4': wanted_guard, '5': wanted_large, '6': wanted_own, '7': wanted_again,
    '8': wanted_matched,
}  # fmt: skip
ON_GPU = ('5', '6')
FLAGS = flags.FLAGS
flags.DEFINE_enum('part', '1', list(WANTED), 'Which part of the study.')
flags.DEFINE_integer('cores', 1, 'Cores of a run. Parts 5 and 6 have the GPU as well.', lower_bound=1)
flags.DEFINE_float('hours', 24.0, 'Start no run after this many hours.')


def measure(job: Job, earlier: Mapping[str, int]) -> Row:
    """Trains and evaluates; returns the row. `earlier` names the steps at which the run is scored, too."""
    workdir = ROOT / RUNS / f'{job.part}_{job.arm}_{job.rate:g}_{job.seed}'
    name, told, base = str(workdir.relative_to(ROOT)), commands(job, 'runs/x'), ARMS[job.arm].base
    for words in commands(job, name):
        call(words, workdir, device())
    row = {
        **job._asdict(), 'changes': ARMS[job.arm].changes, 'samples': SAMPLES[job.part], 'correct': scores(workdir, job),
        **made_by(), 'base': hash_of(base), **({'gpu': gpu_name()} if FLAGS.part in ON_GPU else {}),
    }  # fmt: skip
    if ARMS[job.arm].steps:
        row |= spent(workdir)
        row['earlier'], samples = {}, SAMPLES['guard_scan' if job.part.startswith('guard') else 'scan']
        for other, step in sorted(
            earlier.items(), key=lambda of_other: -of_other[1]
        ):  # falling: what is later is deleted
            for saved in (workdir / 'checkpoints').iterdir():
                if int(saved.name) > step:
                    shutil.rmtree(saved)
            call(evaluation(job, name, samples), workdir, device())
            row['earlier'][other] = {'step': step, 'samples': samples, 'correct': scores(workdir, job, step)}
            told += [[*told[0], f'--config.steps={step}'], evaluation(job, 'runs/x', samples)]
        if keeps_rollouts(job):
            row['moves'] = moves(workdir)
            shutil.rmtree(workdir / 'rollouts')
        shutil.rmtree(workdir / 'checkpoints')
    row |= {'commands': [BASE_COMMANDS[base], *map(shlex.join, told)]}
    return sealed(row) if FLAGS.part == '8' else row


def device() -> dict[str, str]:
    """The variables that give a process its device: a GPU in parts 5 and 6, of whose memory each takes what
    it needs.
    """
    if FLAGS.part in ON_GPU:
        return {'JAX_PLATFORMS': 'cuda', 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
    return {'JAX_PLATFORMS': 'cpu'}


def gpu_name() -> str:
    """The first GPU's name."""
    asked = ['nvidia-smi', '--query-gpu=name', '--format=csv,noheader']
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def scores(workdir: Path, job: Job, step: int | None = None) -> list[int]:
    """The right answers to each problem after `step`, or after the last."""
    last = ARMS[job.arm].steps
    folder = workdir / 'evaluation' / f'{step or last:06d}' if last else workdir
    return answered(folder / 'summary.json')


def spent(workdir: Path) -> Row:
    """What a run took, and its entropy and sources on the way."""
    logged = [row for row in read_metrics(workdir) if row['step'] > 0]
    return {
        'updates': sum(row['actor/updates'] for row in logged),
        'responses': logged[-1]['rollout/responses_total'],
        'tokens': round(sum(row['perf/throughput'] * row['timing_s/step'] for row in logged)),
        'seconds': round(sum(row['timing_s/step'] for row in logged)),
        'entropy': [
            round(float(np.mean([row['actor/entropy'] for row in part])), 4)
            for part in (logged[:24], logged[-24:])
        ],
        'length': [
            round(float(np.mean([row['response_length/mean'] for row in part])), 1)
            for part in (logged[:24], logged[-24:])
        ],
        **{
            origin: round(float(np.mean([row[f'bapo/{origin}_groups'] for row in logged])), 2)
            for origin in ('x1', 'x2', 'x3')
        },
        **{name: sum(row.get(f'bapo/{name}', 0) for row in logged) for name in ('reevaluated', 'improved')},
        'pooled': sum(row.get('retries/pooled', 0) for row in logged),
        'expected_mixed': round(sum(row.get('retries/expected_mixed', 0) for row in logged), 1),
        'given_share': [row['retries/given_share'] for row in logged if 'retries/given_share' in row],
    }


def scored_earlier(job: Job, rows: list[Row]) -> dict[str, int]:
    """The earlier steps at which a run is scored: where another arm has taken as many seconds, or those of
    the guard.
    """
    if job.part == 'final':
        return earlier_steps(rows, job.arm)
    return {str(step): step for step in GUARD_STEPS[:-1]} if job.part.startswith('guard') else {}


def main(_) -> None:
    (ROOT / RUNS).mkdir(parents=True, exist_ok=True)
    write_problems()
    rows, missing = read_rows(), WANTED[FLAGS.part]
    last_start = time.monotonic() + 3600 * FLAGS.hours
    while (jobs := missing(of_today(rows))) and time.monotonic() < last_start:
        print(f'{len(rows)} rows are there, {len(jobs)} runs to go before the next decision', flush=True)
        for base in sorted({ARMS[job.arm].base for job in jobs}):
            make_policy(base, BASE_COMMANDS[base], device())
        if FLAGS.part == '8':
            check_base()
        earlier = {job: scored_earlier(job, of_today(rows)) for job in jobs}
        rows += measure_all(FILE, jobs, lambda job: measure(job, earlier[job]), last_start, FLAGS.cores)


if __name__ == '__main__':
    app.run(main)
