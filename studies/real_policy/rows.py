"""The rows of training: a finished run becomes a line of rows.jsonl, and the lines become the page's tables.

    python -m studies.real_policy.rows runs/arithmetic --seconds=993 --busy     # appends a row: the command's wall clock, the machine
    python -m studies.real_policy.rows                                          # writes the tables into page.md
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from bapo_jax.files import replace_part
from bapo_jax.replay.failures import LAGS
from bapo_jax.run.log import read_metrics
from bapo_jax.scores import interval, ks, pass_at_k, wilson_interval
from benchmarks.host_load import cpu_name

HERE = Path(__file__).resolve().parent
ROWS, PAGE = HERE / 'rows.jsonl', HERE / 'page.md'
SAMPLES = 8
PARTS = {'part 1': 40, 'part 2': 60}  # the steps of its runs


def row_of(run: Path, seconds: float, busy: bool) -> dict[str, Any]:
    """What the study keeps of a run: every test question's count of right answers at its first and its last step."""
    config = json.loads((run / 'config.json').read_text('utf-8'))
    files = sorted((run / 'evals').glob('*.json'))
    first, last = (json.loads(file.read_text('utf-8')) for file in (files[0], files[-1]))
    if (first['step'], last['step']) != (0, config['steps']):
        raise ValueError(f'{run} is not whole: evaluations of steps {first["step"]} to {last["step"]}, and steps={config["steps"]}')
    scores = [each['benchmarks']['arithmetic'] for each in (first, last)]
    return {
        'arm': 'shuffled' if config['task']['name'] == 'studies.real_policy.shuffled' else config['method'],
        'steps': config['steps'], 'seed': config['seed'], 'learning_rate': config['learner']['learning_rate'],
        'base': scores[0]['correct'], 'trained': scores[1]['correct'], 'truncated': [s['truncated'] for s in scores],
        'length': [s['length'] for s in scores], 'seconds': seconds, 'busy': busy,
        'asked_again': asked_again(read_metrics(run)), 'cpu': cpu_name(), 'date': str(date.today()),
        **config['environment'],
    }  # fmt: skip


def asked_again(metrics: list[dict[str, Any]]) -> dict[str, list[int]]:
    """(groups, mixed ones) over a run: of fresh prompts, and of those that failed so many steps before; {} without `replay.probe`."""
    if not any(f'failed_again/asked/{LAGS[0]}' in row for row in metrics):
        return {}
    bins = np.sum([row['accuracy_bins'] for row in metrics if 'accuracy_bins' in row], axis=0)
    counts = {'fresh': [int(bins.sum()), int(bins[1:-1].sum())]}
    for lag in LAGS:
        counts[str(lag)] = [int(sum(row.get(f'failed_again/{part}/{lag}', 0) for row in metrics)) for part in ('asked', 'mixed')]
    return counts


def table_of_failures(rows: list[dict[str, Any]]) -> str:
    """A line a run: the share of mixed groups, and its interval (Wilson's)."""
    columns = ['fresh', *map(str, LAGS)]
    lines = ['| arm | seed | fresh prompts | ' + ' | '.join(f'failed {lag} step{"s" * (lag > 1)} ago' for lag in LAGS) + ' |']
    lines.append('|' + '---|' * (2 + len(columns)))
    for row in rows:
        cells = []
        for column in columns:
            asked, mixed = row['asked_again'][column]
            low, high = wilson_interval(mixed / asked, asked) if asked else (0, 0)
            cells.append(f'{100 * mixed / asked:.0f} of {asked} ({100 * low:.0f} to {100 * high:.0f})' if asked else '')
        lines.append(f'| {" | ".join([row["arm"], str(row["seed"]), *cells])} |')
    return '\n'.join(lines)


def in_percent(counts: list[int], k: int) -> str:
    """pass@k of the questions with its 95 % interval over questions, in percent; k = 1: mean@8."""
    of_question = pass_at_k(np.full(len(counts), SAMPLES), np.array(counts), k)
    low, high = interval(of_question, np.arange(len(counts)))
    return f'{100 * of_question.mean():.1f} ({100 * low:.1f} to {100 * high:.1f})'


def table(rows: list[dict[str, Any]]) -> str:
    """A line a row."""
    head = ['arm', 'steps', 'seed', *(f'{"mean@8" if k == 1 else f"pass@{k}"}: base → trained' for k in ks(SAMPLES)), 'tokens', 'wall clock']
    lines = [f'| {" | ".join(head)} |', '|' + '---|' * len(head)]
    for row in rows:
        scores = [f'{in_percent(row["base"], k)} → {in_percent(row["trained"], k)}' for k in ks(SAMPLES)]
        clock = f'{row["seconds"] / 60:.1f} min, {"busy" if row["busy"] else "idle"}'
        tokens = ' → '.join(f'{length:.0f}' for length in row['length'])
        lines.append(f'| {" | ".join([row["arm"], str(row["steps"]), str(row["seed"]), *scores, tokens, clock])} |')
    return '\n'.join(lines)


def table_of(part: str) -> str:
    return table([row for row in read_rows() if row['steps'] == PARTS[part]])


def probed() -> list[dict[str, Any]]:
    return [row for row in read_rows() if row.get('asked_again')]


def read_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text('utf-8').splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', type=Path, nargs='?')
    parser.add_argument('--seconds', type=float, default=0.0, help='wall clock of the whole command')
    parser.add_argument('--busy', action='store_true', help='other work shared the cores')
    arguments = parser.parse_args()
    if arguments.run:
        with ROWS.open('a', encoding='utf-8') as file:
            file.write(json.dumps(row_of(arguments.run, arguments.seconds, arguments.busy)) + '\n')
    for part in PARTS:
        replace_part(PAGE, part, table_of(part) + '\n')
    replace_part(PAGE, 'asked again', table_of_failures(probed()) + '\n')


if __name__ == '__main__':
    main()
