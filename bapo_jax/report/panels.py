"""The parts of a report's figures: panels with lines or bars, and tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bapo_jax.report.records import STEPS, Records, column, has

MOST_POINTS = 250  # a series with more points is binned; a page is at most some 900 pixels wide
ENOUGH_STEPS = 20  # a shorter run is too noisy for warnings and advice


class Line(NamedTuple):
    """One series. `style` picks colour, dashes and marker together; None is thin and grey."""

    label: str
    x: np.ndarray
    y: np.ndarray
    style: int | None = 0
    low: np.ndarray | None = None  # a band around y
    high: np.ndarray | None = None


class Panel(NamedTuple):
    """One pair of axes.

    `kind` is lines, stack, bars (side by side), level (horizontal bars, named by `ticks`) or matrix.
    """

    title: str
    xlabel: str
    ylabel: str
    lines: tuple[Line, ...] = ()
    kind: str = 'lines'
    ticks: tuple[str, ...] = ()
    matrix: np.ndarray | None = None  # int [rows, columns], row 0 at the bottom
    marks: tuple[int, ...] = ()  # steps of faults and restarts


class Table(NamedTuple):
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Figure(NamedTuple):
    """A figure; `paper` names the paper's figure and `look` says what to look for.

    `views` has the panels over other x axes, by the axis's name. `said` are sentences below the table.
    """

    name: str
    title: str
    paper: str
    look: str
    panels: tuple[Panel, ...] = ()
    views: tuple[tuple[str, tuple[Panel, ...]], ...] = ()
    table: Table | None = None
    said: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def drawn(panel: Panel) -> tuple[Line, ...]:
    """The lines of a panel that have a point."""
    return tuple(x for x in panel.lines if len(x.x))


def binned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the finite points of a series, or means of equal bins if there are more than MOST_POINTS.

    The last bin may be smaller.
    """
    there = np.isfinite(y)
    x, y = x[there], y[there]
    size = -(-len(x) // MOST_POINTS)
    if size <= 1:
        return x, y
    starts = np.arange(0, len(x), size)
    counts = np.diff([*starts, len(x)])
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def smoothed(y: np.ndarray, window: int) -> np.ndarray:
    """The moving mean over `window` values, ignoring non-finite ones; the first `window` - 1 are nan."""
    there = np.isfinite(y)
    sums, counts = (np.cumsum([0, *a]) for a in (np.where(there, y, 0.0), there))
    total, n = sums[window:] - sums[:-window], counts[window:] - counts[:-window]
    means = np.divide(total, n, out=np.full(len(total), np.nan), where=n > 0)
    return np.concatenate([np.full(min(window - 1, len(y)), np.nan), means])


def line(records: Records, metric: str, label: str, style: int | None = 0) -> Line:
    """A line of a metric over steps."""
    return Line(label, *binned(records.steps, column(records, metric)), style)


def enough(records: Records) -> bool:
    """Whether a run has enough steps for a warning about how it went."""
    return len(records.steps) >= ENOUGH_STEPS


def tenths(records: Records) -> tuple[slice, slice]:
    """Slices of the first and the last tenth of the logged steps, at least one step each."""
    tenth = max(1, len(records.steps) // 10)
    return slice(0, tenth), slice(len(records.steps) - tenth, None)


def marks(records: Records) -> tuple[int, ...]:
    """The distinct steps of faults and restarts."""
    return tuple(sorted({*(f.step for f in records.faults if f.step is not None), *records.restarts}))


def over_steps(records: Records, title: str, ylabel: str, *lines: Line) -> Panel:
    """A panel of lines over steps, with the run's faults and restarts."""
    return Panel(title, STEPS, ylabel, lines, marks=marks(records))


def need(records: Records, *metrics: str) -> tuple[str, ...]:
    """Returns the metrics that the run lacks."""
    return tuple(name for name in metrics if not has(records, name))
