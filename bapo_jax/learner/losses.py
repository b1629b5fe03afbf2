"""The one loss kernel: per-token arrays in, per-token arrays out. No model, no config object, no reduction.

Every clipped policy-gradient method here is this kernel with other arrays (algorithms of `bapo_jax/methods.py`):
the anchor is the ratio's denominator, the importance weight multiplies the clipped term, the clip centre is where the trust
region sits, the KL log-prob is what the policy is held close to. Arrays share one shape, here written T.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_LOG_RATIO_LIMIT = 20.0  # exp(20) is far beyond any trust region; what lies past it is only an overflow


class TokenLoss(NamedTuple):
    policy_T: jax.Array  # clipped surrogate, to be minimised
    kl_T: jax.Array  # k3 estimate of the divergence from the KL target, >= 0
    ratio_T: jax.Array  # pi_theta / anchor
    clipped_T: jax.Array  # bool: the clip holds back this token's gradient


def policy_loss(
    logp_T: jax.Array,
    anchor_logp_T: jax.Array,
    weight_T: jax.Array,
    clip_centre_T: jax.Array,
    kl_logp_T: jax.Array,
    advantage_T: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """- w · min(ρ A, clip(ρ, c - ε_low, c + ε_high) A), and the k3 divergence. BAPO eq. 1 and 3; GRPO; decoupled PPO.

    With `dual_clip` = d, a negative advantage never costs more than -d·A however large ρ grows (Ye et al. 2020; d = 3 in
    the authors' runs). k3 = e^Δ - Δ - 1 with Δ = kl_logp - logp, clamped to 10 as in verl.
    """
    ratio_T = jnp.exp(jnp.clip(logp_T - anchor_logp_T, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))
    inside_T = jnp.clip(ratio_T, clip_centre_T - clip_low, clip_centre_T + clip_high)
    loss_T = -jnp.minimum(ratio_T * advantage_T, inside_T * advantage_T)
    clipped_T = ratio_T * advantage_T > inside_T * advantage_T
    if dual_clip is not None:
        loss_T = jnp.where(advantage_T < 0, jnp.minimum(loss_T, -dual_clip * advantage_T), loss_T)
    gap_T = jnp.clip(kl_logp_T - logp_T, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    kl_T = jnp.clip(jnp.exp(gap_T) - gap_T - 1.0, -10.0, 10.0)
    return TokenLoss(weight_T * loss_T, kl_T, ratio_T, clipped_T)


def truncated_weight(proximal_logp_T: jax.Array, behaviour_logp_T: jax.Array, cap: float) -> jax.Array:
    """min(π_prox / α, cap), the importance weight of decoupled PPO (truncated importance sampling); not differentiated."""
    log_weight_T = jnp.clip(proximal_logp_T - behaviour_logp_T, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_weight_T), cap))


def total_variation(logp_T: jax.Array, behaviour_logp_T: jax.Array) -> jax.Array:
    """(1 - π_θ/α)_+ at tokens drawn from α: in [0, 1], and its mean is an unbiased estimate of TV(π_θ, α) = ½ Σ|π_θ - α|."""
    return 1.0 - jnp.exp(jnp.minimum(logp_T - behaviour_logp_T, 0.0))
