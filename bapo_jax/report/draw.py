"""Draws a figure's panels as SVG in the page's text colour, and as a single PNG."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from bapo_jax.machine.files import write_bytes
from bapo_jax.report.figures import Figure, Line, Panel

# Okabe and Ito's palette without black and yellow.
COLOURS = ('#0072B2', '#E69F00', '#009E73', '#D55E00', '#CC79A7', '#56B4E9')
_DASHES = ('-', '--', '-.', ':', (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)))
_MARKERS, _HATCHES = 'os^Dvx', ('', '///', '...', 'xxx', '\\\\\\', '++')
_INK, _GREY = '#010203', '#8a8a8a'  # _INK is a placeholder for the page's text colour
_SIZE = 4.4, 2.9  # inches per panel
_FEW = 40  # lines with at most this many points have markers
_STYLE = {
    'svg.fonttype': 'none',
    'font.size': 9,
    'text.parse_math': False,
    'font.family': 'sans-serif',
    'axes.titlesize': 10,
    'text.color': _INK,
    'axes.labelcolor': _INK,
    'axes.edgecolor': _INK,
    'xtick.color': _INK,
    'ytick.color': _INK,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'legend.frameon': False,
    'hatch.linewidth': 0.6,
    'axes.linewidth': 0.6,
    'path.simplify': True,
    'figure.constrained_layout.w_pad': 0.08,
}


def svg(panel: Panel, salt: str) -> str:
    """Draws a panel as an SVG element.

    `salt` keeps its ids distinct from those of the page's other panels.
    """
    with matplotlib.rc_context({**_STYLE, 'svg.hashsalt': salt}):
        canvas = Canvas(figsize=_SIZE, layout='constrained')
        FigureCanvasSVG(canvas)
        draw_panel(canvas.subplots(), panel)
        canvas.draw_without_rendering()  # the layout may change the ticks, so only the second layout fits
        text = io.StringIO()
        canvas.savefig(text, format='svg', transparent=True, metadata={'Date': None})
    return inline(text.getvalue(), panel.title)


def inline(text: str, label: str) -> str:
    """Returns a file's SVG element without header, metadata and fixed size; rounds to 0.01 points."""
    text = re.sub(r'<metadata>.*?</metadata>', '', text[text.index('<svg') :], flags=re.S)
    text = text.replace('xlink:href', 'href').replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', '')
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', r'<svg \1', text, count=1)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*"', r'<svg \1', text, count=1)
    escaped = label.replace('&', '&amp;').replace('"', '&quot;').replace('<', '&lt;')
    text = text.replace('<svg ', f'<svg role="img" aria-label="{escaped}" ', 1)
    text = re.sub(r' d="[^"]*"', lambda d: re.sub(r'(\.\d\d)\d+', r'\1', d[0]), text)
    return re.sub(r'\n\s*', '\n', text.replace(_INK, 'currentColor'))


