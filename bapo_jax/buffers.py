"""Shows what a run's replay buffer holds, how it was used, and which hard prompts never improved.

    python -m bapo_jax.buffers runs/x [--show=10] [--base=DIRECTORY]

It reads config.json, metrics.jsonl and the replay state of the newest complete checkpoint, but no weights. It
writes nothing, and can run while the trainer does. --show sets how many hard prompts are printed with their
question. --base names the model that the run started from, if it is not at the run's model.path. Bytes are
those of the token and log-prob arrays.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from bapo_jax.config import with_later_fields
from bapo_jax.machine import terminal
from bapo_jax.machine.help import CommandParser
from bapo_jax.machine.output import ends_with_its_reader, is_of_output
from bapo_jax.models.tokenizer import load_tokenizer
from bapo_jax.groups import Group
from bapo_jax.own.method import is_own
from bapo_jax.policies import BASE_HELP, base_of, check_base
from bapo_jax.replay.bapo import Bapo
from bapo_jax.replay.arrays import group_bytes
from bapo_jax.replay.buffer import BadEntry, ReplayBuffer
from bapo_jax.replay.fifo import Fifo
from bapo_jax.replay.freshper import Freshper
from bapo_jax.replay.kinds import OTHER_KINDS, TRACED
from bapo_jax.replay.rollout_replay import RolloutReplay
from bapo_jax.run.checkpoint import read_replay
from bapo_jax.run.directory import commits_in, read_run_config, settings_of
from bapo_jax.run.log.metrics import read_metrics

QUANTILES = (0, 0.25, 0.5, 0.75, 1)


def run(argv: Sequence[str] | None = None) -> None:
    """The command: prints the tables. An error ends it with a one-line message and status 1."""
    terminal.guard()
    parser = CommandParser(__doc__)
    parser.add_argument('run', type=Path, metavar='RUN', help='a run directory')
    parser.add_argument(
        '--show', type=int, default=10, metavar='N', help='hard prompts to print; default: 10'
    )
    parser.add_argument('--base', type=Path, metavar='DIRECTORY', help=BASE_HELP)
    arguments = parser.parse_args(argv)
    jax.config.update('jax_platforms', 'cpu')  # the trainer may be using the accelerator
    logging.getLogger('absl').setLevel(logging.ERROR)  # Orbax warns that it will not write
    with ends_with_its_reader():
        try:
            show_run(arguments.run, arguments.show, terminal.console(), arguments.base)
        except (ValueError, OSError) as e:
            if isinstance(e, OSError) and is_of_output(e):
                raise
            said = ' '.join(str(e).split())
            sys.exit(f'error: {said}' if str(arguments.run) in said else f'error: {arguments.run}: {said}')


def show_run(run: Path, show: int, console: Console, base: Path | None = None) -> None:
    """Prints a run's buffer. `base` has the tokenizer; None if it is at the run's model.path.

    Raises FileNotFoundError or ValueError, naming directory and remedy, if there is no run or it is damaged.
    """
    if not (run / 'config.json').is_file():
        raise FileNotFoundError(f'{run} is not a run directory (no config.json); give the --workdir of a run')
    recorded = read_run_config(run / 'config.json')
    config = with_later_fields(settings_of(recorded))
    c = config.replay
    if is_own(c.kind):
        raise ValueError(
            f'replay.kind={c.kind!r} is your own, and only built-in kinds can be shown; use '
            'read_replay of bapo_jax.run.checkpoint for what it saved'
        )
    if c.kind in TRACED or c.kind == 'bapo' and not (c.use_x2 or c.use_x3):
        console.print(
            f'the method {config.method} has no replay buffer: it neither re-evaluates nor replays',
            soft_wrap=True,
        )
        return
    step, arrays = read_replay(run / 'checkpoints')
    batch_groups, other = config.learner.batch_groups, OTHER_KINDS.get(c.kind)
    replay = other(c, batch_groups) if other else Bapo(c, batch_groups, lambda step: False)
    replay.restore(arrays)
    rows = [row for row in read_metrics(run) if 0 < row['step'] <= step]
    console.print(f'{run}: replay buffer after step {step}', soft_wrap=True)
    if other is None:
        tables = bapo_tables(replay, step, rows)
    elif hasattr(replay, 'history'):
        tables = history_tables(replay.history, c[c.kind]['per_prompt'], step)
    else:
        tables = newest_tables(replay, c[c.kind]['capacity'], step)
    for table in tables:
        if table.row_count:
            console.print(table)
    if other:
        return
    if not c['use_x3']:
        console.print('replay.use_x3 is off: the high part is filled but never replayed')
    if not c['use_x2']:
        console.print('replay.use_x2 is off: the bad part is filled but never re-evaluated')
        return
    hard = resisting(replay.buffer, show)
    if hard:
        path, commits = recorded['model']['path'], commits_in(recorded, run / 'config.json')
        tokenizer = load_tokenizer(base_of(run, path, commits, base))
        check_base(base, recorded, tokenizer)
        console.print(questions_table(hard, tokenizer))
    elif show > 0:
        console.print('no hard prompt in the buffer was re-evaluated without improving')


def bapo_tables(replay: Bapo, step: int, rows: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Tables of contents, ages, accuracy, use and evictions of both parts at `step`.

    `rows` are the rows of metrics.jsonl up to that step.
    """
    buffer, rows = replay.buffer, list(rows)
    parts = {'bad': list(buffer.bad.values()), 'high': list(buffer.high.values())}
    held = {
        name: (len(entries), buffer.capacity[name], sum(e.nbytes for e in entries))
        for name, entries in parts.items()
    }
    accuracy = Counter((e.group.correct, e.group.size) for e in parts['high'])
    used = {
        'bad: re-evaluated': Counter(e.sampled for e in parts['bad']),
        'high: in X3': Counter(e.sampled for e in parts['high']),
        'high: trained on': Counter(e.was_x1 + e.sampled for e in parts['high']),
    }
    return [
        _table(
            'Contents',
            ('part', 'entries', 'capacity', 'bytes'),
            [(name, *numbers) for name, numbers in held.items()],
        ),
        _ages({name: [step - e.stored for e in entries] for name, entries in parts.items()}),
        _table(
            'Accuracy of the high part',
            ('k/G', 'groups'),
            [(f'{k}/{g}', n) for (k, g), n in sorted(accuracy.items())],
        ),
        _table(
            'Uses of the entries in the buffer',
            ('use', 'times', 'entries'),
            [(use, times, n) for use, counts in used.items() for times, n in sorted(counts.items())],
        ),
        _table(
            f'Whole run, {len(rows)} steps of metrics.jsonl',
            ('part', 'added', 'evicted', 'evicted unseen'),
            [
                (name, *(total(rows, f'buffer/{name}/{what}') for what in ('added', 'evicted')), unseen)
                for name, unseen in (('bad', total(rows, 'buffer/bad/evicted_unseen')), ('high', '-'))
            ],
        ),
    ]


