"""The rows of training: a finished run becomes a line of rows.jsonl, and the lines become the page's tables.

# appends a row: the command's wall clock, the machine
python -m studies.real_policy.rows runs/arithmetic --seconds=993 --busy
# writes the tables into page.md, and prints them with every pass@k
python -m studies.real_policy.rows
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path

import numpy as np

from bapo_jax.machine.files import replace_part
from bapo_jax.replay.failures import LAGS
from bapo_jax.run.log.metrics import read_metrics
from bapo_jax.scores import interval, ks, pass_at_k, wilson_interval
from benchmarks.host.load import cpu_name
from studies.lib.rows import Row, append_row, markdown_table, rows_in

HERE = Path(__file__).resolve().parent
ROWS, PAGE = HERE / 'rows.jsonl', HERE / 'page.md'
PARTS = {
    'part 1': ('arithmetic', 40),
    'part 2': ('arithmetic', 60),
    'part 3': ('countdown', 60),
}  # task and steps of its runs


def row_of(run: Path, seconds: float, busy: bool) -> Row:
    """What the study keeps of a run: every test question's count of right answers at its first and its last
    step.
    """
    config = json.loads((run / 'config.json').read_text('utf-8'))
    files = sorted((run / 'evals').glob('*.json'))
    first, last = (json.loads(file.read_text('utf-8')) for file in (files[0], files[-1]))
    if (first['step'], last['step']) != (0, config['steps']):
        raise ValueError(
            f'{run} is not whole: evaluations of steps {first["step"]} to {last["step"]}, and '
            f'steps={config["steps"]}'
        )
    scores = [each['benchmarks'][name] for each in (first, last) for name in list(each['benchmarks'])[:1]]
    return {
        'task': config['task']['name'].replace('studies.real_policy.shuffled', 'arithmetic'), 'samples': config['evaluate']['samples'],
        'arm': 'shuffled' if config['task']['name'] == 'studies.real_policy.shuffled' else config['method'],
        'steps': config['steps'], 'seed': config['seed'], 'learning_rate': config['learner']['learning_rate'],
        'base': scores[0]['correct'], 'trained': scores[1]['correct'], 'truncated': [s['truncated'] for s in scores],
        'length': [s['length'] for s in scores], 'seconds': seconds, 'busy': busy,
        'asked_again': asked_again(read_metrics(run)), 'cpu': cpu_name(), 'date': str(date.today()),
        **config['environment'],
    }  # fmt: skip


def asked_again(metrics: list[Row]) -> dict[str, list[int]]:
    """By lag (groups, mixed ones) of prompts that failed so many steps before, and of fresh ones at the steps
    that asked them.

    {} without `log.failed_again.prompts`.
    """
    if not any(f'failed_again/asked/{LAGS[0]}' in row for row in metrics):
        return {}
    counts = {}
    for lag in LAGS:
        due = [row for row in metrics if row.get(f'failed_again/asked/{lag}')]
        bins = [sum(row['accuracy_bins']) for row in due], [sum(row['accuracy_bins'][1:-1]) for row in due]
        counts[str(lag)] = [
            sum(row[f'failed_again/{part}/{lag}'] for row in due) for part in ('asked', 'mixed')
        ] + [*map(sum, bins)]
    return counts


def table_of_failures(rows: list[Row]) -> str:
    """Two columns a lag that was asked: the share of mixed groups with its interval (Wilson's), of those that
    failed and of fresh ones.
    """
    lags = [lag for lag in LAGS if any(row['asked_again'][str(lag)][0] for row in rows)]
    head = [cell for lag in lags for cell in (f'failed {lag} step{"s" * (lag > 1)} ago', 'fresh then')]
    lines = []
    for row in rows:
        cells = []
        for lag in lags:
            asked, mixed, fresh, mixed_fresh = row['asked_again'][str(lag)]
            cells += [share_of(mixed, asked), share_of(mixed_fresh, fresh)]
        lines.append([row['arm'], str(row['seed']), *cells])
    return markdown_table(['arm', 'seed', *head], lines)


def share_of(count: int, of: int) -> str:
    low, high = wilson_interval(count / of, of) if of else (0, 0)
    return f'{100 * count / of:.0f} of {of} ({100 * low:.0f}–{100 * high:.0f})' if of else ''


def in_percent(counts: list[int], samples: int, k: int) -> str:
    """pass@k of the questions with its 95 % interval over questions, in percent; k = 1: the mean of the
    samples.
    """
    of_question = pass_at_k(np.full(len(counts), samples), np.array(counts), k)
    low, high = interval(of_question, np.arange(len(counts)))
    return f'{100 * of_question.mean():.1f} ({100 * low:.1f}–{100 * high:.1f})'


def table(rows: list[Row], every: bool = False) -> str:
    """A line a row; all have as many samples. `every`: each pass@k, not the mean and the last alone."""
    samples = rows[0]['samples'] if rows else 1
    shown = ks(samples) if every else sorted({1, samples})
    head = ['arm', 'steps', 'seed']
    head += [f'{f"pass@{k}" if k > 1 else f"mean@{samples}"}: base → trained' for k in shown] + [
        'tokens',
        'wall clock',
    ]
    lines = []
    for row in rows:
        scores = [
            ' → '.join(in_percent(row[part], samples, k) for part in ('base', 'trained')) for k in shown
        ]
        clock = f'{row["seconds"] / 60:.1f} min, {"busy" if row["busy"] else "idle"}'
        tokens = ' → '.join(f'{length:.0f}' for length in row['length'])
        lines.append([row['arm'], str(row['steps']), str(row['seed']), *scores, tokens, clock])
    return markdown_table(head, lines)


def tables(every: bool = False) -> dict[str, str]:
    """The page's tables by their names on it; `every`: with each pass@k."""
    found = {}
    for part, of_part in PARTS.items():
        rows = [row for row in read_rows() if (row['task'], row['steps']) == of_part]
        found[part] = table(rows, every)
        if probed := [row for row in rows if row.get('asked_again')]:
            found[f'{part}, asked again'] = table_of_failures(probed)
    return found


def read_rows() -> list[Row]:
    """Of every part; rows of the first two do not say what they all have in common."""
    first = {'task': 'arithmetic', 'samples': 8}
    return [first | row for row in rows_in(ROWS)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('run', type=Path, nargs='?')
    parser.add_argument('--seconds', type=float, default=0.0, help='wall clock of the whole command')
    parser.add_argument('--busy', action='store_true', help='other work shared the cores')
    arguments = parser.parse_args()
    if arguments.run:
        if not (arguments.run / 'config.json').is_file():
            parser.error(f'{arguments.run} is no run: it has no config.json')
        append_row(ROWS, row_of(arguments.run, arguments.seconds, arguments.busy))
    for name, lines in tables().items():
        replace_part(PAGE, name, lines + '\n')
    for name, lines in tables(every=True).items():
        print(f'{name}:\n\n{lines}\n')


if __name__ == '__main__':
    main()
