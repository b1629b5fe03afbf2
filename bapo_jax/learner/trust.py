"""How far each token is trusted, from a mini-batch's scores and rewards before its update. Pure NumPy.

    second_moment_mask(log ratios [n], advantages [n], budget) -> [n]    factor of the advantage
    stale_clip(log ratios [n], quantile) -> [n], [n]                     factors of clip_low and clip_high
    success_clip(advantages [n], wrong shares [n], least) -> [n]         factor of clip_high

Each depends on other tokens than its own. The compiled step sees a mini-batch in parts, on several devices,
so they are computed here. The policy at the step's start, π_prox, thus stands for π_θ.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bapo_jax.groups import Author, Batch, ByGroup
from bapo_jax.learner.credit import on_trained

# learner.trust.kind -> the factors that it gives to each token; all are in [0, 1].
FACTORS: dict[str, tuple[str, ...]] = {
    'fixed': (),
    'second_moment': ('advantage',),
    'staleness': ('low', 'high'),
    'success': ('high',),
}
READS_RATIOS = 'second_moment', 'staleness'  # kinds that compare π_prox with the behaviour policy


def second_moment_mask(log_ratio: np.ndarray, advantage: np.ndarray, budget: float) -> np.ndarray:
    """Returns 0 for tokens to mask, else 1 (M2PO, arXiv 2510.01161, Algorithm 1).

    Counted are tokens whose ratio has moved in the direction of their advantage. While the mean of their
    squared log ratios exceeds the budget, the token with the largest is masked, and no longer counts.
    """
    counted = np.flatnonzero(log_ratio * advantage > 0)
    squares = log_ratio[counted] ** 2
    order = np.argsort(squares, kind='stable')
    # The mean of the n smallest never falls with n.
    means = np.cumsum(squares[order]) / np.arange(1, len(counted) + 1)
    factor = np.ones(len(log_ratio))
    factor[counted[order[(means <= budget).sum() :]]] = 0.0
    return factor


def stale_clip(log_ratio: np.ndarray, quantile: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the factors of clip_low and clip_high (SAT, arXiv 2607.18722).

    d is the log ratio, and q this quantile of |d|. Up to q both factors are 1. Beyond it, the clip is
    narrower on the side to which the ratio has moved: by 1 / (1 + (d/q)²).
    """
    distance = np.abs(log_ratio)
    q = np.quantile(distance, quantile) if len(distance) else 0.0
    factor = np.ones(len(distance))
    if q > 0:
        far = distance > q
        factor[far] = 1 / (1 + (distance[far] / q) ** 2)
    return np.where(log_ratio < 0, factor, 1.0), np.where(log_ratio > 0, factor, 1.0)


def success_clip(advantage: np.ndarray, wrong: np.ndarray, least: float) -> np.ndarray:
    """Returns the factor of clip_high (GAPO, arXiv 2609.00444): the rarer a success, the more it may rise.

    `wrong` is the share of wrong responses among the G - 1 others of the token's group. If the advantage is
    positive, the factor grows with it from `least`, clip_low / clip_high, to 1. Otherwise it is `least`.
    """
    return np.where(advantage > 0, least + (1 - least) * wrong, least)


def factors_of(
    learner: Any, batch: Batch, advantage: ByGroup, proximal: ByGroup | None
) -> dict[str, ByGroup]:
    """Returns the factors of a mini-batch's tokens, float32, by name (FACTORS); 1 on other authors' tokens.

    `learner` is the config's section. `proximal` has the log-probs under π_prox, which READS_RATIOS need.
    """
    kind = learner.trust.kind
    if kind == 'fixed':
        return {}
    own = [[r.by(Author.POLICY) for r in g.responses] for g in batch.groups]
    if kind == 'success':
        least = learner.clip_low / learner.clip_high
        factors = [success_clip(on_trained(advantage, own), on_trained(wrong_shares(batch), own), least)]
    else:
        log_ratio = on_trained(log_gaps(batch, proximal, learner.ratio_level), own)
        factors = (
            [second_moment_mask(log_ratio, on_trained(advantage, own), learner.trust.moment)]
            if kind == 'second_moment'
            else stale_clip(log_ratio, learner.trust.quantile)
        )
    return {name: _onto(own, factor) for name, factor in zip(FACTORS[kind], factors, strict=True)}


def log_gaps(batch: Batch, proximal: ByGroup, level: str) -> ByGroup:
    """Returns log π_prox / α of each token, float64; its mean over the response at the level 'sequence'."""
    gaps = [
        [np.subtract(p, r.logp, dtype=np.float64) for p, r in zip(of_group, g.responses, strict=True)]
        for of_group, g in zip(proximal, batch.groups, strict=True)
    ]
    if level == 'token':
        return gaps
    return [
        [np.full(len(gap), gap[r.trained_on].mean()) for gap, r in zip(of_group, g.responses, strict=True)]
        for of_group, g in zip(gaps, batch.groups, strict=True)
    ]


def wrong_shares(batch: Batch) -> ByGroup:
    """Returns (G - k) / (G - 1) of each token's group, at most 1: 1 with one correct response, 0 with G."""
    shares = [min(1.0, (g.size - g.correct) / max(1, g.size - 1)) for g in batch.groups]
    return [
        [np.full(len(r.tokens), s) for r in g.responses] for g, s in zip(batch.groups, shares, strict=True)
    ]


def _onto(where: ByGroup, values: np.ndarray) -> ByGroup:
    """Inverts `on_trained`, with 1 on all other tokens; float32."""
    result, at = [], 0
    for of_group in where:
        result.append([])
        for mask in of_group:
            factor = np.ones(len(mask), np.float32)
            n = int(mask.sum())
            factor[mask] = values[at : at + n]
            at += n
            result[-1].append(factor)
    return result
