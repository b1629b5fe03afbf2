"""The jitted update: one optimizer step on one mini-batch, its gradient summed over micro-batches. Line 18 of Algorithm 1.

Shapes:  M micro-batches (a power of two, the last ones may be empty) · R rows · T tokens in a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from bapo_jax import parallel
from bapo_jax.groups import ORIGINS
from bapo_jax.learner.logprobs import token_logprobs
from bapo_jax.learner.objective import Objective, evaluate_objective
from bapo_jax.learner.packing import Rows
from bapo_jax.models.attention import Attention

_BY_ORIGIN = ('clipped_by_origin', 'tv_by_origin', 'ratio_by_origin', 'squared_ratio_by_origin', 'tokens_by_origin')


class TrainState(NamedTuple):
    """A policy's (or critic's) float32 master copy and its optimizer's moments."""

    params: Any
    opt_state: Any


class Program(NamedTuple):
    """What the step is compiled for, beside the shapes."""

    graph: nnx.GraphDef
    objective: Objective
    optimizer: optax.GradientTransformation
    mesh: Mesh
    attention: Attention
    chunk: int
    remat: bool


def update(state: TrainState, rows: Rows, n_micro, numbers: dict[str, jax.Array], *, program: Program):
    """Gradients of the first `n_micro` micro-batches, summed; then one clipped AdamW step. The new state, and sums for metrics."""

    def loss(params, micro: Rows):
        """The objective over one micro-batch [R, T]."""
        logp_RxT, entropy_RxT = token_logprobs(
            nnx.merge(program.graph, params), micro.sequences.tokens, micro.sequences.segment, micro.sequences.position,
            numbers['temperature'], attention=program.attention, chunk=program.chunk, remat=program.remat,
        )  # fmt: skip
        return evaluate_objective(program.objective, micro, logp_RxT, entropy_RxT, numbers)

    def add_micro_batch(i, carry):
        micro = jax.tree.map(lambda x: x[i], rows)
        (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(state.params, micro)
        # Split as the parameters are; left to itself, XLA may keep a whole sum of gradients on every device.
        gradient = jax.lax.with_sharding_constraint(gradient, parallel.parameter_sharding(program.mesh, gradient))
        return jax.tree.map(jnp.add, carry, (gradient, sums))

    _, sum_shapes = jax.eval_shape(lambda: loss(state.params, jax.tree.map(lambda x: x[0], rows)))
    zeros = (jax.tree.map(jnp.zeros_like, state.params), jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sum_shapes))
    # The trip count is a runtime value: mini-batches of many sizes share a program and pay for no empty micro-batch.
    gradient, metrics = jax.lax.fori_loop(0, n_micro, add_micro_batch, zeros)
    with jax.numpy_dtype_promotion('standard'):  # optax raises a float to the int32 number of updates
        updates, opt_state = program.optimizer.update(gradient, state.opt_state, state.params)
    metrics['actor/grad_norm'] = optax.tree.norm(gradient)
    return TrainState(optax.apply_updates(state.params, updates), opt_state), metrics


def mean_metrics(parts: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Means over the mini-batches; what compares π_θ with the policy that answered is a mean over an origin's tokens.

    With ρ the ratio of the two: clipped share, TV, mean of ρ, and effective sample size (Σρ)² / (n Σρ²). Empty without a mini-batch.
    Raises FloatingPointError where a gradient is not finite.
    """
    if not parts:
        return {}
    bad = [i for i, part in enumerate(parts) if not np.isfinite(part['actor/grad_norm'])]
    if bad:
        raise FloatingPointError(
            f'the gradient of mini-batch {bad[0]} is not finite; lower learner.learning_rate or learner.grad_clip, '
            'and continue from the last checkpoint'
        )
    sums = [sum(part.pop(name) for part in parts) for name in _BY_ORIGIN]
    metrics = {name: float(np.mean([part[name] for part in parts], dtype=np.float64)) for name in parts[0]}
    for origin, clipped, tv, ratio, squared_ratio, tokens in zip(ORIGINS, *sums, strict=True):
        if tokens:
            metrics |= {
                f'actor/pg_clipfrac/{origin}': float(clipped / tokens),
                f'staleness/tv/{origin}': float(tv / tokens),
                f'staleness/ratio/{origin}': float(ratio / tokens),
                f'staleness/ess/{origin}': float(ratio**2 / (tokens * squared_ratio)),
            }
    return {**metrics, 'actor/updates': len(parts)}
