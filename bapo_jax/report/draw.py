"""Draws a figure's panels: as SVG in the page's colours, and together as a PNG on white.

The page has a panel's title, its legend and the name of its y axis as text, so that they keep their size
on a narrow screen.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from bapo_jax.machine.files import write_bytes
from bapo_jax.report.figures import Figure, Line, Panel
from bapo_jax.report.panels import drawn

# Okabe and Ito's palette without black and yellow, and lighter on a dark page. The last is grey.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#858585')
ON_DARK = ('#4DA6E0', '#FF8A3D', '#2BC79A', '#E39AC6', '#F2B93B', '#8FD0F5', '#9A9A9A')
# In line widths; the first is a solid line.
_DASHES = ((), (4, 1.5), (1, 1.2), (4, 1.2, 1, 1.2), (7, 1.5), (2, 1))
_INK, _GREY = '#010203', COLOURS[-1]  # _INK is a placeholder for the page's text colour
_SIZE = 4.4, 2.9  # inches per panel of a PNG
# Inches of a panel of the page, and around its axes. Text of 9 points is 15 pixels in a column of 900.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BELOW, _ABOVE = 7.4, 2.7, 0.6, 0.1, 0.55, 0.1
_NAMES, _BAR = 1.8, 0.2  # inches of the names beside horizontal bars, and of each bar
_FEW = 40  # lines with at most this many points have markers
_THOUSANDS = 10_000  # an axis that goes this far counts in thousands
_LOW = 0.4  # an axis starts at 0 if the lowest value is below this share of the highest
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
    'axes.linewidth': 0.6,
    'path.simplify': True,
    'figure.constrained_layout.w_pad': 0.08,
    'axes.labelpad': 6,
    'xtick.major.size': 0,
    'ytick.major.size': 0,
}


class LegendEntry(NamedTuple):
    """An entry of a legend. `colour` is a place in COLOURS; `dashes` has SVG's lengths, '' if solid."""

    label: str
    colour: int
    dashes: str
    thick: bool  # an area or bar, not a line


def legend(panel: Panel) -> list[LegendEntry]:
    """The entries of a panel's legend: one for each line that is drawn, none if it is the only one."""
    lines, areas = drawn(panel), panel.kind != 'lines'
    if len(lines) < 2:
        return []
    return [
        LegendEntry(x.label, _place(x), '' if areas else ' '.join(f'{2 * d:g}' for d in _dashes(x)), areas)
        for x in lines
    ]


def svg(panel: Panel, salt: str) -> str:
    """Draws a panel as an SVG element, without title, legend and the name of its y axis.

    `salt` keeps its ids distinct from those of the page's other panels.
    """
    left, height = _LEFT, _HEIGHT
    if panel.kind == 'level':
        left, height = _NAMES, max(1.5, _BAR * len(panel.ticks)) + _BELOW + _ABOVE
    place = (left / _WIDTH, _BELOW / height, 1 - (left + _RIGHT) / _WIDTH, 1 - (_BELOW + _ABOVE) / height)
    with matplotlib.rc_context({**_STYLE, 'svg.hashsalt': salt}):
        canvas = Canvas(figsize=(_WIDTH, height))
        FigureCanvasSVG(canvas)
        draw_panel(canvas.add_axes(place, facecolor='none'), panel)
        text = io.StringIO()
        canvas.savefig(text, format='svg', transparent=True, metadata={'Date': None})
    return inline(text.getvalue(), panel.title)


def inline(text: str, label: str) -> str:
    """Returns a file's SVG element in short: the page's colours and font, and points with one decimal."""
    text = text[text.index('<svg') :].replace('xlink:href', 'href')
    text = text.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', '')
    text = re.sub(r'<metadata>.*?</metadata>|<style.*?</style>', '', text, flags=re.S)
    for size in ('width', 'height'):
        text = re.sub(rf'<svg ([^>]*?){size}="[^"]*"', r'<svg \1', text, count=1)
    text = re.sub(r'<path [^>]*style="fill: none"/>|<g id="[^"]*"/>', '', text)  # what nobody sees
    text = re.sub(r'<g id="[^"]*">', '<g>', text)
    text = re.sub(r' transform="rotate\(-0 [^)]*\)"', '', text.replace(_INK, 'currentColor'))
    text = re.sub(r'font-size: [^;]*; font-family: [^;]*; |; fill: currentColor', '', text)
    for place, colour in enumerate(COLOURS):
        text = re.sub(colour, f'var(--c{place})', text, flags=re.I)
    text = re.sub(r' (d|x|y|transform)="[^"]*"', lambda numbers: _short(numbers[0]), text)
    while (shorter := re.sub(r'<defs>\s*</defs>|<g>\s*</g>', '', text)) != text:
        text = shorter
    escaped = label.replace('&', '&amp;').replace('"', '&quot;').replace('<', '&lt;')
    text = text.replace('<svg ', f'<svg role="img" aria-label="{escaped}" ', 1)
    return re.sub(r'\n\s*', '\n', text)


