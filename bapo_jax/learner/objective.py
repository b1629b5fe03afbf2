"""The objective of a row: which ratio, which surrogate, which trust region, held close to whom; and its value on packed rows.

Shapes:  R rows · T tokens in a row · O origins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.groups import ORIGINS
from bapo_jax.learner.losses import (
    RATIO_LEVELS, SURROGATES, Clip, Tokens, importance_ratio, k3, total_variation, truncated_weight,
)  # fmt: skip
from bapo_jax.learner.packed import Rows

# Roles: policies whose log-probs a row's objective reads. A response stores the behaviour policy's; the others are scored.
BEHAVIOUR, PROXIMAL, REFERENCE, PREVIOUS = 'behaviour', 'proximal', 'reference', 'previous'
# α, and α before the last sync, as servers hold them: for the probe (rollout/fidelity.py). No objective reads them.
ROLLOUT, BEFORE = 'rollout', 'before'


class KL(NamedTuple):
    """A penalty β · share · estimator(π_θ, the role's policy)."""

    role: str
    estimator: Callable[[jax.Array, jax.Array], jax.Array]
    share: str | None = None  # names one of the objective's numbers; None: 1


@dataclasses.dataclass(frozen=True)
class Objective:
    """What the compiled step is specialised to. Numbers that may vary by step are traced: see `numbers`."""

    ratio_level: str  # a name of RATIO_LEVELS
    surrogate: str  # a name of SURROGATES
    clip: Clip
    anchor: str  # the role in the ratio's denominator: behaviour or proximal
    clip_centre: str | None  # the role over the behaviour policy is the centre of the trust region; None: 1 is
    importance_cap: float | None  # the surrogate is multiplied by min(π_prox / α, cap); None: it is not
    kl: tuple[KL, ...]
    entropy: bool  # is there an entropy bonus

    @property
    def ratio_roles(self) -> set[str]:
        """The policies that the ratio, its trust region and its weight are made of."""
        return {self.anchor, self.clip_centre or BEHAVIOUR, PROXIMAL if self.importance_cap else BEHAVIOUR} - {BEHAVIOUR}

    @property
    def roles(self) -> tuple[str, ...]:
        """The policies that score a batch before its updates, in a fixed order."""
        return tuple(sorted(self.ratio_roles | {term.role for term in self.kl} - {BEHAVIOUR}))


def objective_of(learner: Any) -> Objective:
    """From the learner's part of a config."""
    decoupled = learner.anchor == 'decoupled'
    kl = {
        'none': (),
        'convex': (KL(REFERENCE, k3, 'reference_share'), KL(PREVIOUS, k3, 'previous_share')),
    }.get(learner.kl_target, (KL(learner.kl_target, k3),))
    return Objective(
        ratio_level=learner.ratio_level,
        surrogate=learner.surrogate,
        clip=Clip(learner.clip_low, learner.clip_high, learner.dual_clip or None),
        anchor=PROXIMAL if decoupled else learner.anchor,
        clip_centre=PROXIMAL if learner.clip_centre == 'proximal' else None,
        importance_cap=learner.importance_cap if decoupled else None,
        kl=kl,
        entropy=learner.entropy_coef != 0,
    )


def numbers_of(learner: Any, temperature: float, step: int) -> dict[str, np.float32]:
    """The scalars that the compiled step is given at every call."""
    share = 1.0 if switched(learner, step) else convex_share(step)
    numbers = {
        'temperature': temperature,
        'kl_coef': learner.kl_coef,
        'reference_share': share,
        'previous_share': 1 - share,
        'entropy_coef': learner.entropy_coef,
    }
    return {name: np.float32(value) for name, value in numbers.items()}


def switched(learner: Any, step: int) -> bool:
    """Whether `step` comes after the row's switch to GRPO (ReMix's policy reincarnation)."""
    return 0 < learner.switch_step < step


def convex_share(step: int) -> float:
    """ReMix's λ(t) = max(1 - 0.1 ⌈max(t - 50, 0) / 10⌉, 0.5), the reference policy's share of the KL penalty (arXiv 2507.06892)."""
    return max(1 - 0.1 * math.ceil(max(step - 50, 0) / 10), 0.5)


def evaluate_objective(
    objective: Objective, rows: Rows, logp_RxT: jax.Array, entropy_RxT: jax.Array, numbers: Mapping[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Σ weight · (importance weight · surrogate + β Σ share · KL - entropy bonus) over rows, and sums for the metrics.

    Of a metric whose name ends in _max it is the largest. All but actor/pg_loss are over tokens, which count alike whatever the weight.

    `logp_RxT` and `entropy_RxT` are those of π_θ; what they hold where no response token is does not count.
    """
    response_RxT = rows.sequences.response > 0
    logp_RxT = jnp.where(response_RxT, logp_RxT, 0.0)
    roles = {BEHAVIOUR: rows.behaviour, **rows.roles}
    anchor_RxT = roles[objective.anchor]
    log_ratio_RxT = RATIO_LEVELS[objective.ratio_level](logp_RxT - anchor_RxT, rows.sequences.response)
    centre_RxT = jnp.ones_like(logp_RxT)
    if objective.clip_centre is not None:
        centre_RxT = importance_ratio(roles[objective.clip_centre] - rows.behaviour)
    tokens = Tokens(logp_RxT, importance_ratio(log_ratio_RxT), rows.advantage, centre_RxT)
    policy_RxT, held_RxT = SURROGATES[objective.surrogate](tokens, objective.clip)
    held_RxT = held_RxT.astype(jnp.float32)
    if objective.importance_cap is not None:
        policy_RxT = truncated_weight(roles[PROXIMAL], rows.behaviour, objective.importance_cap) * policy_RxT
    kl_RxT = jnp.zeros_like(logp_RxT)
    for term in objective.kl:
        term_RxT = term.estimator(logp_RxT, roles[term.role])
        kl_RxT = kl_RxT + (term_RxT if term.share is None else numbers[term.share] * term_RxT)
    total_RxT = policy_RxT + numbers['kl_coef'] * kl_RxT if objective.kl else policy_RxT
    if objective.entropy:
        total_RxT = total_RxT - numbers['entropy_coef'] * entropy_RxT

    # Of the ratio to the policy that answered, whatever the anchor is.
    gap_RxT = jnp.where(response_RxT, logp_RxT - rows.behaviour, 0.0)
    behaviour_ratio_RxT = jnp.exp(gap_RxT)
    origin_O = 1 + jnp.arange(len(ORIGINS), dtype=rows.origin.dtype)
    origin_RxTxO = (rows.origin[..., None] == origin_O[None, None]).astype(jnp.float32)

    def weighted(x_RxT):
        return jnp.sum(rows.weight * x_RxT)

    def over_tokens(x_RxT):
        return jnp.sum(jnp.where(response_RxT, x_RxT, 0.0))

    def by_origin(x_RxT):
        return jnp.sum(x_RxT[..., None] * origin_RxTxO, axis=(0, 1))

    return weighted(total_RxT), {
        'actor/pg_loss': weighted(policy_RxT),
        'actor/kl_loss': over_tokens(kl_RxT),
        'actor/entropy': over_tokens(entropy_RxT),
        'actor/pg_clipfrac': over_tokens(held_RxT),
        'actor/ppo_kl': over_tokens(anchor_RxT - logp_RxT),
        'clipped_by_origin': by_origin(held_RxT),
        'tv_by_origin': by_origin(total_variation(logp_RxT, rows.behaviour)),
        'ratio_by_origin': by_origin(behaviour_ratio_RxT),
        'squared_ratio_by_origin': by_origin(behaviour_ratio_RxT**2),
        'tokens_by_origin': by_origin(jnp.ones_like(logp_RxT)),
        'gap_by_origin': by_origin(jnp.abs(gap_RxT)),
        'k3_by_origin': by_origin(jnp.maximum(jnp.expm1(gap_RxT) - gap_RxT, 0.0)),  # of KL(α ‖ π_θ); exact for small gaps too
        'gap_by_origin_max': jnp.max(jnp.abs(gap_RxT)[..., None] * origin_RxTxO, axis=(0, 1)),
    }
