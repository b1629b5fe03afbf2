"""A row's objective (ratio, terms, trust region and KL penalties), and its value on packed rows.

Shapes:  R rows · T tokens in a row · O origins.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.cluster.split import Split
from bapo_jax.groups import LANES, Author, Batch, ByGroup
from bapo_jax.learner import credit
from bapo_jax.learner.losses import (
    IMPORTANCE_WEIGHTS,
    RATIO_LEVELS,
    Clip,
    Surrogate,
    Tokens,
    cross_entropy,
    importance_ratio,
    k3,
    regression,
    shaped,
    total_variation,
)
from bapo_jax.learner.mini_batch import Rows, blank_rows
from bapo_jax.learner.own_surrogate import surrogate_of
from bapo_jax.learner.sums import TOKENS, Sums
from bapo_jax.learner.trust import FACTORS, READS_RATIOS

# Roles: policies whose log-probs the objective reads. Responses store the behaviour policy's; the others are
# computed.
BEHAVIOUR, PROXIMAL, REFERENCE, PREVIOUS = 'behaviour', 'proximal', 'reference', 'previous'
# α and the previous α, as servers hold them. Only the probe reads them (rollout/fidelity.py), no objective.
ROLLOUT, BEFORE = 'rollout', 'before'
BALANCE = 'balance'  # the name of the weight of tokens in the experts' imbalance


class KL(NamedTuple):
    """A penalty β · share · estimator(π_θ, the role's policy)."""

    role: str
    estimator: Callable[[jax.Array, jax.Array], jax.Array]
    share: str | None = None  # the name of one of the objective's numbers; None means 1


class Term(NamedTuple):
    """A part of the objective: Σ weight · surrogate, over the tokens of one author."""

    author: Author
    surrogate: Surrogate
    weight: str  # its name in Rows.weight: rl (the policy's tokens), trace or ce (those of traces)


@dataclasses.dataclass(frozen=True)
class Objective:
    """The static part of the objective, for which the step is compiled. Numbers are traced (`numbers_of`)."""

    ratio_level: str  # a name of RATIO_LEVELS
    terms: tuple[Term, ...]  # the first is that of the policy's own tokens
    clip: Clip
    anchor: str  # the role in the ratio's denominator: behaviour or proximal
    clip_centre: str | None  # the trust region is centred at this role / behaviour policy; None: at 1
    importance_cap: float | None  # the surrogate is multiplied by π_prox / α up to the cap; None: by 1
    kl: tuple[KL, ...]
    entropy: bool  # whether there is an entropy bonus
    importance_rule: str = 'truncate'  # what happens above the cap: a name of IMPORTANCE_WEIGHTS
    trust: str = 'fixed'  # a name of FACTORS
    balance: bool = False  # whether the experts' imbalance is added

    @property
    def ratio_roles(self) -> set[str]:
        """The policies that the ratio, its trust region and the importance weight need."""
        return {
            self.anchor,
            self.clip_centre or BEHAVIOUR,
            PROXIMAL if self.importance_cap or self.trust in READS_RATIOS else BEHAVIOUR,
        } - {BEHAVIOUR}

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the terms' weights, and of that of the imbalance."""
        return (*(term.weight for term in self.terms), *[BALANCE] * self.balance)

    @property
    def roles(self) -> tuple[str, ...]:
        """The policies that must score a batch before its updates, in a fixed order."""
        return tuple(sorted(self.ratio_roles | {kl.role for kl in self.kl} - {BEHAVIOUR}))

    def blank_rows(self, shape: tuple[int, int, int], images: bool = False) -> Rows:
        """Returns empty rows [M, R, T] with all that this objective reads."""
        return blank_rows(shape, images, self.roles, self.weights, FACTORS[self.trust])


def objective_of(learner: Any) -> Objective:
    """Returns the objective that a config's learner section describes."""
    decoupled = learner.anchor == 'decoupled'
    name = learner.surrogate
    surrogate = regression(learner.tau) if name == 'regression' else surrogate_of(name)
    kl = {
        'none': (),
        'convex': (KL(REFERENCE, k3, 'reference_share'), KL(PREVIOUS, k3, 'previous_share')),
    }.get(learner.kl_target, (KL(learner.kl_target, k3),))
    return Objective(
        ratio_level=learner.ratio_level,
        terms=(Term(Author.POLICY, surrogate, 'rl'), *trace_terms(learner.traces)),
        clip=Clip(learner.clip_low, learner.clip_high, learner.dual_clip or None),
        anchor=PROXIMAL if decoupled else learner.anchor,
        clip_centre=PROXIMAL if learner.clip_centre == 'proximal' else None,
        importance_cap=learner.importance_cap if decoupled else None,
        kl=kl,
        entropy=learner.entropy_coef != 0,
        importance_rule=learner.importance_rule,
        trust=learner.trust.kind,
        balance=learner.balance_coef != 0,
    )


def trace_terms(traces: Any) -> tuple[Term, ...]:
    """Returns the term of the tokens of traces, if the config's learner.traces section has one."""
    return {
        'none': (),
        'shaped': (Term(Author.TRACE, shaped(traces.gamma), 'trace'),),
        'cross_entropy': (Term(Author.TRACE, cross_entropy, 'ce'),),
    }[traces.loss]


def weights_of(objective: Objective, learner: Any, batch: Batch, limit: int) -> dict[str, ByGroup]:
    """Returns the token weights of each term for a mini-batch, by name.

    The tokens of `rl` and `trace` share one reduction, learner.aggregation; `ce` is a token mean times
    learner.traces.coef. In the imbalance, every response counts alike. `limit` is the response limit.
    """
    together = [term.author for term in objective.terms if term.weight != 'ce']
    by_name = {}
    for term in objective.terms:
        if term.weight == 'ce':
            mean = credit.weights(batch, term.author, (), 'token_mean', limit)
            by_name['ce'] = [[np.float32(learner.traces.coef) * w for w in of_group] for of_group in mean]
        else:
            by_name[term.weight] = credit.weights(batch, term.author, together, learner.aggregation, limit)
    if objective.balance:
        by_name[BALANCE] = credit.weights(batch, Author.POLICY, (), 'seq_mean_token_mean', limit)
    return by_name


def numbers_of(learner: Any, temperature: float, step: int) -> dict[str, np.float32]:
    """Returns the scalars that are passed to the compiled step."""
    share = 1.0 if switched(learner, step) else convex_share(step)
    numbers = {
        'temperature': temperature,
        'kl_coef': learner.kl_coef,
        'reference_share': share,
        'previous_share': 1 - share,
        'entropy_coef': learner.entropy_coef,
        'balance_coef': learner.balance_coef,
    }
    return {name: np.float32(value) for name, value in numbers.items()}


def switched(learner: Any, step: int) -> bool:
    """Returns whether `step` is after the row's switch to GRPO (ReMix's policy reincarnation)."""
    return 0 < learner.switch_step < step


def convex_share(step: int) -> float:
    """Returns the reference policy's share of the KL penalty in ReMix (arXiv 2507.06892).

    λ(t) = max(1 - 0.1 ⌈max(t - 50, 0) / 10⌉, 0.5).
    """
    return max(1 - 0.1 * math.ceil(max(step - 50, 0) / 10), 0.5)


def evaluate_objective(
    objective: Objective,
    rows: Rows,
    logp_RxT: jax.Array,
    entropy_RxT: jax.Array,
    numbers: Mapping[str, jax.Array],
    split: Split = Split(),
) -> tuple[jax.Array, Sums]:
    """Returns the objective's value, summed over rows, and sums for the metrics.

    On the policy's own tokens, the value is Σ weight · (importance weight · surrogate + β Σ share · KL -
    entropy bonus). The other terms add Σ weight · surrogate. Sums for the metrics cover the policy's own
    tokens only, and count all of them alike. The rows' factors multiply the advantage and the clip's ends.
    `logp_RxT` and `entropy_RxT` are those of π_θ; values on other than response tokens are ignored.
    """
    own, *others = objective.terms
    own_RxT = rows.origin > 0
    logp_RxT = jnp.where(rows.sequences.response > 0, logp_RxT, 0.0)
    roles = {BEHAVIOUR: rows.behaviour, **rows.roles}
    anchor_RxT = roles[objective.anchor]
    log_ratio_RxT = RATIO_LEVELS[objective.ratio_level](
        logp_RxT - anchor_RxT, rows.sequences.response, split.token_axis
    )
    centre_RxT = jnp.ones_like(logp_RxT)
    if objective.clip_centre is not None:
        centre_RxT = importance_ratio(roles[objective.clip_centre] - rows.behaviour)
    advantage_RxT, clip = _trusted(objective, rows)
    tokens = Tokens(
        logp_RxT, importance_ratio(log_ratio_RxT), advantage_RxT, centre_RxT, rows.behaviour, log_ratio_RxT
    )
    policy_RxT, held_RxT = own.surrogate(tokens, clip)
    held_RxT = held_RxT.astype(jnp.float32)
    if objective.importance_cap is not None:
        weight_of = IMPORTANCE_WEIGHTS[objective.importance_rule]
        policy_RxT = weight_of(roles[PROXIMAL], rows.behaviour, objective.importance_cap) * policy_RxT
    kl_RxT = jnp.zeros_like(logp_RxT)
    for kl in objective.kl:
        one_RxT = kl.estimator(logp_RxT, roles[kl.role])
        kl_RxT = kl_RxT + (one_RxT if kl.share is None else numbers[kl.share] * one_RxT)
    total_RxT = policy_RxT + numbers['kl_coef'] * kl_RxT if objective.kl else policy_RxT
    if objective.entropy:
        total_RxT = total_RxT - numbers['entropy_coef'] * entropy_RxT

    # Diagnostics use the ratio to the behaviour policy, regardless of the anchor.
    gap_RxT = jnp.where(own_RxT, logp_RxT - rows.behaviour, 0.0)
    behaviour_ratio_RxT = jnp.exp(gap_RxT)
    origin_O = 1 + jnp.arange(LANES, dtype=rows.origin.dtype)
    origin_RxTxO = (rows.origin[..., None] == origin_O[None, None]).astype(jnp.float32)

    def weighted(x_RxT, term=own):
        return jnp.sum(rows.weight[term.weight] * x_RxT)

    def over_tokens(x_RxT):
        return jnp.sum(jnp.where(own_RxT, x_RxT, 0.0))

    def by_origin(x_RxT):
        return jnp.sum(x_RxT[..., None] * origin_RxTxO, axis=(0, 1))

    narrowed = {}
    if rows.factors:
        least_RxT = functools.reduce(jnp.minimum, rows.factors.values())
        narrowed = {'actor/trust_narrowed': over_tokens((least_RxT < 1).astype(jnp.float32))}
    of_others = {
        f'actor/{term.weight}_loss': weighted(term.surrogate(tokens, objective.clip)[0], term)
        for term in others
    }
    return sum(of_others.values(), weighted(total_RxT)), Sums(
        weighted={'actor/pg_loss': weighted(policy_RxT), **of_others},
        over_tokens={
            'actor/kl_loss': over_tokens(kl_RxT),
            'actor/entropy': over_tokens(entropy_RxT),
            'actor/pg_clipfrac': over_tokens(held_RxT),
            'actor/ppo_kl': over_tokens(anchor_RxT - logp_RxT),
            **narrowed,
        },
        by_origin={
            'clipped': by_origin(held_RxT),
            'tv': by_origin(total_variation(logp_RxT, rows.behaviour)),
            'ratio': by_origin(behaviour_ratio_RxT),
            'squared_ratio': by_origin(behaviour_ratio_RxT**2),
            TOKENS: by_origin(jnp.ones_like(logp_RxT)),
            'gap': by_origin(jnp.abs(gap_RxT)),
            # Estimates KL(α ‖ π_θ); exact for small gaps too.
            'k3': by_origin(jnp.maximum(jnp.expm1(gap_RxT) - gap_RxT, 0.0)),
        },
        largest={'gap': jnp.max(jnp.abs(gap_RxT)[..., None] * origin_RxTxO, axis=(0, 1))},
    )


def _trusted(objective: Objective, rows: Rows) -> tuple[jax.Array, Clip]:
    """Returns the advantage and the clip of each token, with the rows' factors."""
    advantage_RxT, clip = rows.advantage, objective.clip
    for name, factor_RxT in rows.factors.items():
        if name == 'advantage':
            advantage_RxT = advantage_RxT * factor_RxT
        else:
            clip = clip._replace(**{name: getattr(clip, name) * factor_RxT})
    return advantage_RxT, clip
