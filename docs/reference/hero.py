"""Draws docs/compare.png, the README's first figure: the first panels of a comparison's page.

    make compare
    python -m docs.reference.hero runs/compare
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bapo_jax.report import comparison, draw
from bapo_jax.report.page import read_runs

PNG = Path(__file__).resolve().parents[1] / 'compare.png'
PANELS = {'cd34, mean@8': 'Countdown, mean@8', 'cd34, pass@8': 'Countdown, pass@8'}  # with their titles there


def write(runs: Sequence[Path], png: Path = PNG) -> None:
    """Draws the panels of PANELS, for runs in the order of their arms."""
    figure = comparison.curves_of_arms(comparison.by_seed(read_runs(runs)))
    panels = (p._replace(title=PANELS[p.title]) for p in figure.panels if p.title in PANELS)
    draw.png(figure._replace(panels=tuple(panels)), png)


if __name__ == '__main__':
    begun = [path.parent for path in Path(sys.argv[1]).glob('*/config.json')]
    write(sorted(begun, key=lambda run: (run / 'config.json').stat().st_mtime))
