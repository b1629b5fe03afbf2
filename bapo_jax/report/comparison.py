"""Compares the arms of several runs: scores and differences over seeds, curves, and costs (Table 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bapo_jax.report.contrast import by_seed, contrast
from bapo_jax.report.evaluations import best_step, first_and_last, migration_counts, responses_until
from bapo_jax.report.figures import Figure, Line, Panel, Table, binned, smoothed
from bapo_jax.report.records import STEPS, Records, Score, benchmarks, column, costs_of, has, samples_of

_CURVES = {  # metric -> (title, unit)
    'critic/score/mean': ('Training reward', 'accuracy'),
    'actor/grad_norm': ('Gradient norm, before clipping', 'gradient norm'),
    'actor/entropy': ('Entropy', 'nats per token'),
    'response_length/mean': ('Response length', 'tokens'),
}
_Curve = tuple[np.ndarray, np.ndarray]  # steps and values


def comparison(runs: Sequence[Records]) -> tuple[Figure, ...]:
    """The figures of several runs; runs that differ only in the seed are one arm."""
    groups = by_seed(runs)
    costs_look = 'Compare arms at equal numbers of rollouts, since rollouts are most of the cost.'
    return (
        *scores_of_arms(groups),
        curves_of_arms(groups),
        Figure('costs', 'Costs at the best and at the last step', 'Table 1', costs_look, table=costs(groups)),
    )


def scores_of_arms(groups: Mapping[str, Sequence[Records]]) -> tuple[Figure, ...]:
    """The table of scores with t-intervals, and the paired differences from the first arm in words."""
    found, base = contrast(groups), next(iter(groups))
    mean = 'Each score is the mean over the seeds in %, with its 95 % confidence interval (t) over seeds.'
    pairs = (
        f'Differences are from {base}, in percentage points, paired by seed. p-values are corrected over the '
        "arms by Holm's method. Intervals cover other seeds, not other test questions."
    )
    missing = tuple(
        f'val-core/BENCHMARK/acc/mean@n of {r.name}' for of in groups.values() for r in of if not r.scores
    )
    figures = [Figure('scores', 'Scores', '', mean, table=found.table, missing=missing)]
    if found.verdict:
        title = f'Differences from {base}'
        figures.append(Figure('differences', title, '', pairs, table=found.differences, said=found.verdict))
    return tuple(figures)


def curves_of_arms(groups: Mapping[str, Sequence[Records]]) -> Figure:
    """Training and test curves, over steps and over whatever else all runs record the cost of."""
    look = (
        'A line is the mean of the seeds, and its band spans the lowest to the highest. If two bands '
        'overlap, they do not show which arm is better.'
    )
    runs = [r for some in groups.values() for r in some]
    costs_by_run = [costs_of(r) for r in runs]
    axes = [name for name in costs_by_run[0] if all(name in costs for costs in costs_by_run)]
    views = tuple((name, tuple(_panels(groups, name))) for name in axes)
    missing = tuple(f'critic/score/mean of {r.name}' for r in runs if not has(r, 'critic/score/mean'))
    title, paper = 'Curves', 'figures 6, 10, 11 and 16'
    return Figure('comparison', title, paper, look, panels=views[0][1], views=views, missing=missing)


def _panels(groups: Mapping[str, Sequence[Records]], axis: str) -> list[Panel]:
    """The panels of all curves over one x axis."""
    runs = [r for some in groups.values() for r in some]
    window, panels = max(1, min(len(r.steps) for r in runs) // 20), []

    def add(
        title: str, unit: str, curve: Callable[[Records], _Curve], there: Callable[[Records], bool]
    ) -> None:
        of = [(name, [r for r in some if there(r)]) for name, some in groups.items()]
        lines = [
            over_seeds(name, [(*_over(axis, r, curve(r)[0]), curve(r)[1]) for r in some], i)
            for i, (name, some) in enumerate(of)
            if some
        ]
        if lines := [x for x in lines if len(x.x)]:
            panels.append(Panel(title, axis, unit, tuple(lines)))

    for benchmark in benchmarks(runs):
        for kind, field in (('mean', 'mean'), ('pass', 'passed')):
            add(
                f'{benchmark}, {kind}@{samples_of(runs, benchmark)}', 'share of questions',
                lambda r, b=benchmark, field=field: (r.scores[b].steps, getattr(r.scores[b], field)),
                lambda r, b=benchmark: b in r.scores,
            )  # fmt: skip
    smooth = f', mean of {window} steps' if window > 1 else ''
    for metric, (title, unit) in _CURVES.items():
        add(
            title + smooth, unit, lambda r, metric=metric: (r.steps, smoothed(column(r, metric), window)),
            lambda r, metric=metric: has(r, metric),
        )  # fmt: skip
    return panels


def _over(axis: str, r: Records, steps: np.ndarray) -> _Curve:
    """The steps, and what the run had cost by each of them; 0 before training."""
    if axis == STEPS:
        return steps, steps
    costs = costs_of(r)[axis]
    there = np.isfinite(costs)
    return steps, np.interp(steps, [0, *r.steps[there]], [0, *costs[there]])


def costs(groups: Mapping[str, Sequence[Records]]) -> Table:
    """Table 1's columns: a row for each name at its best and its last step, as means over the name's runs.

    'solved' is the share of tracked prompts unsolved at first that have a correct response at last.
    """
    runs = [r for some in groups.values() for r in some]
    head = ['', 'step', 'rollouts']
    head += [f'{b} {m}@{samples_of(runs, b)}' for b in benchmarks(runs) for m in ('mean', 'pass')]
    rows = []
    for name, some in groups.items():
        for label, step_of in (('best', lambda r: best_step(r.scores)), ('end', lambda r: int(r.steps[-1]))):
            steps = {r.name: step for r in some if (step := step_of(r)) is not None}
            of = [r for r in some if r.name in steps]
            cells = [_mean([responses_until(r, steps[r.name]) for r in of], '{:,.0f}')]
            for benchmark in benchmarks(runs):
                scores = [(r.scores[benchmark], steps[r.name]) for r in of if benchmark in r.scores]
                for measure in ('mean', 'passed'):
                    cells.append(_mean([_at(s, getattr(s, measure), step) for s, step in scores], '{:.1%}'))
            solved = _mean([_solved(r) for r in some], '{:.1%}') if label == 'end' else '–'
            rows.append((f'{name}, {label}', _mean(list(steps.values()), '{:,.0f}'), *cells, solved))
    return Table((*head, 'solved of those unsolved at first'), tuple(rows))


def _at(s: Score, values: np.ndarray, step: int) -> float | None:
    there = values[s.steps == step]
    return float(there[0]) if len(there) and np.isfinite(there[0]) else None


def _solved(r: Records) -> float | None:
    """The share of tracked prompts with 0 correct responses at first that have a correct one at last."""
    pair = first_and_last(r)
    unsolved = migration_counts(*pair)[0] if pair else np.zeros(1)
    return float(unsolved[1:].sum() / unsolved.sum()) if unsolved.sum() else None


def _mean(values: Sequence[float | None], form: str) -> str:
    """Formats the mean; '–' if any run lacks the value, since a mean over the others is not comparable."""
    return form.format(np.mean(values)) if values and None not in values else '–'


def over_seeds(label: str, curves: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], style: int) -> Line:
    """The mean of (steps, x, y) at the steps that all curves share; the band spans lowest and highest y."""
    finite = [[part[np.isfinite(y)] for part in (steps, x, y)] for steps, x, y in curves]
    shared = finite[0][0]
    for steps, _, _ in finite[1:]:
        shared = np.intersect1d(shared, steps)
    xs, values = (np.array([of[part][np.isin(of[0], shared)] for of in finite]) for part in (1, 2))
    at = xs.mean(axis=0)
    x, y = binned(at, values.mean(axis=0))
    low, high = (binned(at, edge(values, axis=0))[1] for edge in (np.min, np.max))
    return Line(label, x, y, style, *((low, high) if len(curves) > 1 else ()))
