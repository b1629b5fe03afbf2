"""Compares several runs and their costs, with seeds as bands: figures 6, 10, 11 and 16, and Table 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bapo_jax.report.contrast import by_seed
from bapo_jax.report.evaluations import best_step, first_and_last, migration_counts, responses_until
from bapo_jax.report.figures import Figure, Line, Panel, Table, binned, smoothed
from bapo_jax.report.records import Records, Score, benchmarks, column, has, samples_of

_CURVES = {  # metric -> (title, unit)
    'critic/score/mean': ('Training reward', 'accuracy'),
    'actor/grad_norm': ('Gradient norm, before clipping', 'norm'),
    'actor/entropy': ('Entropy', 'nats per token'),
    'response_length/mean': ('Response length', 'tokens'),
}


def comparison(runs: Sequence[Records]) -> Figure:
    """Training and test curves of several runs, with a table of costs; seeds of one config are one curve."""
    look = (
        'A band spans the lowest to the highest seed. If two bands overlap, these runs do not show which '
        'method is better.'
    )
    figure = Figure('comparison', 'Comparison of the runs', 'figures 6, 10, 11 and 16, and Table 1', look)
    groups, panels = by_seed(runs), []
    window = max(1, min(len(r.steps) for r in runs) // 20)
    for metric, (title, unit) in _CURVES.items():
        of = {name: [r for r in some if has(r, metric)] for name, some in groups.items()}
        lines = [
            over_seeds(name, [(r.steps, smoothed(column(r, metric), window)) for r in some], i)
            for i, (name, some) in enumerate(of.items())
            if some
        ]
        if lines:
            panels.append(Panel(f'{title}, mean of {window} steps', 'step', unit, tuple(lines)))
    for benchmark in benchmarks(runs):
        for measure in ('mean', 'passed'):
            there = {
                name: [r.scores[benchmark] for r in some if benchmark in r.scores]
                for name, some in groups.items()
            }
            lines = [
                over_seeds(name, [(s.steps, getattr(s, measure)) for s in scores], i)
                for i, (name, scores) in enumerate(there.items())
                if scores
            ]
            title = f'{benchmark}, {"mean" if measure == "mean" else "pass"}@{samples_of(runs, benchmark)}'
            panels.append(Panel(title, 'step', 'share of questions', tuple(x for x in lines if len(x.x))))
    missing = [f'critic/score/mean of {r.name}' for r in runs if not has(r, 'critic/score/mean')]
    missing += [f'val-core/BENCHMARK/acc/mean@n of {r.name}' for r in runs if not r.scores]
    return figure._replace(panels=tuple(panels), table=costs(groups), missing=tuple(missing))


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


def over_seeds(label: str, curves: Sequence[tuple[np.ndarray, np.ndarray]], style: int) -> Line:
    """The mean of (steps, values) at the steps that all curves share; the band spans lowest and highest."""
    finite = [(steps[np.isfinite(y)], y[np.isfinite(y)]) for steps, y in curves]
    steps = finite[0][0]
    for other, _ in finite[1:]:
        steps = np.intersect1d(steps, other)
    values = np.array([y[np.isin(x, steps)] for x, y in finite])
    x, y = binned(steps, values.mean(axis=0))
    low, high = (binned(steps, edge(values, axis=0))[1] for edge in (np.min, np.max))
    return Line(label, x, y, style, *((low, high) if len(curves) > 1 else ()))
