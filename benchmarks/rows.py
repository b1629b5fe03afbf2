"""Every row of the methods table for 20 steps with a resume, on prompts that come back, so that every part of
the row acts.

    python -m benchmarks.rows                    # or `make rows`; counts go to benchmarks/results/rows.jsonl
    python -m benchmarks.rows --only=repo,dapo   # these rows alone
    python -m benchmarks.rows --on=diagrams      # on questions with images
    python -m benchmarks.rows --on=adapter       # training a LoRA adapter
    python -m benchmarks.rows --on=experts       # on a mixture of experts, which docs/reference/models.md makes

A policy of 0.8M parameters and 32 problems: what is shown is that the parts act, and what they cost, not
which method is better. Each row is stopped after half its steps and continued, and its counters are asserted:
RePO replays, MoPPS chooses, DAPO refills, ReMix mixes and then stops mixing, BAPO's parts fill its batch.
The tables of benchmarks/rows.md are written anew from all that is recorded.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags, logging
from rich.table import Table

from bapo_jax.machine import terminal
from bapo_jax.machine.files import replace_part, write_text
from bapo_jax.methods import METHODS
from bapo_jax.run.log.metrics import read_metrics
from bapo_jax.train import build, train
from benchmarks.host.load import cpu_name

STEPS, RUNS = 20, Path('runs') / 'rows'
SMALL = {
    'task.limit': 32, 'learner.batch_groups': 16, 'learner.mini_batch_groups': 8, 'replay.max_reevaluate': 8, 'log.rollouts_every': 0,
    'evaluate.benchmarks': (), 'evaluate.track_prompts': 0, 'checkpoint.keep': 1, 'checkpoint.every': 100,
}  # fmt: skip
PAGE = Path(__file__).with_suffix('.md')
RECORD = PAGE.with_name('results') / 'rows.jsonl'
COUNTS = ('responses', 'discarded', 'reevaluated', 'reused')
COLUMNS = (
    'row',
    'reward, first and last 5 steps',
    'generated',
    'discarded',
    're-evaluated',
    'reused',
    'updates',
    'acted',
)


class On(NamedTuple):
    """What the rows train: a config, and changes to it."""

    config: str
    changes: dict[str, Any] = {}


ON = {
    'quickstart': On('quickstart'),
    'diagrams': On('diagrams'),
    'adapter': On('quickstart', {'model.adapter.rank': 8, 'learner.learning_rate': 1e-3}),
    'experts': On('quickstart', {'model.path': 'runs/experts/base'}),
}
OF_ROW = {
    'mopps': {'prompts.mopps.candidates': 2, 'prompts.mopps.decay': 0.5},
    'remix': {'learner.switch_step': 12},
    # Of 16 fresh groups a few are hard, and with a delay of 5 there are four chances to re-evaluate them.
    'bapo_official': {'rollout.sync_every': 3, 'replay.reevaluate_every': 2},
    'areal': {'mesh.data': 1, 'rollout.most_behind': 2, 'rollout.step_share': 0.7},
    'kimi': {'rollout.step_share': 0.7},
    'dots': {'prompts.dots.references': 16},
    'exgrpo': {'replay.exgrpo.start_above': 0.2},
    'relift': {'replay.traces.demonstrations': 4},
}
Rows = list[dict[str, Any]]


def total(rows: Rows, name: str) -> float:
    return sum(row.get(name, 0) for row in rows)


def x1(rows: Rows) -> bool:
    return total(rows, 'bapo/x1_groups') > 0


def x2(rows: Rows) -> bool:
    return rows[-1]['rollout/reevaluated_total'] > 0 and total(rows, 'bapo/x2_groups') > 0


def x3(rows: Rows) -> bool:
    return total(rows, 'bapo/x3_groups') > 0


def delayed(rows: Rows) -> bool:
    return max(row['bapo/lag'] for row in rows) > 0


def replays(rows: Rows) -> bool:
    return total(rows, 'bapo/replay_groups') > 0


def continues(rows: Rows) -> bool:
    return max(row['rollout/unfinished'] for row in rows) > 0


def narrows(rows: Rows) -> bool:
    return total(rows, 'actor/trust_narrowed') > 0


# The parts of each row that must have acted, by what a reader calls them.
PARTS: dict[str, dict[str, Callable[[Rows], bool]]] = {
    'grpo_v5': {'delays': delayed},
    'dapo': {
        'refills': lambda rows: rows[-1]['rollout/responses_total'] > STEPS * 16 * 8,
        'punishes long responses': lambda rows: any(
            row['critic/rewards/mean'] < row['critic/score/mean'] for row in rows
        ),
    },
    'mopps': {
        'chooses': lambda rows: (
            rows[-1]['prompts/candidates'] == 32 and abs(rows[-1]['prompts/posterior_mean'] - 0.5) > 1e-3
        ),
    },
    'gapo': {'widens and narrows the clip': narrows},
    'adaprefix': {
        'gives prefixes, then none': lambda rows: (
            total(rows, 'prompts/prefixed') > 0 == rows[-1]['prompts/prefixed']
        )
    },
    'kimi': {'continues responses': continues},
    'areal': {
        'is behind': lambda rows: max(row['staleness/max'] for row in rows) >= 2,
        'continues responses': continues,
    },
    'm2po': {'delays': delayed},
    'sat': {'delays': delayed, 'narrows the clip': narrows},
    'repo': {'replays': replays},
    'arpo': {'replays': replays},
    'fifo': {'replays': replays},
    'freshper': {'replays': replays},
    'exgrpo': {'replays': replays},
    'dots': {
        'replays': replays,
        'predicts': lambda rows: len({row['prompts/predicted'] for row in rows}) > 1,
    },
    'luffy': {'trains on traces': lambda rows: rows[-1]['traces/groups_total'] > 0},
    'relift': {'demonstrates': lambda rows: total(rows, 'traces/demonstrations') > 0},
    'remix': {
        'mixes': lambda rows: max(row['staleness/max'] for row in rows[:12]) == 2,
        'switches': lambda rows: (
            max(row['staleness/max'] for row in rows[12:]) == 0 and rows[-1]['actor/updates'] == 2
        ),
    },
    'ppo': {'explains variance': lambda rows: rows[-1].get('critic/explained_variance') is not None},
    'ba_ppo': {
        'X1': x1,
        'X3': x3,
        'explains variance': lambda rows: rows[-1].get('critic/explained_variance') is not None,
    },
    'bapo': {'delays': delayed, 'X1': x1, 'X2': x2, 'X3': x3},
    'bapo_tuned': {'X1': x1, 'X3': x3},
    'bapo_guarded': {'X1': x1, 'X3': x3},
    'bapo_posterior': {'X1': x1, 'X2': x2, 'X3': x3, 'pools': lambda rows: total(rows, 'retries/pooled') > 0},
    'bapo_continue': {
        'X1': x1,
        'X2': x2,
        'X3': x3,
        'gives first tokens': lambda rows: total(rows, 'retries/given_share') > 0,
    },
    'bapo_official': {'delays': delayed, 'X1': x1, 'X2': x2, 'X3': x3},
    'bapo_mini': {'X1': x1, 'X2': x2, 'X3': x3},
    'bapo_no_x2': {'X1': x1, 'X3': x3},
    'bapo_no_x3': {'X1': x1, 'X2': x2},
}


def run_row(method: str, on: str) -> Rows:
    """The metrics of the row's steps; it is stopped after half of them and continued."""
    workdir = RUNS / on / method
    shutil.rmtree(workdir, ignore_errors=True)
    for steps in (STEPS // 2, STEPS):
        config = importlib.import_module(f'configs.{ON[on].config}').get_config(method)
        changes = {**SMALL, **ON[on].changes, **OF_ROW.get(method, {}), 'steps': steps}
        config.update_from_flattened_dict(changes)
        config.learner.row_tokens = config.rollout.max_prompt_tokens + config.learner.slot_tokens
        train(build(config, workdir))
    return read_metrics(workdir)[1:]


def read_record() -> Rows:
    return [json.loads(line) for line in RECORD.read_text('utf-8').splitlines()]


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A recorded row as its line of the widest table."""
    return (
        f'`{row["row"]}`', '{:.3f} → {:.3f}'.format(*row['reward']), *(f'{row[what]:,}' for what in COUNTS),
        str(row['updates']), ', '.join(row['acted']) or '-',
    )  # fmt: skip


def table(record: Rows) -> str:
    """The quickstart's rows for the page, in the order of the methods, and where they were measured."""
    of = {row['row']: row for row in record if row['config'] == 'quickstart'}
    lines = [COLUMNS, ['---'] * len(COLUMNS), *(cells(of[name]) for name in METHODS if name in of)]
    places: dict[str, list[str]] = {}
    for name, row in of.items():
        places.setdefault(f'{where(row)}, {row["date"]}', []).append(f'`{name}`')
    *few, most = sorted(places, key=lambda place: len(places[place]))
    said = [f'{place}: {", ".join(places[place])}' for place in few] + [
        f'{most}: the others' if few else most
    ]
    text = ''.join(f'| {" | ".join(line)} |\n' for line in lines)
    return f'{text}\n(`make rows`; {"; ".join(said)})\n'


def where(row: dict[str, Any]) -> str:
    of_jax = [f'jax {row["jax"]}'] if row['jax'] else []
    return ', '.join([row['cpu'], f'{row["cores"]} core{"s" * (row["cores"] > 1)}', *of_jax])


def elsewhere(record: Rows) -> str:
    """What else the rows trained: how many there are, their mean reward, and where they were measured."""
    lines = ['| command | rows | reward, first and last 5 steps, mean | measured |', '|---|---|---|---|']
    for on in ON:
        of = [row for row in record if row['config'] == on != 'quickstart']
        if of:
            reward = '{:.3f} → {:.3f}'.format(*np.mean([row['reward'] for row in of], axis=0))
            places, dates = sorted({where(row) for row in of}), sorted({row['date'] for row in of})
            when = f'{"; ".join(places)}; {" to ".join([dates[0], dates[-1]][: len(dates)])}'
            lines.append(f'| `python -m benchmarks.rows --on={on}` | {len(of)} | {reward} | {when} |')
    return '\n'.join(lines) + '\n'


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    names = FLAGS.only or list(METHODS)
    jax.config.update('jax_compilation_cache_dir', str(RUNS.absolute() / 'cache'))
    measured = []
    for name in names:
        rows = run_row(name, FLAGS.on)
        failed = [part for part, acted in PARTS.get(name, {}).items() if not acted(rows)]
        if failed:
            sys.exit(f'{name}: did not act: {", ".join(failed)}; {RUNS / FLAGS.on / name}/metrics.jsonl')
        reward = [np.mean([row['critic/score/mean'] for row in part]) for part in (rows[:5], rows[-5:])]
        measured.append({
            'config': FLAGS.on, 'row': name, 'reward': [round(float(mean), 3) for mean in reward],
            **{what: rows[-1][f'rollout/{what}_total'] for what in COUNTS},
            'updates': round(total(rows, 'actor/updates')), 'acted': list(PARTS.get(name, {})),
            'cpu': cpu_name(), 'cores': len(os.sched_getaffinity(0)),
            'jax': importlib.metadata.version('jax'), 'date': str(datetime.date.today()),
        })  # fmt: skip
    shown = Table(*COLUMNS, title=f'{STEPS} steps of 16 prompts × 8 responses, 32 problems')
    for row in measured:
        shown.add_row(*cells(row))
    terminal.console().print(shown)
    replaced = {(FLAGS.on, name) for name in names}
    record = [row for row in read_record() if (row['config'], row['row']) not in replaced] + measured
    write_text(RECORD, ''.join(json.dumps(row) + '\n' for row in record))
    replace_part(PAGE, 'measured', table(record))
    replace_part(PAGE, 'elsewhere', elsewhere(record))


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_list('only', [], 'Rows; default: all.')
    flags.DEFINE_enum('on', 'quickstart', list(ON), 'What the rows train.')
    app.run(main)
