"""What logging costs of a quickstart step: files, TensorBoard, the progress display and the sinks, in one run
of the real trainer.

    JAX_NUM_CPU_DEVICES=2 python -m benchmarks.host.logging_cost
    python -m benchmarks.host.logging_cost --config=configs/countdown.py --steps=40 --config.model.path=DIR

Trains in a temporary directory, without evaluations and without checkpoints on the way. Rollout files come as
often as the config says: every 20 steps. The progress display is that of a terminal. Both sinks are on: W&B
offline, trackio in a directory of its own. The --steps behind the first rollout file count: what comes before
compiles. Prints one table, in milliseconds a step:

    trainer   what the trainer's thread spends in a part, at the boundary of its function
    beside    processor time beside it: the display's thread, and each sink's processes
    share     both, of the sum of timing_s/step and of what is logged behind it

Time beside the trainer counts in full, although it may be that of an idle core. The last lines say what a
sink takes once at its start, and the first rollout file, and whether logging without sinks is below 1 %: exit
status 1 where it is not.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

from absl import app, flags, logging
from ml_collections import config_flags
from rich.live import Live
from rich.table import Table

from bapo_jax.machine import terminal
from bapo_jax.run import run
from bapo_jax.run.log import metrics as log
from bapo_jax.run.log.metrics import MetricsLog, read_metrics
from bapo_jax.run.log.progress import ProgressBar
from bapo_jax.run.run import Run
from bapo_jax.train import build, train
from benchmarks.host.load import cpu_name

GOAL = 0.01
SINKS = ('trackio', 'wandb')
_TICK_S = 1 / os.sysconf('SC_CLK_TCK')
# What the trainer's thread calls: a part, and where its function is looked up. A part of a part begins with
# dots.
METRICS, ROLLOUTS, DISPLAY, RATIOS = (
    'a row of metrics',
    'rollouts/STEP.jsonl.zst',
    'progress display',
    'importance ratios for it',
)
PARTS = (
    (METRICS, MetricsLog, 'write'), ('… TensorBoard', MetricsLog, '_add'), ('… a look at the sinks', log, 'drop_lost'),
    (ROLLOUTS, run, 'write_rollouts'), (DISPLAY, ProgressBar, 'update'),
)  # fmt: skip


class Costs:
    """Seconds by part: of the trainer's thread, beside it, and of the sinks before the steps that count."""

    def __init__(self):
        self.trainer, self.beside, self.once = Counter(), Counter(), {}

    def timed(self, part: str, function: Callable) -> Callable:
        def call(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments, **named)
            self.trainer[part] += time.perf_counter() - started
            return result

        return call

    def refreshing(self, function: Callable) -> Callable:
        def call(live: Live) -> None:
            started = time.thread_time()
            function(live)
            self.beside[DISPLAY] += time.thread_time() - started

        return call

    def after_a_row(self, function: Callable, first: int, last: int) -> Callable:
        """Counts from the row of step `first` on, to that of step `last`."""

        def call(of_run: Run, now: Any, *rest: Any) -> None:
            function(of_run, now, *rest)
            used = {name: group_cpu_s(process.pid) for name, process in of_run._log._sinks.items()}
            if now.number == first:
                self.trainer.clear()
                self.beside.clear()
                self.once = used
            if now.number == last:
                self.beside |= {name: used[name] - self.once[name] for name in used}

        return call


@contextlib.contextmanager
def measured(costs: Costs, first: int, last: int) -> Iterator[None]:
    """Inside, the parts of a run's logging are timed."""
    with contextlib.ExitStack() as patches:
        for part, place, name in PARTS:
            patches.enter_context(mock.patch.object(place, name, costs.timed(part, getattr(place, name))))
        patches.enter_context(mock.patch.object(Live, 'refresh', costs.refreshing(Live.refresh)))
        patches.enter_context(mock.patch.object(Run, '_write', costs.after_a_row(Run._write, first, last)))
        yield


