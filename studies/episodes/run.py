"""Runs what plan.md says and is missing, one run after another, writes rows.jsonl, and page.md from it.

    python -m studies.episodes.run            # from the root of the repository; about 2 hours on two idle cores
    python -m studies.episodes.run --page     # only the page
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from studies.lib.rows import Row, append_row, markdown_table, rows_in

FOLDER, RUNS = Path(__file__).parent, Path('runs/episodes')
ROWS, PAGE = FOLDER / 'rows.jsonl', FOLDER / 'page.md'
ARMS, SEEDS = ('tool', 'alone'), (0, 1)
MINUTES, MOST_STEPS = 20, 600
TIMED, LAST = 8, 5
BENCHMARKS = ('cd34', 'cd4')
LEARNS, HELPS = 8.0, 2.0  # points of mean@8


def main() -> None:
    if '--page' not in sys.argv[1:]:
        steps = steps_that_fit()
        done = {(row['arm'], row['seed']) for row in rows_in(ROWS)}
        for seed in SEEDS:
            for arm in ARMS:
                if (arm, seed) not in done:
                    measure(arm, seed, steps)
    PAGE.write_text(page(rows_in(ROWS)), 'utf-8')


def command(arm: str, seed: int, workdir: Path, *more: str) -> list[str]:
    return [
        sys.executable, '-m', 'bapo_jax.train', f'--config=studies/episodes/config.py:{arm}', f'--workdir={workdir}',
        f'--config.seed={seed}', *more,
    ]  # fmt: skip


def train(*arguments: Any) -> None:
    subprocess.run(command(*arguments), check=True, env={**os.environ, 'JAX_NUM_CPU_DEVICES': '2'})


def metrics(workdir: Path) -> list[Row]:
    rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text('utf-8').splitlines()]
    return [row for row in rows if 'timing_s/step' in row]


def steps_that_fit() -> int:
    """The steps that `tool` takes in 20 minutes."""
    workdir = RUNS / 'timing'
    if not (workdir / 'metrics.jsonl').is_file():
        train('tool', 99, workdir, f'--config.steps={TIMED}', '--config.evaluate.benchmarks=()', '--config.evaluate.at_start=False')
    seconds = np.mean([row['timing_s/step'] for row in metrics(workdir)][-LAST:])
    return min(MOST_STEPS, int(60 * MINUTES / seconds))


def measure(arm: str, seed: int, steps: int) -> None:
    """Trains one arm and appends its row."""
    workdir, more = RUNS / f'{arm}_{seed}', (f'--config.steps={steps}',)
    train(arm, seed, workdir, *more)
    logged = metrics(workdir)
    row = {
        'arm': arm, 'seed': seed, 'steps': steps, 'seconds': round(sum(r['timing_s/step'] for r in logged)),
        'replies': ends(logged, 'response_length/replies'), 'unparseable': ends(logged, 'reward/unparseable'),
        **{when: scores(workdir / 'evals' / f'{step:06d}.json') for when, step in (('before', 0), ('after', steps))},
        'command': ' '.join(['python', *command(arm, seed, workdir, *more)[1:]]), 'date': time.strftime('%Y-%m-%d'),
    }  # fmt: skip
    append_row(ROWS, row)


def ends(logged: list[Row], name: str) -> list[float]:
    """The mean of a metric over the first and the last ten steps; 0 where it is not logged."""
    return [round(float(np.mean([r.get(name, 0) for r in part])), 3) for part in (logged[:10], logged[-10:])]


def scores(file: Path) -> dict[str, dict[str, float]]:
    found = json.loads(file.read_text('utf-8'))['benchmarks']
    return {name: {m: found[name][m] for m in ('mean', 'pass')} for name in BENCHMARKS}


def rise(row: Row) -> float:
    """Of mean@8 on cd34, in points."""
    return 100 * (row['after']['cd34']['mean'] - row['before']['cd34']['mean'])


def verdict(rows: list[Row]) -> str:
    """What plan.md concludes from all runs."""
    of = {(row['arm'], row['seed']): row for row in rows}
    if missing := [f'{arm} {seed}' for arm in ARMS for seed in SEEDS if (arm, seed) not in of]:
        return f'Missing: {", ".join(missing)}.'
    rises = {arm: float(np.mean([rise(of[arm, seed]) for seed in SEEDS])) for arm in ARMS}
    leads = [100 * (of['tool', s]['after']['cd34']['mean'] - of['alone', s]['after']['cd34']['mean']) for s in SEEDS]
    learns = rises['tool'] >= LEARNS
    helps = min(leads) > 0 and np.mean(leads) >= HELPS
    return (
        f'**Episodes {"learn" if learns else "do not learn"}**: `tool` raises mean@8 on cd34 by {rises["tool"]:.1f} points, `alone` by '
        f'{rises["alone"]:.1f}. **{"The tool helps" if helps else "Its help is not shown"}**: `tool` ends '
        f'{" and ".join(f"{lead:.1f}" for lead in leads)} points above `alone`.'
    )


def page(rows: list[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: (row['seed'], -ARMS.index(row['arm']))):
        cells = [
            f'{100 * row["before"][name][m]:.1f} → {100 * row["after"][name][m]:.1f}'
            for name in BENCHMARKS
            for m in ('mean', 'pass')
        ]
        both = [f'{row[name][0]:g} → {row[name][1]:g}' for name in ('replies', 'unparseable')]
        minutes = f'{row["seconds"] / 60:.0f}'
        lines.append([f'`{row["arm"]}`', str(row['seed']), str(row['steps']), minutes, *cells, *both])
    titles = ['arm', 'seed', 'steps', 'minutes', 'cd34 mean@8', 'pass@8', 'cd4 mean@8', 'pass@8', 'replies', 'without an answer']
    return '\n'.join([
        '# Episodes: a small policy with a calculator', '', 'By the rules of [plan.md](plan.md). ' + verdict(rows), '',
        markdown_table(titles, lines), '',
        'Replies are per response and answers missing per step of 512 responses, in the first and last ten steps.', '',
    ])  # fmt: skip


if __name__ == '__main__':
    main()
