"""A policy's measures on a benchmark, from its judged responses: mean@n, pass@k, maj@n, an interval. Numpy alone.

A question has n judged responses, c of them correct. A response whose verifier failed (an infrastructure error) is not wrong: it is
left out of its question's n. A question with too few responses for a measure is left out of that measure's mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.groups import Group, Verdict

_RESAMPLES, _SEED = 10_000, 0  # of the bootstrap; fixed, so that equal samples give equal intervals


class Question(NamedTuple):
    """What scores need of one question's responses; every field has one entry a response."""

    verdicts: tuple[Verdict, ...]
    answers: tuple[str | None, ...]  # what the verifier extracted
    lengths: tuple[int, ...]  # tokens
    truncated: tuple[bool, ...]  # cut at the token limit


def question(group: Group) -> Question:
    """The question of a judged group."""
    lengths = tuple(len(r.tokens) for r in group.responses)
    return Question(group.verdicts, group.answers, lengths, tuple(r.finish == 'length' for r in group.responses))


def summary(questions: Sequence[Question], votes: bool) -> dict[str, Any]:
    """A benchmark's measures, ready for JSON. All questions have equally many responses, `samples` of them.

    mean        mean over questions of c/n; `interval` is its 95 % interval by bootstrap over questions
    pass_at_k   {k: pass@k} for the powers of two up to `samples`, and `samples` itself; `pass` is the last of them
    maj         maj@n, where `votes` says that the task's answers can be voted on
    pass_interval, maj_interval     theirs, so too
    truncated   share of responses cut at the token limit; `length` their mean number of tokens
    correct     every question's c

    A measure is None where no question has enough judged responses. Raises ValueError where there are no questions.
    """
    if not questions:
        raise ValueError('a benchmark without questions has no score')
    verdicts = np.array([q.verdicts for q in questions])
    samples = verdicts.shape[1]
    judged, correct = (verdicts != Verdict.INFRA_ERROR).sum(axis=1), (verdicts == Verdict.CORRECT).sum(axis=1)
    accuracy = correct[judged > 0] / judged[judged > 0]
    solved = {str(k): pass_at_k(judged, correct, k) for k in ks(samples)}
    pass_at = {k: _mean(values) for k, values in solved.items()}
    voted = [majority(q.verdicts, q.answers) for q in questions] if votes else []
    return {
        'questions': len(questions),
        'samples': samples,
        'mean': _mean(accuracy),
        'interval': _interval(accuracy),
        'pass': pass_at[str(samples)],
        'pass_interval': _interval(solved[str(samples)]),
        'pass_at_k': pass_at,
        **({'maj': _mean(voted), 'maj_interval': _interval(voted)} if votes else {}),
        'truncated': float(np.mean([q.truncated for q in questions])),
        'length': float(np.mean([q.lengths for q in questions])),
        'unparseable': int((verdicts == Verdict.UNPARSEABLE).sum()),
        'infra_errors': int((verdicts == Verdict.INFRA_ERROR).sum()),
        'correct': correct.tolist(),
    }


def ks(samples: int) -> list[int]:
    """The k of pass@k: powers of two up to `samples`, and `samples`."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples})


def pass_at_k(judged: np.ndarray, correct: np.ndarray, k: int) -> np.ndarray:
    """1 - C(n-c, k) / C(n, k) of every question (Chen et al., arXiv 2107.03374), nan where n < k; n and c are int [questions].

    It is the chance that k of the n responses, drawn without replacement, include a correct one: unbiased for the policy's pass@k.
    """
    i = np.arange(k)
    # C(n-c, k) / C(n, k) is the product of (n-c-i) / (n-i) over i < k. Where fewer than k are wrong, a factor is 0.
    wrong, left = np.maximum((judged - correct)[:, None] - i, 0), np.maximum(judged[:, None] - i, 1)
    return np.where(judged >= k, 1 - np.prod(wrong / left, axis=1), np.nan)


def majority(verdicts: Sequence[Verdict], answers: Sequence[str | None]) -> float:
    """The correctness of a question's most frequent answer; the mean over tied answers, as if the winner were drawn among them.

    Equal strings are equal answers. A response does not vote if it has no answer, is unparseable, or its verifier failed. Without
    any vote the result is 0, or nan where the verifier failed on all responses.
    """
    if all(v == Verdict.INFRA_ERROR for v in verdicts):
        return float('nan')
    votes = defaultdict(list)
    for verdict, answer in zip(verdicts, answers, strict=True):
        if answer is not None and verdict in (Verdict.CORRECT, Verdict.WRONG):
            votes[answer].append(verdict == Verdict.CORRECT)
    most = max(map(len, votes.values()), default=0)
    return float(np.mean([np.mean(v) for v in votes.values() if len(v) == most])) if votes else 0.0


def bootstrap_interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The interval of the mean of `values` [questions] by resampling them with replacement: the percentile bootstrap.

    It covers how the mean varies over other questions of the kind. Samples of the same questions vary less.
    """
    drawn = np.random.default_rng(_SEED).integers(len(values), size=(_RESAMPLES, len(values)), dtype=np.int32)
    low, high = np.quantile(values[drawn].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _interval(values: Sequence[float]) -> list[float] | None:
    """The interval of `_mean`."""
    kept = np.asarray(values)[~np.isnan(values)]
    return list(bootstrap_interval(kept)) if len(kept) else None


def _mean(values: Sequence[float]) -> float | None:
    """The mean of the values that are not nan; None where there are none, since JSON has no nan."""
    kept = np.asarray(values)[~np.isnan(values)]
    return float(kept.mean()) if len(kept) else None
