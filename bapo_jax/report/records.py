"""Reads a run directory into plain arrays, from which the figures are computed.

metrics.jsonl is required. evals/, events.jsonl, config.json and tensorboard/ are optional.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog

from bapo_jax.config.earlier import as_now
from bapo_jax.machine import events
from bapo_jax.run.directory import part_of
from bapo_jax.run.log.metrics import iter_rows

VAL = 'val-core/'
STEPS = 'training steps'  # the usual x axis
BETWEEN_STEPS = ('rollouts', 'testing', 'save_checkpoint')  # phases after timing_s/step has ended


class Tracked(NamedTuple):
    """The tracked training prompts at one evaluation."""

    step: int
    correct: dict[int | str, int]  # correct responses, by prompt id
    samples: int  # responses per prompt


class Score(NamedTuple):
    """A benchmark's curves; every array has one entry per evaluation, and shares are in [0, 1]."""

    samples: int  # n of mean@n and pass@n
    steps: np.ndarray
    mean: np.ndarray
    passed: np.ndarray  # pass@n
    # Correct responses by question, int [questions] each; None if an evaluation lacks them, () if all do.
    correct: tuple[np.ndarray | None, ...] = ()


class Fault(NamedTuple):
    """A row of events.jsonl and the last training step done when it was written; None if unknown."""

    kind: str
    message: str
    time: str
    step: int | None


class Records(NamedTuple):
    """A run's records. The T logged steps are ascending and may have gaps."""

    name: str
    steps: np.ndarray  # int [T]
    columns: dict[str, np.ndarray]  # by metric, float [T]; nan if a step lacks it
    bins: np.ndarray  # float [T, G+1]: groups by number of correct responses; nan if a step lacks them
    scores: dict[str, Score]  # by benchmark
    tracked: list[Tracked]  # by step
    faults: list[Fault]
    restarts: list[int]  # the first step after each restart
    config: dict[str, Any]  # empty if config.json is absent
    notes: list[str]  # files that could not be read


def column(records: Records, name: str) -> np.ndarray:
    """The metric at every step, float [T]; all nan if the run lacks it."""
    return records.columns.get(name, np.full(len(records.steps), np.nan))


def has(records: Records, name: str) -> bool:
    """Whether at least one step has a finite value of the metric."""
    return bool(np.isfinite(column(records, name)).any())


def benchmarks(runs: Sequence[Records]) -> list[str]:
    """The distinct names of all benchmarks of these runs."""
    return list(dict.fromkeys(b for r in runs for b in r.scores))


def samples_of(runs: Sequence[Records], benchmark: str) -> str:
    """n of mean@n; several values if the runs differ."""
    return '/'.join(dict.fromkeys(str(r.scores[benchmark].samples) for r in runs if benchmark in r.scores))


def starts_of(records: Records) -> list[dict[str, Any]]:
    """The starts that config.json records (run/starts.py), oldest first, as far as they are not damaged."""
    starts = records.config.get('starts')
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def costs_of(records: Records) -> dict[str, np.ndarray]:
    """What the run had cost by the end of each logged step, float [T], by the name of an x axis.

    Minutes are those that the run's starts had run, with compilation and evaluation. For a step of which they
    do not tell, its own timings count. A cost that the run does not record is left out.
    """
    costs = {STEPS: records.steps.astype(float)}
    if has(records, 'rollout/responses_total'):
        costs['responses generated'] = column(records, 'rollout/responses_total')
    if has(records, 'actor/updates'):
        costs['optimizer updates'] = np.cumsum(np.nan_to_num(column(records, 'actor/updates')))
    timings = [column(records, f'timing_s/{phase}') for phase in ('step', *BETWEEN_STEPS)]
    passed = np.diff(_seconds_run(records), prepend=0.0)
    seconds = np.where(np.isfinite(passed), passed, np.nan_to_num(timings).sum(axis=0))
    if seconds.any():
        costs['minutes of training'] = np.cumsum(seconds) / 60
    return costs


