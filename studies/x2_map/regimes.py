"""Where X2 can pay, built (plan_2.md): problems that a late policy mostly solves, and problems as they come.

python -m studies.x2_map.regimes pools            # the policy, its answers to 24,000 problems, and the pools
python -m studies.x2_map.regimes predict          # fits the simulation to those answers; into plan_2.md
python -m studies.x2_map.regimes run --hours=2    # runs what is missing, one run a core
python -m studies.x2_map.regimes                  # what came, beside what was predicted
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.machine.files import replace_part, write_text
from bapo_jax.report.contrast import p_of_mean, t_interval
from bapo_jax.run.log.metrics import read_metrics
from bapo_jax.tasks.countdown.problems import generate, problem_key, test_problems
from studies.lib.contrasts import holm, of_questions
from studies.lib.rows import ROOT, Row, answered, markdown_table, rows_in
from studies.lib.runner import call, hash_of, made_by, measure_all
from studies.real_policy.rows import asked_again, table_of_failures
from studies.x2_map.calibrate import QUICKSTART, Answers, answers, fit
from studies.x2_map.page import ends, number
from studies.x2_map.simulate import Policy, Retry, accuracy, delayed, fifo, mixed

HERE = Path(__file__).resolve().parent
ROWS, PLAN = HERE / 'rows.jsonl', HERE / 'plan_2.md'
RUNS, BASE = 'runs/x2_map', 'runs/x2_map/late'
ASKED_OF, TRAIN, TEST, RIGHT_OF_8 = 24_000, 2_560, 500, 8
LATE_STEPS, LATE_RATE, LATE_SEED = 240, 1e-4, 400
PROBLEM_SEED, STEPS, SAVED, SAMPLES, RATE = 20261203, 120, 20, 16, 5e-5
SEEDS, POOLS, WAIT = (401, 402, 403, 404), ('solved', 'raw'), 20
BATCH, EVERY, MOST = 64, 5, 32  # prompts of a step; m, and how many are asked again at most
POOLS_COMMAND = 'python -m studies.x2_map.regimes pools'
ARMS: dict[str, dict[str, Any]] = {
    'none': {},
    'fifo': {'replay.use_x2': True, 'replay.reevaluate_every': EVERY, 'replay.max_reevaluate': MOST},
    'delayed': {
        'replay.use_x2': True, 'replay.reevaluate': 'delayed', 'replay.reevaluate_every': WAIT,
        'replay.max_reevaluate': MOST,
    },
}  # fmt: skip
WAYS = ('fifo', 'delayed')


# ---- problems


def file_of(pool: str, part: str) -> str:
    return f'{RUNS}/{pool}_{part}.jsonl'


def write_pools() -> None:
    """Problems of 3 numbers: as they come, and those that the late policy gets right 8 times of 8."""
    (ROOT / RUNS).mkdir(parents=True, exist_ok=True)
    known = frozenset(problem_key(p) for p in test_problems('cd34'))
    problems = generate(TRAIN + ASKED_OF, seed=PROBLEM_SEED, sizes=(3,), exclude=known)
    write(file_of('late', 'train'), problems[:TRAIN])
    if not (ROOT / BASE).is_dir():
        make_late()
    problems = problems[TRAIN:]
    write(file_of('all', 'problems'), problems)
    right = asked(file_of('all', 'problems'), 8)
    solved = [p for p, n in zip(problems, right, strict=True) if n >= RIGHT_OF_8]
    if len(solved) < TRAIN + TEST:
        raise ValueError(f'{len(solved)} of {ASKED_OF} problems are mostly solved; raise ASKED_OF')
    for pool, of in (('solved', solved), ('raw', problems)):
        write(file_of(pool, 'train'), of[:TRAIN])
        write(file_of(pool, 'test'), of[TRAIN : TRAIN + TEST])


def make_late() -> None:
    """Trains the quickstart's base on problems of 3 numbers that are in no pool."""
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '1'}
    for words in late_commands():
        subprocess.run([sys.executable, *words[1:]], cwd=ROOT, check=True, env=environment)


