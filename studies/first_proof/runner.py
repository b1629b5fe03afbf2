"""First proof: BAPO against GRPO in miniature. One axis at a time around a centre, several seeds, each method
at its own best.

    python -m studies.first_proof.runner  # runs what is missing, most informative first, and writes the page
    python -m studies.first_proof.runner --hours=2    # starts no row after two hours; run it again to go on
    python -m studies.first_proof.runner --only=grpo,centre   # these settings alone
    # the page of the rows there are: while others run, or after a stop
    python -m studies.first_proof.runner --print_only

Run from the root of the repository. A row is one setting and seed: a run of bapo_jax.train and an evaluation
with 32 samples, both on one core; the row holds its commands. Rows go to rows.jsonl as they end (delete one
to measure it again); page.py makes the page.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from bapo_jax.machine.files import write_text
from bapo_jax.run.log.metrics import read_metrics
from bapo_jax.tasks.countdown.problems import generate, problem_key, test_problems
from studies.first_proof.grid import (
    HELD_OUT,
    WEAK_BASE,
    WEAK_BASE_COMMAND,
    Setting,
    commands,
    problems_file,
    settings,
)
from studies.first_proof.page import write_page
from studies.lib.rows import ROOT, rows_in
from studies.lib.runner import call, made_by, make_policy, measure_all

FLAGS = flags.FLAGS
flags.DEFINE_float('hours', 24.0, 'Start no row after this many hours.')
flags.DEFINE_list('only', [], 'Names of settings; default: all.')
flags.DEFINE_bool('print_only', False, 'Run nothing.')

STUDY = Path(__file__).resolve().parent
ROWS, RUNS = STUDY / 'rows.jsonl', ROOT / 'runs' / 'first_proof'
SEEDS, MORE_SEEDS = (1, 2, 3), (4, 5)  # the second: for GRPO, BAPO, its ablations, and what led with three


def write_problems() -> None:
    """10,000 training and 200 test problems of three numbers, of which the base solves about 45 %, and as
    many of four (8 %).
    """
    for numbers in (3, 4):
        test = generate(200, seed=77, sizes=(numbers,))
        known = frozenset(map(problem_key, [*test, *test_problems('cd34'), *test_problems('cd4')]))
        train = generate(10_000, seed=1000, sizes=(numbers,), exclude=known)
        for part, problems in (('test', test), ('train', train)):
            lines = (json.dumps({'nums': p['numbers'], 'target': p['target']}) + '\n' for p in problems)
            write_text(ROOT / problems_file(numbers, part), ''.join(lines))


def rows_wanted() -> list[tuple[Setting, int]]:
    """(setting, seed) in order: five seeds of the weak bases' cores, one of everything, five of the
    quickstart's core, the rest.
    """
    grid = [s for s in settings() if not FLAGS.only or s.name in FLAGS.only]
    core = [
        s
        for s in grid
        if s.axis == 'sources' or s.name in ('grpo', 'centre', 'wide', 'wide_no_x2', 'wide_recent_1')
    ]
    weak, weak_four, weak_g4, quickstart = (
        [(s, seed) for seed in (*SEEDS, *MORE_SEEDS) for s in core if s.base == base]
        for base in ('weak', 'weak_four', 'weak_g4', 'quickstart')
    )
    wanted = []
    for item in [
        *weak,
        *weak_four,
        *weak_g4,
        *((s, 1) for s in grid),
        *quickstart,
        *((s, seed) for seed in SEEDS for s in grid),
    ]:
        if item not in wanted:
            wanted.append(item)
    return wanted


def measure(item: tuple[Setting, int]) -> dict[str, Any]:
    """Trains and evaluates one setting with one seed; returns its row."""
    setting, seed = item
    workdir = RUNS / f'{setting.base}_{setting.name}_{seed}'
    for words in commands(setting, seed, str(workdir.relative_to(ROOT))):
        call(words, workdir)
    base = [WEAK_BASE_COMMAND] if setting.changes.get('model.path') == WEAK_BASE else []
    row = {
        **setting._asdict(), 'seed': seed, **story(workdir, setting),
        **made_by(), 'commands': [*base, *map(shlex.join, commands(setting, seed, 'runs/x'))],
    }  # fmt: skip
    shutil.rmtree(workdir / 'checkpoints')
    return row


def story(workdir: Path, setting: Setting) -> dict[str, Any]:
    """What a row keeps of a run: final scores with a count for every question, the curve, tracked prompts,
    diagnostics.
    """
    parts = ('step', 'testing', 'save_checkpoint')
    summary = json.loads(
        (workdir / 'evaluation' / f'{setting.changes["steps"]:06d}' / 'summary.json').read_text('utf-8')
    )['benchmarks']
    logged = read_metrics(workdir)
    evals = [json.loads(path.read_text('utf-8')) for path in sorted((workdir / 'evals').glob('*.json'))]
    seconds = np.cumsum([row.get('timing_s/step', 0) for row in logged])
    spent = {
        row['step']: {'responses': row.get('rollout/responses_total', 0), 'seconds': round(s)}
        for row, s in zip(logged, seconds)
    }
    base, trained = (np.array(evals[i]['tracked']['correct']) for i in (0, -1))
    return {
        'final': {name: {key: s[key] for key in ('mean', 'interval', 'pass', 'samples', 'correct')} for name, s in summary.items()},
        'curve': [
            {'step': e['step'], **spent[e['step']],
             **{f'{name}/{key}': s[key] for name, s in e['benchmarks'].items() for key in ('mean', 'pass')},
             **{f'{name}/{key}': e['benchmarks'][name][key] for name in dict.fromkeys(['cd34', *HELD_OUT[setting.base]])
                for key in ('samples', 'correct')}}
            for e in evals
        ],
        'tracked': {'unsolved_at_base': int((base == 0).sum()), 'solved_later': int(((base == 0) & (trained > 0)).sum()),
                    'solved_at_base': int((base > 0).sum()), 'unsolved_later': int(((base > 0) & (trained == 0)).sum())},
        # Includes compilation and the evaluations along the way; excludes start-up and the last evaluation,
        # with 32 samples.
        'seconds': round(sum(row.get(f'timing_s/{part}', 0) for row in logged for part in parts)),
        'diagnostics': diagnostics(logged),
    }  # fmt: skip


def diagnostics(logged: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the steps. What compares π_θ with the behaviour policy also stands by lag, the steps since
    the sync.
    """
    always = ('actor/grad_norm', 'actor/entropy', 'actor/updates', 'bapo/batch_groups', 'bapo/x1_groups', 'bapo/x2_groups',
              'bapo/x3_groups', 'bapo/reevaluated', 'bapo/improved', 'bapo/x3/age', 'bapo/x3/mean_reward',
              'bapo/x3/uses')  # fmt: skip
    compared = tuple(
        name for row in logged for name in row if name.startswith(('actor/pg_clipfrac/', 'staleness/'))
    )
    means: dict[str, list[float]] = defaultdict(list)
    for row in logged:
        for name in {*always, *compared} & row.keys():
            means[name].append(row[name])
            if name in compared:
                means[f'{name}/lag{row["bapo/lag"]}'].append(row[name])
    return {name: round(float(np.mean(values)), 5) for name, values in sorted(means.items())}


def main(_) -> None:
    rows = rows_in(ROWS)
    have = {(row['base'], row['name'], row['seed']) for row in rows}
    missing = [
        (s, seed) for s, seed in rows_wanted() if (s.base, s.name, seed) not in have and not FLAGS.print_only
    ]
    print(f'{len(rows)} rows are there, {len(missing)} to go', flush=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    write_problems()
    if missing:
        make_policy(WEAK_BASE, WEAK_BASE_COMMAND)
    rows += measure_all(ROWS, missing, measure, time.monotonic() + 3600 * FLAGS.hours)
    if rows:  # once, at the end: after every row it would take a core from the runs
        write_page(rows, STUDY, WEAK_BASE_COMMAND)


if __name__ == '__main__':
    app.run(main)