def png(figure: Figure, path: Path) -> None:
    """Draws all panels of a figure side by side on white."""
    with matplotlib.rc_context({**_STYLE, **{name: 'black' for name, x in _STYLE.items() if x == _INK}}):
        across = min(3, len(figure.panels))
        down = -(-len(figure.panels) // across)
        canvas = Canvas(figsize=(_SIZE[0] * across, _SIZE[1] * down), layout='constrained')
        FigureCanvasAgg(canvas)
        all_axes = canvas.subplots(down, across, squeeze=False).ravel()
        for axes in all_axes[len(figure.panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(all_axes, figure.panels, strict=False):
            draw_panel(axes, panel)
        data = io.BytesIO()
        canvas.savefig(data, format='png', dpi=110)
    write_bytes(path, data.getvalue())


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draws one panel of any kind."""
    {'lines': _lines, 'stack': _stack, 'bars': _bars, 'level': _level, 'matrix': _matrix}[panel.kind](
        axes, panel
    )
    if panel.kind in ('lines', 'stack'):
        for step in panel.marks:
            axes.axvline(step, color=_GREY, linewidth=0.8, linestyle=':', zorder=0)
    axes.set_title(panel.title, loc='left')
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)
    if len(panel.lines) > 1 or any(x.low is not None for x in panel.lines):
        axes.legend(
            fontsize=8, ncols=2, loc='upper left', bbox_to_anchor=(0, -0.2), borderaxespad=0, handlelength=2.6
        )


def _lines(axes: Axes, panel: Panel) -> None:
    for x in panel.lines:
        _line(axes, x, alone=len(panel.lines) == 1)
    axes.margins(x=0.02)
    axes.grid(axis='y', color=_GREY, alpha=0.25, linewidth=0.5)
    axes.locator_params(axis='x', integer=True, nbins=6)


def _line(axes: Axes, x: Line, alone: bool) -> None:
    marker = _MARKERS[(x.style or 0) % len(_MARKERS)] if len(x.x) <= _FEW else None
    if x.style is None:
        axes.plot(
            x.x, x.y, color=_GREY, alpha=0.7, linewidth=0.7, marker=marker, markersize=2.5, label=x.label
        )
        return
    colour, dashes = COLOURS[x.style % len(COLOURS)], '-' if alone else _DASHES[x.style % len(_DASHES)]
    if x.low is not None:
        axes.fill_between(x.x, x.low, x.high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(
        x.x, x.y, color=colour, linestyle=dashes, linewidth=1.4, marker=marker, markersize=3.5, label=x.label
    )


def _stack(axes: Axes, panel: Panel) -> None:
    bottom = np.zeros(len(panel.lines[0].x))
    for x in panel.lines:
        place = x.style or 0
        colour, hatch = COLOURS[place % len(COLOURS)], _HATCHES[place % len(_HATCHES)]
        face = {'facecolor': colour, 'hatch': hatch, 'edgecolor': _INK, 'linewidth': 0}
        if len(x.x) == 1:  # an area over one step has no width
            axes.bar(x.x, x.y, 0.8, bottom, label=x.label, **face)
        else:
            axes.fill_between(
                x.x, bottom, bottom + x.y, label=x.label, step='mid' if len(x.x) <= _FEW else None, **face
            )
        bottom = bottom + x.y
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis='x', integer=True, nbins=6)


def _bars(axes: Axes, panel: Panel) -> None:
    width = 0.8 / len(panel.lines)
    for i, x in enumerate(panel.lines):
        place = x.style or 0
        left = x.x + (i - (len(panel.lines) - 1) / 2) * width
        axes.bar(
            left,
            x.y,
            width,
            color=COLOURS[place],
            hatch=_HATCHES[place],
            edgecolor=_INK,
            linewidth=0,
            label=x.label,
        )
    axes.locator_params(axis='x', integer=True)


def _level(axes: Axes, panel: Panel) -> None:
    bars = panel.lines[0]
    axes.barh(bars.y, bars.x, 0.7, color=COLOURS[0])
    axes.set_yticks(bars.y, panel.ticks, fontsize=7.5)
    axes.grid(axis='x', color=_GREY, alpha=0.25, linewidth=0.5)


def _matrix(axes: Axes, panel: Panel) -> None:
    counts, most = panel.matrix, max(1, panel.matrix.max())
    for (row, col), count in np.ndenumerate(counts):
        strength = 0.65 * (count / most) ** 0.5
        axes.add_patch(
            Rectangle((col - 0.5, row - 0.5), 1, 1, facecolor=COLOURS[0], alpha=strength, linewidth=0)
        )
        if count and len(counts) <= 17:
            axes.text(col, row, str(count), ha='center', va='center', fontsize=7 if len(counts) <= 9 else 5)
    axes.plot([-0.5, len(counts) - 0.5], [-0.5, len(counts) - 0.5], color=_GREY, linewidth=0.6, linestyle=':')
    axes.set(xlim=(-0.5, len(counts) - 0.5), ylim=(-0.5, len(counts) - 0.5))
    axes.locator_params(integer=True)
