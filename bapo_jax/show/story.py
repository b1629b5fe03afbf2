"""Reads what a run directory tells of its run. Only a damaged config.json or metrics.jsonl is an error."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from bapo_jax.groups import Verdict
from bapo_jax.machine import events
from bapo_jax.machine.lock import is_held
from bapo_jax.report.inspect_log import group_rows
from bapo_jax.report.viewer import rollout_files
from bapo_jax.run.directory import read_run_config, starts_in
from bapo_jax.run.log.metrics import iter_rows
from bapo_jax.run.log.responses import rollout_lines
from bapo_jax.run.log.tables import scores_in

MOST_STEPS = 10  # steps at either end of the run over which metrics are averaged
_FILES = 3  # newest rollout files in which responses are looked for
_NEARBY = 3  # most run directories that an error suggests


class Sampled(NamedTuple):
    """A response of a training step."""

    step: int
    verdict: str  # 'correct', 'wrong' or 'unparseable'
    prompt: str
    response: str


class Story(NamedTuple):
    """What a run directory tells. The lists are empty, and the rest None, if it does not tell."""

    run: str  # the directory, as it was named
    config: dict[str, Any]  # config.json; empty if there is none
    starts: list[dict[str, Any]] | None  # starts.py; None if the run's version recorded none
    held: bool  # whether a process is training the run
    step: int  # the last step with a row in metrics.jsonl
    rows: int  # number of training steps with a row
    seconds: float  # all their timing_s/step
    first: list[dict[str, Any]]  # the rows of the first training steps, at most MOST_STEPS
    last: list[dict[str, Any]]  # and of the last ones, which may be the same
    written: str | None  # when the last row was written
    checkpoint: int | None  # the step of the newest checkpoint
    scores: dict[int, dict[str, dict]]  # step -> benchmark -> summary (scores.py): first and last evaluation
    events: Counter[str]  # rows of events.jsonl by kind
    responses: list[Sampled]  # a correct and another one, as far as the newest rollout files have them
    notes: list[str]  # files that could not be read


def read_story(run: Path) -> Story:
    """Reads a run directory, and writes nothing.

    Raises FileNotFoundError or NotADirectoryError if it is no run directory, ValueError if config.json or a
    row of metrics.jsonl is damaged, and OSError if a file cannot be read. All name the file and a remedy.
    """
    check_is_run(run)
    notes: list[str] = []
    path, metrics = run / 'config.json', run / 'metrics.jsonl'
    held = is_held(run)  # before the files are read, so that a run that ends meanwhile has not crashed
    config = read_run_config(path) if path.is_file() else {}
    if not config:
        notes.append('config.json is missing, so settings and starts are unknown; restore it')
    step, rows, seconds = 0, 0, 0.0
    first: list[dict[str, Any]] = []
    last: deque[dict[str, Any]] = deque(maxlen=MOST_STEPS)
    row: dict[str, Any] = {}
    for row in iter_rows(metrics):
        step = row['step']
        if step > 0:
            rows, seconds = rows + 1, seconds + _number(row.get('timing_s/step'))
            last.append(row)
            if len(first) < MOST_STEPS:
                first.append(row)
    written = row.get('time')
    if row and not isinstance(written, str):  # of an earlier version
        written = events.utc(metrics.stat().st_mtime)
    evaluated = sorted(int(file.stem) for file in (run / 'evals').glob('*.json') if file.stem.isdecimal())
    ends = dict.fromkeys([*evaluated[:1], *evaluated[-1:]])
    scores = scores_in({str(n): run / 'evals' / f'{n:06d}.json' for n in ends})
    saved = [int(file.name) for file in (run / 'checkpoints').glob('[0-9]*') if file.name.isdecimal()]
    return Story(
        str(run), config, starts_in(config, path) if 'starts' in config else None, held,
        step, rows, seconds, first, list(last), written, max(saved, default=None),
        {int(n): of for n, of in scores.items()}, _kinds(run / events.EVENTS_FILE, notes),
        two_of(_sampled(run, notes)), notes,
    )  # fmt: skip


def check_is_run(directory: Path) -> None:
    """Raises FileNotFoundError or NotADirectoryError, naming run directories nearby, if it is not one.

    Raises ValueError if only a damaged config.json is there.
    """
    if _is_run(directory):
        return
    around = [directory.parent, directory.parent.parent]
    inside = sorted(directory.iterdir()) if directory.is_dir() else []
    nearby = [str(path) for path in (*around, *inside) if _is_run(path)][:_NEARBY]
    such_as = f', such as {", ".join(nearby)}' if nearby else ''
    if not directory.exists():
        raise FileNotFoundError(f'{directory} does not exist; give the --workdir of a run{such_as}')
    if not directory.is_dir():
        raise NotADirectoryError(
            f'{directory} is a file and not a run directory; give the --workdir of a run{such_as}'
        )
    if (directory / 'config.json').is_file():
        read_run_config(directory / 'config.json')  # if it is damaged, it may be that of a run
        raise FileNotFoundError(
            f'{directory} is not a run directory (its config.json has no settings of a run); give the '
            f'--workdir of a run{such_as}'
        )
    raise FileNotFoundError(
        f'{directory} is not a run directory (no config.json and no metrics.jsonl); give the --workdir of a '
        f'run{such_as}'
    )


def _is_run(directory: Path) -> bool:
    """Whether the directory has the files of a run; a Hugging Face directory has a config.json, too."""
    config = directory / 'config.json'
    if not config.is_file():
        return (directory / 'metrics.jsonl').is_file()
    try:
        return 'task' in read_run_config(config)
    except ValueError:  # damaged
        return (directory / 'metrics.jsonl').is_file()


def two_of(sampled: Iterator[Sampled]) -> list[Sampled]:
    """Returns the first correct response and the first other one; reads no more than it needs."""
    found: dict[bool, Sampled] = {}
    for response in sampled:
        found.setdefault(response.verdict == 'correct', response)
        if len(found) == 2:
            break
    return [found[right] for right in (True, False) if right in found]


def _sampled(run: Path, notes: list[str]) -> Iterator[Sampled]:
    """Yields the judged responses of the newest rollout files."""
    failed = Verdict.INFRA_ERROR.name.lower()
    for file in rollout_files(run)[:_FILES]:
        step = int(file.name.partition('.')[0])
        try:
            for line in rollout_lines(file):
                for row in group_rows(json.loads(line)):
                    if row['verdict'] != failed:
                        yield Sampled(step, row['verdict'], row['prompt'], row['response'])
        except (ValueError, KeyError, TypeError, EOFError, RecursionError, zstandard.ZstdError) as e:
            notes.append(f'rollouts/{file.name} is damaged ({type(e).__name__}); restore or remove it')


def _kinds(file: Path, notes: list[str]) -> Counter[str]:
    """Counts the rows of events.jsonl by kind."""
    kinds: Counter[str] = Counter()
    for number, line in enumerate(file.read_bytes().splitlines() if file.is_file() else (), start=1):
        try:
            kinds[str(json.loads(line)['event'])] += 1
        except (ValueError, KeyError, TypeError, RecursionError):
            notes.append(f'line {number} of {file.name} is damaged; remove it')
    return kinds


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) else 0.0