def late_commands() -> list[list[str]]:
    changes = {
        'task.train': file_of('late', 'train'), 'task.limit': TRAIN, 'seed': LATE_SEED, 'steps': LATE_STEPS,
        'learner.learning_rate': LATE_RATE, 'evaluate.at_start': False, 'evaluate.benchmarks': '()',
        'evaluate.track_prompts': 0, 'checkpoint.every': LATE_STEPS,
    }  # fmt: skip
    run = f'{RUNS}/late_run'
    words = [
        'python',
        '-m',
        'bapo_jax.train',
        '--config=configs/quickstart.py:bapo_tuned',
        f'--workdir={run}',
    ]
    return [
        [*words, *(f'--config.{field}={value}' for field, value in changes.items())],
        ['python', '-m', 'bapo_jax.export', f'--checkpoint={run}', f'--output={BASE}'],
    ]


def write(file: str, problems: Sequence[dict[str, Any]]) -> None:
    lines = (json.dumps({'nums': p['numbers'], 'target': p['target']}) + '\n' for p in problems)
    write_text(ROOT / file, ''.join(lines))


def asked(file: str, samples: int) -> list[int]:
    """How many of the late policy's answers to each problem are right."""
    output = ROOT / RUNS / f'{Path(file).stem}_{samples}'
    words = [
        sys.executable, '-m', 'bapo_jax.evaluate', f'--checkpoint={BASE}',
        '--config=configs/quickstart.py:grpo',
        f'--benchmarks={file}', f'--samples={samples}', f'--output={output}',
    ]  # fmt: skip
    subprocess.run(words, cwd=ROOT, check=True, env=os.environ | {'JAX_PLATFORMS': 'cpu'})
    return answered(output / 'summary.json')


# ---- the prediction


def policies(pool: str) -> list[Policy]:
    """What fits the late policy on the pool's test problems, if it changes in training by 0, 1 and 2 times
    what the quickstart's does.
    """
    counts = np.bincount(asked(file_of(pool, 'test'), SAMPLES), minlength=SAMPLES + 1)[:, None]
    base, usual = fit(Answers(counts, 0)).first, fit(answers()[QUICKSTART]).first
    return [base._replace(growth=n * usual.growth, sharpening=n * usual.sharpening) for n in (0, 1, 2)]


