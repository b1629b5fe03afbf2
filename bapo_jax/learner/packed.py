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


class Rows(NamedTuple):
    """What the objective is taken over, [M, R, T]; all but the sequences are 0 where `response` is."""

    sequences: Sequences
    origin: np.ndarray  # int8, 1 + index into ORIGINS
    behaviour: np.ndarray  # float32, log-prob under the behaviour policy, as sampled
    advantage: np.ndarray  # float32
    weight: np.ndarray  # float32: the loss is Σ weight · token loss
    roles: Mapping[str, np.ndarray]  # float32, by role: the log-prob under that policy


def blank_rows(shape: tuple[int, int, int], roles: Sequence[str] = ()) -> Rows:
    """Rows [M, R, T] without a token."""

    def zeros(*dtypes: Any) -> list[np.ndarray]:
        return [np.zeros(shape, dtype) for dtype in dtypes]

    sequences = Sequences(*zeros(*[np.int32] * 4))
    return Rows(sequences, *zeros(np.int8, *[np.float32] * 3), {role: zeros(np.float32)[0] for role in roles})