def _short(numbers: str) -> str:
    return re.sub(r'\s*([MLCQzZ])\s*', r'\1', re.sub(r'(\.\d)\d+', r'\1', numbers))


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
            axes.set_title(panel.title, loc='left')
            axes.set_ylabel(y_label(panel))
            if legend(panel):
                axes.legend(
                    fontsize=8, ncols=2, loc='upper left', bbox_to_anchor=(0, -0.2), borderaxespad=0,
                    handlelength=2.6,
                )  # fmt: skip
        data = io.BytesIO()
        canvas.savefig(data, format='png', dpi=110)
    write_bytes(path, data.getvalue())


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draws one panel of any kind, without title, legend and the name of its y axis."""
    {'lines': _lines, 'stack': _stack, 'bars': _bars, 'level': _level, 'matrix': _matrix}[panel.kind](
        axes, panel
    )
    if panel.kind in ('lines', 'stack'):
        for step in panel.marks:
            axes.axvline(step, color=_GREY, linewidth=0.8, linestyle=':', zorder=0)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_view_interval()[1] >= _THOUSANDS:
            axis.set_major_formatter(lambda x, _: f'{x / 1000:g}k' if x else '0')
    axes.set_xlabel(panel.xlabel)


def y_label(panel: Panel) -> str:
    """What the y axis shows, and where it starts if that is not 0; '' for names, which need no title."""
    start = _y_limits(panel)[0] if panel.kind == 'lines' else 0.0
    return panel.ylabel + (f', axis from {start:.2g}' if start else '')


def _y_limits(panel: Panel) -> tuple[float, float]:
    """The y axis of lines: from 0 if the values are not far from it, else around the values."""
    values = [y for x in drawn(panel) for y in (x.y, x.low, x.high) if y is not None]
    low = min((float(y.min()) for y in values), default=0.0)
    high = max((float(y.max()) for y in values), default=1.0)
    from_0 = 0 <= low <= _LOW * high
    space = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return 0.0 if from_0 else low - space, high + space


def _place(x: Line) -> int:
    """The place of a line's colour in COLOURS; a line without a style is grey."""
    return len(COLOURS) - 1 if x.style is None else x.style % (len(COLOURS) - 1)


def _dashes(x: Line) -> tuple[float, ...]:
    return () if x.style is None else _DASHES[x.style % len(_DASHES)]


def _lines(axes: Axes, panel: Panel) -> None:
    lines = drawn(panel)
    for x in lines:
        colour, dashes = COLOURS[_place(x)], _dashes(x) if len(lines) > 1 else ()
        if x.low is not None:
            axes.fill_between(x.x, x.low, x.high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(
            x.x, x.y, color=colour, linestyle=(0, dashes) if dashes else '-', label=x.label,
            linewidth=0.7 if x.style is None else 1.4, marker='o' if len(x.x) <= _FEW else None, markersize=3,
        )  # fmt: skip
    axes.set_ylim(*_y_limits(panel))
    axes.margins(x=0.02)
    axes.grid(axis='y', color=_GREY, alpha=0.25, linewidth=0.5)
    _few_ticks(axes)


def _few_ticks(axes: Axes) -> None:
    axes.locator_params(axis='x', integer=True, nbins=6)
    axes.locator_params(axis='y', nbins=5)


def _stack(axes: Axes, panel: Panel) -> None:
    bottom = np.zeros(len(panel.lines[0].x))
    for x in drawn(panel):
        face = {'facecolor': COLOURS[_place(x)], 'linewidth': 0, 'label': x.label}
        if len(x.x) == 1:  # an area over one step has no width
            axes.bar(x.x, x.y, 0.8, bottom, **face)
        else:
            axes.fill_between(x.x, bottom, bottom + x.y, step='mid' if len(x.x) <= _FEW else None, **face)
        bottom = bottom + x.y
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    _few_ticks(axes)


def _bars(axes: Axes, panel: Panel) -> None:
    width = 0.8 / len(panel.lines)
    for i, x in enumerate(panel.lines):
        left = x.x + (i - (len(panel.lines) - 1) / 2) * width
        axes.bar(left, x.y, width, color=COLOURS[_place(x)], label=x.label)
    axes.locator_params(axis='x', integer=True)
    axes.locator_params(axis='y', nbins=5)


def _level(axes: Axes, panel: Panel) -> None:
    bars = panel.lines[0]
    axes.barh(bars.y, bars.x, 0.7, color=COLOURS[0])
    axes.set_yticks(bars.y, panel.ticks)
    axes.margins(y=0.01)
    axes.grid(axis='x', color=_GREY, alpha=0.25, linewidth=0.5)


def _matrix(axes: Axes, panel: Panel) -> None:
    counts, most = panel.matrix, max(1, panel.matrix.max())
    for (row, col), count in np.ndenumerate(counts):
        if not count:
            continue
        strength = 0.65 * (count / most) ** 0.5
        axes.add_patch(
            Rectangle((col - 0.5, row - 0.5), 1, 1, facecolor=COLOURS[0], alpha=strength, linewidth=0)
        )
        if len(counts) <= 17:
            axes.text(col, row, str(count), ha='center', va='center', fontsize=9 if len(counts) <= 9 else 6)
    axes.plot([-0.5, len(counts) - 0.5], [-0.5, len(counts) - 0.5], color=_GREY, linewidth=0.6, linestyle=':')
    axes.set(xlim=(-0.5, len(counts) - 0.5), ylim=(-0.5, len(counts) - 0.5))
    axes.locator_params(integer=True)
