"""The jitted update: one optimizer step on one mini-batch (line 18 of Algorithm 1).

The gradient is summed over micro-batches. The policy and the critic share the code, each with its own loss.

Shapes:  M micro-batches (the last ones may be empty) · R rows · T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from bapo_jax.cluster.mesh import ROWS, per_device, replicated, row_spec, with_sharding
from bapo_jax.cluster.split import gathered
from bapo_jax.learner.logprobs import Compute, image_features
from bapo_jax.learner.sums import Sums, Updated, joined_sums, over_mesh
from bapo_jax.models.decoder import Decoder
from bapo_jax.models.parameters import parted, united
from bapo_jax.models.sharding import parameter_specs
from bapo_jax.models.vision.patches import Pixels


class TrainState(NamedTuple):
    """A policy (or critic) in training: its float32 master weights, and their optimizer state."""

    trained: Any
    opt_state: Any
    critic: TrainState | None = None  # only with a policy whose advantages come from values
    # The other parameters, which have neither gradient nor moments, and are in no checkpoint.
    frozen: Any = None

    @property
    def params(self) -> Any:
        """All parameters of the model."""
        return united(self.trained, self.frozen)


# (model, image features, rows, numbers) -> (loss of one micro-batch [R, T], sums for the metrics).
Loss = Callable[[Decoder, Any, Any, Any], tuple[jax.Array, Sums]]


class Program(NamedTuple):
    """The static arguments of the compiled step."""

    graph: nnx.GraphDef
    loss: Loss
    optimizer: optax.GradientTransformation
    mesh: Mesh
    compute: Compute
    moments_on_host: bool = False


def update(
    state: TrainState, rows: Any, n_micro, numbers: Any, pixels: Pixels | None = None, frozen: Any = None, *,
    program: Program,
) -> tuple[TrainState, Updated]:  # fmt: skip
    """Sums the gradients of the first `n_micro` micro-batches, then takes one clipped AdamW step.

    `numbers` are scalars for the loss; `pixels` are the images of the mini-batch. `frozen` parameters are
    apart from the state, whose buffers the compiled step reuses.
    """
    gradient, sums = accumulate(state.trained, frozen, rows, pixels, n_micro, numbers, program)
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm)
    for x in sums.weighted.values():
        finite &= jnp.isfinite(x)
    if program.moments_on_host:
        state = state._replace(opt_state=in_memory('device', program.optimizer, state.opt_state))
    state = stepped(state, gradient, finite, program.optimizer)
    if program.moments_on_host:
        state = state._replace(opt_state=in_memory('pinned_host', program.optimizer, state.opt_state))
    return state, Updated(sums, norm, 1 - finite.astype(jnp.int32))


def accumulate(
    trained: Any, frozen: Any, rows: Any, pixels: Pixels | None, n_micro, numbers: Any, program: Program
) -> tuple[Any, Sums]:
    """Returns (gradient by `trained`, sums) of the program's loss over `n_micro` micro-batches.

    Each device works on its own rows, or tokens of rows, and its own shard of the parameters. Once per
    micro-batch, the model gathers the weights it needs (cluster/split.py) and sums their gradient over
    'fsdp'. If `compute.split` asks for it, all weights are instead gathered before the first micro-batch and
    their gradient is summed after the last. Everything else is summed over the mesh once, at the end.

    The vision tower reads each image once, before the first micro-batch. The gradient of its features is
    summed over all micro-batches and devices, and back-propagated through the tower once.
    """
    mesh, split = program.mesh, program.compute.split
    specs, frozen_specs = parted(parameter_specs(mesh, united(trained, frozen)), trained)

    def on_device(trained, frozen, rows, pixels, n_micro, numbers):
        frozen_whole = gathered(frozen, frozen_specs, split, mesh.shape['fsdp'])

        def prepared(trained):
            whole = gathered(trained, specs, split, mesh.shape['fsdp'])
            model = nnx.merge(program.graph, united(whole, frozen_whole))
            return whole, image_features(model, pixels, program.compute)

        prepared_once, transpose = jax.vjp(prepared, trained)

        def micro_loss(prepared, micro, numbers):
            whole, features = prepared
            model = nnx.merge(program.graph, united(whole, frozen_whole))
            return program.loss(model, features, micro, numbers)

        def add_micro_batch(i, carry):
            micro = jax.tree.map(lambda x: x[i], rows)
            (_, sums), gradient = jax.value_and_grad(micro_loss, has_aux=True)(prepared_once, micro, numbers)
            return jax.tree.map(jnp.add, carry[0], gradient), joined_sums(carry[1], sums)

        _, sum_shapes = jax.eval_shape(micro_loss, prepared_once, jax.tree.map(lambda x: x[0], rows), numbers)
        zeros = (
            jax.tree.map(jnp.zeros_like, prepared_once),
            jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sum_shapes),
        )
        # With a runtime trip count, mini-batches of all sizes share a program and skip empty micro-batches.
        gradient, sums = jax.lax.fori_loop(0, n_micro, add_micro_batch, zeros)
        [gradient] = transpose(gradient)
        gradient = jax.tree.map(
            lambda g, spec: jax.lax.psum(g, 'data' if 'fsdp' in spec else ROWS), gradient, specs
        )
        return gradient, over_mesh(sums)

    of_rows = row_spec(1, split.tokens > 1), row_spec(), PartitionSpec(), PartitionSpec()
    on_devices = per_device(on_device, mesh, (specs, frozen_specs, *of_rows), (specs, PartitionSpec()))
    return on_devices(trained, frozen, rows, pixels, n_micro, numbers)


def stepped(
    state: TrainState, gradient: Any, finite: jax.Array, optimizer: optax.GradientTransformation
) -> TrainState:
    """Returns the state after one optimizer step; the old state if the gradient is not `finite`."""
    with jax.numpy_dtype_promotion('standard'):  # optax raises a float to the power of the int32 update count
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.trained)
    before = state.trained, state.opt_state
    after = optax.apply_updates(state.trained, updates), opt_state
    return TrainState(*jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before))


def in_memory(kind: str, optimizer: optax.GradientTransformation, opt_state: Any) -> Any:
    """Returns an optimizer state whose moments are in a kind of memory: 'device' or 'pinned_host'."""
    space = jax.memory.Space.Device if kind == 'device' else jax.memory.Space.Host
    return optax.tree.map_params(optimizer, lambda moment: jax.device_put(moment, space), opt_state)


def state_shapes(
    optimizer: optax.GradientTransformation, trained: Any, mesh: Mesh, moments_on_host: bool = False
) -> TrainState:
    """Returns a state's shapes with shardings; the moments are sharded like the parameters (also shapes)."""
    moments = jax.eval_shape(optimizer.init, trained)
    kind = 'pinned_host' if moments_on_host else None
    sharding = optax.tree.map_params(
        optimizer, lambda _, p: p.sharding.with_memory_kind(kind) if kind else p.sharding, moments, trained,
        transform_non_params=lambda _: replicated(mesh),
    )  # fmt: skip
    return TrainState(trained, with_sharding(moments, sharding))


def initial_state(optimizer: optax.GradientTransformation, trained: Any, shapes: TrainState) -> TrainState:
    """Returns parameters and zero moments on the mesh, sharded as in `shapes` (from `state_shapes`)."""
    sharding = jax.tree.map(lambda x: x.sharding, shapes)
    trained = jax.device_put(trained, sharding.trained)
    return TrainState(trained, jax.jit(optimizer.init, out_shardings=sharding.opt_state)(trained))


def with_frozen(state: TrainState, params: Any) -> TrainState:
    """Returns the state with frozen parameters of `params`, which policy and critic share."""
    critic = with_frozen(state.critic, params) if state.critic else None
    return state._replace(frozen=parted(params, state.frozen)[0], critic=critic)
