"""Writes what the rows say of every cell at the common rate into page.md, and draws page.png.

    python -m studies.six_ways.page

Opens no answers while a run is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bapo_jax.machine.files import replace_part
from bapo_jax.report.contrast import mean_interval, t_interval
from bapo_jax.report.draw import COLOURS
from studies.lib.rows import markdown_table, rows_in
from studies.six_ways.analysis import COSTS, Contrast, Run, aim, at_aim, contrasts, runs_at
from studies.six_ways.run import FILE
from studies.six_ways.ways import CELLS, COMMON, OWN, SAMPLES, wanted

PAGE, FIGURE = Path(__file__).with_name('page.md'), Path(__file__).with_name('page.png')
WAYS = tuple(CELLS[cell].way for cell in OWN if cell != 'G')
COLUMNS = 4


def cells_table(runs: dict[str, list[Run]], found: Sequence[Contrast]) -> str:
    """Each cell: what it ends with, the costs of reaching s over G's, and pass@16 there less G's.

    Intervals are by seeds, and corrected for nothing.
    """
    ratios = {(c.cell, c.cost): c for c in found}
    passed, lines = at_aim(runs), []
    for cell, of in runs.items():
        ends = [f'{np.mean([scores(run)[-1] for run in of]):.1f}' for scores in (Run.mean, Run.passed)]
        told = [''] * (len(COSTS) + 1)
        if cell != 'G':
            told = [ratio(ratios[cell, cost]) for cost in COSTS]
            less = passed[cell] - passed['G']
            less = less[np.isfinite(less)]
            told.append(mean_interval(less) if len(less) > 1 else '')
        lines.append([f'`{cell}`', f'{np.mean([run.old for run in of]):.2f}', *ends, *told])
    titles = ['old', f'mean@{SAMPLES}', f'pass@{SAMPLES}', 'responses', 'tokens', 'seconds']
    return markdown_table(['cell', *titles, f'pass@{SAMPLES} at s'], lines)


def ratio(contrast: Contrast) -> str:
    """A cost over G's with its interval; † marks one with a run, of either, that does not reach s."""
    low, high = np.exp(t_interval(contrast.logs))
    bound = '†' * (min(contrast.reached, contrast.reached_g) < len(contrast.logs))
    return f'{np.exp(contrast.logs.mean()):.2f}{bound} ({low:.2f} to {high:.2f})'


def draw_way(runs: dict[str, list[Run]], way: str, axes: Axes) -> None:
    """Mean@16 by responses of a way's cells beside G: means over seeds, and each seed thinly."""
    cells = ['G', *(cell for cell in runs if CELLS[cell].way == way)]
    for cell, colour in zip(cells, ('black', *COLOURS)):
        spent = np.mean([run.costs['responses'] for run in runs[cell]], axis=0) / 1e3
        axes.plot(
            spent, np.mean([run.mean() for run in runs[cell]], axis=0), color=colour, lw=1.5, label=cell
        )
        for run in runs[cell]:
            axes.plot(run.costs['responses'] / 1e3, run.mean(), color=colour, lw=0.5, alpha=0.4)
    axes.axhline(aim(runs['G']), color='black', lw=0.8, ls=':')
    axes.set(title=way, xlabel='responses, thousands', ylabel=f'mean@{SAMPLES}, %')
    axes.legend(fontsize=7, frameon=False, loc='upper left')


def draw(runs: dict[str, list[Run]], path: Path) -> None:
    figure = Figure((3.6 * COLUMNS, 3.2 * -(-len(WAYS) // COLUMNS)), layout='constrained')
    grid = figure.subplots(-(-len(WAYS) // COLUMNS), COLUMNS, sharey=True).flat
    for axes, way in zip(grid, WAYS):
        draw_way(runs, way, axes)
    for axes in grid[len(WAYS) :]:
        axes.remove()
    figure.savefig(path, dpi=80)


def main() -> None:
    rows = rows_in(FILE)
    if missing := wanted(rows):
        sys.exit(f'error: {len(missing)} runs are missing; run python -m studies.six_ways.run')
    runs = runs_at(rows, dict.fromkeys(CELLS, COMMON))
    replace_part(PAGE, 'cells', cells_table(runs, contrasts(runs)) + '\n')
    draw(runs, FIGURE)


if __name__ == '__main__':
    main()
