"""A policy's scores on a benchmark: mean@n, pass@k, maj@n and confidence intervals. Needs only numpy.

A question has n judged responses, of which c are correct. If the verifier failed on a response (an
infrastructure error), the response is not wrong but is excluded from n. A question with too few responses for
a measure is excluded from the mean of that measure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.groups import Group, Verdict

_RESAMPLES, _SEED = 10_000, 0  # of the bootstrap; fixed, so that the same samples give the same interval


class Question(NamedTuple):
    """The data of one question's responses that the scores need. Each field has one entry per response."""

    verdicts: tuple[Verdict, ...]
    answers: tuple[str | None, ...]  # as the verifier extracted them
    lengths: tuple[int, ...]  # in tokens
    truncated: tuple[bool, ...]  # cut at the token limit


def question(group: Group) -> Question:
    """The `Question` for a judged group."""
    lengths = tuple(len(r.tokens) for r in group.responses)
    return Question(
        group.verdicts, group.answers, lengths, tuple(r.finish == 'length' for r in group.responses)
    )


def summary(
    questions: Sequence[Question], votes: bool, problems: Sequence[int] | None = None
) -> dict[str, Any]:
    """A benchmark's scores, ready for JSON. All questions must have the same number of responses, `samples`.

    `problems` gives the number of each question's problem, if a file asks some problems more than once; None
    means that all differ. Copies add no information about other problems, so intervals are over problems.
    `problems` in the result is their number.

    mean        mean of c/n over questions; `interval` is its 95 % confidence interval over problems
    pass_at_k   {k: pass@k} for powers of two up to `samples`, and `samples` itself; `pass` is the last one
    maj         maj@n, if `votes`: the task's answers can be voted on
    pass_interval, maj_interval     intervals of `pass` and `maj`
    truncated   share of responses cut at the token limit; `length` is the mean number of tokens
    correct     c of every question

    A measure is None if no question has enough judged responses. Raises ValueError if there are no questions.
    """
    if not questions:
        raise ValueError('a benchmark must have at least one question')
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
    """The values of k for pass@k: powers of two up to `samples`, and `samples` itself."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples})


def pass_at_k(judged: np.ndarray, correct: np.ndarray, k: int) -> np.ndarray:
    """pass@k of every question, 1 - C(n-c, k) / C(n, k) (Chen et al., arXiv 2107.03374); nan if n < k.

    n (`judged`) and c (`correct`) are int [questions]. This is the probability that k of the n responses,
    drawn without replacement, include a correct one: an unbiased estimate of the policy's pass@k.
    """
    i = np.arange(k)
    # C(n-c, k) / C(n, k) is the product of (n-c-i) / (n-i) over i < k; one is 0 if fewer than k are wrong.
    wrong, left = np.maximum((judged - correct)[:, None] - i, 0), np.maximum(judged[:, None] - i, 1)
    return np.where(judged >= k, 1 - np.prod(wrong / left, axis=1), np.nan)


def majority(verdicts: Sequence[Verdict], answers: Sequence[str | None]) -> float:
    """The correctness of a question's most frequent answer, averaged over ties.

    Answers are compared as strings. A response does not vote if it has no answer, is unparseable, or its
    verifier failed. Without votes the result is 0, or nan if the verifier failed on all responses.
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
    """The 95 % confidence interval of the mean of `values` [questions].

    `problems` [questions] has the number of each question's problem. The interval bootstraps over problems.
    If all problems have the same score, as at 0 and 100 %, the bootstrap interval would have no width; then
    it is Wilson's interval, with one trial per problem.
    """
    _, place, counts = np.unique(problems, return_inverse=True, return_counts=True)
    if len(counts) == len(values):
        of_problems, counts = values, None
    else:
        of_problems = np.bincount(place, values) / counts
    if np.ptp(of_problems) == 0:
        return wilson_interval(float(of_problems[0]), len(of_problems))
    return bootstrap_interval(of_problems, counts)


def bootstrap_interval(
    values: np.ndarray, counts: np.ndarray | None = None, level: float = 0.95
) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean of `values` [problems].

    `counts` weights each problem by its number of questions. The interval covers variation over other
    problems of the same kind. New samples for the same problems vary less.
    """
    drawn = np.random.default_rng(_SEED).integers(len(values), size=(_RESAMPLES, len(values)), dtype=np.int32)
    if counts is None:
        means = values[drawn].mean(axis=1)
    else:
        means = (values * counts)[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def wilson_interval(share: float, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a share of `trials` independent trials; it has width even at 0 and 1."""
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = np.sqrt(z2 * (share * (1 - share) / trials + z2 / (4 * trials**2))) / (1 + z2 / trials)
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def _interval(values: Sequence[float], problems: np.ndarray) -> list[float] | None:
    """The confidence interval of `_mean`; None if all values are nan."""
    there = ~np.isnan(values)
    return list(interval(np.asarray(values)[there], problems[there])) if there.any() else None


def _mean(values: Sequence[float]) -> float | None:
    """The mean of the values that are not nan; None if all are nan, since JSON has no nan."""
    kept = np.asarray(values)[~np.isnan(values)]
    return float(kept.mean()) if len(kept) else None
