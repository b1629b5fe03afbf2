"""Surrogates, KL estimators and ratio levels, as functions of per-token arrays without any reduction.

    surrogate(tokens, clip) -> (loss_RxT, held_RxT)     a loss to minimise; held: the clip stops the gradient
    estimator(logp, target logp) -> kl_RxT              an estimate of the divergence from the target policy
    level(log ratio, response, axis) -> log ratio       the log of the importance ratio; if a mesh axis splits
                                                        the tokens of rows, it is `axis`

Shapes:  R rows · T tokens in a row · S responses.  `learner/objective.py` combines a row's choices of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

_LOG_RATIO_LIMIT = 20.0  # exp(20) is far beyond any trust region; larger values only overflow
_MOST_WEIGHT = 20.0  # C of `binary_tv`: the paper wants it large; verl's code falls back to 20


class Tokens(NamedTuple):
    """The per-token inputs of a surrogate; 0 except on response tokens."""

    logp_RxT: jax.Array  # log π_θ, differentiated
    ratio_RxT: jax.Array  # ρ, the importance ratio π_θ / anchor at the row's level, differentiated
    advantage_RxT: jax.Array  # A
    centre_RxT: jax.Array  # c, the centre of the trust region
    behaviour_RxT: jax.Array  # log-prob as sampled or stored; 0 if it is unknown
    log_ratio_RxT: jax.Array  # log ρ, not bounded


class Clip(NamedTuple):
    """The trust region [c - low, c + high] of the importance ratio.

    `dual` bounds the loss of negative advantages; None means no bound.
    """

    low: float | jax.Array  # an array has one number per token
    high: float | jax.Array
    dual: float | None


Surrogate = Callable[[Tokens, Clip], tuple[jax.Array, jax.Array]]


def clipped(tokens: Tokens, clip: Clip) -> tuple[jax.Array, jax.Array]:
    """-min(ρ A, clip(ρ, c - ε_low, c + ε_high) A): PPO's clipped surrogate, BAPO eq. 1 and 3, GRPO.

    With `clip.dual` = d, the loss of a negative advantage is at most -d·A for any ρ (Ye et al. 2020; d = 3 in
    the authors' runs).
    """
    ratio_RxT, advantage_RxT = tokens.ratio_RxT, tokens.advantage_RxT
    inside_RxT = jnp.clip(ratio_RxT, tokens.centre_RxT - clip.low, tokens.centre_RxT + clip.high)
    loss_RxT = -jnp.minimum(ratio_RxT * advantage_RxT, inside_RxT * advantage_RxT)
    held_RxT = ratio_RxT * advantage_RxT > inside_RxT * advantage_RxT
    if clip.dual is not None:
        loss_RxT = jnp.where(advantage_RxT < 0, jnp.minimum(loss_RxT, -clip.dual * advantage_RxT), loss_RxT)
    return loss_RxT, held_RxT


def cispo(tokens: Tokens, clip: Clip) -> tuple[jax.Array, jax.Array]:
    """-sg(clip(ρ, c - ε_low, c + ε_high)) A log π_θ (CISPO).

    The clip bounds a token's weight and stops no gradient. Here `held` means that the weight was clipped.
    """
    inside_RxT = jnp.clip(tokens.ratio_RxT, tokens.centre_RxT - clip.low, tokens.centre_RxT + clip.high)
    loss_RxT = -jax.lax.stop_gradient(inside_RxT) * tokens.advantage_RxT * tokens.logp_RxT
    return loss_RxT, inside_RxT != tokens.ratio_RxT


def binary_tv(tokens: Tokens, clip: Clip) -> tuple[jax.Array, jax.Array]:
    """-sg(min(ρ, C)) A log π_θ, but 0 where π_θ is too far from the anchor (DPPO, arXiv 2602.04879).

    Too far means π_θ - anchor > ε_high if A > 0, and < -ε_low if A < 0. These are the token's probabilities:
    the difference is the total variation of (p, 1 - p), which the paper calls Binary-TV. ρ must be per token.
    """
    p_RxT = jax.lax.stop_gradient(jnp.exp(tokens.logp_RxT))
    weight_RxT = jax.lax.stop_gradient(tokens.ratio_RxT)
    moved_RxT = p_RxT - p_RxT / weight_RxT
    risen_RxT = (tokens.advantage_RxT > 0) & (moved_RxT > clip.high)
    fallen_RxT = (tokens.advantage_RxT < 0) & (moved_RxT < -clip.low)
    held_RxT = risen_RxT | fallen_RxT
    loss_RxT = -jnp.minimum(weight_RxT, _MOST_WEIGHT) * tokens.advantage_RxT * tokens.logp_RxT
    return jnp.where(held_RxT, 0.0, loss_RxT), held_RxT


def unclipped(tokens: Tokens, clip: Clip) -> tuple[jax.Array, jax.Array]:
    """-ρ A: importance sampling without a trust region (LUFFY)."""
    return -tokens.ratio_RxT * tokens.advantage_RxT, jnp.zeros_like(tokens.ratio_RxT, bool)


@functools.cache  # one function a number: the step is compiled once
def shaped(gamma: float) -> Surrogate:
    """-f(w) A with f(w) = w / (w + γ): policy shaping (LUFFY, arXiv 2504.14945; ExGRPO, arXiv 2510.02245).

    w is π_θ / the stored probability of a trace's token, or π_θ itself if that is unknown.
    """

    def surrogate(tokens: Tokens, clip: Clip) -> tuple[jax.Array, jax.Array]:
        weight_RxT = importance_ratio(tokens.logp_RxT - tokens.behaviour_RxT)
        return -weight_RxT / (weight_RxT + gamma) * tokens.advantage_RxT, jnp.zeros_like(weight_RxT, bool)

    return surrogate


@functools.cache
def regression(tau: float) -> Surrogate:
    """-A log π_θ + τ/2 S Δ, with Δ = log π_θ/α of a token and S its sum over the response (Kimi k1.5).

    Over a response, this sums to -A log π_θ(y) + τ/2 S². With A = r - mean, its gradient is that of
    arXiv 2501.12599, eq. 3. It needs the ratio level `response` and the behaviour policy as anchor.
    """

    def surrogate(tokens: Tokens, clip: Clip) -> tuple[jax.Array, jax.Array]:
        gap_RxT = tokens.logp_RxT - tokens.behaviour_RxT
        loss_RxT = -tokens.advantage_RxT * tokens.logp_RxT + tau / 2 * tokens.log_ratio_RxT * gap_RxT
        return loss_RxT, jnp.zeros_like(gap_RxT, bool)

    return surrogate


def cross_entropy(tokens: Tokens, clip: Clip) -> tuple[jax.Array, jax.Array]:
    """-log π_θ: supervised learning of a trace's tokens (ReLIFT, arXiv 2506.07527)."""
    return -tokens.logp_RxT, jnp.zeros_like(tokens.logp_RxT, bool)


def importance_ratio(log_ratio_RxT: jax.Array) -> jax.Array:
    """Returns exp(log ratio), clipped against overflow."""
    return jnp.exp(jnp.clip(log_ratio_RxT, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))


def token_level(log_ratio_RxT: jax.Array, response_RxT: jax.Array, axis: str | None = None) -> jax.Array:
    """Each token has its own ratio."""
    return log_ratio_RxT


def sequence_level(log_ratio_RxT: jax.Array, response_RxT: jax.Array, axis: str | None = None) -> jax.Array:
    """Each token gets its response's mean log ratio, so ρ is the geometric mean over its tokens (GSPO)."""
    count_RxS = _sums_of_responses(jnp.ones_like(log_ratio_RxT), response_RxT, axis)
    mean_RxS = _sums_of_responses(log_ratio_RxT, response_RxT, axis) / jnp.maximum(count_RxS, 1.0)
    return _at_tokens(mean_RxS, response_RxT)


def response_level(log_ratio_RxT: jax.Array, response_RxT: jax.Array, axis: str | None = None) -> jax.Array:
    """Each token gets the sum of its response's log ratios, so ρ is the ratio of the whole response."""
    return _at_tokens(_sums_of_responses(log_ratio_RxT, response_RxT, axis), response_RxT)


def _sums_of_responses(x_RxT: jax.Array, response_RxT: jax.Array, axis: str | None) -> jax.Array:
    """The sum over each response of a row, [R, S]: more than there are; 0 is for all other tokens."""
    most = response_RxT.shape[1] * (jax.lax.psum(1, axis) if axis else 1) + 1
    sum_RxS = jax.vmap(lambda x_T, response_T: jax.ops.segment_sum(x_T, response_T, most))(
        x_RxT, response_RxT
    )
    return jax.lax.psum(sum_RxS, axis) if axis else sum_RxS


def _at_tokens(x_RxS: jax.Array, response_RxT: jax.Array) -> jax.Array:
    return jax.vmap(lambda x_S, response_T: x_S[response_T])(x_RxS, response_RxT)


def truncated_weight(proximal_logp_RxT: jax.Array, behaviour_logp_RxT: jax.Array, cap: float) -> jax.Array:
    """min(π_prox / α, cap), decoupled PPO's truncated importance weight; not differentiated."""
    return jax.lax.stop_gradient(jnp.minimum(importance_ratio(proximal_logp_RxT - behaviour_logp_RxT), cap))


def masked_weight(proximal_logp_RxT: jax.Array, behaviour_logp_RxT: jax.Array, cap: float) -> jax.Array:
    """π_prox / α, or 0 where it exceeds the cap (AReaL); not differentiated."""
    weight_RxT = importance_ratio(proximal_logp_RxT - behaviour_logp_RxT)
    return jax.lax.stop_gradient(jnp.where(weight_RxT > cap, 0.0, weight_RxT))


def k3(logp_RxT: jax.Array, target_logp_RxT: jax.Array) -> jax.Array:
    """Schulman's k3 = e^Δ - Δ - 1 >= 0 with Δ = log π_target - log π_θ, clamped to 10 as in verl."""
    gap_RxT = jnp.clip(target_logp_RxT - logp_RxT, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return jnp.clip(jnp.exp(gap_RxT) - gap_RxT - 1.0, -10.0, 10.0)


def total_variation(logp_RxT: jax.Array, behaviour_logp_RxT: jax.Array) -> jax.Array:
    """(1 - π_θ/α)_+ at tokens drawn from α, in [0, 1].

    Its mean is an unbiased estimate of TV(π_θ, α) = ½ Σ|π_θ - α|.
    """
    return 1.0 - jnp.exp(jnp.minimum(logp_RxT - behaviour_logp_RxT, 0.0))


SURROGATES: dict[str, Surrogate] = {
    'clip': clipped,
    'cispo': cispo,
    'binary_tv': binary_tv,
    'unclipped': unclipped,
}
RATIO_LEVELS = {'token': token_level, 'sequence': sequence_level, 'response': response_level}
IMPORTANCE_WEIGHTS = {'truncate': truncated_weight, 'mask': masked_weight}
