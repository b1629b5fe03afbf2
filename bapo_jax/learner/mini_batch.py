"""The input of the jitted programs: packed rows of a mini-batch, and its images.

Arrays are [micro-batches M, rows R, tokens T], in NumPy on the host. packing.py makes the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.sharding import NamedSharding

from bapo_jax.cluster.mesh import row_sharding, spread
from bapo_jax.models.vision.patches import Pixels, blank_pixels


class Sequences(NamedTuple):
    """The input of a policy that scores tokens, [M, R, T]."""

    tokens: np.ndarray  # int32
    segment: np.ndarray  # int32 attention segments: 1, 2, … along the row; 0 is padding
    # int32, from 0 at the sequence's start; responses to a shared prompt continue its positions.
    position: np.ndarray
    response: np.ndarray  # int32, 1, 2, … along the row on trained tokens, 0 elsewhere
    # Only with images:
    rope: np.ndarray | None = None  # int32 [M, R, T, 3], rotary positions; not `position` after an image
    feature: np.ndarray | None = None  # int32, index of the image feature at this token; -1 for no feature


class Rows(NamedTuple):
    """The input of the objective, [M, R, T]; all but the sequences are 0 where `response` is 0."""

    sequences: Sequences
    origin: np.ndarray  # int8, 1 + the lane of the group's origin (`groups.lanes_of`); 0 on others' traces
    behaviour: np.ndarray  # float32, log-prob under the behaviour policy, as sampled
    advantage: np.ndarray  # float32
    # float32, of each term: the loss is Σ weight · token loss over the terms
    weight: Mapping[str, np.ndarray]
    roles: Mapping[str, np.ndarray]  # float32, log-probs under each role's policy
    # float32 in [0, 1], factors of the advantage and of the clip's ends `low` and `high` (trust.py)
    factors: Mapping[str, np.ndarray] = {}


def blank_rows(
    shape: tuple[int, int, int],
    images: bool = False,
    roles: Sequence[str] = (),
    weights: Sequence[str] = ('rl',),
    factors: Sequence[str] = (),
) -> Rows:
    """Returns empty rows [M, R, T]; with `images`, they include the image fields."""

    def zeros(*dtypes: Any) -> list[np.ndarray]:
        return [np.zeros(shape, dtype) for dtype in dtypes]

    by_name = ({name: zeros(np.float32)[0] for name in names} for names in (weights, roles, factors))
    return Rows(blank_sequences(shape, images), *zeros(np.int8, *[np.float32] * 2), *by_name)


def blank_sequences(shape: tuple[int, int, int], images: bool = False) -> Sequences:
    """Returns empty sequences [M, R, T]."""
    sequences = Sequences(*(np.zeros(shape, np.int32) for _ in range(4)))
    return (
        sequences._replace(rope=np.zeros((*shape, 3), np.int32), feature=np.full(shape, -1, np.int32))
        if images
        else sequences
    )


class Images(Protocol):
    """The images of a mini-batch's prompts."""

    pixel_shape: tuple[int, int, int]  # V, P, C of the patches, as the vision tower reads them

    def pixels(self) -> Pixels:
        """Returns the patches. Reads the image files."""


class Shape(NamedTuple):
    """The shape of a mini-batch, which other hosts need for their part of the work."""

    rows: tuple[int, int, int]  # M, R, T
    filled: int
    pixels: tuple[int, int, int] | None  # V, P, C


class MiniBatch(NamedTuple):
    """The rows of one optimizer step, or rows that are scored together."""

    rows: Any  # Rows, Sequences, or the critic's Targets
    filled: int  # number of leading micro-batches that hold tokens; the rest is padding
    images: Images | None = None

    def spread(self, sharding: NamedSharding) -> tuple[Any, int, Pixels | None]:
        """Puts (rows, filled, pixels) on the mesh, its rows split so. Reads the image files."""
        pixels = self.images and self.images.pixels()
        return spread(self.rows, sharding), self.filled, spread(pixels, row_sharding(sharding.mesh))


class _Blank(NamedTuple):
    """Placeholder for images that another host holds."""

    pixel_shape: tuple[int, int, int]

    def pixels(self) -> Pixels:
        return blank_pixels(self.pixel_shape)


def blank(shape: Shape, rows: Callable[[tuple[int, int, int], bool], Any]) -> MiniBatch:
    """Returns an empty mini-batch of that shape; `rows(shape, images)` makes its rows."""
    images = _Blank(tuple(shape.pixels)) if shape.pixels else None
    return MiniBatch(rows(tuple(shape.rows), images is not None), shape.filled, images)
