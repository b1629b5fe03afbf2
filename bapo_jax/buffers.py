"""What a run's replay buffer holds, how it was used, and which hard prompts resist.

    python -m bapo_jax.buffers runs/x [--show=10]

Reads config.json, metrics.jsonl and the replay of the newest whole checkpoint, not the weights. Writes nothing, and may read beside
a trainer. --show says how many hard prompts are printed with their question. Bytes are those of token and log-prob arrays.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from bapo_jax import hub, terminal
from bapo_jax.models.tokenizer import load_tokenizer
from bapo_jax.output import ends_with_its_reader
from bapo_jax.replay.bapo import Bapo
from bapo_jax.replay.buffer import BadEntry, ReplayBuffer
from bapo_jax.replay.kinds import make_replay
from bapo_jax.replay.repo import Repo
from bapo_jax.run.checkpoint import read_replay
from bapo_jax.run.directory import commits_in, read_config
from bapo_jax.run.log import read_metrics

QUANTILES = (0, 0.25, 0.5, 0.75, 1)


def run(argv: Sequence[str] | None = None) -> None:
    """Prints the tables; an error is one line and status 1."""
    terminal.guard()
    parser = argparse.ArgumentParser(prog='bapo_jax.buffers', description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('run', type=Path)
    parser.add_argument('--show', type=int, default=10)
    arguments = parser.parse_args(argv)
    jax.config.update('jax_platforms', 'cpu')  # an accelerator may be the trainer's
    logging.getLogger('absl').setLevel(logging.ERROR)  # Orbax warns that it will not write
    with ends_with_its_reader():
        try:
            show_run(arguments.run, arguments.show, terminal.console())
        except (ValueError, OSError) as e:
            if isinstance(e, BrokenPipeError):
                raise
            said = ' '.join(str(e).split())
            sys.exit(said if str(arguments.run) in said else f'{arguments.run}: {said}')


def show_run(run: Path, show: int, console: Console) -> None:
    """Prints a run's buffer. Raises FileNotFoundError or ValueError, naming the directory and the remedy."""
    if not (run / 'config.json').is_file():
        raise FileNotFoundError(f'{run} holds no run (no config.json); give the --workdir of a run')
    config = read_config(run / 'config.json')
    c = config.get('replay', {})
    if c.get('kind') != 'repo' and not (c.get('use_x2') or c.get('use_x3')):
        console.print(f'{config.get("method", "this method")} keeps no buffer: it neither re-evaluates nor replays', soft_wrap=True)
        return
    step, arrays = read_replay(run / 'checkpoints')
    replay = make_replay(ConfigDict(c), config['learner']['batch_groups'], lambda step: False)
    replay.restore(arrays)
    rows = [row for row in read_metrics(run) if 0 < row['step'] <= step]
    console.print(f'{run}: replay after step {step}', soft_wrap=True)
    if isinstance(replay, Repo):
        for table in repo_tables(replay, c['per_prompt'], step):
            console.print(table)
        return
    for table in bapo_tables(replay, step, rows):
        console.print(table)
    if not c['use_x3']:
        console.print('replay.use_x3 is off: the high part is filled, and never replayed')
    if not c['use_x2']:
        console.print('replay.use_x2 is off: the bad part is filled, and never re-evaluated')
        return
    hard = resisting(replay.buffer, show)
    if hard:
        console.print(questions_table(hard, load_tokenizer(_tokenizer_of(config))))
    elif show > 0:
        console.print('no hard prompt that is held was re-evaluated in vain')


