"""What plan.md measures: problems, arms, rates and seeds, and the commands of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from bapo_jax.files import write_text
from bapo_jax.tasks.countdown_data import generate, problem_key, test_problems
from studies.first_proof.grid import WEAK_BASE

ROOT = Path(__file__).resolve().parents[2]
RUNS = 'runs/second_proof'
PROBLEMS = {'test': (20261125, 1_000), 'scan': (20261126, 300), 'train': (20261127, 5_120)}  # seed and number
RATES = (5e-5, 1e-4, 2e-4)
SCAN_SEEDS, SEEDS, CEILING_SEEDS = (101, 102), tuple(range(201, 213)), tuple(range(201, 206))
KEPT = (201, 202)  # seeds whose rollouts of every step are kept, for P(mixed)
SAMPLES = {'scan': 8, 'final': 32, 'ceiling': 32, 'base': 32}
CONTRASTS = (('R', 'P'), ('RX', 'R'), ('R', 'G'))
BASE_SEEDS = (1, 2)  # problems are sorted by the answers of one, and compared with those of the other
SAVED = 20  # steps between the checkpoints from which an arm is scored at equal seconds
STEPS, PROMPTS, RESPONSES = 240, 64, 8
HARD, EVERY = 32, 5  # hard prompts that RX re-evaluates every so many steps
PASSES, MINI_BATCH = 4, 16  # of P; plan.md says how they follow from the scan


class Arm(NamedTuple):
    method: str
    changes: dict[str, Any]  # of the config's fields
    steps: int = STEPS


ARMS = {
    'G': Arm('grpo', {'learner.anchor': 'behaviour', 'learner.kl_target': 'behaviour'}),
    'P': Arm(
        'bapo_tuned',
        {'replay.use_x3': False, 'learner.passes_per_batch': PASSES, 'learner.mini_batch_groups': MINI_BATCH},
    ),
    'R': Arm('bapo_tuned', {}),
    'RX': Arm(
        'bapo_tuned',
        {'replay.use_x2': True, 'replay.reevaluate_every': EVERY, 'replay.max_reevaluate': HARD},
        steps=round(STEPS * PROMPTS / (PROMPTS + HARD / EVERY)),  # as many responses as R
    ),
    'C': Arm('bapo_tuned', {'replay.use_x3': False, 'learner.batch_groups': 224}),
    'base': Arm('bapo_tuned', {}, steps=0),
}


class Job(NamedTuple):
    """A run: a part of SAMPLES, an arm, its learning rate and its seed."""

    part: str
    arm: str
    rate: float
    seed: int


def write_problems() -> None:
    """Writes the three sets; no problem is in two of them, in the shipped test sets or in those of the first proof."""
    first_proof = [p for numbers in (3, 4) for p in generate(200, seed=77, sizes=(numbers,))]
    known = set(map(problem_key, [*test_problems('cd34'), *test_problems('cd4'), *first_proof]))
    for name, (seed, count) in PROBLEMS.items():
        problems = generate(count, seed=seed, sizes=(4,), exclude=frozenset(known))
        known |= set(map(problem_key, problems))
        lines = (json.dumps({'nums': p['numbers'], 'target': p['target']}) + '\n' for p in problems)
        write_text(ROOT / problems_file(name), ''.join(lines))


def problems_file(name: str) -> str:
    return f'{RUNS}/{name}.jsonl'


def fields(job: Job) -> dict[str, Any]:
    """The fields of configs/quickstart.py:METHOD that a run changes."""
    arm = ARMS[job.arm]
    return {
        'model.path': WEAK_BASE, 'task.train': problems_file('train'), 'task.limit': PROBLEMS['train'][1], 'seed': job.seed,
        'steps': arm.steps, 'learner.learning_rate': job.rate, 'evaluate.at_start': False, 'evaluate.benchmarks': '()',
        'evaluate.track_prompts': 0, 'rollouts.every': int(keeps_rollouts(job)), 'checkpoint.every': SAVED,
        'checkpoint.keep': STEPS // SAVED, **arm.changes,
    }  # fmt: skip


def keeps_rollouts(job: Job) -> bool:
    return job.part == 'final' and job.seed in KEPT


def commands(job: Job, workdir: str) -> list[list[str]]:
    """The training command and the evaluation of its result; the base's is an evaluation alone."""
    config = f'--config=configs/quickstart.py:{ARMS[job.arm].method}'
    if job.part == 'base':
        return [[*evaluation(job, WEAK_BASE, SAMPLES['base']), config, f'--config.seed={job.seed}', f'--output={workdir}']]
    changes = [f'--config.{field}={value}' for field, value in fields(job).items()]
    return [['python', '-m', 'bapo_jax.train', config, f'--workdir={workdir}', *changes], evaluation(job, workdir, SAMPLES[job.part])]


def evaluation(job: Job, checkpoint: str, samples: int) -> list[str]:
    """The evaluation of a policy on the problems of the job's part."""
    problems = problems_file('scan' if job.part == 'scan' else 'test')
    return ['python', '-m', 'bapo_jax.evaluate', f'--checkpoint={checkpoint}', f'--benchmarks={problems}', f'--samples={samples}']
