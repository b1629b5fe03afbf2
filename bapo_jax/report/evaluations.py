"""The figures of a run's evaluations. Each is a pure function from records to the numbers that are drawn."""

from __future__ import annotations

import numpy as np

from bapo_jax.report.contrast import t_interval
from bapo_jax.report.figures import Figure, Line, Panel, Table, binned
from bapo_jax.report.panels import enough
from bapo_jax.report.records import STEPS, Records, Score, Tracked, column, has

_PAPER_SOLVED = 'the paper reports 31 % for BAPO on mathematics, and 40.7 % in its abstract'


def curves(r: Records) -> Figure:
    """mean@n and pass@n of every benchmark.

    Warns if pass@n falls, beyond noise, while mean@n rises from the first to the last evaluation.
    """
    look = 'Both curves should rise; if pass@n falls while mean@n rises, the policy loses diversity.'
    figure = Figure('tests', 'Test curves', 'figure 12', look)
    if not r.scores:
        return figure._replace(missing=('val-core/BENCHMARK/acc/mean@n, or evals/',))
    panels, warnings = [], []
    for name, s in r.scores.items():
        lines = (
            Line(f'mean@{s.samples}', *binned(s.steps, s.mean), 0),
            Line(f'pass@{s.samples}', *binned(s.steps, s.passed), 1),
        )
        panels.append(Panel(name, STEPS, 'share of questions', tuple(x for x in lines if len(x.x))))
        change = _change_of_solved(s) if enough(r) else None
        if change and change[1] < 0 and s.mean[-1] > s.mean[0]:
            mean, passed = (f'{a[0]:.1%} to {a[-1]:.1%}' for a in (s.mean, s.passed))
            points = '{:.1f} to {:.1f} points'.format(*(100 * x for x in change)).replace('-', '−')
            warnings.append(
                f'{name}: pass@{s.samples} fell from {passed} (95 % CI of the change: {points}) while '
                f'mean@{s.samples} rose from {mean}.'
            )
    return figure._replace(panels=tuple(panels), warnings=tuple(warnings))


def _change_of_solved(s: Score) -> tuple[float, float] | None:
    """The 95 % interval over questions of the change in the share with a correct response, first to last.

    None if the evaluations do not have the same questions.
    """
    if not s.correct or any(c is None for c in (s.correct[0], s.correct[-1])):
        return None
    first, last = s.correct[0], s.correct[-1]
    return t_interval((last > 0).astype(float) - (first > 0)) if len(first) == len(last) > 1 else None


def first_and_last(r: Records) -> tuple[Tracked, Tracked] | None:
    """The tracked prompts of the first and last evaluation that have them; None if there are not two."""
    return (r.tracked[0], r.tracked[-1]) if len(r.tracked) > 1 else None


def migration_counts(first: Tracked, last: Tracked) -> np.ndarray:
    """Counts prompts by correct responses of n before (row) and after (column), int [n+1, n+1].

    Only prompts in both evaluations count.
    """
    size = max(first.samples, last.samples) + 1
    counts = np.zeros((size, size), int)
    for prompt, before in first.correct.items():
        if prompt in last.correct:
            counts[before, last.correct[prompt]] += 1
    return counts


def migration(r: Records) -> Figure:
    """Migration of the tracked prompts, and the share of unsolved ones that are solved at last."""
    look = (
        'Prompts right of the diagonal improved, those left of it got worse; the bottom row was unsolved at '
        'first.'
    )
    paper = 'figure 15; accuracy before and after: figures 1, 7 and 13'
    figure = Figure('migration', 'Migration of the tracked prompts', paper, look)
    pair = first_and_last(r)
    if pair is None:
        return figure._replace(
            missing=('two evals/STEP.json with tracked prompts (evaluate.track_prompts, evaluate.at_start)',)
        )
    first, last = pair
    counts = migration_counts(first, last)
    n, names = len(counts) - 1, (f'step {first.step}', f'step {last.step}')
    k, total = np.arange(n + 1), max(1, counts.sum())
    before = Line(names[0], k, counts.sum(axis=1) / total, 0)
    after = Line(names[1], k, counts.sum(axis=0) / total, 1)
    panels = (
        Panel(
            f'Tracked prompts by correct responses of {n}',
            f'correct responses at {names[1]}',
            f'correct responses at {names[0]}',
            kind='matrix',
            matrix=counts,
        ),
        Panel(
            'Accuracy of the tracked prompts',
            f'correct responses of {n}',
            'share of prompts',
            (before, after),
            'bars',
        ),
    )
    base, solved = int(counts[0].sum()), int(counts[0, 1:].sum())
    share = (
        f'{solved / base:.1%} ({solved} of {base}); {_PAPER_SOLVED}'
        if base
        else 'no tracked prompt was unsolved at first'
    )
    table = Table(
        ('measure', 'value'), ((f'prompts with 0 of {n} correct at first and at least 1 at the end', share),)
    )
    return figure._replace(panels=panels, table=table)


def best_step(scores: dict[str, Score]) -> int | None:
    """The step with the highest mean@n, averaged over benchmarks. Step 0, before training, is excluded."""
    steps = (
        sorted(set.intersection(*(set(s.steps[s.steps > 0].tolist()) for s in scores.values())))
        if scores
        else []
    )
    means = [np.mean([s.mean[s.steps == step][0] for s in scores.values()]) for step in steps]
    return int(steps[int(np.nanargmax(means))]) if np.isfinite(means).any() else None


def responses_until(r: Records, step: int) -> int | None:
    """Responses generated up to a step: the counter's last value by then, 0 at step 0, None if unknown."""
    if step == 0:
        return 0
    total = column(r, 'rollout/responses_total')
    there = np.flatnonzero((r.steps <= step) & np.isfinite(total))
    return int(total[there[-1]]) if len(there) else None


def cost(r: Records) -> Figure:
    """Table 1's columns: rollouts at best and end; mean@n and pass@n at base, best and end."""
    look = 'The difference between best and end shows whether the rollouts after the best step paid off.'
    figure = Figure('cost', 'Rollouts and scores', 'Table 1', look)
    end = int(r.steps[-1])
    if not has(r, 'rollout/responses_total') and not r.scores:
        return figure._replace(missing=('rollout/responses_total', 'val-core/BENCHMARK/acc/mean@n'))
    best = best_step(r.scores)
    at = {'base': 0, 'best': best, 'end': end}
    there = {name: step for name, step in at.items() if step is not None}
    shown = {name: responses_until(r, step) for name, step in there.items()}
    rows = [('rollouts', *('–' if x is None else f'{x:,}' for x in shown.values()))]
    for name, s in r.scores.items():
        for label, values in ((f'mean@{s.samples}', s.mean), (f'pass@{s.samples}', s.passed)):
            cells = [values[s.steps == step] for step in there.values()]
            rows.append(
                (f'{name} {label}', *(f'{c[0]:.1%}' if len(c) and np.isfinite(c[0]) else '–' for c in cells))
            )
    head = ('', *(f'{name} (step {step})' for name, step in there.items()))
    missing = () if r.scores else ('val-core/BENCHMARK/acc/mean@n, or evals/',)
    return figure._replace(table=Table(head, tuple(rows)), missing=missing)
