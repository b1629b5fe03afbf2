"""Puts a run's story into labelled lines of text. Pure: a story in, lines out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from bapo_jax.machine.events import counts_in_words
from bapo_jax.run.directory import part_of
from bapo_jax.run.log.responses import excerpt
from bapo_jax.run.log.tables import duration, with_interval
from bapo_jax.run.starts import CRASHED, WITH_ERROR, STOPPED, outcome
from bapo_jax.show.story import Sampled, Story

Labelled = tuple[str, str]  # label and text; a line that continues the one above has no label

_TEXT = 100  # most characters shown of a prompt or response
_SCORES = 6  # most lines of scores


def lines_of(story: Story) -> list[Labelled]:
    """Returns the story as labelled lines, which fit on a screen if wrapped at 80 columns."""
    lines = [('run', story.run), ('outcome', outcome_of(story)), *_what(story.config), *_when(story)]
    lines += [*_scores(story.scores), *_training(story)]
    if story.events:
        lines.append(('events', f'{counts_in_words(story.events)} (events.jsonl)'))
    lines += [(r.verdict, _in_words(r)) for r in story.responses]
    return [*lines, *(('note', note) for note in story.notes)]


def outcome_of(story: Story) -> str:
    """Returns whether the run is running, or how it ended, and how it can continue."""
    ended = outcome(story.starts, story.config.get('steps'), story.step, story.held)
    if ended.kind == STOPPED:
        return f'{ended.words}; the same command continues'
    if ended.kind in (CRASHED, WITH_ERROR):
        saved = story.checkpoint
        again = 'starts over' if saved is None else f'continues after step {saved}'
        return f'{ended.words}; the same command {again}'
    return ended.words


def _what(config: Mapping[str, Any]) -> Iterator[Labelled]:
    """What was trained, on what, and how."""
    if not config:
        return
    model, task, learner, rollout = (
        part_of(config, name) for name in ('model', 'task', 'learner', 'rollout')
    )
    shape = part_of(part_of(config, 'fingerprints'), 'model')
    kind, layers, width = (shape.get(name) for name in ('model_type', 'num_hidden_layers', 'hidden_size'))
    size = f' ({kind}, {layers} layers of {width})' if kind else ''
    data = f', {task["train"]}' if task.get('train') else ''
    yield 'trained', f'{model.get("path")}{size} on {task.get("name")}{data}'
    prompts, responses = learner.get('batch_groups'), rollout.get('group_size')
    yield (
        '',
        f'method {config.get("method")}, {prompts} prompts × {responses} responses a step, learning rate '
        f'{learner.get("learning_rate")}, seed {config.get("seed")}',
    )


def _when(story: Story) -> Iterator[Labelled]:
    """When and where the run began, continued and ended, and with what."""
    took = f', {duration(story.seconds)} in {story.rows} steps' if story.seconds else ''
    if not story.starts:
        if story.written:
            yield 'last row', f'{_time(story.written)}{took}'
        return
    first, newest = story.starts[0], story.starts[-1]
    # A run that an earlier version began has no entry for that.
    label, after = ('continued', _after(first)) if first.get('step') else ('began', '')
    yield label, f'{_time(first.get("time"))} on {_place(first)}{after}'
    if len(story.starts) > 1:
        times = 'once' if len(story.starts) == 2 else f'{len(story.starts) - 1} times, last'
        yield 'continued', f'{times} {_time(newest.get("time"))} on {_place(newest)}{_after(newest)}'
    if end := part_of(newest, 'end'):
        yield 'ended', f'{_time(end.get("time"))}{took}'
    elif story.written:
        yield 'last row', f'{_time(story.written)}{took}'
    commit, _, changed = str(newest.get('commit') or '').partition('-')
    code = f' ({commit[:12]}{", with changes" * bool(changed)})' if commit else ''
    yield (
        'with',
        f'bapo_jax {newest.get("version")}{code}, jax {newest.get("jax")}, Python {newest.get("python")}',
    )
    yield 'command', str(newest.get('command'))


def _scores(scores: Mapping[int, Mapping[str, dict]]) -> Iterator[Labelled]:
    """Each benchmark's scores at the first and the last evaluation, in percent, with confidence intervals."""
    if not scores:
        return
    *_, newest = steps = sorted(scores)
    yield 'scores', f'in %, after step {" → ".join(map(str, steps))}, with 95 % confidence intervals'
    measured = [
        (name, measure)
        for name, summary in scores[newest].items()
        for measure in ('mean', 'pass', 'maj')
        if measure in summary
    ]
    if len(measured) > _SCORES:
        measured = [(name, measure) for name, measure in measured if measure == 'mean']
    for name, measure in measured[:_SCORES]:
        values = [with_interval(scores[step].get(name, {}), measure) for step in steps]
        yield '', f'{name} {measure}@{scores[newest][name]["samples"]}: {" → ".join(values)}'
    if len(measured) > _SCORES:
        yield '', f'and {len(measured) - _SCORES} more benchmarks (evals/)'


def _training(story: Story) -> Iterator[Labelled]:
    """The metrics of the last steps in words, and how the training score changed."""
    last, n = story.last, len(story.last)
    span = f'the last {n} steps' if n > 1 else f'step {story.step}'
    score, before = _mean(last, 'critic/score/mean'), _mean(story.first, 'critic/score/mean')
    if score is not None:
        change = f', {before:.1%} in the first {n}' if before is not None and story.rows > n else ''
        yield 'training', f'{score:.1%} of the responses of {span} were correct{change}.'
    parts = [
        form.format(value)
        for name, form in (
            ('response_length/mean', 'A response had {:.0f} tokens'),
            ('response_length/clip_ratio', '{:.1%} were cut at the limit'),
            ('actor/entropy', 'the entropy was {:.2f} nats per token'),
            ('timing_s/step', 'a step took {:.1f} s'),
        )
        if (value := _mean(last, name)) is not None
    ]
    if parts:
        yield '', f'{", ".join(parts)}.'
    groups = [_mean(last, f'bapo/{origin}_groups') for origin in ('x1', 'x2', 'x3')]
    if None not in groups:
        fresh, again, replayed = groups
        yield (
            '',
            f'A batch had {fresh:.1f} fresh, {again:.1f} re-evaluated and {replayed:.1f} replayed groups.',
        )
    if skipped := sum(_count(row.get('actor/skipped_updates')) for row in last):
        yield '', f'{skipped} updates of {span} were skipped: the gradient was not finite.'


def _in_words(response: Sampled) -> str:
    prompt, text = excerpt(response.prompt, _TEXT, last=True), excerpt(response.response, _TEXT)
    return f'step {response.step}: {prompt} → {text}'


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean of a metric over the rows that have it as a finite number; None if none has."""
    values = [
        row[name] for row in rows if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])
    ]
    return sum(values) / len(values) if values else None


def _place(start: Mapping[str, Any]) -> str:
    """The host and devices of a start."""
    hosts = f', {start["hosts"]} hosts' if start.get('hosts', '1') != '1' else ''
    return f'{start.get("host")} ({start.get("devices")}{hosts})'


def _after(start: Mapping[str, Any]) -> str:
    return f', after step {start.get("step")}'


def _time(text: Any) -> str:
    """'2026-11-29T07:18:34+00:00' -> '2026-11-29 07:18 UTC'; the text itself if it is not a time."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime('%Y-%m-%d %H:%M UTC')
    except (ValueError, TypeError, OverflowError):
        return str(text)


def _count(value: Any) -> int:
    """A whole number in a file; 0 if it is missing or damaged."""
    return value if type(value) is int else 0
