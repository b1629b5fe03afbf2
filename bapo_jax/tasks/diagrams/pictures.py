"""Draws a figure from its description: triangles with numbers at their sides or corners, 96 × 96 pixels.

    {'kind': 'angles', 'corners': [[x, y], ...], 'labels': ['57', '?', '64']}

    angles     a triangle; label i is in corner i
    right      a triangle, right-angled at corner 0; label i is outside the side from corner i to the next
    similar    a small triangle, then a large one; each has labels at the sides after and before its corner 0
    blank      nothing: a white picture

Corners are in pixels from the upper left. Figures are not drawn to scale, so only the labels give the
numbers. The font is Pillow's own. Equal descriptions give equal pixels if Pillow has the same font renderer;
a reference detects a difference.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence

from PIL import Image, ImageDraw, ImageFont

SIDE = 96  # pixels
CORNERS = {'angles': 3, 'right': 3, 'similar': 6, 'blank': 0}
LABELS = {'angles': 3, 'right': 3, 'similar': 4, 'blank': 0}
_LINE, _TEXT = (70, 120, 210), (0, 0, 0)
_FONT_SIZE, _BOLD = 15, 0.4  # pixels
_ARC, _SQUARE = 8, 6  # pixels: radius of an angle's mark, side of a right angle's mark
_INWARD = 0.48  # position of an angle's label, as a fraction of the way from its corner to the centre
_GAP = 3  # pixels between a side and its label

Diagram = dict  # {'kind': str, 'corners': list[[int, int]], 'labels': list[str]}
Point = tuple[float, float]


def draw_diagram(figure: Diagram) -> Image.Image:
    """Returns the picture, RGB on white. Raises ValueError, naming the field, if `figure` is invalid."""
    check_figure(figure)
    picture = Image.new('RGB', (SIDE, SIDE), 'white')
    pen, corners = ImageDraw.Draw(picture), figure['corners']
    for first in range(0, len(corners), 3):
        pen.polygon([tuple(corner) for corner in corners[first : first + 3]], outline=_LINE)
    if figure['kind'] == 'angles':
        for i in range(3):
            _mark_angle(pen, corners[i], corners[i - 1], corners[i - 2])
    if figure['kind'] == 'right':
        _mark_right_angle(pen, corners[0], corners[1], corners[2])
    for place, label in zip(_places(figure), figure['labels'], strict=True):
        pen.text(place, label, _TEXT, _font(), anchor='mm', stroke_width=_BOLD)
    return picture


def figure_image(figure: Diagram) -> dict:
    """Returns a reference to the picture (images.py). Its sha256, of the pixels, detects other rendering."""
    return {'figure': figure, 'sha256': pixels_hash(draw_diagram(figure)), 'width': SIDE, 'height': SIDE}


def pixels_hash(picture: Image.Image) -> str:
    return hashlib.sha256(picture.tobytes()).hexdigest()


def sheet(
    figures: Sequence[Diagram], captions: Sequence[str], columns: int = 3, scale: int = 2
) -> Image.Image:
    """Returns the pictures side by side and enlarged, each above its caption, for people to look at."""
    wide, high, rows = scale * SIDE + 12, scale * SIDE + 36, -(-len(figures) // columns)
    whole = Image.new('RGB', (columns * wide, rows * high), (235, 235, 235))
    pen = ImageDraw.Draw(whole)
    for i, (figure, caption) in enumerate(zip(figures, captions, strict=True)):
        x, y = i % columns * wide + 6, i // columns * high + 6
        whole.paste(
            draw_diagram(figure).resize((scale * SIDE, scale * SIDE), Image.Resampling.NEAREST), (x, y)
        )
        pen.text(
            (x + scale * SIDE / 2, y + scale * SIDE + 14),
            caption,
            _TEXT,
            ImageFont.load_default(13),
            anchor='mm',
        )
    return whole


def check_figure(figure: object) -> None:
    """Raises ValueError, naming the field, unless `figure` is a description as in the module docstring."""
    if not isinstance(figure, dict) or figure.get('kind') not in CORNERS:
        raise ValueError(f'figure.kind must be one of {", ".join(CORNERS)}, got {repr(figure)[:100]}')
    kind, corners, labels = figure['kind'], figure.get('corners', []), figure.get('labels', [])
    are_points = isinstance(corners, list) and all(
        isinstance(c, list) and len(c) == 2 and all(type(x) is int and 0 <= x < SIDE for x in c)
        for c in corners
    )
    if not are_points or len(corners) != CORNERS[kind]:
        raise ValueError(
            f'figure.corners must be {CORNERS[kind]} pixel positions [x, y] below {SIDE}, got '
            f'{repr(corners)[:100]}'
        )
    if (
        not isinstance(labels, list)
        or len(labels) != LABELS[kind]
        or not all(isinstance(x, str) and len(x) < 4 for x in labels)
    ):
        raise ValueError(
            f'figure.labels must be {LABELS[kind]} strings of at most 3 characters, got {repr(labels)[:100]}'
        )


@functools.cache
def _font() -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(_FONT_SIZE)


def _places(figure: Diagram) -> Iterator[Point]:
    """Yields the centre of each label."""
    corners, labels = figure['corners'], figure['labels']
    if figure['kind'] == 'angles':
        centre = _centre(corners)
        for corner in corners:
            yield tuple(c + _INWARD * (m - c) for c, m in zip(corner, centre))
    sides = {'right': ((0, 0), (0, 1), (0, 2)), 'similar': ((0, 0), (0, 2), (3, 0), (3, 2))}.get(
        figure['kind'], ()
    )
    for (first, side), label in zip(sides, labels):
        yield _beside(corners[first : first + 3], side, label)


def _beside(triangle: list, side: int, label: str) -> Point:
    """Returns the centre of a label outside a triangle's side and clear of it."""
    (ax, ay), (bx, by), centre = triangle[side], triangle[(side + 1) % 3], _centre(triangle)
    middle, length = ((ax + bx) / 2, (ay + by) / 2), math.dist((ax, ay), (bx, by)) or 1.0
    out = ((by - ay) / length, (ax - bx) / length)
    if (middle[0] - centre[0]) * out[0] + (middle[1] - centre[1]) * out[1] < 0:
        out = (-out[0], -out[1])
    left, top, right, bottom = _font().getbbox(label, anchor='mm')
    distance = abs(out[0]) * (right - left) / 2 + abs(out[1]) * (bottom - top) / 2 + _GAP
    return middle[0] + distance * out[0], middle[1] + distance * out[1]


def _centre(corners: list) -> Point:
    return sum(x for x, _ in corners) / len(corners), sum(y for _, y in corners) / len(corners)


def _mark_angle(pen: ImageDraw.ImageDraw, corner: list, one: list, other: list) -> None:
    """Draws an arc inside the corner."""
    x, y = corner
    start, end = (math.degrees(math.atan2(py - y, px - x)) for px, py in (one, other))
    if (end - start) % 360 > 180:
        start, end = end, start
    pen.arc((x - _ARC, y - _ARC, x + _ARC, y + _ARC), start, end, _LINE)


def _mark_right_angle(pen: ImageDraw.ImageDraw, corner: list, one: list, other: list) -> None:
    """Draws a small square inside the corner."""
    (x, y), (ux, uy), (vx, vy) = corner, *(_towards(corner, end) for end in (one, other))
    pen.line([(x + ux, y + uy), (x + ux + vx, y + uy + vy), (x + vx, y + vy)], _LINE)


def _towards(start: list, end: list) -> Point:
    length = math.dist(start, end) or 1.0
    return _SQUARE * (end[0] - start[0]) / length, _SQUARE * (end[1] - start[1]) / length