def history_tables(history: Mapping[int, Group], per_prompt: int, step: int) -> list[Table]:
    """Tables of contents, ages and sizes of histories by prompt; they count no uses and limit no prompts."""
    groups = list(history.values())
    sizes = Counter(g.size for g in groups)
    ages = [step - version for g in groups for r in g.responses for version in r.versions[-1:].tolist()]
    return [
        _table(
            'Contents',
            ('prompts', 'responses', 'limit per prompt', 'bytes'),
            [(len(groups), sum(g.size for g in groups), per_prompt, sum(map(group_bytes, groups)))],
        ),
        _ages({'since the last response': [step - g.step for g in groups], 'of the rollout policy': ages}),
        _table('Responses kept per prompt', ('responses', 'prompts'), sorted(sizes.items())),
    ]


def newest_tables(replay: Fifo | Freshper | RolloutReplay, capacity: int, step: int) -> list[Table]:
    """Tables of contents, ages, accuracy and use of a memory of the newest groups."""
    groups = replay.groups
    accuracy, uses = Counter((g.correct, g.size) for g in groups), Counter(replay.uses)
    return [
        _table(
            'Contents',
            ('groups', 'capacity', 'bytes'),
            [(len(groups), capacity, sum(map(group_bytes, groups)))],
        ),
        _ages({'of the groups': [step - g.step for g in groups]}),
        _table('Accuracy', ('k/G', 'groups'), [(f'{k}/{g}', n) for (k, g), n in sorted(accuracy.items())]),
        _table('Uses of the groups', ('times trained on', 'groups'), sorted(uses.items())),
    ]


def resisting(buffer: ReplayBuffer, count: int) -> list[BadEntry]:
    """Up to `count` hard prompts in the buffer that no re-evaluation found improved, most re-evaluated first.

    A re-evaluation leaves its entry in place, whatever its result. The entry is removed when the prompt is
    drawn as a fresh one.
    """
    # `best` is nan before the first re-evaluation, so such entries are left out.
    resist = (e for e in buffer.bad.values() if e.best <= e.accuracy)
    return sorted(resist, key=lambda e: (-e.sampled, e.stored))[: max(0, count)]


def total(rows: Iterable[Mapping[str, Any]], name: str) -> int:
    """The sum of a metric over the rows that have it."""
    return sum(row.get(name, 0) for row in rows)


def questions_table(hard: Sequence[BadEntry], tokenizer: Any) -> Table:
    """A table with a row for each hard prompt, with its question as the policy reads it."""

    def read(entry: BadEntry) -> str:
        return tokenizer.decode(entry.prompt.tokens, skip_special_tokens=True).strip()

    return _table(
        'Hard prompts that no re-evaluation improved',
        ('prompt', 'accuracy when stored', 'best since', 'stored at', 're-evaluated', 'question'),
        [(e.prompt.id, f'{e.accuracy:.3f}', f'{e.best:.3f}', e.stored, e.sampled, read(e)) for e in hard],
    )


def _ages(ages: Mapping[str, Sequence[int]]) -> Table:
    rows = [(name, *(f'{x:g}' for x in np.quantile(a, QUANTILES))) for name, a in ages.items() if len(a)]
    return _table('Age in steps', ('', 'min', '25%', 'median', '75%', 'max'), rows)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    table = Table(title=title, title_justify='left')
    for i, name in enumerate(head):
        table.add_column(name, justify='left' if i == 0 or name == 'question' else 'right')
    for row in rows:
        table.add_row(*(f'{x:,}' if isinstance(x, int) else str(x) for x in row))
    return table


if __name__ == '__main__':
    run()
