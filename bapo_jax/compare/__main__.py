"""Compares methods or settings over seeds: trains the missing runs, then writes one table and one page.

    bapo-compare quickstart:grpo quickstart:bapo quickstart:bapo_guarded --seeds=3 --steps=60
    bapo-compare quickstart:grpo --set=learner.learning_rate=2.5e-5,5e-5,1e-4 --seeds=3

Flags --config.FIELD=VALUE apply to all runs. The same command continues a comparison that was stopped, and
trains only what is missing, so more seeds or methods can be added later.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bapo_jax.compare.arms import Job, arms_of, jobs_of
from bapo_jax.compare.jobs import RunFailed, check_begun, finish, has_finished
from bapo_jax.machine import stopping, terminal
from bapo_jax.machine.help import CommandParser
from bapo_jax.machine.lock import held
from bapo_jax.machine.output import guard_streams
from bapo_jax.report.contrast import Contrast, by_seed, contrast
from bapo_jax.report.page import read_runs, write_report

PAGE = 'compare.html'


def run() -> None:
    """The command `bapo-compare`."""
    with stopping.ending():
        guard_streams()
        terminal.guard()
        main(sys.argv[1:])


def main(arguments: Sequence[str]) -> None:
    """Parses the arguments, trains what is missing, and reports. Exits with 1, or 75 if it was stopped."""
    args, shared = _parser().parse_known_args(arguments)
    try:
        if args.seeds < 1 or args.steps is not None and args.steps < 1:
            raise ValueError('--seeds and --steps must be at least 1')
        unknown = [flag for flag in shared if not flag.startswith('--config.') or '=' not in flag]
        if unknown:
            raise ValueError(
                f'{unknown[0]}: unknown flag; write --config.FIELD=VALUE for a setting of all runs'
            )
        _check_own(args, shared)
        jobs = jobs_of(arms_of(args.config, args.set, shared), args.seeds, args.steps, args.workdir)
        for job in jobs:
            check_begun(job)
        with held(args.workdir):
            train_missing(jobs)
            runs = [job.workdir for job in jobs]
            page = write_report(runs, args.workdir / PAGE)
        show(contrast(by_seed(read_runs(runs))))
    except stopping.Stopped:
        print('stopped; the same command continues')
        sys.exit(stopping.STATUS)
    except (ValueError, OSError, RunFailed) as error:
        sys.exit(f'error: {error}')
    print(f'page: {page}')


def _check_own(args: argparse.Namespace, shared: Sequence[str]) -> None:
    """Raises ValueError for settings that the command itself gives to its runs."""
    given = {word.removeprefix('--config.').partition('=')[0] for word in (*shared, *args.set)}
    if 'seed' in given:
        raise ValueError('seed: every run has a seed of its own; give --seeds=N')
    if 'steps' in given and args.steps is not None:
        raise ValueError('--steps and --config.steps are both given; leave one out')


def train_missing(jobs: Sequence[Job]) -> None:
    """Trains the runs that have not finished, with a progress bar on a terminal, else a line per run."""
    left = [job for job in jobs if not has_finished(job)]
    lengths = ' or '.join(map(str, sorted({job.steps for job in jobs})))
    print(f'{len(jobs)} runs of {lengths} steps, {len(left)} of them to train', flush=True)
    console = terminal.console()
    bar = Progress(
        TextColumn('{task.description}'), MofNCompleteColumn(), BarColumn(bar_width=20), TimeElapsedColumn(),
        console=console, disable=not console.is_terminal, refresh_per_second=1,
    )  # fmt: skip
    with bar:
        terminal.guard()
        for number, job in enumerate(left, 1):
            name, began = f'{job.arm}, seed {job.seed}', time.monotonic()
            task = bar.add_task(f'{number} of {len(left)}: {name}', total=job.steps)
            finish(job, lambda done, task=task: bar.update(task, completed=done))
            bar.remove_task(task)
            minutes = (time.monotonic() - began) / 60
            console.print(f'{number} of {len(left)}: {name}: {job.steps} steps in {minutes:.1f} min')


def show(found: Contrast) -> None:
    """Prints the scores with the arms side by side, then the differences in a table and in words."""
    arms, *columns = zip(found.table.head, *found.table.rows, strict=True)
    console = terminal.console()
    caption = 'in brackets: 95 % confidence intervals over seeds'
    console.print(_table('scores in %', caption, arms, columns))
    if found.differences.rows:
        rows = [
            (score, difference.removesuffix(f' − {arms[1]}'), *cells)
            for score, difference, *cells in found.differences.rows
        ]
        caption = 'in percentage points, paired by seed'
        console.print(_table(f'differences from {arms[1]}', caption, found.differences.head, rows))
    for sentence in found.verdict:
        console.print(sentence)


def _table(title: str, caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, caption=caption)
    for name in head:
        table.add_column(name, overflow='fold')  # a narrow terminal shows long names whole
    for row in rows:
        table.add_row(*row)
    return table


def _parser() -> CommandParser:
    parser = CommandParser(__doc__)
    parser.add_argument(
        'config',
        nargs='+',
        metavar='CONFIG:METHOD',
        help='as for bapo-train --config; the first is the baseline',
    )
    parser.add_argument('--seeds', type=int, default=3, metavar='N', help='seeds per method; default: 3')
    parser.add_argument('--steps', type=int, metavar='N', help="steps per run; default: the config's")
    parser.add_argument(
        '--set',
        action='append',
        default=[],
        metavar='FIELD=VALUE,VALUE',
        help='settings to sweep; repeatable',
    )
    parser.add_argument(
        '--workdir',
        type=Path,
        default=Path('runs/compare'),
        help='directory of the runs; default: %(default)s',
    )
    return parser


if __name__ == '__main__':
    run()
