"""A policy's measures on a benchmark, from its judged responses: mean@n, pass@k, maj@n, an interval. Numpy alone.

A question has n judged responses, c of them correct. A response whose verifier failed (an infrastructure error) is not wrong: it is
left out of its question's n. A question with too few responses for a measure is left out of that measure's mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import NormalDist
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


def summary(questions: Sequence[Question], votes: bool, problems: Sequence[int] | None = None) -> dict[str, Any]:
    """A benchmark's measures, ready for JSON. All questions have equally many responses, `samples` of them.

    `problems` numbers the problem of each question, where a file asks some more than once; None: all are different. Copies are no
    news of other problems, so the interval is over problems, and `problems` in the result counts them.

    mean        mean over questions of c/n; `interval` is its 95 % interval over problems (`interval` below)
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
    numbers = np.arange(len(questions)) if problems is None else np.asarray(problems)
    distinct = len(np.unique(numbers))
    solved = {str(k): pass_at_k(judged, correct, k) for k in ks(samples)}
    pass_at = {k: _mean(values) for k, values in solved.items()}
    voted = [majority(q.verdicts, q.answers) for q in questions] if votes else []
    return {
        'questions': len(questions),
        **({'problems': distinct} if distinct < len(questions) else {}),
        'samples': samples,
        'mean': _mean(accuracy),
        'interval': _interval(accuracy, numbers[judged > 0]),
        'pass': pass_at[str(samples)],
        'pass_interval': _interval(solved[str(samples)], numbers),
        'pass_at_k': pass_at,
        **({'maj': _mean(voted), 'maj_interval': _interval(voted, numbers)} if votes else {}),
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


def interval(values: np.ndarray, problems: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the mean of `values` [questions], whose problems are numbered in `problems` [questions].

    By bootstrap over problems. Where all problems score the same, as at 0 and at 100 %, resampling would show no width at all:
    there it is Wilson's, of as many trials as there are problems.
    """
    _, place, counts = np.unique(problems, return_inverse=True, return_counts=True)
    if len(counts) == len(values):
        of_problems, counts = values, None
    else:
        of_problems = np.bincount(place, values) / counts
    if np.ptp(of_problems) == 0:
        return wilson_interval(float(of_problems[0]), len(of_problems))
    return bootstrap_interval(of_problems, counts)


def bootstrap_interval(values: np.ndarray, counts: np.ndarray | None = None, level: float = 0.95) -> tuple[float, float]:
    """The interval of the mean of `values` [problems] by resampling them with replacement: the percentile bootstrap.

    `counts` weighs each by its number of questions. It covers how the mean varies over other problems of the kind. Samples of the
    same problems vary less.
    """
    drawn = np.random.default_rng(_SEED).integers(len(values), size=(_RESAMPLES, len(values)), dtype=np.int32)
    if counts is None:
        means = values[drawn].mean(axis=1)
    else:
        means = (values * counts)[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def wilson_interval(share: float, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share of so many independent trials; it has width at 0 and at 1 too."""
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = np.sqrt(z2 * (share * (1 - share) / trials + z2 / (4 * trials**2))) / (1 + z2 / trials)
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def _interval(values: Sequence[float], problems: np.ndarray) -> list[float] | None:
    """The interval of `_mean`."""
    there = ~np.isnan(values)
    return list(interval(np.asarray(values)[there], problems[there])) if there.any() else None


def _mean(values: Sequence[float]) -> float | None:
    """The mean of the values that are not nan; None where there are none, since JSON has no nan."""
    kept = np.asarray(values)[~np.isnan(values)]
    return float(kept.mean()) if len(kept) else None
