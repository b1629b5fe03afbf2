"""The critic (PPO): a decoder with a value head, regressed on returns with its own optimizer.

The state of a response token is the prompt and the response before it. V(s_t) is read at the position that
predicts the token.

Shapes:  M micro-batches (the last ones may be empty) · R rows · T tokens in a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.groups import ByGroup
from bapo_jax.learner import credit
from bapo_jax.learner.logprobs import Compute, hidden_states, states_before
from bapo_jax.learner.mini_batch import Sequences, blank_sequences
from bapo_jax.learner.packing import Part
from bapo_jax.learner.score import OfTokens
from bapo_jax.learner.sums import Sums
from bapo_jax.learner.update import Loss
from bapo_jax.models.decoder import Decoder

CRITIC = 'critic'  # the role under which values are scored


class Targets(NamedTuple):
    """The input of the value loss, [M, R, T]; all but the sequences are 0 where `response` is 0."""

    sequences: Sequences
    value: np.ndarray  # float32, V of the critic before this step's updates
    target: np.ndarray  # float32, the return
    weight: np.ndarray  # float32: the loss is Σ weight · token loss


def token_values(
    model: Decoder, sequences: Sequences, compute: Compute = Compute(), features: jax.Array | None = None
) -> jax.Array:
    """Returns V of the state before each response token, float32 [B, T]; 0 elsewhere.

    Arguments are as in `token_logprobs`.
    """
    hidden_BxTxD, _ = hidden_states(model, sequences, compute, features)
    state_SxD, at_BxT = states_before(hidden_BxTxD, sequences, compute)
    value_S = model.values(state_SxD, compute.split)
    return jnp.where(sequences.response > 0, value_S[at_BxT], 0.0)


def critic_scores(compute: Compute) -> OfTokens:
    """Returns a function that computes V for one micro-batch; it ignores `numbers`."""

    def values(model: Decoder, features, micro: Sequences, _) -> jax.Array:
        return token_values(model, micro, compute, features)

    return values


def value_loss(value_RxT: jax.Array, old_RxT: jax.Array, target_RxT: jax.Array, clip: float) -> jax.Array:
    """½ max((V - R)², (clip(V, V_old - ε, V_old + ε) - R)²) per token.

    A step thus gains nothing by leaving the interval around V_old.
    """
    clipped_RxT = jnp.clip(value_RxT, old_RxT - clip, old_RxT + clip)
    return 0.5 * jnp.maximum((value_RxT - target_RxT) ** 2, (clipped_RxT - target_RxT) ** 2)


def critic_loss(value_clip: float, compute: Compute) -> Loss:
    """Returns the value loss of one micro-batch [R, T]; it ignores `numbers`."""

    def loss(model: Decoder, features, micro: Targets, _) -> tuple[jax.Array, Sums]:
        value_RxT = token_values(model, micro.sequences, compute, features)
        total = jnp.sum(micro.weight * value_loss(value_RxT, micro.value, micro.target, value_clip))
        return total, Sums(weighted={'critic/value_loss': total})

    return loss


def pack_targets(part: Part, values: ByGroup, returns: ByGroup) -> Targets:
    """Packs a mini-batch's targets from values and returns of the batch; all trained tokens count alike."""
    trained = [[r.trained_on for r in g.responses] for g in part.batch.groups]
    lengths = [int(t.sum()) for group_values in trained for t in group_values]
    weights = iter(credit.token_weights(lengths, 'token_mean', max(lengths)))
    weight = [[np.where(t, next(weights), 0) for t in group_values] for group_values in trained]
    chosen = ([by_group[i] for i in part.indices] for by_group in (values, returns))
    return Targets(part.sequences(), *(part.on_responses(x, np.float32) for x in (*chosen, weight)))


def blank_targets(shape: tuple[int, int, int], images: bool = False) -> Targets:
    """Returns empty targets [M, R, T]."""
    return Targets(blank_sequences(shape, images), *(np.zeros(shape, np.float32) for _ in range(3)))


def value_metrics(values: ByGroup, returns: ByGroup, trained: ByGroup) -> dict[str, float]:
    """Returns the mean value over trained tokens, and the explained variance 1 - Var(R - V) / Var(R).

    Returns {} without trained tokens. The explained variance is left out if the returns do not vary.
    """
    value, target = (credit.on_trained(x, trained) for x in (values, returns))
    if not len(value):
        return {}
    metrics = {'critic/value_mean': float(value.mean())}
    if np.ptp(target) > 1e-6:  # smaller differences are rounding
        metrics['critic/explained_variance'] = float(1 - (target - value).var() / target.var())
    return metrics
