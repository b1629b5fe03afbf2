"""The control: arithmetic whose rewards in training are those of other responses. As many are rewarded, and
nothing says which.

    python -m bapo_jax.train --config=configs/arithmetic.py --config.task.name=studies.real_policy.shuffled \\
        --workdir=runs/shuffled

Verdicts of the responses that are judged together are permuted among them, in training alone: the test set is
judged as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bapo_jax.groups import Verdict
from bapo_jax.tasks import arithmetic
from bapo_jax.tasks.arithmetic import (  # noqa: F401
    BENCHMARKS, TEMPLATES, VOTES, benchmark, check_ground_truth, prompt_text, verify, with_demands,
)  # fmt: skip


def training_problems(source: str, *, limit: int, seed: int) -> list[dict]:
    """Those of arithmetic, marked."""
    return [
        question | {'shuffled': True}
        for question in arithmetic.training_problems(source, limit=limit, seed=seed)
    ]


def verify_all(
    responses: Sequence[str], ground_truths: Sequence[dict], budget_s: float = math.inf
) -> list[tuple[Verdict, str | None]]:
    """`verify` of each, verdicts permuted among the marked ones; the same responses have the same
    permutation.
    """
    judged = arithmetic.verify_all(responses, ground_truths, budget_s)
    marked = [i for i, truth in enumerate(ground_truths) if truth.get('shuffled')]
    seed = [len(text) for text in responses]
    verdicts = [judged[i][0] for i in np.random.default_rng(seed).permutation(marked)]
    for i, verdict in zip(marked, verdicts, strict=True):
        judged[i] = verdict, judged[i][1]
    return judged
