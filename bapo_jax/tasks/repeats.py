"""Which questions of a file are the same problem.

A problem is its question and its accepted answers. Files repeat them: an epoch of DAPO-Math-17k asks each 100 times, AIME files
have every problem 32 times. Replay, X2, RePO and MoPPS know a prompt by its id, so training keeps the first of equal problems
alone. A benchmark keeps all its rows, and its interval is over problems (scores.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from absl import logging

# What counts of a ground truth that has the first two.
_PARTS = (('problem', 'answers', 'before', 'images'), ('question', 'answer', 'images'))


def key(ground_truth: Any) -> bytes:
    """Equal for equal problems.

    Of a ground truth with a question and answers these count, and the pixels of its images; other columns of the row, such as its
    index, do not. Of any other ground truth everything counts.
    """
    parts = ground_truth
    names = next((names for names in _PARTS if isinstance(parts, dict) and set(names[:2]) <= parts.keys()), ())
    if names:
        parts = {name: parts[name] for name in names if name in parts}
        if 'images' in parts:
            parts['images'] = [image['sha256'] for image in parts['images']]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def numbered(ground_truths: Sequence[Any]) -> list[int]:
    """The problem of each question: the place of the first one that is equal."""
    first: dict[bytes, int] = {}
    return [first.setdefault(key(truth), place) for place, truth in enumerate(ground_truths)]


def left_out(ground_truths: Iterable[Any], source: str) -> list[Any]:
    """The first of equal problems, in order. A warning counts the others."""
    kept: dict[bytes, Any] = {}
    rows = 0
    for rows, truth in enumerate(ground_truths, start=1):
        kept.setdefault(key(truth), truth)
    if len(kept) < rows:
        logging.warning(
            '%s: %s of %s rows repeat an earlier problem and are left out of training; %s distinct problems are trained on',
            source, f'{rows - len(kept):,}', f'{rows:,}', f'{len(kept):,}',
        )  # fmt: skip
    return list(kept.values())


def report(ground_truths: Sequence[Any], benchmark: str) -> None:
    """A warning says how many problems a benchmark has, where it repeats some."""
    if (problems := len(set(numbered(ground_truths)))) < len(ground_truths):
        logging.warning(
            '%s: %d rows ask %d distinct problems; all rows are scored, and the interval is over problems',
            benchmark, len(ground_truths), problems,
        )  # fmt: skip
