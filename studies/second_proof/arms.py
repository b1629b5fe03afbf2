"""What plan.md and plan_2.md to plan_8.md measure: problems, arms, rates and seeds, and the commands of a
run.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from bapo_jax.machine.files import write_text
from bapo_jax.tasks.countdown.problems import generate, problem_key, test_problems, training_problems
from configs import quickstart
from studies.first_proof.grid import WEAK_BASE, WEAK_BASE_COMMAND
from studies.lib.rows import ROOT, Job

RUNS = 'runs/second_proof'
PROBLEMS = {  # seed, number, and numbers in a problem
    'test': (20261125, 1_000, (4,)),
    'scan': (20261126, 300, (4,)),
    'train': (20261127, 5_120, (4,)),
    'scan_34': (20261128, 300, (3, 4)),
}
RATES = (5e-5, 1e-4, 2e-4)
SCAN_SEEDS, SEEDS, CEILING_SEEDS = (101, 102), tuple(range(201, 213)), tuple(range(201, 205))
KEPT = (201, 202)  # seeds whose rollouts of every step are kept, for P(mixed)
# By part, the samples of an evaluation, and where they are not the test problems, those that are answered.
SAMPLES = {
    'scan': 8, 'final': 32, 'ceiling': 32, 'base': 32, 'hard_scan': 8, 'hard': 32, 'search': 32, 'table_scan': 8, 'table': 32,
    'guard_scan': 32, 'guard': 32, 'large_scan': 8, 'large': 32,
    'large_own_scan': 8, 'large_own': 32, 'repeat': 32, 'matched': 32, 'second': 32,
}  # fmt: skip
CONTRASTS = (('R', 'P'), ('RX', 'R'), ('R', 'G'))
BASE_SEEDS = (1, 2)  # problems are sorted by the answers of one, and compared with those of the other
HARD_SEEDS, HARD_FINAL_SEEDS, SEARCH_SEEDS = (111, 112, 113), SEEDS[:5], (121, 122, 123)
SAVED = 20  # steps between the checkpoints from which a run is scored at an earlier step, too
STEPS, PROMPTS, RESPONSES = 240, 64, 8
HARD, EVERY = 32, 5  # hard prompts that RX re-evaluates every so many steps
PASSES, MINI_BATCH = 4, 17  # of P; plan.md says how they follow from the scan, README.md what was decided
SEARCH_BASE, QUICKSTART_BASE, LARGE_BASE = (
    f'{RUNS}/search_base',
    'configs/quickstart_base',
    f'{RUNS}/large_base',
)
SECOND_BASE = f'{RUNS}/second_base'
BASE_COMMANDS = {
    # it is in the repository
    QUICKSTART_BASE: 'python -m configs.making.sft --output=configs/quickstart_base',
    WEAK_BASE: WEAK_BASE_COMMAND,
    SECOND_BASE: WEAK_BASE_COMMAND.replace(WEAK_BASE, SECOND_BASE) + ' --seed=8',
    SEARCH_BASE: 'python -m configs.making.sft --start=configs/quickstart_base --searching --steps=400 --learning_rate=2e-3 '
    f'--problems=20000 --output={SEARCH_BASE}',
    LARGE_BASE: f'python -m configs.making.sft --width=512 --steps=1500 --learning_rate=2.5e-3 --problems=20000 --output={LARGE_BASE}',
}
SEARCH_TOKENS = 160


class Arm(NamedTuple):
    method: str
    changes: dict[str, Any]  # of the config's fields
    steps: int = STEPS
    base: str = WEAK_BASE


def steps_with(hard: int, every: int, steps: int = STEPS) -> int:
    """As many responses as in `steps` without re-evaluation, where so many prompts are asked again every so
    many steps.
    """
    return round(steps * PROMPTS / (PROMPTS + hard / every))


# Part 1.
DECISIVE = {
    'G': Arm('grpo', {'learner.anchor': 'behaviour', 'learner.kl_target': 'behaviour'}),
    'P': Arm(
        'bapo_tuned',
        {'replay.use_x3': False, 'learner.passes_per_batch': PASSES, 'learner.mini_batch_groups': MINI_BATCH},
    ),
    'R': Arm('bapo_tuned', {}),
    'RX': Arm(
        'bapo_tuned',
        {'replay.use_x2': True, 'replay.reevaluate_every': EVERY, 'replay.max_reevaluate': HARD},
        steps=steps_with(HARD, EVERY),
    ),
    'C': Arm('bapo_tuned', {'replay.use_x3': False, 'learner.batch_groups': 224}),
    'base': Arm('bapo_tuned', {}, steps=0),
}
# Part 2: settings by kind.
_SOLVER = {'replay.given_by': 'solver'}
KINDS = {
    'posterior': {
        'epoch': Arm('bapo_posterior', {}, steps_with(HARD, EVERY)),
        'soon': Arm('bapo_posterior', {'replay.posterior.after': 10}, steps_with(HARD, EVERY)),
    },
    'continue': {
        'solver': Arm('bapo_continue', _SOLVER, steps_with(HARD, EVERY)),
        'own': Arm('bapo_continue', {'replay.given_by': 'policy'}, steps_with(HARD, EVERY)),
        'often': Arm('bapo_continue', {**_SOLVER, 'replay.reevaluate_every': 2}, steps_with(HARD, 2)),
    },
    'spread': {
        'over_mean': Arm('bapo_tuned', {'learner.advantage': 'over_mean'}),
        'reference_01': Arm('bapo_tuned', {'learner.kl_target': 'reference', 'learner.kl_coef': 0.01}),
        'reference_05': Arm('bapo_tuned', {'learner.kl_target': 'reference', 'learner.kl_coef': 0.05}),
        'higher': Arm('bapo_tuned', {'learner.clip_high': 0.28}),
    },
}
# Part 2: the arms of part 1 from a base that searches.
_LONGER = {
    'rollout.max_response_tokens': SEARCH_TOKENS,
    'learner.slot_tokens': SEARCH_TOKENS,
    'learner.row_tokens': 16 + 4 * SEARCH_TOKENS,
}
SEARCH_STEPS = 120
SEARCH = {
    'search_G': Arm('grpo', {**DECISIVE['G'].changes, **_LONGER}, SEARCH_STEPS, SEARCH_BASE),
    'search_R': Arm('bapo_tuned', _LONGER, SEARCH_STEPS, SEARCH_BASE),
    'search_RX': Arm(
        'bapo_tuned',
        {**DECISIVE['RX'].changes, **_LONGER},
        steps_with(HARD, EVERY, SEARCH_STEPS),
        SEARCH_BASE,
    ),
    'search_base': Arm('bapo_tuned', {}, 0, SEARCH_BASE),
}
# Part 3: methods as the quickstart has them.
TABLE_METHODS = (
    'grpo', 'dapo', 'grpo_v5', 'repo', 'remix', 'mopps', 'bapo', 'bapo_tuned', 'bapo_no_x2', 'bapo_no_x3', 'bapo_official', 'ppo',
    'ba_ppo',
)  # fmt: skip
TABLE_RATES, TABLE_SCAN_SEEDS, TABLE_SEEDS = (2.5e-5, 5e-5, 1e-4), (301,), (311, 312, 313)
_GENERATED = {'task.train': 'generated', 'task.limit': 2_560}
TABLE = {
    **{f'table_{method}': Arm(method, _GENERATED, 120, QUICKSTART_BASE) for method in TABLE_METHODS},
    'table_base': Arm('grpo', {}, 0, QUICKSTART_BASE),
}
# Part 4: the quickstart, and what may keep its pass@k.
GUARD_RATE, GUARD_SCAN_SEED, GUARD_SEEDS = 5e-5, 401, tuple(range(411, 416))
GUARD_STEPS = (40, 100, 200)  # after which a run is scored
_AS_SHIPPED = {'task.train': 'generated', 'task.limit': quickstart.get_config().task.limit}
_OVER_MEAN, _HARD_X3 = {'learner.advantage': 'over_mean'}, {'replay.c3': '(0.25,)'}
_REFERENCE = {'learner.kl_target': 'reference', 'learner.kl_coef': 0.05}
GUARD = {
    f'guard_{setting}': Arm('bapo_tuned', _AS_SHIPPED | changes, GUARD_STEPS[-1], QUICKSTART_BASE)
    for setting, changes in {
        'as_is': {},
        'over_mean': _OVER_MEAN,
        'reference_05': _REFERENCE,
        'reference_20': _REFERENCE | {'learner.kl_coef': 0.2},
        'higher': {'learner.clip_high': 0.28},
        'hard_x3': _HARD_X3,
        'hard_over_mean': _OVER_MEAN | _HARD_X3,
        'over_mean_05': _OVER_MEAN | _REFERENCE,
    }.items()
} | {'guard_base': Arm('bapo_tuned', {}, 0, QUICKSTART_BASE)}
# Parts 5 and 6: the arms of part 1 from a base of 12.7M parameters, on a GPU.
_ON_GPU = {
    'rollout.rows': 512,
    'learner.micro_batch_rows': 36,
    'learner.remat': 'none',
    'checkpoint.every': STEPS,
}
LARGE = {
    **{
        f'large_{name}': DECISIVE[name]._replace(changes=DECISIVE[name].changes | _ON_GPU, base=LARGE_BASE)
        for name in ('G', 'P', 'R', 'RX')
    },
    'large_half': Arm('bapo_tuned', _ON_GPU, STEPS // 2, LARGE_BASE),  # R's scan
    'large_base': Arm('bapo_tuned', {'rollout.rows': 512}, 0, LARGE_BASE),
}
LARGE_RATES, LARGE_SCAN_SEED, LARGE_SEEDS = (1.25e-5, 2.5e-5, 5e-5), 101, SEEDS[:8]
OWN_RATES, OWN_SEEDS = (*LARGE_RATES, 1e-4), tuple(range(209, 215))
# Part 8: arms of part 1 at the other rate, and prompts that were mixed last time.
SELECTED = {
    'S': Arm('bapo_tuned', {'prompts.selector': 'mixed'}),
    'M': Arm('bapo_tuned', {'prompts.selector': 'mopps'}),
}
ON_SECOND_BASE = {
    f'second_{name}': arm._replace(base=SECOND_BASE)
    for name, arm in {**DECISIVE, **SELECTED}.items()
    if name in ('G', 'R', 'S')
}
MATCHED_RATES = (5e-5, 1e-4)
ARMS = {
    **DECISIVE,
    **SELECTED,
    **ON_SECOND_BASE,
    **{name: arm for kind in KINDS.values() for name, arm in kind.items()},
    **SEARCH,
    **TABLE,
    **GUARD,
    **LARGE,
}


def write_problems() -> None:
    """Writes the sets of problems; none is in two of them, in shipped test sets, in the first proof's or in
    the table's.
    """
    first_proof = [p for numbers in (3, 4) for p in generate(200, seed=77, sizes=(numbers,))]
    table = training_problems(
        'generated', limit=_GENERATED['task.limit'], seed=quickstart.get_config().task.seed
    )
    known = set(map(problem_key, [*test_problems('cd34'), *test_problems('cd4'), *first_proof]))
    for name, (seed, count, sizes) in PROBLEMS.items():
        if name == 'scan_34':  # the other sets do not depend on part 3
            known |= set(map(problem_key, table))
        problems = generate(count, seed=seed, sizes=sizes, exclude=frozenset(known))
        known |= set(map(problem_key, problems))
        lines = (json.dumps({'nums': p['numbers'], 'target': p['target']}) + '\n' for p in problems)
        write_text(ROOT / problems_file(name), ''.join(lines))


def problems_file(name: str) -> str:
    return f'{RUNS}/{name}.jsonl'


def fields(job: Job) -> dict[str, Any]:
    """The fields of configs/quickstart.py:METHOD that a run changes."""
    arm = ARMS[job.arm]
    return {
        'model.path': arm.base, 'task.train': problems_file('train'), 'task.limit': PROBLEMS['train'][1], 'seed': job.seed,
        'steps': arm.steps, 'learner.learning_rate': job.rate, 'evaluate.at_start': False, 'evaluate.benchmarks': '()',
        'evaluate.track_prompts': 0, 'log.rollouts_every': int(keeps_rollouts(job)), 'checkpoint.every': SAVED,
        'checkpoint.keep': STEPS // SAVED, **arm.changes,
    }  # fmt: skip


def keeps_rollouts(job: Job) -> bool:
    return job.part == 'final' and job.seed in KEPT


def commands(job: Job, workdir: str) -> list[list[str]]:
    """The training command and the evaluation of its result; that of a base is an evaluation alone."""
    arm = ARMS[job.arm]
    config = f'--config=configs/quickstart.py:{arm.method}'
    if arm.steps == 0:
        length = [f'--max_response_tokens={SEARCH_TOKENS}'] if arm.base == SEARCH_BASE else []
        changes = [f'--config.{field}={value}' for field, value in ({'seed': job.seed} | arm.changes).items()]
        return [
            [*evaluation(job, arm.base, SAMPLES[job.part]), config, *changes, f'--output={workdir}', *length]
        ]
    changes = [f'--config.{field}={value}' for field, value in fields(job).items()]
    return [
        ['python', '-m', 'bapo_jax.train', config, f'--workdir={workdir}', *changes],
        evaluation(job, workdir, SAMPLES[job.part]),
    ]


def evaluation(job: Job, checkpoint: str, samples: int) -> list[str]:
    """The evaluation of a policy on the problems of the job's part."""
    problems = {
        'scan': 'scan', 'hard_scan': 'scan', 'large_scan': 'scan', 'large_own_scan': 'scan', 'table_scan': 'scan_34',
        'guard_scan': 'scan_34',
    }.get(job.part, 'test')  # fmt: skip
    problems = 'cd34,cd4' if job.part in ('table', 'guard') else problems_file(problems)
    return [
        'python',
        '-m',
        'bapo_jax.evaluate',
        f'--checkpoint={checkpoint}',
        f'--benchmarks={problems}',
        f'--samples={samples}',
    ]
