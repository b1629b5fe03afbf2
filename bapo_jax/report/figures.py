"""The figures of one run's training. Each is a pure function from records to the numbers that are drawn.

Shares and accuracies are in [0, 1]. A figure whose metrics a run lacks names them and has no panels.
"""

from __future__ import annotations

import numpy as np

from bapo_jax.groups import REPLAY, X1
from bapo_jax.replay.bapo import X2, X3
from bapo_jax.replay.failures import LAGS
from bapo_jax.report.panels import (
    Figure,
    Line,
    Panel,
    Table,
    binned,
    enough,
    line,
    marks,
    need,
    over_steps,
    smoothed,
    tenths,
)
from bapo_jax.report.records import BETWEEN_STEPS, STEPS, Records, column, has
from bapo_jax.run.log.measures import one_sided
from bapo_jax.scores import wilson_interval

_ENTROPY = 0.05  # nats per token; below it the policy is nearly greedy
_ESS = 0.5  # share of the tokens; below it a few tokens dominate the gradient
_SELDOM = 0.05  # share of the steps in which it may be lower without a warning
_RISE = 0.02  # warn if the all-wrong share rises by more, from the first to the last tenth
_BESIDE = ('gen', 'reward', 'reevaluate')  # phases in other threads, partly while the trainer waits
_ORIGINS = (X1, X2, X3, REPLAY)
_NAMES = {X1: 'fresh (X1)', X2: 're-evaluated (X2)', X3: 'replayed (X3)', REPLAY: 'replayed'}


