"""The jitted update: one optimizer step on one mini-batch, its gradient summed over micro-batches. Line 18 of Algorithm 1.

What the policy's step and the critic's share is here: the sum over micro-batches, the optimizer, and the state of the two.

Shapes:  M micro-batches (the last ones may be empty) · R rows · T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from bapo_jax import parallel
from bapo_jax.groups import ORIGINS, X1
from bapo_jax.learner.logprobs import Compute, image_features, token_logprobs
from bapo_jax.learner.objective import Objective, evaluate_objective
from bapo_jax.learner.packed import Rows
from bapo_jax.models.patches import Pixels
from bapo_jax.models.split import gathered

_OF_TOKENS = ('actor/kl_loss', 'actor/entropy', 'actor/pg_clipfrac', 'actor/ppo_kl')
_BY_ORIGIN = ('clipped_by_origin', 'tv_by_origin', 'ratio_by_origin', 'squared_ratio_by_origin', 'tokens_by_origin')
_OF_MISMATCH = ('gap_by_origin', 'k3_by_origin', 'gap_by_origin_max')


class TrainState(NamedTuple):
    """What a step trains: a policy's (or critic's) float32 master copy and its optimizer's moments."""

    params: Any
    opt_state: Any
    critic: TrainState | None = None  # beside a policy whose advantages come from values


class Program(NamedTuple):
    """What the step is compiled for, beside the shapes."""

    graph: nnx.GraphDef
    objective: Objective
    optimizer: optax.GradientTransformation
    mesh: Mesh
    compute: Compute
    frozen_vision: bool = False  # the vision tower has no gradient


def update(
    state: TrainState, rows: Rows, n_micro, numbers: dict[str, jax.Array], pixels: Pixels | None = None, *, program: Program
):
    """Gradients of the first `n_micro` micro-batches, summed; then one clipped AdamW step. The new state, and sums for metrics.

    `pixels` are the images of the mini-batch.
    """

    def loss(model, features, micro: Rows, numbers):
        """The objective over one micro-batch [R, T]."""
        logp_RxT, entropy_RxT = token_logprobs(
            model, micro.sequences, numbers['temperature'], program.compute, features, entropy_gradient=program.objective.entropy
        )
        return evaluate_objective(program.objective, micro, logp_RxT, entropy_RxT, numbers)

    gradient, metrics = accumulate(loss, state.params, rows, pixels, n_micro, numbers, program)
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm) & jnp.isfinite(metrics['actor/pg_loss'])
    metrics |= {'actor/grad_norm': norm, 'actor/skipped_updates': 1 - finite.astype(jnp.int32)}
    return stepped(state, gradient, finite, program.optimizer), metrics


def accumulate(
    loss: Callable, params: Any, rows: Any, pixels: Pixels | None, n_micro, numbers: Any, program: Any
) -> tuple[Any, Any]:
    """(gradient, sums): those of `loss(model, features, micro-batch, numbers) -> (scalar, sums)`, over `n_micro` micro-batches.

    Of a sum whose name ends in _max, not negative, the largest is taken. `program` has `graph`, `mesh`, `compute`, `frozen_vision`.

    Each device works on its own rows and its own part of the parameters; the model gathers what it needs (models/split.py) and
    sums over 'fsdp' the gradient of what it gathered, once a micro-batch; or all is gathered before the first one and summed after
    the last, where `compute.split` asks for it. All else is summed over the mesh once, at the end.

    The vision tower reads each image once, before the first micro-batch. The gradient of its features is summed over all
    micro-batches and devices, and goes back through the tower once.
    """
    mesh, split, specs = program.mesh, program.compute.split, parallel.parameter_specs(program.mesh, params)

    def on_device(params, rows, pixels, n_micro, numbers):
        def prepared(params):
            whole = gathered(params, specs, split, mesh.shape['fsdp'])
            features = image_features(nnx.merge(program.graph, whole), pixels, program.compute)
            return whole, jax.lax.stop_gradient(features) if program.frozen_vision else features

        prepared_once, transpose = jax.vjp(prepared, params)

        def of_micro_batch(prepared, micro, numbers):
            params, features = prepared
            return loss(nnx.merge(program.graph, params), features, micro, numbers)

        def add_micro_batch(i, carry):
            micro = jax.tree.map(lambda x: x[i], rows)
            (_, sums), gradient = jax.value_and_grad(of_micro_batch, has_aux=True)(prepared_once, micro, numbers)
            return jax.tree.map(jnp.add, carry[0], gradient), joined(carry[1], sums)

        _, sum_shapes = jax.eval_shape(of_micro_batch, prepared_once, jax.tree.map(lambda x: x[0], rows), numbers)
        zeros = (
            jax.tree.map(jnp.zeros_like, prepared_once), jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sum_shapes)
        )  # fmt: skip
        # The trip count is a runtime value: mini-batches of all sizes share a program and pay for no empty micro-batch.
        gradient, sums = jax.lax.fori_loop(0, n_micro, add_micro_batch, zeros)
        [gradient] = transpose(gradient)
        gradient = jax.tree.map(lambda g, spec: jax.lax.psum(g, 'data' if 'fsdp' in spec else parallel.ROWS), gradient, specs)
        largest = {name: jax.lax.pmax(x, parallel.ROWS) for name, x in sums.items() if name.endswith('_max')}
        return gradient, jax.lax.psum(sums, parallel.ROWS) | largest

    in_specs = (specs, PartitionSpec(None, parallel.ROWS), PartitionSpec(parallel.ROWS), PartitionSpec(), PartitionSpec())
    on_devices = parallel.per_device(on_device, mesh, in_specs, (specs, PartitionSpec()))
    return on_devices(params, rows, pixels, n_micro, numbers)


