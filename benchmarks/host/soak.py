"""Two thousand small steps: what grows. Memory, open files, threads and disk of a run, measured every hundred
steps.

    python -m benchmarks.host.soak                  # writes the table into docs/reference/operations.md
    python -m benchmarks.host.soak --steps=300      # printed alone

A policy of 0.8M parameters, 8 prompts × 4 responses × 48 tokens a step, all of BAPO's parts, a checkpoint
every 20 steps and an evaluation every 200. metrics.jsonl and the TensorBoard events grow by a row a step, so
the disk is counted without them.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import os
import shutil
from pathlib import Path

from absl import app, flags, logging
from rich.table import Table

from bapo_jax.machine import terminal
from bapo_jax.machine.files import replace_part
from bapo_jax.machine.lock import held
from bapo_jax.run import run as module
from bapo_jax.train import build, train
from benchmarks.host.load import cpu_name

RUN, PAGE = (
    Path('runs') / 'soak',
    Path(__file__).resolve().parents[2] / 'docs' / 'reference' / 'operations.md',
)
SMALL = {
    'task.limit': 64, 'rollout.group_size': 4, 'learner.batch_groups': 8, 'learner.mini_batch_groups': 4, 'learner.row_tokens': 112,
    'rollout.sync_every': 2, 'replay.reevaluate_every': 5, 'replay.max_reevaluate': 8, 'log.rollouts_every': 0, 'evaluate.every': 200,
    'evaluate.samples': 2, 'evaluate.track_prompts': 8, 'evaluate.benchmarks': (), 'checkpoint.every': 20, 'log.ledger': False,
}  # fmt: skip
LOGS = ('metrics.jsonl', 'events.out.tfevents', 'evals')
SHOWN = (1, 5, 10, 20)  # of the twenty measurements, on the page
WARM_UP = 0.2  # of the steps: what grows in them is caches that fill


def measured() -> dict[str, float]:
    """MiB in memory, open files and threads of this process; MiB of the run directory, its logs left out."""
    status = dict(line.split(':', 1) for line in Path('/proc/self/status').read_text().splitlines())
    files = [f for f in RUN.rglob('*') if f.is_file() and not any(name in str(f) for name in LOGS)]
    return {
        'memory': int(status['VmRSS'].split()[0]) / 1024,
        'files': len(os.listdir('/proc/self/fd')),
        'threads': int(status['Threads']),
        'disk': sum(f.stat().st_size for f in files if f.exists()) / 2**20,
    }


def soak(steps: int) -> dict[int, dict[str, float]]:
    """What is measured after every twentieth of the steps."""
    config = importlib.import_module('configs.quickstart').get_config('bapo')
    config.update_from_flattened_dict({**SMALL, 'steps': steps})
    rows, write = {}, module.MetricsLog.write

    def measuring(self, step, row):
        write(self, step, row)
        if step and step % max(1, steps // 20) == 0:
            rows[step] = measured()

    module.MetricsLog.write = measuring
    shutil.rmtree(RUN, ignore_errors=True)
    with held(RUN):
        train(build(config, RUN))
    return rows


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    rows = soak(FLAGS.steps)
    warm = {step: row for step, row in rows.items() if step > WARM_UP * FLAGS.steps}
    first, last = warm[min(warm)], warm[max(warm)]
    table, heads = Table(), ('step', 'memory, MiB', 'open files', 'threads', 'disk, MiB')
    for head in heads:
        table.add_column(head)
    for step, row in rows.items():
        cells = [f'{step:,}', *(f'{x:.0f}' for x in row.values())]
        table.add_row(*cells)
    grown = ', '.join(f'{name} {last[name] - first[name]:+.1f}' for name in first)
    terminal.console().print(table)
    print(f'from step {min(warm):,} to {max(warm):,}: {grown}')
    if FLAGS.steps == 2000:
        where = (
            f'(`python -m benchmarks.host.soak`, {datetime.date.today()}, {os.cpu_count()} cores of '
            f'{cpu_name()}, jax {importlib.metadata.version("jax")}.)'
        )
        replace_part(
            PAGE,
            'soak',
            f'{columns({step: list(row.values()) for step, row in rows.items()}, heads[1:])}\n\n{where}\n',
        )


def columns(rows: dict[int, list[float]], heads: tuple[str, ...]) -> str:
    """The page's table: a row for each measure; columns of some of the steps."""
    steps = [step for number, step in enumerate(rows, 1) if number in SHOWN]
    lines = [f'| | {" | ".join(f"step {step:,}" for step in steps)} |', f'|---|{"---|" * len(steps)}']
    lines += [
        f'| {head} | {" | ".join(f"{rows[step][i]:.0f}" for step in steps)} |' for i, head in enumerate(heads)
    ]
    return '\n'.join(lines)


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_integer('steps', 2000, 'Training steps.', lower_bound=20)
    app.run(main)
