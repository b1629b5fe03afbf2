"""Estimates of the terms and constants of BAPO's improvement bound. They are logged, and never gate training.

The bound, for origins X1, X2, X3 with behaviour policies α_1, α_2, α_3:

    E_x[I(x) (J(π_θ) - J(π_θt))] >= Σ_i E_{x in X_i}[L_i - 2 K_i TV(π_θ, α_i) - 2 TV(π_θt, α_i)],
    L_i = (J(π_θ) - J(α_i)) / σ_i

π_θt is the policy before a step's update, π_θ the policy after it, and σ_i the standard deviation of the
rewards under α_i. Responses carry their log-probs under α_i, so scoring them once gives ρ = π/α and an
estimate of every term. Only trained tokens count. Values are averaged over the G responses of a prompt, then
over an origin's prompts.

`monitor` returns these metrics; an origin without groups in the batch has no keys:

    theory/K1                         eq. 11: the bound's penalty factor for distance from α_1; 1 at accuracy
                                      ½, larger elsewhere
    theory/K2, theory/K3              the same for X2 and X3: the largest K of the levels k/G that can occur
                                      there
    theory/{K2,K3}_printed            eq. 12 and 13 as printed. Their step "c1 < μ < 1, so μ(1-μ) > c1(1-c1)"
                                      is false near μ = 1: K2 as printed is too small for G = 16, and for c1 =
                                      1/2
    theory/delta{1,3}/{mean,p95,max}  δ1 and δ3: sequence TV(π_θt, α) over the prompts of X1 and X3; the
                                      theorem assumes that it is small
    theory/tv_token/ORIGIN            TV(π_θt, α) of the next token, mean over the tokens of a response, in
                                      [0, 1]
    theory/tv_sequence/ORIGIN         TV(π_θt, α) of whole responses, in [0, 1]. For X2, α is π_θt, so it
                                      measures only the engine mismatch
    theory/tv_bound/ORIGIN            upper bound of tv_sequence from the estimated KL: the lower of Pinsker's
                                      and Bretagnolle-Huber's
    theory/kl_sequence/ORIGIN         KL(α || π_θt) of whole responses in nats, by k3: never negative
    theory/kl_sequence_k1/ORIGIN      the same by k1. If the two stay apart, a few responses dominate the
                                      estimate, or the stored log-probs are not the sampler's
    theory/ess_sequence/ORIGIN        effective sample size as a share of the n responses: 1 at ρ = 1, 1/n if
                                      one response has all the weight
    theory/surrogate/ORIGIN           L of π_θt; 0 if α is π_θt
    theory/bound/ORIGIN               the origin's summand; below 0 it guarantees no improvement
    theory/surrogate_after/ORIGIN     L of π_θ, if log-probs after the update are given; `bound` is then that
                                      of π_θ, not π_θt
    theory/tv_sequence_after/ORIGIN   TV(π_θ, α) of whole responses, if log-probs after the update are given

Expect tv_sequence close to 1 for long responses. At 8,000 tokens, a KL of 0.001 nats per token is 8 nats per
response: a TV of 0.95 if the log ratio is Gaussian. The theorem's premise then fails for any method; tv_token
and kl_sequence still tell policies apart. K, L and the bound assume rewards of 0 and 1. `surrogate` and
`bound` exclude prompts that are all right or all wrong, because the theorem does not cover them. Groups enter
X1, X2 and X3 according to their rewards, so every estimate is conditional on that selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bapo_jax.groups import X1, Author, Batch, Group, taken
from bapo_jax.replay.bapo import X2, X3

ByToken = Sequence[Sequence[np.ndarray]]  # for each group and each response: one number per token
EPS = 1e-6  # ε of eq. 2 and 11-13, under the root
_LOG_RATIO_LIMIT = 20.0  # a ratio beyond exp(±20) is an overflow, not a measurement
_TOLERANCE = 1e-6  # in units of k: a threshold on the grid includes its own level, as in replay's selection


# ---- constants


def constants(G: int, c1: float, low: float, high: float, eps: float = EPS) -> dict[str, float]:
    """K1, K2, K2_printed, K3, K3_printed of eq. 11-13: (1 - s) / s with s² = eps + the least variance μ(1-μ).

    Each prompt has G responses; X2 holds c1 < k/G < 1, X3 holds low <= k/G <= high. K2 and K3 use the least
    variance over the levels k in these ranges, and are nan if a range is empty. The printed versions use the
    variance at c1, and at the worse of low and high.
    """

    def of_variance(variance: float) -> float:
        s = math.sqrt(variance + eps)
        return (1 - s) / s

    def of_levels(levels: Sequence[int]) -> float:
        return of_variance(min(k * (G - k) for k in levels) / G**2) if levels else math.nan

    return {
        'K1': of_variance((G - 1) / G**2),
        'K2': of_levels([k for k in range(G) if k > c1 * G + _TOLERANCE]),
        'K2_printed': of_variance(c1 * (1 - c1)),
        'K3': of_levels([k for k in range(G + 1) if low * G - _TOLERANCE <= k <= high * G + _TOLERANCE]),
        'K3_printed': of_variance(min(low * (1 - low), high * (1 - high))),
    }


# ---- estimators on one response y sampled from q; `gap` is log p - log q of its tokens, float64 [tokens]


def token_tv(gap: np.ndarray) -> float:
    """Mean over tokens of (1 - ρ_k)_+.

    Its expectation at a position is TV(p, q) of that token, given the tokens before it.
    """
    return float(-np.expm1(np.minimum(gap, 0.0)).sum() / max(1, len(gap)))


def sequence_tv(gap: np.ndarray) -> float:
    """(1 - ρ)_+ with ρ = p(y) / q(y): in [0, 1], with expectation TV(p, q) = ½ Σ_y |p(y) - q(y)|."""
    return max(0.0, 1.0 - sequence_ratio(gap))


def sequence_ratio(gap: np.ndarray) -> float:
    """ρ = p(y) / q(y), with log ρ clamped to ±20."""
    return float(np.exp(np.clip(gap.sum(), -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)))


def sequence_kl_k1(gap: np.ndarray) -> float:
    """-log ρ, with expectation KL(q || p) of whole responses; often negative for a single response."""
    return float(-gap.sum())


def sequence_kl_k3(gap: np.ndarray) -> float:
    """Sum over tokens of ρ_k - 1 - log ρ_k, which is never negative; its expectation is also KL(q || p).

    log ρ_k is clamped to ±20.
    """
    gap = np.clip(gap, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return float((np.expm1(gap) - gap).sum())


# ---- bounds, and statistics over many responses


def pinsker(kl: np.ndarray) -> np.ndarray:
    """TV <= sqrt(KL / 2); vacuous above 2 nats."""
    return np.sqrt(kl / 2)


def bretagnolle_huber(kl: np.ndarray) -> np.ndarray:
    """TV <= sqrt(1 - exp(-KL)), below 1 at any KL."""
    return np.sqrt(-np.expm1(-kl))


def effective_share(ratios: np.ndarray) -> float:
    """(Σ ρ)² / (n Σ ρ²), in [1/n, 1]: the effective sample size as a share of the n responses."""
    return float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()))


def log_ratios(groups: Sequence[Group], logp: ByToken) -> ByToken:
    """Returns log p - log q of the trained tokens, float64.

    `logp` is log p of every token; q is the policy that sampled them.
    """
    return [
        [
            (now.astype(np.float64) - r.logp)[r.trained_on]
            for r, now in zip(g.responses, group_values, strict=True)
        ]
        for g, group_values in zip(groups, logp, strict=True)
    ]


def per_prompt(estimator: Callable[[np.ndarray], float], gaps: ByToken) -> np.ndarray:
    """The mean of the estimator over each prompt's responses, [prompts]."""
    return np.array([np.mean([estimator(gap) for gap in group_values]) for group_values in gaps])