def joined(a: dict[str, jax.Array], b: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sums of both, by name; of a name that ends in _max, the larger."""
    return {name: (jnp.maximum if name.endswith('_max') else jnp.add)(a[name], b[name]) for name in a}


def stepped(state: TrainState, gradient: Any, finite: jax.Array, optimizer: optax.GradientTransformation) -> TrainState:
    """The state after one optimizer step; as it was where the gradient is not `finite`."""
    with jax.numpy_dtype_promotion('standard'):  # optax raises a float to the int32 number of updates
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    before = state.params, state.opt_state
    after = optax.apply_updates(state.params, updates), opt_state
    return TrainState(*jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before))


def state_shapes(optimizer: optax.GradientTransformation, parameters: Any, mesh: Mesh) -> TrainState:
    """The shapes of a state and where each array lives, the moments as the `parameters` (shapes with shardings) are."""
    moments = jax.eval_shape(optimizer.init, parameters)

    def is_left_out(x: Any) -> bool:  # what is frozen has no moments
        return isinstance(x, optax.MaskedNode)

    sharding = optax.tree.map_params(
        optimizer, lambda moment, p: moment if is_left_out(moment) else p.sharding, moments, parameters,
        transform_non_params=lambda _: parallel.replicated(mesh), is_leaf=is_left_out,
    )  # fmt: skip
    return TrainState(parameters, parallel.with_sharding(moments, sharding))


def initial_state(optimizer: optax.GradientTransformation, params: Any, shapes: TrainState) -> TrainState:
    """`params` on the mesh, and zero moments, as `shapes` of `state_shapes` say."""
    sharding = jax.tree.map(lambda x: x.sharding, shapes)
    params = jax.device_put(params, sharding.params)
    return TrainState(params, jax.jit(optimizer.init, out_shardings=sharding.opt_state)(params))


def mean_metrics(parts: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Means over the mini-batches: of the loss, and of KL, entropy, clipped share and log ratio, which are means over tokens.

    What compares π_θ with the policy that answered is a mean over an origin's tokens, of all mini-batches together.

    With ρ the ratio of the two: clipped share, TV, mean of ρ, and effective sample size (Σρ)² / (n Σρ²). `mismatch` says what else
    is there. Mini-batches whose update was skipped count in actor/skipped_updates alone. Empty without a mini-batch.
    """
    if not parts:
        return {}
    parts, skipped = without_skipped(parts, 'actor/skipped_updates')
    if not parts:
        return {'actor/updates': 0, **skipped}
    for part in parts:
        tokens = max(1.0, float(part['tokens_by_origin'].sum()))
        part |= {name: part[name] / tokens for name in _OF_TOKENS}
    compared = mismatch(parts[0])
    for part in parts:
        for name in _OF_MISMATCH:
            del part[name]
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
    return {**metrics, **compared, 'actor/updates': len(parts), **skipped}


def mismatch(first: dict[str, np.ndarray]) -> dict[str, float]:
    """How far the policy that answered X1 is from π_θ before its first step, from the sums of the first mini-batch.

    Where α is π_θ, this is how far two programs of one policy are apart: the engine's and the trainer's. With s the engine's log-prob
    of a token, t the trainer's and r = exp(t - s):

    mismatch/logprob_abs_mean, _max   of |s - t|
    mismatch/kl    KL(engine ‖ trainer), estimated by the mean of r - 1 - log r; never negative (Schulman's k3)
    mismatch/ess   effective sample size (Σ r)² / (n Σ r²) of the tokens as samples of the trainer's policy; 1 where the two agree
    """
    x1 = {name: float(sums[ORIGINS.index(X1)]) for name, sums in first.items() if 'by_origin' in name}
    tokens = x1['tokens_by_origin']
    if not tokens:
        return {}
    return {
        'mismatch/logprob_abs_mean': x1['gap_by_origin'] / tokens,
        'mismatch/logprob_abs_max': x1['gap_by_origin_max'],
        'mismatch/kl': x1['k3_by_origin'] / tokens,
        'mismatch/ess': min(1.0, x1['ratio_by_origin'] ** 2 / (tokens * x1['squared_ratio_by_origin'])),
    }


def without_skipped(parts: Sequence[dict[str, np.ndarray]], name: str) -> tuple[list[dict[str, np.ndarray]], dict[str, int]]:
    """The metrics of the mini-batches whose update was not skipped, and under `name` the number of the others."""
    skipped = [int(part.pop(name)) for part in parts]
    return [part for part, was_skipped in zip(parts, skipped, strict=True) if not was_skipped], {name: sum(skipped)}
