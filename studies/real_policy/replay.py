"""Part 4 (plan_4.md): what replay and prompts that were mixed last bring SmolLM2-135M-Instruct.

python -m studies.real_policy.replay run --hours=2    # runs what is missing, one after the other
python -m studies.real_policy.replay                  # the tables
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies.lib.contrasts import Contrast, holm, mean_interval, of_questions, paired_both
from studies.lib.rows import ROOT, Row, markdown_table, rows_in
from studies.lib.runner import call, made_by, measure_all
from studies.real_policy.rows import read_rows as of_part_2
from studies.real_policy.rows import row_of, table_of_failures
from studies.second_proof.arms import DECISIVE, SELECTED

ROWS = Path(__file__).with_name('rows_4.jsonl')
RUNS, SEEDS, SAMPLES = 'runs/real_replay', (0, 1, 2, 3), 8
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    'G': ('grpo', DECISIVE['G'].changes),
    'R': ('bapo_tuned', {}),
    'S': ('bapo_tuned', SELECTED['S'].changes),
}
CONTRASTS = (('R', 'G'), ('S', 'R'))
PREDICTED = '3, open'  # of mean@8, both


def read_rows() -> list[Row]:
    """The rows of this part, and part 2's two of R."""
    earlier = [
        row | {'arm': 'R'}
        for row in of_part_2()
        if (row['task'], row['steps'], row['arm']) == ('arithmetic', 60, 'bapo_tuned')
    ]
    return [*earlier, *rows_in(ROWS)]


def wanted(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """The runs that are missing, seed by seed."""
    have = {(row['arm'], row['seed']) for row in rows}
    return [(arm, seed) for seed in SEEDS for arm in ARMS if (arm, seed) not in have]


def command(arm: str, seed: int, workdir: str) -> list[str]:
    method, changes = ARMS[arm]
    words = [
        'python',
        '-m',
        'bapo_jax.train',
        f'--config=configs/arithmetic.py:{method}',
        f'--workdir={workdir}',
    ]
    return [*words, *(f'--config.{field}={value}' for field, value in ({'seed': seed} | changes).items())]


def measure(job: tuple[str, int]) -> Row:
    """Makes a run, or goes on with it; returns its row."""
    arm, seed = job
    workdir, began = f'{RUNS}/{arm}_{seed}', time.monotonic()
    call(command(arm, seed, workdir), ROOT / workdir)
    row = row_of(ROOT / workdir, seconds=round(time.monotonic() - began), busy=False)
    shutil.rmtree(ROOT / workdir / 'checkpoints')  # 4 GB
    return row | made_by() | {'arm': arm, 'command': shlex.join(command(arm, seed, 'runs/x'))}


def score(row: Row, k: int, part: str = 'trained') -> np.ndarray:
    """pass@k of each question, in percent; k = 1: the mean of the samples."""
    return of_questions(row[part], SAMPLES, k)


def contrasts(rows: Sequence[Row]) -> list[tuple[str, int, Contrast]]:
    """(contrast, k, by seeds and questions) of each; k = 1 is mean@8."""
    by = {(row['arm'], row['seed']): row for row in rows}
    return [
        (f'{a} - {b}', k, paired_both('', np.stack([score(by[a, s], k) - score(by[b, s], k) for s in SEEDS])))
        for a, b in CONTRASTS
        for k in (1, SAMPLES)
    ]


def contrasts_table(rows: Sequence[Row]) -> str:
    found = contrasts(rows)
    lines = []
    for (name, k, c), rejected in zip(found, holm([c.p for _, _, c in found], 0.05), strict=True):
        word = 'open' if not rejected else 'helps' if c.mean > 0 else 'harms'
        low, high = c.interval95
        lines.append(
            [
                name,
                'mean@8' if k == 1 else 'pass@8',
                f'{c.mean:.1f} ({low:.1f} to {high:.1f})',
                PREDICTED * (k == 1),
                word,
            ]
        )
    return markdown_table(['contrast', 'score', 'points, 95 %', 'predicted', ''], lines)


def rises_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: (row['arm'], row['seed'])):
        cells = [f'{score(row, k, "base").mean():.1f} → {score(row, k).mean():.1f}' for k in (1, SAMPLES)]
        lines.append([row['arm'], str(row['seed']), *cells])
    for arm in ARMS:
        of = [row for row in rows if row['arm'] == arm]
        rises = [[(score(row, k) - score(row, k, 'base')).mean() for row in of] for k in (1, SAMPLES)]
        lines.append([arm, 'rise', *map(mean_interval, rises)])
    return markdown_table(['arm', 'seed', 'mean@8', 'pass@8'], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('what', nargs='?', default='tables', choices=['run', 'tables'])
    parser.add_argument('--hours', type=float, default=24.0, help='start no run after this many hours')
    given = parser.parse_args()
    if given.what == 'run':
        last_start = time.monotonic() + 3600 * given.hours
        measure_all(ROWS, wanted(read_rows()), measure, last_start, cores=len(os.sched_getaffinity(0)))
    elif missing := wanted(rows := read_rows()):
        sys.exit(f'error: {len(missing)} runs are missing; run python -m studies.real_policy.replay run')
    else:
        for table in (contrasts_table(rows), rises_table(rows), table_of_failures(rows)):
            print(table, end='\n\n')


if __name__ == '__main__':
    main()