def reward(r: Records) -> Figure:
    look = 'The curve should rise; once it is flat, the policy learns little more from these prompts.'
    figure = Figure('reward', 'Training reward', 'figures 4 and 5', look)
    metric = 'critic/score/mean'
    if missing := need(r, metric):
        return figure._replace(missing=missing)
    window = max(1, len(r.steps) // 20)
    lines = [line(r, metric, 'each step', None if window > 1 else 0)]
    if window > 1:
        smooth = binned(r.steps, smoothed(column(r, metric), window))
        lines.append(Line(f'mean of {window} steps', *smooth, 0))
    shaped = column(r, 'critic/rewards/mean')
    if has(r, 'critic/rewards/mean') and not np.allclose(shaped, column(r, metric), equal_nan=True):
        lines.append(line(r, 'critic/rewards/mean', 'reward, which differs from the accuracy', 1))
    panel = over_steps(r, 'Training accuracy of fresh groups, before filtering', 'accuracy', *lines)
    return figure._replace(panels=(panel,))


def bins(r: Records) -> Figure:
    """Shares of groups with k = 0..G correct responses, averaged over steps."""
    look = (
        'Groups should move from 0 correct to the right; the bar at 0 shows what the policy still cannot '
        'solve.'
    )
    figure = Figure('bins', 'Accuracy of fresh groups, first and last tenth', 'figures 1, 7 and 13', look)
    counted = (
        np.isfinite(r.bins).all(axis=1) & (r.bins.sum(axis=1) > 0)
        if r.bins.size
        else np.zeros(len(r.steps), bool)
    )
    first, last = (np.flatnonzero(counted[part]) + (part.start or 0) for part in tenths(r))
    if not len(first) or not len(last):
        return figure._replace(missing=('accuracy_bins',))
    shares = r.bins / np.maximum(r.bins.sum(axis=1, keepdims=True), 1)
    k, before, after = np.arange(r.bins.shape[1]), shares[first].mean(axis=0), shares[last].mean(axis=0)
    lines = (Line(f'first {len(first)} steps', k, before, 0), Line(f'last {len(last)} steps', k, after, 1))
    panel = Panel(
        'Fresh groups by correct responses', f'correct responses of {len(k) - 1}', 'share of groups', lines,
        'bars',
    )  # fmt: skip
    warnings = [_sentence_of(said)] if (said := one_sided(_bins_of_rows(r))) else []
    wrong = [(int(r.bins[part, 0].sum()), int(r.bins[part].sum())) for part in (first, last)]
    (_, high), (low, _) = (wilson_interval(some / of, of) for some, of in wrong)
    if enough(r) and low > high and after[0] - before[0] > _RISE:
        warnings.append(f'The share of all-wrong groups rose from {before[0]:.1%} to {after[0]:.1%}.')
    return figure._replace(panels=(panel,), warnings=tuple(warnings))


def _bins_of_rows(r: Records) -> list[dict[str, list[float]]]:
    """The bins as rows of metrics.jsonl have them."""
    return [{'accuracy_bins': counts.tolist()} for counts in r.bins if np.isfinite(counts).all()]


def _sentence_of(advice: str) -> str:
    return f'{advice[0].upper()}{advice[1:].rstrip(".")}.'


def composition(r: Records) -> Figure:
    """Groups of each origin in every batch; an origin that a step lacks counts as 0."""
    look = (
        'Fresh groups (X1) become fewer as prompts become too easy or stay too hard; re-evaluated (X2) and '
        'replayed ones (X3) should then fill the batch.'
    )
    figure = Figure('composition', 'Batch composition', 'figures 8 and 14', look)
    metrics = {origin: f'bapo/{origin}_groups' for origin in _ORIGINS}
    if missing := need(r, metrics[X1]):
        return figure._replace(missing=missing)
    groups = {o: np.nan_to_num(column(r, metrics[o])) for o in _ORIGINS}
    lines = tuple(
        Line(_NAMES[o], *binned(r.steps, groups[o]), i)
        for i, o in enumerate(_ORIGINS)
        if o == X1 or groups[o].any()
    )
    replay = r.config.get('replay', {})
    empty = [o for o in (X2, X3) if enough(r) and replay.get(f'use_{o}') and not groups[o].any()]
    warnings = tuple(f'{o.upper()} is empty at every step, although replay.use_{o} is True.' for o in empty)
    return figure._replace(
        panels=(Panel('Groups of the batch by origin', STEPS, 'groups', lines, 'stack', marks=marks(r)),),
        warnings=warnings,
    )


def failed_again(r: Records) -> Figure:
    """P(mixed | failed `lag` steps ago) and P(mixed) of the same steps' fresh groups; Wilson intervals."""
    look = (
        'X2 can pay off for a lag if its share is above that of the fresh prompts: a response costs the '
        'same for both.'
    )
    figure = Figure(
        'failed_again',
        'Failed prompts, asked again',
        '',
        look,
    )
    if missing := need(r, *(f'failed_again/asked/{lag}' for lag in LAGS)):
        return figure._replace(missing=missing)
    names, counts = [], []
    for lag in LAGS:
        asked, mixed = (np.nan_to_num(column(r, f'failed_again/{part}/{lag}')) for part in ('asked', 'mixed'))
        names.append(f'failed {lag} step{"s" * (lag > 1)} ago')
        counts.append((int(asked.sum()), int(mixed.sum())))
        fresh = r.bins[asked > 0]
        if fresh.size and np.isfinite(fresh).all():
            names.append('fresh, same steps')
            counts.append((int(fresh.sum()), int(fresh[:, 1:-1].sum())))
    rows, shares = [], []
    for name, (asked, mixed) in zip(names, counts, strict=True):
        low, high = wilson_interval(mixed / asked, asked) if asked else (np.nan, np.nan)
        shares.append(mixed / asked if asked else np.nan)
        rows.append(
            (name, str(asked), str(mixed), f'{shares[-1]:.3f} ({low:.3f} to {high:.3f})' if asked else '')
        )
    bars = Line('share of mixed groups', np.array(shares[::-1]), np.arange(len(names)), 0)
    panel = Panel('Share of mixed groups', 'share of groups', '', (bars,), 'level', ticks=tuple(names[::-1]))
    return figure._replace(
        panels=(panel,), table=Table(('prompts', 'asked', 'mixed', 'share (95 % interval)'), tuple(rows))
    )


def rollouts(r: Records) -> Figure:
    look = 'The slope is the cost of a step; re-evaluation and refills make it steeper.'
    figure = Figure('rollouts', 'Cumulative rollouts', 'figure 9', look)
    parts = {
        'responses': 'generated',
        'discarded': 'discarded',
        'reevaluated': 're-evaluation',
        'reused': 'replayed',
    }
    if missing := need(r, 'rollout/responses_total'):
        return figure._replace(missing=missing)
    lines = [line(r, f'rollout/{part}_total', label, i) for i, (part, label) in enumerate(parts.items())]
    shown = [x for i, x in enumerate(lines) if i == 0 or x.y.any()]
    return figure._replace(panels=(over_steps(r, 'Responses since the run began', 'responses', *shown),))


def gradient(r: Records) -> Figure:
    look = 'If the gradient norm jumps while the score falls, the learning rate may be too high.'
    figure = Figure('gradient', 'Gradient norm and score', 'figure 10', look)
    if missing := need(r, 'actor/grad_norm', 'critic/score/mean'):
        return figure._replace(missing=missing)
    panels = (
        over_steps(
            r,
            'Gradient norm, before clipping',
            'gradient norm',
            line(r, 'actor/grad_norm', 'gradient norm', 3),
        ),
        over_steps(r, 'Score', 'accuracy', line(r, 'critic/score/mean', 'score')),
    )
    return figure._replace(panels=panels)


def dynamics(r: Records) -> Figure:
    """Reward, entropy and response length. Warns if the entropy is near 0 in the last tenth of the run."""
    look = 'Entropy should fall slowly and stay above 0; few responses should reach the length limit.'
    figure = Figure('dynamics', 'Reward, entropy and length', 'figure 11', look)
    shown = {
        'critic/score/mean': ('Reward', 'accuracy', 0),
        'actor/entropy': ('Entropy', 'nats per token', 1),
        'response_length/mean': ('Response length', 'tokens', 2),
        'response_length/clip_ratio': ('Responses cut at the limit', 'share of responses', 3),
    }
    there = [name for name in shown if has(r, name)]
    panels = tuple(
        over_steps(r, shown[n][0], shown[n][1], line(r, n, shown[n][0], shown[n][2])) for n in there
    )
    end = _mean(column(r, 'actor/entropy')[tenths(r)[1]])
    warning = (
        f'Entropy is near 0: {end:.3f} nats per token over the last tenth of the run (below {_ENTROPY}).'
    )
    missing = need(r, *list(shown)[:3])
    return figure._replace(
        panels=panels, missing=missing, warnings=(warning,) if enough(r) and end < _ENTROPY else ()
    )


def seconds(r: Records) -> Figure:
    """Mean seconds per logged step by phase; a step without the phase counts as 0. Their shares add up to 1.

    gen, reward and reevaluate run beside other phases or inside of wait_rollouts, so they have no share.
    """
    look = 'Speed up the phase with the longest bar.'
    figure = Figure('seconds', 'Seconds by phase', 'Table 2', look)
    if missing := need(r, 'timing_s/step'):
        return figure._replace(missing=missing)
    phases = [n.removeprefix('timing_s/') for n in r.columns if n.startswith('timing_s/') and has(r, n)]
    means = {n: float(np.nansum(column(r, f'timing_s/{n}')) / len(r.steps)) for n in phases}
    whole = means.pop('step') + sum(means.get(n, 0.0) for n in BETWEEN_STEPS)
    beside = {n: means.pop(n) for n in _BESIDE if n in means}
    if (rest := whole - sum(means.values())) > 0:
        means['other'] = rest
    means = dict(sorted(means.items(), key=lambda phase: -phase[1]))
    total = sum(means.values())
    bars = Line('seconds', np.array([*means.values()][::-1]), np.arange(len(means)), 0)
    panels = (
        Panel('Mean seconds per step', 'seconds', '', (bars,), 'level', ticks=tuple(means)[::-1]),
        over_steps(r, 'Seconds of each step', 'seconds', line(r, 'timing_s/step', 'whole step')),
    )
    rows = [(n, f'{x:.3g}', f'{x / total:.1%}') for n, x in means.items()]
    rows.append(('all of these', f'{total:.3g}', '100.0%'))
    rows += [(n, f'{x:.3g}', 'beside or inside other phases') for n, x in beside.items()]
    table = Table(('phase', 'seconds per step', 'share'), tuple(rows))
    return figure._replace(panels=panels, table=table)


def staleness(r: Records) -> Figure:
    """Age of the batch, and by origin: importance ratio, effective sample size, TV and clipped share.

    Warns if an effective sample size is often below a half.
    """
    look = 'If the ratios and effective sample sizes are near 1, old responses still fit the policy.'
    figure = Figure('staleness', 'Staleness, importance ratios and clipping', '', look)
    by_origin = {
        'staleness/ratio': ('Mean importance ratio', 'importance ratio'),
        'staleness/ess': ('Effective sample size', 'share of tokens'),
        'staleness/tv': ('Total variation', 'total variation per token'),
        'actor/pg_clipfrac': ('Clipped tokens', 'share of tokens'),
    }
    panels, missing = [], []
    if has(r, 'staleness/mean'):
        ages = (line(r, 'staleness/mean', 'mean', 0), line(r, 'staleness/max', 'largest', None))
        panels.append(over_steps(r, 'Age of the behaviour policy', 'steps behind', *ages))
    for metric, (title, ylabel) in by_origin.items():
        lines = [
            line(r, f'{metric}/{o}', _NAMES[o], i) for i, o in enumerate(_ORIGINS) if has(r, f'{metric}/{o}')
        ]
        if lines:
            panels.append(over_steps(r, title, ylabel, *lines))
        else:
            missing.append(f'{metric}/ORIGIN')
    warnings = []
    for o in _ORIGINS:
        ess = column(r, f'staleness/ess/{o}')
        low = int((ess < _ESS).sum())
        if enough(r) and low > _SELDOM * np.isfinite(ess).sum():
            where = f'at {low} of {len(r.steps)} steps; the lowest is {np.nanmin(ess):.2f}'
            warnings.append(f'The effective sample size of {o.upper()} is below 0.5 {where}.')
    return figure._replace(
        panels=tuple(panels), warnings=tuple(warnings), missing=(*need(r, 'staleness/mean'), *missing)
    )


def thresholds(r: Records) -> Figure:
    look = (
        'Replayed groups have an accuracy from c2 to c3, both included. These bounds should move with the '
        'average accuracy, in the direction of replay.thresholds.'
    )
    figure = Figure('thresholds', 'Thresholds of X3, and performance', '', look)
    if missing := need(r, 'bapo/c2', 'bapo/c3', 'bapo/r_tot'):
        return figure._replace(missing=missing)
    names = {'c2': 'lower bound (c2)', 'c3': 'upper bound (c3)', 'r_tot': 'average accuracy (r_tot)'}
    lines = (line(r, f'bapo/{name}', label, i) for i, (name, label) in enumerate(names.items()))
    return figure._replace(panels=(over_steps(r, 'Bounds and average accuracy', 'accuracy', *lines),))


def faults(r: Records) -> Figure:
    """Faults and restarts by kind over steps. Those with an unknown step are only in the table."""
    look = (
        'Dotted lines mark faults in every figure; if a curve jumps there, the cause may be the fault, not '
        'the method.'
    )
    figure = Figure('faults', 'Faults and restarts', '', look)
    steps: dict[str, list[int | None]] = {}
    for fault in r.faults:
        steps.setdefault(fault.kind, []).append(fault.step)
    if r.restarts:
        steps['restart'] = list(r.restarts)
    if not steps:
        return figure._replace(missing=('rows of events.jsonl (nothing failed, or the file is missing)',))
    last = {fault.kind: fault.message for fault in r.faults}
    rows, lines = [], []
    for i, (kind, at) in enumerate(steps.items()):
        known = np.array([s for s in at if s is not None], int)
        span = f'{known.min()} to {known.max()}' if len(known) else 'unknown'
        rows.append((kind, str(len(at)), span, last.get(kind, '')[:200]))
        if len(known):
            counts = np.unique(known, return_counts=True)
            lines.append(Line(kind, counts[0], np.cumsum(counts[1]), i))
    panels = (
        (Panel('Count since the run began', STEPS, 'faults', tuple(lines), marks=marks(r)),) if lines else ()
    )
    return figure._replace(
        panels=panels, table=Table(('kind', 'count', 'steps', 'last message'), tuple(rows))
    )


def _mean(values: np.ndarray) -> float:
    """The mean of the finite values; nan if there are none."""
    there = values[np.isfinite(values)]
    return float(there.mean()) if len(there) else float('nan')
