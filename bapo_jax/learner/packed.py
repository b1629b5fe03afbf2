"""What the jitted programs are given: packed arrays [micro-batches M, rows R, tokens T]. NumPy alone; packing.py makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Sequences(NamedTuple):
    """What a policy scores, [M, R, T]."""

    tokens: np.ndarray  # int32
    segment: np.ndarray  # int32, 0 is padding, then 1, 2, … along the row: who attends to whom
    position: np.ndarray  # int32, from 0 at its sequence's start; a response behind a shared prompt goes on where that ends
    response: np.ndarray  # int32, 1, 2, … along the row on the tokens that are trained on, 0 elsewhere
    # Of a mini-batch with images alone:
    rope: np.ndarray | None = None  # int32 [M, R, T, 3], rotary positions, which are not `position` behind an image
    feature: np.ndarray | None = None  # int32, which feature of the mini-batch's images stands there; -1: none


class Rows(NamedTuple):
    """What the objective is taken over, [M, R, T]; all but the sequences are 0 where `response` is."""

    sequences: Sequences
    origin: np.ndarray  # int8, 1 + index into ORIGINS
    behaviour: np.ndarray  # float32, log-prob under the behaviour policy, as sampled
    advantage: np.ndarray  # float32
    weight: np.ndarray  # float32: the loss is Σ weight · token loss
    roles: Mapping[str, np.ndarray]  # float32, by role: the log-prob under that policy


def blank_rows(shape: tuple[int, int, int], roles: Sequence[str] = (), images: bool = False) -> Rows:
    """Rows [M, R, T] without a token; with `images`, as of a mini-batch that has some."""

    def zeros(*dtypes: Any) -> list[np.ndarray]:
        return [np.zeros(shape, dtype) for dtype in dtypes]

    rows = zeros(np.int8, *[np.float32] * 3)
    return Rows(blank_sequences(shape, images), *rows, {role: zeros(np.float32)[0] for role in roles})


def blank_sequences(shape: tuple[int, int, int], images: bool = False) -> Sequences:
    """Sequences [M, R, T] without a token."""
    sequences = Sequences(*(np.zeros(shape, np.int32) for _ in range(4)))
    return sequences._replace(rope=np.zeros((*shape, 3), np.int32), feature=np.full(shape, -1, np.int32)) if images else sequences