def _seconds_run(records: Records) -> np.ndarray:
    """How long the starts in config.json had run by the time of each row, in seconds, float [T].

    The time between two starts does not count. A start that crashed counts until its last row, since the time
    of the crash is not recorded. nan for a row without a time or before the first start, and for all rows if
    no start, or one without a time, is recorded.
    """
    starts = starts_of(records)
    times, begun = column(records, 'time'), np.array([_moment(s.get('time')) for s in starts])
    if not starts:
        return np.full(len(times), np.nan)
    ended = np.array([_moment(part_of(s, 'end').get('time')) for s in starts])
    for i, next_begun in enumerate([*begun[1:], np.inf]):
        if np.isnan(ended[i]):
            ended[i] = times[(times >= begun[i]) & (times < next_begun)].max(initial=begun[i])
    ran = np.clip(np.minimum(ended, times[:, None]) - begun, 0, None).sum(axis=1)
    return np.where(times >= begun[0], ran, np.nan)


def read_run(directory: Path, name: str | None = None) -> Records:
    """Reads a run directory. Raises ValueError, naming it, if it has no training step or a damaged row."""
    if not (directory / 'metrics.jsonl').is_file():
        raise ValueError(
            f'{directory} is not a run directory (no metrics.jsonl); give the --workdir of a run'
        )
    steps, columns, bins, values = _metrics(directory / 'metrics.jsonl')
    if not len(steps):
        raise ValueError(f'{directory}: metrics.jsonl has no training step yet; wait for the first')
    notes: list[str] = []
    evaluations = [
        e for file in sorted((directory / 'evals').glob('*.json')) if (e := _evaluation(file, notes))
    ]
    clock, starts = _clock(directory / 'tensorboard', notes)
    return Records(
        name=directory.name if name is None else name,
        steps=steps,
        columns=columns,
        bins=bins,
        scores={**_scores_of_metrics(values), **_scores_of_evals(evaluations)},
        tracked=_tracked(evaluations),
        faults=_faults(directory / events.EVENTS_FILE, clock, notes),
        restarts=[max(1, step) for step in starts[1:]],
        config=as_now(_json(directory / 'config.json', notes) or {}),
        notes=notes,
    )


def _metrics(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray, dict[str, dict[int, float]]]:
    """Returns (steps, columns, bins) of the training steps, and val-core values by name and step.

    The values include those of step 0.
    """
    steps, places, numbers = array('q'), defaultdict(lambda: array('q')), defaultdict(lambda: array('d'))
    bins: list[tuple[int, list[int]]] = []
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    for row in iter_rows(path):
        step, place = row['step'], len(steps)
        scored = {name: x for name, x in row.items() if name.startswith(VAL) and isinstance(x, (int, float))}
        for name, x in scored.items():
            scores[name][step] = x
        if step <= 0:
            continue
        steps.append(step)
        for name, x in {**row, 'time': _moment(row.get('time'))}.items():
            if type(x) in (int, float):
                places[name].append(place)
                numbers[name].append(x)
        if isinstance(row.get('accuracy_bins'), list):
            bins.append((place, row['accuracy_bins']))
    columns = {}
    for name, there in places.items():
        columns[name] = np.full(len(steps), np.nan)
        columns[name][np.array(there)] = numbers[name]
    counts = np.full((len(steps), max((len(b) for _, b in bins), default=0)), np.nan)
    for place, b in bins:
        counts[place] = 0
        counts[place, : len(b)] = b
    return np.array(steps, int), columns, counts, scores


def _moment(time: Any) -> float:
    """A time in a record, ISO 8601 or seconds since 1970, in seconds since 1970; nan if it is neither."""
    if isinstance(time, str):
        try:
            return datetime.fromisoformat(time).timestamp()
        except (ValueError, OverflowError):
            return np.nan
    return time if type(time) in (int, float) else np.nan


def _scores_of_metrics(values: dict[str, dict[int, float]]) -> dict[str, Score]:
    """Builds the curves from val-core/BENCHMARK/acc/{mean@n,pass@n}."""
    scores = {}
    for name, at in values.items():
        benchmark, _, measure = name.removeprefix(VAL).rpartition('/acc/')
        if measure.startswith('mean@'):
            n = int(measure.removeprefix('mean@'))
            steps = sorted(at)
            passed = values.get(f'{VAL}{benchmark}/acc/pass@{n}', {})
            scores[benchmark] = Score(
                n,
                np.array(steps),
                np.array([at[s] for s in steps]),
                np.array([passed.get(s, np.nan) for s in steps]),
            )
    return scores


