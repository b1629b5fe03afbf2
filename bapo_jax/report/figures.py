"""The figures of one run's training. Each is a pure function from records to the numbers that are drawn.

Shares and accuracies are in [0, 1]. A figure whose metrics a run lacks names them and has no panels.
"""

from __future__ import annotations

import numpy as np

from bapo_jax.groups import X1
from bapo_jax.replay.bapo import X2, X3
from bapo_jax.replay.failures import LAGS
from bapo_jax.replay.repo import REPLAY
from bapo_jax.report.panels import (
    Figure,
    Line,
    Panel,
    Table,
    binned,
    line,
    marks,
    need,
    over_steps,
    smoothed,
    tenths,
)
from bapo_jax.report.records import STEPS, Records, column, has
from bapo_jax.scores import wilson_interval

_ENTROPY = 0.05  # nats per token; below it the policy is nearly greedy
_ESS = 0.5  # share of the tokens; below it a few tokens dominate the gradient
_RISE = 0.02  # warn if the all-wrong share rises by more, from the first to the last tenth
_ORIGINS = (X1, X2, X3, REPLAY)
_NAMES = {X1: 'X1 fresh', X2: 'X2 re-evaluated', X3: 'X3 replayed'}


def reward(r: Records) -> Figure:
    look = 'The curve should rise; once it is flat, the policy learns little more from these prompts.'
    figure = Figure('reward', 'Training reward', 'figures 4 and 5', look)
    metric = 'critic/score/mean'
    if missing := need(r, metric):
        return figure._replace(missing=missing)
    window = max(1, len(r.steps) // 20)
    mean = Line(f'mean of {window} steps', *binned(r.steps, smoothed(column(r, metric), window)), 0)
    lines = [line(r, metric, 'each step', None), mean]
    shaped = column(r, 'critic/rewards/mean')
    if has(r, 'critic/rewards/mean') and not np.allclose(shaped, column(r, metric), equal_nan=True):
        lines.append(line(r, 'critic/rewards/mean', 'reward, which differs from the accuracy', 1))
    panel = over_steps(r, 'Accuracy of fresh groups, before filtering', 'accuracy', *lines)
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
    rise = after[0] - before[0]
    warning = f'The share of all-wrong groups rose from {before[0]:.1%} to {after[0]:.1%}.'
    panel = Panel(f'Correct responses of {len(k) - 1}', 'correct responses', 'share of groups', lines, 'bars')
    return figure._replace(panels=(panel,), warnings=(warning,) if rise > _RISE else ())


def composition(r: Records) -> Figure:
    """Groups of each origin in every batch; an origin that a step lacks counts as 0."""
    look = 'X1 shrinks as prompts become too easy or stay too hard; X2 and X3 should then fill the batch.'
    figure = Figure('composition', 'Batch composition', 'figures 8 and 14', look)
    metrics = {origin: f'bapo/{origin}_groups' for origin in _ORIGINS}
    if missing := need(r, metrics[X1]):
        return figure._replace(missing=missing)
    there = [o for o in _ORIGINS if has(r, metrics[o])]
    lines = tuple(
        Line(_NAMES.get(o, f'{o} groups'), *binned(r.steps, np.nan_to_num(column(r, metrics[o]))), i)
        for i, o in enumerate(there)
    )
    replay = r.config.get('replay', {})
    empty = [o for o in (X2, X3) if replay.get(f'use_{o}') and not np.nansum(column(r, metrics[o]))]
    warnings = tuple(f'{o.upper()} is empty at every step, although replay.use_{o} is True.' for o in empty)
    return figure._replace(
        panels=(Panel('Groups by origin', STEPS, 'groups', lines, 'stack', marks=marks(r)),),
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
    panel = Panel('Share of mixed groups', 'share', '', (bars,), 'level', ticks=tuple(names[::-1]))
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
    return figure._replace(
        panels=(over_steps(r, 'Responses since the run began', 'responses', *(x for x in lines if len(x.x))),)
    )


def gradient(r: Records) -> Figure:
    look = 'If the gradient norm jumps while the score falls, the learning rate may be too high.'
    figure = Figure('gradient', 'Gradient norm and score', 'figure 10', look)
    if missing := need(r, 'actor/grad_norm', 'critic/score/mean'):
        return figure._replace(missing=missing)
    panels = (
        over_steps(
            r, 'Gradient norm, before clipping', 'norm', line(r, 'actor/grad_norm', 'gradient norm', 3)
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
        'response_length/clip_ratio': ('Responses cut at the limit', 'share', 3),
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
    return figure._replace(panels=panels, missing=missing, warnings=(warning,) if end < _ENTROPY else ())


def seconds(r: Records) -> Figure:
    """Mean seconds per logged step by phase; a step without the phase counts as 0.

    gen and reward partly overlap with wait_rollouts.
    """
    look = (
        'Speed up the phase with the longest bar. Without overlap, gen and reward are part of wait_rollouts.'
    )
    figure = Figure('seconds', 'Seconds by phase', 'Table 2', look)
    if missing := need(r, 'timing_s/step'):
        return figure._replace(missing=missing)
    phases = [n for n in r.columns if n.startswith('timing_s/') and n != 'timing_s/step' and has(r, n)]
    means = np.array([np.nansum(column(r, n)) / len(r.steps) for n in phases])
    order = np.argsort(means)
    names = tuple(phases[i].removeprefix('timing_s/') for i in order)
    bars = Line('seconds', means[order], np.arange(len(order)), 0)
    step = line(r, 'timing_s/step', 'whole step')
    panels = [over_steps(r, 'Seconds of each step', 'seconds', step)]
    if len(order):
        panels.insert(0, Panel('Mean seconds per step', 'seconds', '', (bars,), 'level', ticks=names))
    share = means / _mean(column(r, 'timing_s/step'))
    rows = tuple(
        (phases[i].removeprefix('timing_s/'), f'{means[i]:.3g}', f'{share[i]:.0%}') for i in order[::-1]
    )
    return figure._replace(
        panels=tuple(panels), table=Table(('phase', 'seconds per step', 'share of the step'), rows)
    )


def staleness(r: Records) -> Figure:
    """Age of the batch, and by origin: importance ratio, effective sample size, TV and clipped share.

    Warns if an effective sample size is below a half.
    """
    look = 'If the ratios and effective sample sizes are near 1, old responses still fit the policy.'
    figure = Figure('staleness', 'Staleness, importance ratios and clipping', '', look)
    by_origin = {
        'staleness/ratio': ('Mean importance ratio', 'ratio'),
        'staleness/ess': ('Effective sample size', 'share of tokens'),
        'staleness/tv': ('Total variation', 'TV per token'),
        'actor/pg_clipfrac': ('Clipped tokens', 'share of tokens'),
    }
    panels, missing = [], []
    if has(r, 'staleness/mean'):
        ages = (line(r, 'staleness/mean', 'mean', 0), line(r, 'staleness/max', 'max', None))
        panels.append(over_steps(r, 'Age of the behaviour policy', 'steps', *ages))
    for metric, (title, ylabel) in by_origin.items():
        lines = [
            line(r, f'{metric}/{o}', o.upper(), i) for i, o in enumerate(_ORIGINS) if has(r, f'{metric}/{o}')
        ]
        if lines:
            panels.append(over_steps(r, title, ylabel, *lines))
        else:
            missing.append(f'{metric}/ORIGIN')
    warnings = []
    for o in _ORIGINS:
        ess = column(r, f'staleness/ess/{o}')
        if low := int((ess < _ESS).sum()):
            where = f'at {low} step{"s" * (low > 1)}; the lowest is {np.nanmin(ess):.2f}'
            warnings.append(f'The effective sample size of {o.upper()} is below 0.5 {where}.')
    return figure._replace(
        panels=tuple(panels), warnings=tuple(warnings), missing=(*need(r, 'staleness/mean'), *missing)
    )


def thresholds(r: Records) -> Figure:
    look = (
        'The window [c2, c3] of replayed accuracies should move with r_tot, in the direction of '
        'replay.thresholds.'
    )
    figure = Figure('thresholds', 'Thresholds of X3, and performance', '', look)
    if missing := need(r, 'bapo/c2', 'bapo/c3', 'bapo/r_tot'):
        return figure._replace(missing=missing)
    lines = (line(r, 'bapo/c2', 'c2', 0), line(r, 'bapo/c3', 'c3', 1), line(r, 'bapo/r_tot', 'r_tot', 2))
    return figure._replace(panels=(over_steps(r, 'c2, c3 and r_tot', 'accuracy', *lines),))


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
