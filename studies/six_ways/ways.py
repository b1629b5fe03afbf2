"""What plan.md compares: the cells, the problems, the runs in their order, and the commands of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.machine.files import write_text
from bapo_jax.tasks.countdown.problems import generate, problem_key, test_problems
from studies.first_proof.grid import WEAK_BASE
from studies.lib.rows import ROOT, Job, Row, job_of
from studies.second_proof import arms as second_proof
from studies.second_proof.arms import EVERY, HARD

RUNS = 'runs/six_ways'
TEST = f'{RUNS}/test.jsonl'
TEST_SEED, TEST_PROBLEMS = 20261202, 500
STEPS, EVALUATED, SAMPLES, TRAIN = 120, 20, 16, 2_560
SPEED_STEPS = 8  # of G, by which a machine's seconds are told
PROMPTS = second_proof.PROMPTS
COMMON, RATES = 5e-5, (5e-5, 1e-4, 2e-4)
SCAN_SEED, SEEDS = 301, (302, 303, 304, 305)


class Cell(NamedTuple):
    way: str
    method: str
    changes: dict[str, Any]  # of the config's fields


ALIKE = {
    'learner.anchor': 'behaviour',
    'learner.kl_target': 'behaviour',
    'learner.aggregation': 'token_mean',
}


def _fifo(ratio: int, steps: int) -> Cell:
    return Cell(
        'FIFO', 'fifo', {**ALIKE, 'replay.fifo.ratio': ratio, 'replay.fifo.capacity': steps * PROMPTS}
    )


def _x3(**changes: int) -> Cell:
    return Cell('X3', 'bapo_tuned', {f'replay.{name}': value for name, value in changes.items()})


CELLS = {
    'G': Cell('G', 'grpo', ALIKE),
    'fifo': _fifo(2, 8),
    'fifo_2_steps': _fifo(2, 2),
    'fifo_32_steps': _fifo(2, 32),
    'fifo_three_quarters': _fifo(4, 8),
    'freshper': Cell('FreshPER', 'freshper', ALIKE),
    'freshper_8_steps': Cell('FreshPER', 'freshper', {**ALIKE, 'replay.freshper.capacity': 8 * PROMPTS}),
    'repo': Cell('RePO', 'repo', {**ALIKE, 'replay.repo.per_prompt': 8}),
    'exgrpo': Cell('ExGRPO', 'exgrpo', {'replay.exgrpo.start_above': 0.05}),
    'x3': _x3(),
    'x3_2_steps': _x3(high_recent_steps=2),
    'x3_8_steps': _x3(high_recent_steps=8),
    'x3_32_steps': _x3(high_recent_steps=32),
    'x3_half': _x3(high_capacity=19),
    'x3_quarter': _x3(high_capacity=6),
    'x2_x3': Cell('X2 and X3', 'bapo_tuned', second_proof.ARMS['RX'].changes),
    'mixed': Cell('S', 'bapo_tuned', second_proof.ARMS['S'].changes),
}
OWN = ('G', 'fifo', 'freshper', 'repo', 'exgrpo', 'x3', 'x2_x3', 'mixed')  # a way's own cell
assert (EVERY, HARD) == (5, 32)  # as the plan says


def write_problems() -> None:
    """Writes the problems of evaluations; none is in another set of the second proof, or in a shipped one."""
    for folder in (RUNS, second_proof.RUNS):
        (ROOT / folder).mkdir(parents=True, exist_ok=True)
    second_proof.write_problems()
    known = {problem_key(p) for name in ('cd34', 'cd4') for p in test_problems(name)}
    for name in second_proof.PROBLEMS:
        lines = (ROOT / second_proof.problems_file(name)).read_text('utf-8').splitlines()
        known |= {problem_key({'numbers': p['nums'], 'target': p['target']}) for p in map(json.loads, lines)}
    problems = generate(TEST_PROBLEMS, seed=TEST_SEED, sizes=(4,), exclude=frozenset(known))
    lines = (json.dumps({'nums': p['numbers'], 'target': p['target']}) + '\n' for p in problems)
    write_text(ROOT / TEST, ''.join(lines))


def fields(job: Job) -> dict[str, Any]:
    """The fields of configs/quickstart.py:METHOD that a run changes."""
    return {
        'model.path': WEAK_BASE, 'task.train': second_proof.problems_file('train'), 'task.limit': TRAIN, 'seed': job.seed,
        'steps': STEPS, 'learner.learning_rate': job.rate, 'evaluate.at_start': False,
        'evaluate.benchmarks': f"('{TEST}',)", 'evaluate.every': EVALUATED, 'evaluate.samples': SAMPLES,
        'evaluate.track_prompts': 0, 'log.rollouts_every': 0, 'checkpoint.every': EVALUATED, **CELLS[job.arm].changes,
    }  # fmt: skip


def command(job: Job, workdir: str) -> list[str]:
    changes = [f'--config.{field}={value}' for field, value in fields(job).items()]
    config = f'--config=configs/quickstart.py:{CELLS[job.arm].method}'
    return ['python', '-m', 'bapo_jax.train', config, f'--workdir={workdir}', *changes]


def speed_command(workdir: str) -> list[str]:
    """A few steps of G, for their seconds."""
    job = Job('speed', 'G', COMMON, SCAN_SEED)
    return [*command(job, workdir), f'--config.steps={SPEED_STEPS}', '--config.evaluate.benchmarks=()']


def base_command(workdir: str) -> list[str]:
    return [
        'python', '-m', 'bapo_jax.evaluate', f'--checkpoint={WEAK_BASE}', '--config=configs/quickstart.py:grpo',
        f'--config.seed={SCAN_SEED}', f'--benchmarks={TEST}', f'--samples={SAMPLES}', f'--output={workdir}',
    ]  # fmt: skip


def best_rate(rows: Sequence[Row], cell: str) -> float:
    """The rate with the highest mean at the end of the scan's seed."""
    of = [row for row in rows if (row['part'], row['arm']) == ('scan', cell)]
    return max(of, key=lambda row: np.mean(row['correct'][str(STEPS)]))['rate']


def wanted(rows: Sequence[Row]) -> list[Job]:
    """The runs that are missing, in the plan's order; those at best rates once the scan is whole."""
    have = set(map(job_of, rows))
    jobs = [Job('base', 'base', 0.0, SCAN_SEED)]
    jobs += [Job('common', cell, COMMON, seed) for seed in SEEDS for cell in CELLS]
    scan = [Job('scan', cell, rate, SCAN_SEED) for cell in OWN for rate in RATES]
    jobs += scan
    if have >= set(scan):
        best = {cell: best_rate(rows, cell) for cell in OWN}
        jobs += [
            Job('best', cell, rate, seed) for seed in SEEDS for cell, rate in best.items() if rate != COMMON
        ]
    return [job for job in jobs if job not in have]
