"""The head of a run's part of the report: what was run where, how it ended, and one of its responses."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from bapo_jax.report.records import Records, costs_of, starts_of
from bapo_jax.report.viewer import readable_rows, rollout_files
from bapo_jax.run.directory import part_of
from bapo_jax.run.log.tables import duration
from bapo_jax.run.starts import UNKNOWN, outcome

_SHOWN = 2000  # most characters of a sample's prompt, and of its response
_GROUPS = 8  # in which a correct response is looked for


class SampleResponse(NamedTuple):
    """A response of a run's newest rollouts, as text."""

    about: str  # its step, verdict and reward
    prompt: str
    response: str


def head_of(r: Records) -> list[tuple[str, str]]:
    """(name, value) of what config.json and the metrics record; what they lack is left out.

    Command, commit and host are those of the newest start, and the time is that of the first one.
    """
    config, starts = r.config, starts_of(r)
    task, learner, last = part_of(config, 'task'), part_of(config, 'learner'), starts[-1] if starts else {}
    where = {**part_of(config, 'environment'), **last}
    minutes = costs_of(r).get('minutes of training')
    data = [task.get('train'), f'{task["limit"]:,} problems' if task.get('limit') else None]
    groups, size = learner.get('batch_groups'), part_of(config, 'rollout').get('group_size')
    # Whether a process holds the run is not asked: the page is read later.
    ended = outcome(starts or None, config.get('steps'), int(r.steps[-1]), held=None)
    versions = ('bapo_jax', last.get('version')), ('JAX', where.get('jax')), ('Python', where.get('python'))
    facts = {
        'model': part_of(config, 'model').get('path'),
        'task': task.get('name'),
        'data': _joined(data),
        'method': config.get('method'),
        'seed': config.get('seed'),
        'learning rate': learner.get('learning_rate'),
        'batch': f'{groups} groups of {size} responses' if groups and size else None,
        'hardware': _joined([where.get('devices'), where.get('machine'), where.get('host')]),
        'version': _joined(f'{name} {x}' for name, x in versions if x),
        'commit': last.get('commit'),
        'command': last.get('command'),
        'start': _joined([starts[0].get('time'), f'{len(starts)} starts' if len(starts) > 1 else None])
        if starts
        else None,
        'wall clock': None if minutes is None else duration(60 * minutes[-1]),
        'steps': f'{len(r.steps):,}, from {r.steps[0]:,} to {r.steps[-1]:,}',
        'outcome': None if ended.kind == UNKNOWN else ended.words,
    }  # fmt: skip
    return [(name, str(value)) for name, value in facts.items() if value not in (None, '')]


def sample_response(directory: Path) -> SampleResponse | None:
    """The first correct response of the newest rollouts, or their first one; None if there are none.

    Looks at a few groups only, since their tokens may take much memory.
    """
    first = None
    for file in rollout_files(directory)[:1]:
        for _, row in islice(readable_rows(file, []), _GROUPS):  # the viewer tells what cannot be read
            first = first or (row, 0)
            if 'correct' in row['verdicts']:
                return _shown(row, row['verdicts'].index('correct'))
    return first and _shown(*first)


def _shown(row: dict[str, Any], i: int) -> SampleResponse:
    reward = row['rewards'][i]
    about = f'Step {row["step"]}, {row["verdicts"][i]}' + ('.' if reward is None else f', reward {reward:g}.')
    prompt, response = row['prompt'], row['responses'][i]
    return SampleResponse(
        about,
        prompt if len(prompt) <= _SHOWN else '… ' + prompt[-_SHOWN:],
        response if len(response) <= _SHOWN else response[:_SHOWN] + ' …',
    )


def _joined(parts: Iterable[Any]) -> str:
    return ', '.join(str(part) for part in parts if part)
