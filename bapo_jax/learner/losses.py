"""Surrogates, KL estimators and ratio levels: per-token arrays in, per-token arrays out. No model, no config object, no reduction.

    surrogate(tokens, clip) -> (loss_RxT, held_RxT)     a loss to be minimised; held: the clip holds back this token's gradient
    estimator(logp, target logp) -> kl_RxT              an estimate of the divergence from the target policy
    level(log ratio, response) -> log ratio             of which the importance ratio is taken

Shapes:  R rows · T tokens in a row.  `learner/objective.py` puts a row's choices of these together.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_LOG_RATIO_LIMIT = 20.0  # exp(20) is far beyond any trust region; what lies past it is only an overflow


class Tokens(NamedTuple):
    """What a surrogate sees of each token; 0 except on response tokens."""

    logp_RxT: jax.Array  # log π_θ, differentiated
    ratio_RxT: jax.Array  # ρ, the importance ratio π_θ / anchor at the row's level, differentiated
    advantage_RxT: jax.Array  # A
    centre_RxT: jax.Array  # c, where the trust region sits


class Clip(NamedTuple):
    """The trust region [c - low, c + high] of the importance ratio; `dual` bounds a negative advantage's loss, None: not at all."""

    low: float
    high: float
    dual: float | None


def clipped(tokens: Tokens, clip: Clip) -> tuple[jax.Array, jax.Array]:
    """-min(ρ A, clip(ρ, c - ε_low, c + ε_high) A): PPO's clipped surrogate, BAPO eq. 1 and 3, GRPO.

    With `clip.dual` = d, a negative advantage never costs more than -d·A however large ρ grows (Ye et al. 2020; d = 3 in
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
    """-sg(clip(ρ, c - ε_low, c + ε_high)) A log π_θ: the clip bounds a token's weight and holds back no gradient (CISPO).

    What is held here is the weight of a token.
    """
    inside_RxT = jnp.clip(tokens.ratio_RxT, tokens.centre_RxT - clip.low, tokens.centre_RxT + clip.high)
    loss_RxT = -jax.lax.stop_gradient(inside_RxT) * tokens.advantage_RxT * tokens.logp_RxT
    return loss_RxT, inside_RxT != tokens.ratio_RxT


def importance_ratio(log_ratio_RxT: jax.Array) -> jax.Array:
    """exp of the log ratio, cut where it would overflow."""
    return jnp.exp(jnp.clip(log_ratio_RxT, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))


def token_level(log_ratio_RxT: jax.Array, response_RxT: jax.Array) -> jax.Array:
    """Every token has a ratio of its own."""
    return log_ratio_RxT


def sequence_level(log_ratio_RxT: jax.Array, response_RxT: jax.Array) -> jax.Array:
    """Every token of a response has the mean of its tokens' log ratios, so ρ is their geometric mean (GSPO)."""

    def of_row(log_ratio_T, response_T):
        segments = response_T.shape[0] + 1  # more than a row has responses; number 0 is what belongs to none
        total = jax.ops.segment_sum(log_ratio_T, response_T, segments)
        count = jax.ops.segment_sum(jnp.ones_like(log_ratio_T), response_T, segments)
        return (total / jnp.maximum(count, 1.0))[response_T]

    return jax.vmap(of_row)(log_ratio_RxT, response_RxT)


def truncated_weight(proximal_logp_RxT: jax.Array, behaviour_logp_RxT: jax.Array, cap: float) -> jax.Array:
    """min(π_prox / α, cap), the importance weight of decoupled PPO (truncated importance sampling); not differentiated."""
    return jax.lax.stop_gradient(jnp.minimum(importance_ratio(proximal_logp_RxT - behaviour_logp_RxT), cap))


def k3(logp_RxT: jax.Array, target_logp_RxT: jax.Array) -> jax.Array:
    """Schulman's k3 = e^Δ - Δ - 1 >= 0 with Δ = log π_target - log π_θ, clamped to 10 as in verl."""
    gap_RxT = jnp.clip(target_logp_RxT - logp_RxT, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return jnp.clip(jnp.exp(gap_RxT) - gap_RxT - 1.0, -10.0, 10.0)


def total_variation(logp_RxT: jax.Array, behaviour_logp_RxT: jax.Array) -> jax.Array:
    """(1 - π_θ/α)_+ at tokens drawn from α: in [0, 1], and its mean is an unbiased estimate of TV(π_θ, α) = ½ Σ|π_θ - α|."""
    return 1.0 - jnp.exp(jnp.minimum(logp_RxT - behaviour_logp_RxT, 0.0))


SURROGATES = {'clip': clipped, 'cispo': cispo}
RATIO_LEVELS = {'token': token_level, 'sequence': sequence_level}