def _scores_of_evals(evaluations: list[dict]) -> dict[str, Score]:
    """Builds the curves from evals/; a measure that is None becomes nan."""
    rows: dict[str, list[tuple]] = defaultdict(list)
    for e in evaluations:
        for benchmark, s in e.get('benchmarks', {}).items():
            rows[benchmark].append((int(e['step']), s['mean'], s['pass'], s['samples'], s.get('correct')))
    scores = {}
    for benchmark, of in rows.items():
        steps, means, passed, samples, correct = zip(*sorted(of, key=lambda row: row[0]), strict=True)
        scores[benchmark] = Score(
            samples[-1],
            np.array(steps),
            np.array(means, float),
            np.array(passed, float),
            tuple(None if c is None else np.array(c, int) for c in correct),
        )
    return scores


def _tracked(evaluations: list[dict]) -> list[Tracked]:
    """The tracked prompts of each evaluation that has them, by step."""
    there = [(e['step'], e['tracked']) for e in evaluations if e.get('tracked')]
    of = [
        Tracked(step, dict(zip(t['prompt_ids'], t['correct'], strict=True)), t['samples'])
        for step, t in there
    ]
    return sorted(of, key=lambda t: t.step)


def _clock(directory: Path, notes: list[str]) -> tuple[list[tuple[float, int]], list[int]]:
    """Returns (seconds since 1970, step) of every written row and the first step of each session, by time.

    Reads TensorBoard's records: 8 bytes of length, 4 of checksum, an Event, 4 of checksum.
    """
    written, sessions = [], []
    for file in sorted(directory.glob('events*')):
        try:
            with file.open('rb') as f:
                while len(length := f.read(12)) == 12:
                    data = f.read(int.from_bytes(length[:8], 'little') + 4)[:-4]
                    event = Event.FromString(data)
                    if event.session_log.status == SessionLog.START:
                        sessions.append((event.wall_time, event.step))
                    elif event.HasField('summary'):
                        written.append((event.wall_time, event.step))
        except Exception as e:  # a crash truncates a record, and the parser's errors have no common class
            notes.append(f'{file.name} ends in a damaged record ({type(e).__name__})')
    return sorted(written), [step for _, step in sorted(sessions)]


def _faults(path: Path, clock: list[tuple[float, int]], notes: list[str]) -> list[Fault]:
    """Returns the rows of events.jsonl. A row without a step gets the last step written before it."""
    if not path.is_file():
        return []
    times, faults = np.array([time for time, _ in clock]), []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
            kind, time = str(row['event']), str(row['time'])
            step = row.get('step', row.get('after'))
            if not isinstance(step, int) and clock:
                place = np.searchsorted(times, datetime.fromisoformat(time).timestamp(), 'right')
                step = clock[place - 1][1] if place else 0
            faults.append(
                Fault(kind, str(row.get('message', '')), time, step if isinstance(step, int) else None)
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            notes.append(f'line {number} of {path.name} is damaged')
    return faults


def _evaluation(path: Path, notes: list[str]) -> dict | None:
    """Returns an evaluation if its scores and tracked prompts can be read; else None, and adds a note."""
    read = _json(path, notes)
    try:
        if read is not None:
            _scores_of_evals([read])
            _tracked([read])
        return read
    except (KeyError, TypeError, ValueError, AttributeError):
        notes.append(f'{path.name} is damaged')
        return None


def _json(path: Path, notes: list[str]) -> dict | None:
    """Returns the JSON object in a file; None if it is missing or damaged. Damage adds a note."""
    if not path.is_file():
        return None
    try:
        read = json.loads(path.read_bytes())
        if isinstance(read, dict):
            return read
    except (ValueError, RecursionError):
        pass
    notes.append(f'{path.name} is damaged')
    return None