# ---- the bound


class Bound(NamedTuple):
    """One origin's summand of the bound and its terms, as means over prompts."""

    surrogate: float  # L of the current policy
    tv_now: float  # TV(current policy, α) of whole responses
    tv_start: float  # TV(π_θt, α) of whole responses
    value: float  # surrogate - factor · K · tv_now - factor · tv_start


def bound_terms(
    groups: Sequence[Group], start: ByToken, now: ByToken, K: float, factor: float = 2.0
) -> Bound:
    """Returns the bound over groups of one origin.

    `start` and `now` are log ratios of π_θt and of the current policy to α (`log_ratios`). L is estimated by
    mean_j ρ_j Â_j, with Â of eq. 2 and ρ of whole responses. Â subtracts the mean of the same G rewards,
    which shrinks the expectation by (G - 1) / G. The paper's factor 2 is for |r| <= 1; 1 is enough for
    rewards in [0, 1], where |J(p) - J(q)| <= TV(p, q).
    """
    ratios = [np.array([sequence_ratio(gap) for gap in group_values]) for group_values in now]
    surrogate = np.mean(
        [np.mean(ratio * _advantages(g.rewards)) for g, ratio in zip(groups, ratios, strict=True)]
    )
    tv_now, tv_start = per_prompt(sequence_tv, now).mean(), per_prompt(sequence_tv, start).mean()
    value = surrogate - factor * K * tv_now - factor * tv_start
    return Bound(float(surrogate), float(tv_now), float(tv_start), float(value))


