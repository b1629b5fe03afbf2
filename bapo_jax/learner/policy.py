"""The policy as a trainee: its loss, its scores, and the metrics of its updates."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from bapo_jax.learner.logprobs import Compute, token_logprobs
from bapo_jax.learner.mini_batch import Rows, Sequences
from bapo_jax.learner.objective import BALANCE, Objective, evaluate_objective
from bapo_jax.learner.score import OfTokens
from bapo_jax.learner.sums import TOKENS, Sums, Updated, means, not_skipped
from bapo_jax.learner.update import Loss
from bapo_jax.models.decoder import Decoder

LOAD = 'experts'  # key of Sums.counts: the tokens of each expert, [layers, experts]


def policy_loss(objective: Objective, compute: Compute) -> Loss:
    """Returns the objective of one micro-batch as a loss; its `numbers` come from `numbers_of`."""

    def loss(model: Decoder, features, micro: Rows, numbers) -> tuple[jax.Array, Sums]:
        said = token_logprobs(
            model,
            micro.sequences,
            numbers['temperature'],
            compute,
            features,
            entropy_gradient=objective.entropy,
            balance_BxT=micro.weight.get(BALANCE),
        )
        value, sums = evaluate_objective(objective, micro, said.logp, said.entropy, numbers, compute.split)
        if said.load_LxE is not None:
            sums = sums._replace(counts={LOAD: said.load_LxE})
        if said.imbalance is not None:
            value = value + numbers['balance_coef'] * said.imbalance
            sums = sums._replace(weighted=sums.weighted | {'experts/imbalance': said.imbalance})
        return value, sums

    return loss


def policy_scores(compute: Compute) -> OfTokens:
    """Returns a function that computes (log-probs, entropy) of one micro-batch at a temperature.

    The entropy is unused, but without it XLA would sum the head in another order than in an update.
    """

    def logprobs(model: Decoder, features, micro: Sequences, temperature) -> tuple[jax.Array, jax.Array]:
        return token_logprobs(model, micro, temperature, compute, features)[:2]

    return logprobs


def policy_metrics(updates: Sequence[Updated], lanes: Sequence[str]) -> dict[str, float]:
    """Returns the metrics of the policy's updates; {} without a mini-batch.

    The loss, and the token means of KL, entropy, clipped fraction and log ratio, are averaged over
    mini-batches. Metrics that compare π_θ with the behaviour policy are means over an origin's tokens in all
    mini-batches. With ρ the ratio of the two, they are the clipped fraction, TV, the mean of ρ, and the
    effective sample size (Σρ)² / (n Σρ²). `mismatch` documents the rest. `lanes` are the batch's origins.
    Mini-batches whose update was skipped only count in actor/skipped_updates.
    """
    if not updates:
        return {}
    kept = not_skipped(updates)
    metrics = {**means(updates, 'actor'), 'actor/updates': len(kept)}
    if not kept:
        return metrics
    names = ('clipped', 'tv', 'ratio', 'squared_ratio', TOKENS)
    sums = [sum(update.sums.by_origin[name] for update in kept) for name in names]
    for origin, clipped, tv, ratio, squared_ratio, tokens in zip(lanes, *sums, strict=False):
        if tokens:
            metrics |= {
                f'actor/pg_clipfrac/{origin}': float(clipped / tokens),
                f'staleness/tv/{origin}': float(tv / tokens),
                f'staleness/ratio/{origin}': float(ratio / tokens),
                f'staleness/ess/{origin}': float(ratio**2 / (tokens * squared_ratio)),
            }
    return metrics | mismatch(kept[0].sums) | routing_metrics(kept)


def routing_metrics(updates: Sequence[Updated]) -> dict[str, float]:
    """Returns how evenly tokens are spread over experts; {} without experts.

    The largest load is that of a layer's busiest expert, as a multiple of the mean load; idle experts are
    those without a token. Both are means over layers. All mini-batches are counted together, with prompts,
    and without padding.
    """
    loads = [update.sums.counts[LOAD] for update in updates if LOAD in update.sums.counts]
    if not loads:
        return {}
    load_LxE = np.sum(loads, axis=0, dtype=np.int64)
    return {
        'experts/load_max': float((load_LxE.max(axis=1) / load_LxE.mean(axis=1)).mean()),
        'experts/idle': float((load_LxE == 0).mean()),
    }


def mismatch(first: Sums) -> dict[str, float]:
    """Compares X1's behaviour policy with π_θ before its first step, from the sums of the first mini-batch.

    If α is π_θ, this measures the difference between two programs of one policy: the engine's and the
    trainer's. With s the engine's log-prob of a token, t the trainer's and r = exp(t - s):

    mismatch/logprob_abs_mean, _max   of |s - t|
    mismatch/kl    KL(engine ‖ trainer), estimated by the mean of r - 1 - log r;
                   never negative (Schulman's k3)
    mismatch/ess   effective sample size (Σ r)² / (n Σ r²) of the tokens as samples of the trainer's policy;
                   1 if the two agree
    """
    # Lane 0 is X1.
    x1 = {name: float(sums[0]) for name, sums in first.by_origin.items()}
    tokens = x1[TOKENS]
    if not tokens:
        return {}
    return {
        'mismatch/logprob_abs_mean': x1['gap'] / tokens,
        'mismatch/logprob_abs_max': float(first.largest['gap'][0]),
        'mismatch/kl': x1['k3'] / tokens,
        'mismatch/ess': min(1.0, x1['ratio'] ** 2 / (tokens * x1['squared_ratio'])),
    }