def retry_at(policy: Policy, arm: str, step: int) -> Retry:
    """X2 of an arm at a step, given the policy then: an epoch is 40 steps, and nothing is from before the
    first.
    """
    if arm == 'fifo':
        return fifo(policy, oldest=min(TRAIN // BATCH, step - 1))
    retry = delayed(policy, WAIT, asked=MOST / BATCH)
    return retry if step > WAIT else retry._replace(asked=0.0)


class Expected(NamedTuple):
    """What the simulation says of a run: shares of fresh and of asked groups, and the gain in percent."""

    fresh: float
    enters: float
    gain: float


def expected_of(policy: Policy, arm: str) -> Expected:
    """A run that begins with this policy, its steps summed up."""
    steps = range(EVERY, STEPS + 1, EVERY)
    fresh = np.array([mixed(policy.after(step)) for step in steps])
    retries = [retry_at(policy.after(step), arm, step) for step in steps]
    asked_again = np.array([retry.asked for retry in retries])
    entered = asked_again * [retry.enters for retry in retries]
    gain = (fresh + entered).sum() / (1 + asked_again).sum() / fresh.mean() - 1
    return Expected(float(fresh.mean()), float(entered.sum() / asked_again.sum()), 100 * float(gain))


def prediction_table() -> str:
    lines = []
    for pool in POOLS:
        of = policies(pool)
        found = {arm: [expected_of(policy, arm) for policy in of] for arm in WAYS}
        lines.append([
            pool, *(f'{100 * x:.0f}' for x in (accuracy(of[0]), of[0].hopeless)), number(of[0].spread),
            f'{100 * found["fifo"][1].fresh:.0f}', '/'.join(f'{100 * runs[1].enters:.0f}' for runs in found.values()),
            *(f'{number(runs[1].gain)} ({ends(run.gain for run in runs)})' for runs in found.values()),
        ])  # fmt: skip
    return markdown_table(
        ['pool', 'right', 'hopeless', 'spread', 'fresh mixed', 'enter X2', 'FIFO', '20 steps'], lines
    )


def made() -> str:
    """What the prediction is of: hashes of the late policy and of the pools."""
    files = [ROOT / file_of(pool, part) for pool in POOLS for part in ('train', 'test')]
    pools = hashlib.sha256(b''.join(file.read_bytes() for file in files)).hexdigest()[:16]
    return f'Policy {hash_of(BASE)}, pools {pools}.'


# ---- runs


def command(pool: str, arm: str, seed: int, workdir: str) -> list[str]:
    changes = {
        'model.path': BASE,
        'task.train': file_of(pool, 'train'), 'task.limit': TRAIN, 'seed': seed, 'steps': STEPS,
        'learner.learning_rate': RATE, 'evaluate.at_start': True, 'evaluate.samples': SAMPLES,
        'evaluate.benchmarks': f"('{file_of(pool, 'test')}',)", 'evaluate.track_prompts': 0,
        'checkpoint.every': SAVED, 'log.failed_again.prompts': 8, 'log.failed_again.every': 5, **ARMS[arm],
    }  # fmt: skip
    words = [
        'python',
        '-m',
        'bapo_jax.train',
        '--config=configs/quickstart.py:bapo_tuned',
        f'--workdir={workdir}',
    ]
    return [*words, *(f'--config.{field}={value}' for field, value in changes.items())]


def measure(pool: str, arm: str, seed: int) -> Row:
    """Makes a run, or goes on with it; returns its row."""
    name = f'{RUNS}/{pool}_{arm}_{seed}'
    workdir = ROOT / name
    call(command(pool, arm, seed, name), workdir)
    logged = [row for row in read_metrics(workdir) if row['step'] > 0]
    row = {
        'pool': pool, 'arm': arm, 'seed': seed, 'responses': logged[-1]['rollout/responses_total'],
        **{origin: sum(row[f'bapo/{origin}_groups'] for row in logged) for origin in ('x1', 'x2')},
        'reevaluated': sum(row.get('bapo/reevaluated', 0) for row in logged),
        'asked_again': asked_again(logged),
        'correct': [answered(workdir / 'evals' / f'{step:06d}.json') for step in (0, STEPS)], 'samples': SAMPLES,
        **made_by(), 'base': hash_of(BASE),
        'commands': [POOLS_COMMAND, shlex.join(command(pool, arm, seed, 'runs/x'))],
    }  # fmt: skip
    shutil.rmtree(workdir / 'checkpoints')
    return row


def wanted(rows: Sequence[Row]) -> list[tuple[str, str, int]]:
    """The runs that are missing: seed by seed, all of one."""
    have = {(row['pool'], row['arm'], row['seed']) for row in rows}
    return [job for seed in SEEDS for pool in POOLS for arm in ARMS if (job := (pool, arm, seed)) not in have]


# ---- what came


def gains(rows: Sequence[Row], pool: str, arm: str) -> np.ndarray:
    """Mixed groups a response with X2, less those without, in percent of those without; of each seed."""
    by = {
        (row['arm'], row['seed']): (row['x1'] + row['x2']) / row['responses']
        for row in rows
        if row['pool'] == pool
    }
    return np.array([100 * (by[arm, seed] / by['none', seed] - 1) for seed in SEEDS])


def interval(values: np.ndarray) -> str:
    low, high = t_interval(values)
    return f'{number(values.mean())} ({number(low)} to {number(high)})'


def predicted() -> dict[tuple[str, str], tuple[float, float, float]]:
    """What the plan's table says of each pool and X2: the gain, and the ends of its bracket."""
    table = PLAN.read_text('utf-8').partition('<!-- prediction -->\n')[2].partition('<!-- /prediction -->')[0]
    found = {}
    for line in table.partition('\n\n')[0].splitlines()[2:]:
        pool, *_, of_fifo, of_delayed = (cell.strip() for cell in line.strip('|').split('|'))
        for arm, cell in zip(WAYS, (of_fifo, of_delayed), strict=True):
            found[pool, arm] = tuple(map(float, re.findall(r'-?[\d.]+', cell)))
    return found


def verdicts(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[str, str]]:
    """In the plan's words: whether X2 pays, and whether the simulation holds."""
    of = {(pool, arm): gains(rows, pool, arm) for pool, arm in itertools.product(POOLS, WAYS)}
    rejected = dict(zip(of, holm([p_of_mean(values) for values in of.values()], 0.05), strict=True))
    found = {}
    for key, values in of.items():
        (low, high), (expected, least, most) = t_interval(values), predicted()[key]
        word = 'open' if not rejected[key] or low <= 0 <= high else 'pays' if low > 0 else 'costs'
        holds = low <= most and high >= least and values.mean() * expected > 0
        found[key] = word, 'holds' if holds else 'does not hold'
    return found


def outcome_table(rows: Sequence[Row]) -> str:
    lines, words = [], verdicts(rows)
    for pool, arm in itertools.product(POOLS, ARMS):
        of = [row for row in rows if (row['pool'], row['arm']) == (pool, arm)]
        scores = [
            '→'.join(
                f'{np.mean([of_questions(r["correct"][i], SAMPLES, k) for r in of]):.1f}' for i in (0, 1)
            )
            for k in (1, SAMPLES)
        ]
        x2 = [''] * 6
        if arm in WAYS:
            expected, least, most = predicted()[pool, arm]
            asked = sum(r['reevaluated'] for r in of)
            x2 = [
                f'{100 * sum(r["x2"] for r in of) / max(1, asked):.0f}',
                f'{100 * 8 * asked / sum(r["responses"] for r in of):.1f}',
                interval(gains(rows, pool, arm)), f'{number(expected)} ({number(least)}…{number(most)})', *words[pool, arm],
            ]  # fmt: skip
        lines.append([pool, arm, *scores, *x2])
    titles = ['enter X2', '% of responses', 'gain', 'predicted', 'X2', 'the simulation']
    return markdown_table(['pool', 'X2', f'mean@{SAMPLES}', f'pass@{SAMPLES}', *titles], lines)


def probe_table(rows: Sequence[Row]) -> str:
    """P(mixed) of prompts that failed so many steps before, of all runs of a pool, and of fresh prompts then."""
    of_pools = []
    for pool in POOLS:
        counts = [row['asked_again'] for row in rows if row['pool'] == pool]
        total = {lag: np.sum([of_run[lag] for of_run in counts], axis=0).tolist() for lag in counts[0]}
        of_pools.append({'arm': pool, 'seed': 'all', 'asked_again': total})
    return table_of_failures(of_pools)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('what', nargs='?', default='tables', choices=['pools', 'predict', 'run', 'tables'])
    parser.add_argument('--hours', type=float, default=24.0, help='start no run after this many hours')
    given = parser.parse_args()
    if given.what == 'pools':
        write_pools()
    elif given.what == 'predict':
        replace_part(PLAN, 'prediction', f'{prediction_table()}\n\n{made()}\n')
    elif given.what == 'run':
        if made() not in PLAN.read_text('utf-8'):
            parser.error(f'the plan predicts nothing of {made()} run `predict` first, and commit it')
        jobs, last_start = wanted(rows_in(ROWS)), time.monotonic() + 3600 * given.hours
        measure_all(ROWS, jobs, lambda job: measure(*job), last_start)
    elif missing := wanted(rows_in(ROWS)):
        sys.exit(f'error: {len(missing)} runs are missing; run python -m studies.x2_map.regimes run')
    else:
        for table in (outcome_table, probe_table):
            print(table(rows_in(ROWS)), end='\n\n')


if __name__ == '__main__':
    main()