def bapo_tables(replay: Bapo, step: int, rows: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Contents, ages, accuracy, use and evictions of both parts at `step`; `rows` are those of metrics.jsonl up to it."""
    buffer, rows = replay.buffer, list(rows)
    parts = {'bad': list(buffer.bad.values()), 'high': list(buffer.high.values())}
    held = {name: (len(entries), buffer.capacity[name], sum(e.nbytes for e in entries)) for name, entries in parts.items()}
    accuracy = Counter((e.group.correct, e.group.size) for e in parts['high'])
    used = {
        'bad: re-evaluated': Counter(e.sampled for e in parts['bad']),
        'high: in X3': Counter(e.sampled for e in parts['high']),
        'high: trained on': Counter(e.was_x1 + e.sampled for e in parts['high']),
    }
    return [
        _table('Contents', ('part', 'entries', 'capacity', 'bytes'), [(name, *numbers) for name, numbers in held.items()]),
        _ages({name: [step - e.stored for e in entries] for name, entries in parts.items()}),
        _table('Accuracy of the high part', ('k/G', 'groups'), [(f'{k}/{g}', n) for (k, g), n in sorted(accuracy.items())]),
        _table(
            'How often entries that are held were used', ('use', 'times', 'entries'),
            [(use, times, n) for use, counts in used.items() for times, n in sorted(counts.items())],
        ),
        _table(
            f'Over the run, {len(rows)} steps of metrics.jsonl', ('part', 'added', 'evicted', 'evicted unseen'),
            [
                (name, *(total(rows, f'buffer/{name}/{what}') for what in ('added', 'evicted')), unseen)
                for name, unseen in (('bad', total(rows, 'buffer/bad/evicted_unseen')), ('high', '-'))
            ],
        ),
    ]  # fmt: skip


def repo_tables(replay: Repo, per_prompt: int, step: int) -> list[Table]:
    """Contents, ages, and how full the histories are; RePO counts no uses and bounds no prompts."""
    groups = list(replay.history.values())
    held = replay.metrics(step)
    sizes = Counter(g.size for g in groups)
    ages = [step - r.version for g in groups for r in g.responses]
    return [
        _table(
            'Contents', ('prompts', 'responses', 'most a prompt', 'bytes'),
            [(held['buffer/repo/prompts'], held['buffer/repo/responses'], per_prompt, held['buffer/repo/bytes'])],
        ),
        _ages({'since its last response': [step - g.step for g in groups], 'of the answering policy': ages}),
        _table('Responses kept of a prompt', ('responses', 'prompts'), sorted(sizes.items())),
    ]  # fmt: skip


def resisting(buffer: ReplayBuffer, count: int) -> list[BadEntry]:
    """Up to `count` hard prompts that are held and that no re-evaluation found improved, the most often re-evaluated first.

    A re-evaluation leaves its entry in place, whatever it gave. The entry goes when the prompt is drawn afresh.
    """
    resist = (e for e in buffer.bad.values() if e.best <= e.accuracy)  # nan before the first
    return sorted(resist, key=lambda e: (-e.sampled, e.stored))[: max(0, count)]


def total(rows: Iterable[Mapping[str, Any]], name: str) -> int:
    """The sum of a metric over the rows that have it."""
    return sum(row.get(name, 0) for row in rows)


def questions_table(hard: Sequence[BadEntry], tokenizer: Any) -> Table:
    """A row for each hard prompt, with its question as the policy read it."""

    def read(entry: BadEntry) -> str:
        return tokenizer.decode(entry.prompt.tokens, skip_special_tokens=True).strip()

    return _table(
        'Hard prompts that no re-evaluation found improved',
        ('prompt', 'accuracy when stored', 'best since', 'stored at', 're-evaluated', 'question'),
        [(e.prompt.id, f'{e.accuracy:.3f}', f'{e.best:.3f}', e.stored, e.sampled, read(e)) for e in hard],
    )  # fmt: skip


def _ages(ages: Mapping[str, Sequence[int]]) -> Table:
    rows = [(name, *(f'{x:g}' for x in np.quantile(a, QUANTILES))) for name, a in ages.items() if len(a)]
    return _table('Age in steps', ('', 'least', '25%', 'median', '75%', 'most'), rows)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    table = Table(title=title, title_justify='left')
    for i, name in enumerate(head):
        table.add_column(name, justify='left' if i == 0 or name == 'question' else 'right')
    for row in rows:
        table.add_row(*(f'{x:,}' if isinstance(x, int) else str(x) for x in row))
    return table


def _tokenizer_of(config: Mapping[str, Any]) -> str:
    path = hub.folder_in_run(config['model']['path'], commits_in(config, Path('config.json')))
    if not Path(path).is_dir():
        raise FileNotFoundError(f'model.path={path} of config.json is not there; restore it, or leave out questions with --show=0')
    return path


if __name__ == '__main__':
    run()
