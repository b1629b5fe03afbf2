"""Finds the questions of a file that are the same problem.

A problem is its question and its accepted answers. Files repeat problems: an epoch of DAPO-Math-17k asks each
100 times, and AIME files have every problem 32 times. Replay, X2, RePO and MoPPS identify a prompt by its id,
so training keeps only the first of equal problems. A benchmark keeps all its rows, and its confidence
interval is over problems (scores.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from bapo_jax.groups import Prompt
from bapo_jax.tasks.jsonl import shown

# The fields that identify a problem, if the ground truth has the first two.
_PARTS = (('problem', 'answers', 'before', 'images'), ('question', 'answer', 'images'))


def key(ground_truth: Any) -> bytes:
    """Returns a hash that is equal for equal problems.

    If a ground truth has a question and answers, only these and the content of its images count, not other
    columns of the row such as its index. In any other ground truth everything counts.
    """
    parts = ground_truth
    if names := _names(parts):
        parts = {name: parts[name] for name in names if name in parts}
        if 'images' in parts:
            parts['images'] = [image['sha256'] for image in parts['images']]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _names(ground_truth: Any) -> tuple[str, ...]:
    """The fields that identify this problem; () if it has no question and answers."""
    fields = ground_truth if isinstance(ground_truth, dict) else {}
    return next((names for names in _PARTS if set(names[:2]) <= fields.keys()), ())


def numbered(ground_truths: Sequence[Any]) -> list[int]:
    """Returns the problem number of each question: the index of the first equal question."""
    first: dict[bytes, int] = {}
    return [first.setdefault(key(truth), place) for place, truth in enumerate(ground_truths)]


def left_out(ground_truths: Iterable[Any], source: str) -> list[Any]:
    """Returns the problems without repeats, in order. A warning counts the repeats."""
    kept: dict[bytes, Any] = {}
    rows = 0
    for rows, truth in enumerate(ground_truths, start=1):
        kept.setdefault(key(truth), truth)
    if len(kept) < rows:
        logging.warning(
            '%s: %s of %s rows repeat an earlier problem and are left out of training; %s distinct problems '
            'are trained on',
            source, f'{rows - len(kept):,}', f'{rows:,}', f'{len(kept):,}',
        )  # fmt: skip
    return list(kept.values())


def report_repeats(ground_truths: Sequence[Any], benchmark: str) -> None:
    """Warns how many distinct problems a benchmark has, if it repeats some."""
    if (problems := len(set(numbered(ground_truths)))) < len(ground_truths):
        logging.warning(
            '%s: %d rows have only %d distinct problems; all rows are scored, and the confidence interval is '
            'over problems',
            benchmark,
            len(ground_truths),
            problems,
        )


def report_shared(prompts: Sequence[Prompt], benchmarks: Mapping[str, Sequence[Prompt]]) -> None:
    """Warns of each benchmark that asks some of the training `prompts`, whatever their answers."""
    trained = {_asked(prompt) for prompt in prompts}
    for name, held_out in benchmarks.items():
        shared = [number for number, prompt in enumerate(held_out, start=1) if _asked(prompt) in trained]
        if shared:
            logging.warning(
                '%s: training also asks %s of its %s questions; the first is question %s. Its scores are not '
                'those of held-out questions',
                name, f'{len(shared):,}', f'{len(held_out):,}', f'{shared[0]:,}',
            )  # fmt: skip


def report_contradictions(prompts: Sequence[Prompt], source: str) -> None:
    """Warns if training `prompts` ask the same and accept other answers, where the answers are a field."""
    first: dict[Any, Any] = {}
    found = []
    for prompt in prompts:
        if names := _names(prompt.ground_truth):
            question, answer = (prompt.ground_truth[name] for name in names[:2])
            if (before := first.setdefault(_asked(prompt), answer)) != answer:
                found.append((question, before, answer))
    if found:
        logging.warning(
            '%s: questions that are asked again with another answer, and all trained on: %s; the first is '
            '%s, with %s and %s',
            source, f'{len(found):,}', *map(shown, found[0]),
        )  # fmt: skip


def _asked(prompt: Prompt) -> tuple:
    """What the policy reads: equal for equal prompts."""
    return prompt.tokens.tobytes(), *(image['sha256'] for image in prompt.images)
