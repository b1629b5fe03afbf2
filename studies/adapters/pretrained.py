"""A pretrained model's adapter against all its weights (plan_2.md): finished runs become lines of rows_2.jsonl,
and the lines become the page's tables.

python -m studies.adapters.pretrained runs/adapters_2/*    # appends what is missing
python -m studies.adapters.pretrained --costs              # three steps of both arms, some minutes: rows too
python -m studies.adapters.pretrained                      # writes the tables into page.md
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import jax
import numpy as np

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.machine.files import replace_part
from bapo_jax.models import hf
from bapo_jax.models.adapters import adapted, adapter_of
from bapo_jax.models.decoder import trained_parameters
from bapo_jax.models.parameters import parted
from bapo_jax.policies import find_policy
from bapo_jax.report.contrast import t_interval
from bapo_jax.run.log.metrics import read_metrics
from bapo_jax.weights.publish import publish
from benchmarks.host.load import cpu_name
from studies.lib.contrasts import of_questions
from studies.lib.rows import Row, append_row, markdown_table, rows_in
from studies.real_policy import rows as real_policy

HERE = Path(__file__).resolve().parent
ROWS, PAGE = HERE / 'rows_2.jsonl', HERE / 'page.md'
MODEL = 'pretrained/SmolLM2-135M-Instruct'
ADAPTER = {'rank': 16, 'alpha': 32}
SAMPLES, SCAN_SEED, SEEDS = 8, 0, (0, 1)
COST_STEPS = 3


# ---- rows


def row_of(run: Path) -> Row:
    """A run of the adapter; raises ValueError if it is not whole."""
    kept = real_policy.row_of(run, seconds=0, busy=True)
    return {'arm': 'adapter', 'rate': kept['learning_rate']} | {
        name: kept[name]
        for name in (
            'seed',
            'base',
            'trained',
            'truncated',
            'length',
            'cpu',
            'date',
            'devices',
            'jax',
            'python',
        )
    }


def of_all_weights() -> list[Row]:
    """The two runs of part 2 of the real policy."""
    wanted = [
        row
        for row in real_policy.read_rows()
        if (row['task'], row['steps'], row['arm']) == ('arithmetic', 60, 'bapo_tuned')
        and row['seed'] in SEEDS
    ]
    return [row | {'arm': 'all', 'rate': row['learning_rate']} for row in wanted]


def costs_of(arm: str) -> Row:
    """Trains an arm for three steps in a process of its own, and measures what the plan names."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / 'run'
        command = [
            sys.executable, '-m', 'bapo_jax.train', '--config=configs/arithmetic.py', f'--workdir={run}',
            f'--config.steps={COST_STEPS}', f'--config.checkpoint.every={COST_STEPS}', '--config.evaluate.at_start=False',
            '--config.evaluate.benchmarks=()',
        ]  # fmt: skip
        if arm == 'adapter':
            command += [f'--config.model.adapter.{name}={value}' for name, value in ADAPTER.items()]
        process = subprocess.Popen(command)
        _, status, usage = os.wait4(process.pid, 0)  # its peak is the VmHWM of that process alone
        if status:
            raise ValueError(f'{" ".join(command)} ended with status {os.waitstatus_to_exitcode(status)}')
        config, metrics = json.loads((run / 'config.json').read_text('utf-8')), read_metrics(run)
        timings = {
            name: float(np.median([row[f'timing_s/{key}'] for row in metrics if row.get(f'timing_s/{key}')]))
            for name, key in (('sync_s', 'weight_sync'), ('update_s', 'update_actor'))
        }
        model = adapted(hf.read_config(Path(MODEL)), adapter_of(config['model']))
        params = find_policy(run).params(model, Path(MODEL), make_mesh(1, 1, 1))
        published = publish(Path(directory) / 'policy', COST_STEPS, params, model, config['model']['dtype'])
        trained, _ = parted(params, trained_parameters(model, vision=False))
        return {
            'costs': arm, 'trained_parameters': sum(leaf.size for leaf in jax.tree.leaves(trained)),
            'peak_bytes': usage.ru_maxrss * 1024, 'checkpoint_bytes': bytes_in(run / 'checkpoints' / str(COST_STEPS)),
            'published_bytes': bytes_in(published), **timings, 'cpu': cpu_name(), 'date': str(date.today()),
            **config['environment'],
        }  # fmt: skip


