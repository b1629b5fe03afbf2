"""Replay, settled: writes what the studies' rows say into docs/evidence.md, and draws its figure.

    python -m studies.settled

A part that misses a run is left out, and its answers stay unread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bapo_jax.machine.files import replace_part
from bapo_jax.report.contrast import t_interval
from bapo_jax.report.draw import COLOURS
from studies.lib.rows import ROOT, Row, rows_in
from studies.real_policy import replay
from studies.second_proof import matched
from studies.second_proof.rows import of_today, passed, read_rows
from studies.six_ways import analysis, ways
from studies.six_ways.run import FILE as SIX_WAYS
from studies.x2_map import page as x2_map
from studies.x2_map import regimes
from studies.x2_map.simulate import PAPER

EVIDENCE, FIGURE = ROOT / 'docs' / 'evidence.md', ROOT / 'docs' / 'replay.png'
AXES = {
    'responses': 'responses, thousands',
    'tokens': 'tokens trained, millions',
    'seconds': 'seconds, in those of a step of G',
}
UNITS = {'responses': 1e3, 'tokens': 1e6, 'seconds': 1}


# ---- tables


def of_rates() -> str | None:
    rows = of_today(read_rows())
    return None if missing_rates(rows) else matched.summary_table(rows)


def of_ways() -> str | None:
    runs = runs_at_best()
    return runs and analysis.summary_table(analysis.contrasts(runs), runs)


def of_regimes() -> str | None:
    rows = rows_in(regimes.ROWS)
    return None if regimes.wanted(rows) else regimes.outcome_table(rows)


def of_language_model() -> str | None:
    rows = replay.read_rows()
    return None if replay.wanted(rows) else replay.contrasts_table(rows)


TABLES: dict[str, Callable[[], str | None]] = {
    'rates': of_rates, 'ways': of_ways, 'regimes': of_regimes, 'language model': of_language_model,
}  # fmt: skip


def missing_rates(rows: list[Row]) -> bool:
    return any(job.part != 'second' for job in matched.wanted_matched(rows))


def runs_at_best() -> dict[str, list[analysis.Run]] | None:
    rows = rows_in(SIX_WAYS)
    if ways.wanted(rows):
        return None
    return analysis.runs_at(rows, {cell: ways.best_rate(rows, cell) for cell in ways.OWN})


# ---- the figure


def draw_curves(runs: dict[str, list[analysis.Run]], cost: str, axes: Axes) -> None:
    """Mean@16 by what was spent: the mean over seeds, and its 95 % interval by t. The dotted line is s."""
    for (cell, of), colour in zip(runs.items(), ('black', *COLOURS)):
        spent = np.mean([run.costs[cost] for run in of], axis=0) / UNITS[cost]
        scores = np.array([run.mean() for run in of])
        low, high = np.transpose([t_interval(at) if np.ptp(at) else (at[0], at[0]) for at in scores.T])
        axes.plot(spent, scores.mean(axis=0), color=colour, lw=1.3, label=ways.CELLS[cell].way)
        axes.fill_between(spent, low, high, color=colour, alpha=0.1, linewidth=0)
    axes.axhline(analysis.aim(runs['G']), color='black', lw=0.8, ls=':')
    axes.set(xlabel=AXES[cost], ylabel=f'mean@{ways.SAMPLES}, %')


def draw_paths(runs: dict[str, list[analysis.Run]], axes: Axes) -> None:
    """pass@16 against mean@16 on the way, means over seeds."""
    for (cell, of), colour in zip(runs.items(), ('black', *COLOURS)):
        at = [np.mean([getattr(run, what)() for run in of], axis=0) for what in ('mean', 'passed')]
        axes.plot(*at, 'o-', color=colour, lw=1, ms=3, label=ways.CELLS[cell].way)
    axes.set(xlabel=f'mean@{ways.SAMPLES}, %', ylabel=f'pass@{ways.SAMPLES}, %', title='on the way')
    axes.legend(fontsize=8, frameon=False)


def draw_frontier(rows: list[Row], axes: Axes) -> None:
    """mean@32 against pass@32 of every arm and rate, and of the base; an arm's rates are joined."""
    found = matched.frontier(rows)
    of_base = [row for row in rows if row['part'] == 'base']
    base = [float(np.mean([passed(row, k) for row in of_base])) for k in (1, 32)]
    axes.plot(*base, 'k*', ms=9)
    axes.annotate('  the base', base, fontsize=8, va='center')
    for arm, colour in zip(dict.fromkeys(arm for arm, _ in matched.CELLS), COLOURS):
        rates = sorted(rate for other, rate in matched.CELLS if other == arm)
        axes.plot(*zip(*(found[arm, rate] for rate in rates)), 'o-', color=colour, lw=1, ms=6, label=arm)
        axes.plot(*found[arm, rates[-1]], 'o', color=colour, mfc='white' if len(rates) > 1 else colour, ms=6)
    axes.set(xlabel='mean@32, %', ylabel='pass@32, %', title='rates: filled 5e-5, open 1e-4')
    axes.legend(fontsize=8, frameon=False)


def draw_x2(axes: Axes) -> None:
    """The simulated gain of X2 with our policies, and what the two pools measured."""
    x2_map.draw_map(x2_map.all_fits(), PAPER, axes)
    rows = rows_in(regimes.ROWS)
    for pool, mark in zip(regimes.POOLS, 'X*') if not regimes.wanted(rows) else ():
        right = np.mean([row['correct'] for row in rows if row['pool'] == pool]) * 100 / regimes.SAMPLES
        for arm, colour in zip(regimes.WAYS, ('black', COLOURS[1])):
            found = regimes.gains(rows, pool, arm)
            low, high = t_interval(found)
            axes.plot([right] * 2, (low, high), color=colour, lw=1)
            axes.set_ylim(bottom=min(axes.get_ylim()[0], low - 1))
            axes.plot(right, found.mean(), mark, color=colour, ms=8, label=f'measured: {pool}, {arm}')
    axes.set_ylabel('gain in mixed groups a response, %')
    axes.legend(fontsize=7, frameon=False, loc='upper left')


def draw(path: Path) -> None:
    """What each part that is whole has to show, three panels a line."""
    panels: list[Callable[[Axes], Any]] = []
    if runs := runs_at_best():
        panels += [lambda axes, cost=cost: draw_curves(runs, cost, axes) for cost in analysis.COSTS]
        panels.append(lambda axes: draw_paths(runs, axes))
    if not missing_rates(rows := of_today(read_rows())):
        panels.append(lambda axes: draw_frontier(rows, axes))
    panels.append(draw_x2)
    lines, columns = -(-len(panels) // 3), min(3, len(panels))
    figure = Figure((4.4 * columns, 3.9 * lines), layout='constrained')
    grid = figure.subplots(lines, columns, squeeze=False).flat
    for draw_panel, axes in zip(panels, grid):
        draw_panel(axes)
    for axes in grid[len(panels) :]:
        axes.remove()
    figure.savefig(path, dpi=80)


def main() -> None:
    for name, table in TABLES.items():
        if (text := table()) is not None:
            replace_part(EVIDENCE, name, text + '\n')
    draw(FIGURE)


if __name__ == '__main__':
    main()
