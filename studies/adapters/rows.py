"""LoRA against full training: finished runs become lines of rows.jsonl, and the lines become the page's tables.

python -m studies.adapters.rows runs/adapters/*/*_seed*    # appends what is missing
python -m studies.adapters.rows                            # writes the tables into page.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import numpy as np

from bapo_jax.machine.files import replace_part
from bapo_jax.report.contrast import p_of_mean, t_interval
from bapo_jax.run.log.metrics import read_metrics
from bapo_jax.scores import pass_at_k
from benchmarks.host.load import cpu_name
from studies.lib.contrasts import holm
from studies.lib.rows import Row, append_row, markdown_table, rows_in

HERE = Path(__file__).resolve().parent
ROWS, PAGE = HERE / 'rows.jsonl', HERE / 'page.md'
BENCHMARKS, SAMPLES = ('cd34', 'cd4'), 8
SCAN_SEED, SEEDS = 0, (1, 2, 3)
MATCHED = 5e-5
MOST_LOST = -2.0  # points of pass@8 on cd34 that the best rate may lose
CLOSE = 3.0  # points of mean@8 within which the arms are as good


def row_of(run: Path) -> Row:
    """What the study keeps of a run; raises ValueError if the run is not whole."""
    config, metrics = json.loads((run / 'config.json').read_text('utf-8')), read_metrics(run)
    first, last = (
        json.loads((run / 'evals' / f'{step:06d}.json').read_text('utf-8')) for step in (0, config['steps'])
    )
    if metrics[-1]['step'] != config['steps']:
        raise ValueError(f'{run} ends at step {metrics[-1]["step"]} of {config["steps"]}; continue it')
    checkpoint = run / 'checkpoints' / str(config['steps'])
    return {
        'arm': 'adapter' if config['model']['adapter']['rank'] else 'all', 'seed': config['seed'],
        'rate': config['learner']['learning_rate'],
        **{
            part: {name: scores['benchmarks'][name]['correct'] for name in BENCHMARKS}
            for part, scores in (('base', first), ('trained', last))
        },
        'bytes': sum(file.stat().st_size for file in checkpoint.rglob('*') if file.is_file()),
        'sync_s': float(np.median([row['timing_s/weight_sync'] for row in metrics if row.get('timing_s/weight_sync')])),
        'step_s': float(np.median([row['timing_s/step'] for row in metrics[2:]])),
        'cpu': cpu_name(), 'date': str(date.today()), **config['environment'],
    }  # fmt: skip


def score(row: Row, benchmark: str, k: int, part: str = 'trained') -> np.ndarray:
    """pass@k of each problem, in percent; k = 1: the mean of the samples."""
    correct = np.array(row[part][benchmark])
    return 100 * pass_at_k(np.full(len(correct), SAMPLES), correct, k)


def best_rate(rows: Sequence[Row], arm: str) -> float:
    """By the plan: the highest mean@8 on cd34 among the rates that lose at most 2 points of pass@8 there."""
    scan = [row for row in rows if (row['arm'], row['seed']) == (arm, SCAN_SEED)]
    keep = [row for row in scan if change(row, 8) >= MOST_LOST]
    return max(keep or scan, key=lambda row: score(row, 'cd34', 1).mean())['rate']


def change(row: Row, k: int) -> float:
    return float((score(row, 'cd34', k) - score(row, 'cd34', k, 'base')).mean())


def scan_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: (row['arm'] != 'all', row['rate'])):
        if row['seed'] == SCAN_SEED:
            cells = [
                f'{score(row, "cd34", k, "base").mean():.1f} → {score(row, "cd34", k).mean():.1f}'
                for k in (1, 8)
            ]
            best = 'best' if row['rate'] == best_rate(rows, row['arm']) else ''
            lines.append([row['arm'], f'{row["rate"]:g}', *cells, best])
    return markdown_table(['arm', 'rate', 'mean@8', 'pass@8', ''], lines)


def differences(rows: Sequence[Row]) -> dict[tuple[str, str, int], np.ndarray]:
    """(rates, benchmark, k) -> adapter - all of each seed and problem, in points [seeds, problems]."""
    rates = {
        'at 5e-5': (MATCHED, MATCHED),
        'at the best': (best_rate(rows, 'adapter'), best_rate(rows, 'all')),
    }
    by = {(row['arm'], row['rate'], row['seed']): row for row in rows}
    return {
        (name, benchmark, k): np.stack([
            score(by['adapter', of_adapter, seed], benchmark, k) - score(by['all', of_all, seed], benchmark, k)
            for seed in SEEDS
        ])
        for name, (of_adapter, of_all) in rates.items()
        for benchmark in BENCHMARKS
        for k in (1, 8)
    }  # fmt: skip


def contrast_table(rows: Sequence[Row]) -> str:
    """Holm's correction is over the eight differences, once by seeds and once by problems."""
    found = differences(rows)
    over = {'seeds': lambda d: d.mean(axis=1), 'problems': lambda d: d.mean(axis=0)}
    excluded = {
        way: dict(zip(found, holm([p_of_mean(values(d)) for d in found.values()], 0.05), strict=True))
        for way, values in over.items()
    }
    lines = []
    for (name, benchmark, k), d in found.items():
        cells = [
            interval(values(d)) + (' *' if excluded[way][name, benchmark, k] else '')
            for way, values in over.items()
        ]
        measure = f'{benchmark} {"pass" if k > 1 else "mean"}@8'
        lines.append([name, measure, f'{d.mean():.1f}', *cells])
    return markdown_table(['rates', 'score', 'points', 'by seeds', 'by problems'], lines)


def interval(values: np.ndarray, show: Callable[[float], str] = '{:.1f}'.format) -> str:
    low, high = t_interval(values)
    return f'{show(low)} to {show(high)}'


def outcome(rows: Sequence[Row]) -> str:
    """In the words of the plan."""
    found = differences(rows)
    key = ('at the best', 'cd34', 1)
    low, high = t_interval(found[key].mean(axis=1))
    rejected = dict(zip(found, holm([p_of_mean(d.mean(axis=1)) for d in found.values()], 0.05), strict=True))
    if -CLOSE <= low and high <= CLOSE:
        return 'as good'
    if rejected[key]:
        return 'better' if found[key].mean() > 0 else 'worse'
    return 'not resolved'


def costs_table(rows: Sequence[Row]) -> str:
    lines = []
    for arm in ('all', 'adapter'):
        of = [row for row in rows if row['arm'] == arm]
        size, sync, step = (np.median([row[name] for row in of]) for name in ('bytes', 'sync_s', 'step_s'))
        lines.append([arm, f'{size / 1e6:.2f}', f'{1e3 * sync:.1f}', f'{step:.2f}'])
    return markdown_table(['arm', 'a checkpoint, MB', 'a sync, ms', 'a step, s'], lines)


def tables() -> dict[str, str]:
    rows = rows_in(ROWS)
    return {
        'rates': scan_table(rows), 'differences': contrast_table(rows), 'costs': costs_table(rows),
        'outcome': f'**{outcome(rows)}**',
    }  # fmt: skip


def main(runs: Sequence[str]) -> None:
    there = {(row['arm'], row['rate'], row['seed']) for row in rows_in(ROWS)}
    for run in runs:
        row = row_of(Path(run))
        if (row['arm'], row['rate'], row['seed']) not in there:
            append_row(ROWS, row)
    if not runs:
        for name, lines in tables().items():
            replace_part(PAGE, name, lines + '\n')
            print(f'{lines}\n')


if __name__ == '__main__':
    main(sys.argv[1:])
