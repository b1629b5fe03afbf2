"""Draws a run as one picture, run.png: training reward, batch composition, accuracy of fresh groups."""

from __future__ import annotations

from pathlib import Path

from bapo_jax.report.figures import bins, composition, reward
from bapo_jax.report.panels import Figure
from bapo_jax.report.records import read_run


def draw_run(directory: Path) -> Path:
    """Draws DIRECTORY/run.png from metrics.jsonl and returns its path.

    Raises ValueError if no step is logged.
    """
    from bapo_jax.report.draw import (
        png,
    )  # matplotlib takes a while to load, and a run needs it at its end only

    r, path = read_run(directory), Path(directory) / 'run.png'
    parts = reward(r), composition(r), bins(r)
    png(Figure('run', r.name, '', '', panels=tuple(p for part in parts for p in part.panels)), path)
    return path