def _advantages(rewards: np.ndarray) -> np.ndarray:
    """Â of eq. 2 for one prompt [G], with the population variance."""
    rewards = rewards.astype(np.float64)
    return (rewards - rewards.mean()) / np.sqrt(rewards.var() + EPS)


# ---- the metrics row


def monitor(
    batch: Batch, logp_before: ByToken, logp_after: ByToken | None, *, c1: float, low: float, high: float
) -> dict[str, float]:
    """Returns the metrics listed in this module's docstring, for a batch.

    `logp_before` and `logp_after` are log-probs of every response token, as `Learner.score` returns them; the
    latter may be None. c1, low = c2(t) and high = c3(t) are the thresholds that the batch was composed with.
    Traces do not count: nobody knows the policy that wrote them.
    """
    row = {}
    for number, origin in enumerate((X1, X2, X3), 1):
        at = [i for i, o in enumerate(batch.origins) if o == origin]
        if not at:
            continue
        every = batch.of_origin(origin)
        before = _without_traces(every, log_ratios(every, [logp_before[i] for i in at]))
        after = None
        if logp_after is not None:
            after = _without_traces(every, log_ratios(every, [logp_after[i] for i in at]))
        groups = [taken(g, own) if len(own := _own(g)) < g.size else g for g in every]
        K = constants(groups[0].size, c1, low, high)
        row |= {f'theory/{name}': value for name, value in K.items() if name.startswith(f'K{number}')}
        row |= {f'theory/{name}/{origin}': value for name, value in _distances(before).items()}
        if origin in (X1, X3):
            row |= {f'theory/delta{number}/{name}': value for name, value in _delta(before).items()}
        if after is not None:
            row[f'theory/tv_sequence_after/{origin}'] = float(per_prompt(sequence_tv, after).mean())
        row |= {
            f'theory/{name}/{origin}': value
            for name, value in _bound(groups, before, after, K[f'K{number}']).items()
        }
    return row


def _own(group: Group) -> list[int]:
    """The places of a group's responses that are not traces."""
    return [i for i, r in enumerate(group.responses) if not r.by(Author.TRACE).any()]


def _without_traces(groups: Sequence[Group], gaps: ByToken) -> ByToken:
    return [[of_group[i] for i in _own(g)] for g, of_group in zip(groups, gaps, strict=True)]


def _distances(gaps: ByToken) -> dict[str, float]:
    kl = per_prompt(sequence_kl_k3, gaps)
    return {
        'tv_token': float(per_prompt(token_tv, gaps).mean()),
        'tv_sequence': float(per_prompt(sequence_tv, gaps).mean()),
        'tv_bound': float(np.minimum(pinsker(kl), bretagnolle_huber(kl)).mean()),
        'kl_sequence': float(kl.mean()),
        'kl_sequence_k1': float(per_prompt(sequence_kl_k1, gaps).mean()),
        'ess_sequence': effective_share(
            np.array([sequence_ratio(gap) for group_values in gaps for gap in group_values])
        ),
    }


def _delta(gaps: ByToken) -> dict[str, float]:
    tv = per_prompt(sequence_tv, gaps)
    return {'mean': float(tv.mean()), 'p95': float(np.percentile(tv, 95)), 'max': float(tv.max())}


def _bound(groups: Sequence[Group], before: ByToken, after: ByToken | None, K: float) -> dict[str, float]:
    covered = [i for i, g in enumerate(groups) if 0 < g.correct < g.size]
    if not covered:
        return {}
    groups, before = [groups[i] for i in covered], [before[i] for i in covered]
    bound = bound_terms(groups, before, before, K)
    if after is None:
        return {'surrogate': bound.surrogate, 'bound': bound.value}
    updated = bound_terms(groups, before, [after[i] for i in covered], K)
    return {'surrogate': bound.surrogate, 'surrogate_after': updated.surrogate, 'bound': updated.value}