def bytes_in(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob('*') if file.is_file())


# ---- tables


def score(row: Row, k: int, part: str = 'trained') -> np.ndarray:
    """pass@k of each question, in percent; k = 1: the mean of the samples."""
    return of_questions(row[part], SAMPLES, k)


def best_rate(adapters: Sequence[Row]) -> float:
    """By the plan: the highest mean@8 after the last step, on one seed."""
    scan = [row for row in adapters if row['seed'] == SCAN_SEED]
    return max(scan, key=lambda row: score(row, 1).mean())['rate']


def scores_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        cells = [f'{score(row, k, "base").mean():.1f} → {score(row, k).mean():.1f}' for k in (1, SAMPLES)]
        lines.append([row['arm'], f'{row["rate"]:g}', str(row['seed']), *cells])
    return markdown_table(['arm', 'rate', 'seed', 'mean@8', 'pass@8'], lines)


def differences(adapters: Sequence[Row], full: Sequence[Row]) -> dict[tuple[int, int], np.ndarray]:
    """(seed, k) -> the adapter at its best rate less all weights, of each question, in points."""
    best = {row['seed']: row for row in adapters if row['rate'] == best_rate(adapters)}
    of_all = {row['seed']: row for row in full}
    return {
        (seed, k): score(best[seed], k) - score(of_all[seed], k)
        for seed in SEEDS
        for k in (1, SAMPLES)
        if seed in best
    }


def differences_table(found: dict[tuple[int, int], np.ndarray]) -> str:
    lines = []
    for seed in sorted({seed for seed, _ in found}):
        cells = [
            '{:.1f} ({:.1f} to {:.1f})'.format(d.mean(), *t_interval(d))
            for d in (found[seed, 1], found[seed, SAMPLES])
        ]
        lines.append([str(seed), *cells])
    return markdown_table(['seed', 'mean@8', 'pass@8'], lines)


def outcome(found: dict[tuple[int, int], np.ndarray]) -> str:
    """In the words of the plan."""
    intervals = [t_interval(found[seed, 1]) for seed in SEEDS]
    if all(low <= 0 <= high for low, high in intervals):
        return 'as good on these questions'
    if all(high < 0 for _, high in intervals):
        return 'worse'
    return 'better' if all(low > 0 for low, _ in intervals) else 'mixed'


def costs_table(rows: Sequence[Row]) -> str:
    lines = [
        [
            row['costs'], f'{row["trained_parameters"]:,}', f'{row["peak_bytes"] / 1e9:.2f}',
            f'{row["checkpoint_bytes"] / 1e6:,.1f}', f'{row["published_bytes"] / 1e6:,.1f}',
            f'{1e3 * row["sync_s"]:.0f}', f'{row["update_s"]:.2f}',
        ]
        for row in rows
    ]  # fmt: skip
    titles = ['a checkpoint, MB', 'published, MB', 'a sync, ms', 'an update, s']
    return markdown_table(['arm', 'trained parameters', 'peak, GB', *titles], lines)


def tables() -> dict[str, str]:
    rows = rows_in(ROWS)
    adapters, full = [row for row in rows if 'arm' in row], of_all_weights()
    found = differences(adapters, full)
    return {
        'pretrained scores': scores_table(
            [*full, *sorted(adapters, key=lambda row: (row['rate'], row['seed']))]
        ),
        'pretrained differences': differences_table(found),
        'pretrained outcome': f'**{outcome(found)}**',
        'pretrained costs': costs_table([row for row in rows if 'costs' in row]),
    }


def main(argv: Sequence[str]) -> None:
    if '--costs' in argv:
        for arm in ('all', 'adapter'):
            append_row(ROWS, costs_of(arm))
        return
    there = {(row['rate'], row['seed']) for row in rows_in(ROWS) if 'arm' in row}
    for run in argv:
        row = row_of(Path(run))
        if (row['rate'], row['seed']) not in there:
            append_row(ROWS, row)
    if not argv:
        for name, lines in tables().items():
            replace_part(PAGE, name, lines + '\n')
            print(f'{lines}\n')


if __name__ == '__main__':
    main(sys.argv[1:])