def group_cpu_s(group: int) -> float:
    """Processor seconds of the processes of a group so far."""
    ticks = 0
    for file in Path('/proc').glob('[0-9]*/stat'):
        with contextlib.suppress(OSError):  # it has ended since
            fields = file.read_text().rpartition(')')[2].split()  # from the state on
            ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == group else 0
    return ticks * _TICK_S


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    config, costs = FLAGS.config, Costs()
    first = max(5, config.log.rollouts_every)
    config.steps = first + FLAGS.steps
    config.evaluate.update({'every': 0, 'benchmarks': (), 'track_prompts': 0})
    config.checkpoint.every, config.log.sinks = config.steps + 1, SINKS
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, 'w', encoding='utf-8') as nowhere:
        workdir = Path(folder) / 'run'
        os.environ |= {
            'WANDB_MODE': 'offline',
            'TRACKIO_DIR': f'{folder}/trackio',
            'TTY_COMPATIBLE': '1',
        }  # the last: for rich
        try:
            setup = build(config, workdir)
        except (ValueError, OSError) as e:
            sys.exit(f'error: {e}')
        with contextlib.redirect_stdout(nowhere), measured(costs, first, config.steps):
            train(setup)
        before, rows = (
            list(group) for _, group in groupby(read_metrics(workdir), lambda row: row['step'] > first)
        )
        lost = [name for name in SINKS if name not in costs.beside]
    os.environ.pop('TTY_COMPATIBLE')
    if len(rows) < FLAGS.steps or lost:
        sys.exit(f'the run stopped early, or lost a sink ({", ".join(lost) or "none"}): nothing to report')
    scoring = sum(row.get('timing_s/rollouts', 0.0) for row in rows) - costs.trainer[ROLLOUTS]
    costs.once['first rollout file'] = max(row.get('timing_s/rollouts', 0.0) for row in before)
    if scoring > 0:
        costs.trainer[RATIOS] = scoring
    sys.exit(0 if report(costs, rows) < GOAL else 1)


def report(costs: Costs, rows: Sequence[dict[str, Any]]) -> float:
    """Prints the table. Returns the share of logging without the sinks."""
    outside = sum(costs.trainer[part] for part in (METRICS, ROLLOUTS, DISPLAY))
    steps, whole = len(rows), sum(row['timing_s/step'] for row in rows) + outside
    title = (
        f'{steps} steps of {whole / steps:.3f} s; {os.cpu_count()} cores of {cpu_name()}, load '
        f'{os.getloadavg()[0]:.1f}'
    )
    packages = ', '.join(f'{name} {version(name)}' for name in ('jax', 'tensorboardX', 'rich', *SINKS))
    table = Table(
        'part',
        'trainer',
        'beside',
        'share',
        title=f'{title}\n{packages}, {datetime.date.today()}',
        title_justify='left',
    )

    def add(part: str, trainer: float, beside: float) -> None:
        both = (f'{1e3 * seconds / steps:.2f}' if seconds else '' for seconds in (trainer, beside))
        table.add_row(part, *both, f'{(trainer + beside) / whole:.2%}')

    wanted = [part for part, *_ in PARTS] + [RATIOS]
    for part in wanted:
        if costs.trainer[part] or costs.beside[part]:
            add(part, costs.trainer[part], costs.beside[part])
    trainer, beside = outside + costs.trainer[RATIOS], costs.beside[DISPLAY]
    add('without sinks', trainer, beside)
    for name in SINKS:
        add(name, 0.0, costs.beside[name])
    add('with both sinks', trainer, beside + sum(costs.beside[name] for name in SINKS))
    terminal.console().print(table)
    print('once: ' + ', '.join(f'{name} {seconds:.1f} s' for name, seconds in costs.once.items()))
    share = (trainer + beside) / whole
    print(f'logging without sinks is {share:.2%} of a step; the goal is below {GOAL:.0%}')
    return share


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_integer(
        'steps',
        40,
        'Steps that count; multiples of log.rollouts_every count its files fairly.',
        lower_bound=20,
    )
    config_flags.DEFINE_config_file(
        'config', 'configs/quickstart.py', 'FILE or FILE:METHOD.', lock_config=True
    )
    app.run(main)
