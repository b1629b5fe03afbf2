"""The critic: a decoder whose head gives every state a value, regressed on returns with an optimizer of its own (PPO).

The state of a response token is the prompt and the response before it: V(s_t) is read where that token's log-prob is.

Shapes:  M micro-batches (the last ones may be empty) · R rows · T tokens in a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bapo_jax import parallel
from bapo_jax.groups import ByGroup
from bapo_jax.learner import credit
from bapo_jax.learner.logprobs import Compute, hidden_states, state_before
from bapo_jax.learner.optimizer import clipped_adamw
from bapo_jax.learner.packed import Sequences, blank_sequences
from bapo_jax.learner.packing import Part
from bapo_jax.learner.score import over_micro_batches
from bapo_jax.learner.update import TrainState, accumulate, initial_state, state_shapes, stepped, without_skipped
from bapo_jax.models import hf
from bapo_jax.models.patches import Pixels
from bapo_jax.models.decoder import Decoder, ModelConfig
from bapo_jax.parallel import compiled_for, spread

CRITIC = 'critic'  # the role under which its values are scored


class Targets(NamedTuple):
    """What the value loss is taken over, [M, R, T]; all but the sequences are 0 where `response` is."""

    sequences: Sequences
    value: np.ndarray  # float32, V of the critic before this step's updates
    target: np.ndarray  # float32, the return
    weight: np.ndarray  # float32: the loss is Σ weight · token loss


class Program(NamedTuple):
    """What the step is compiled for, beside the shapes."""

    graph: nnx.GraphDef
    optimizer: optax.GradientTransformation
    mesh: Mesh
    compute: Compute
    value_clip: float
    frozen_vision: bool


def token_values(
    model: Decoder, sequences: Sequences, compute: Compute = Compute(), features: jax.Array | None = None
) -> jax.Array:
    """V, float32 [B, T], of the state before each response token, 0 elsewhere; arguments as of `token_logprobs`."""
    value_BxT = model.values(hidden_states(model, sequences, compute, features), compute.split)
    return jnp.where(sequences.response > 0, value_BxT.reshape(-1)[state_before(sequences, compute)], 0.0)


def score_values(
    params, sequences: Sequences, n_micro, pixels: Pixels | None = None, *, graph: nnx.GraphDef, mesh: Mesh, compute: Compute
) -> jax.Array:
    """V [M, R, T] before each response token under `params`, 0 elsewhere; of the first `n_micro` micro-batches."""

    def values(model: Decoder, features, micro: Sequences, _) -> jax.Array:
        return token_values(model, micro, compute, features)

    return over_micro_batches(values, params, sequences, pixels, n_micro, (), graph, mesh, compute)


def value_loss(value_RxT: jax.Array, old_RxT: jax.Array, target_RxT: jax.Array, clip: float) -> jax.Array:
    """½ max((V - R)², (clip(V, V_old - ε, V_old + ε) - R)²) of each token: no step gains by leaving the interval around V_old."""
    clipped_RxT = jnp.clip(value_RxT, old_RxT - clip, old_RxT + clip)
    return 0.5 * jnp.maximum((value_RxT - target_RxT) ** 2, (clipped_RxT - target_RxT) ** 2)


def update_critic(
    state: TrainState, targets: Targets, n_micro, pixels: Pixels | None = None, *, program: Program
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One clipped AdamW step on a mini-batch, its gradient summed over `n_micro` micro-batches. The new state, and metrics."""

    def loss(model, features, micro: Targets, _):
        """The value loss over one micro-batch [R, T]."""
        value_RxT = token_values(model, micro.sequences, program.compute, features)
        total = jnp.sum(micro.weight * value_loss(value_RxT, micro.value, micro.target, program.value_clip))
        return total, {'critic/value_loss': total}

    gradient, metrics = accumulate(loss, state.params, targets, pixels, n_micro, (), program)
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm) & jnp.isfinite(metrics['critic/value_loss'])
    metrics |= {'critic/grad_norm': norm, 'critic/skipped_updates': 1 - finite.astype(jnp.int32)}
    return stepped(state, gradient, finite, program.optimizer), metrics


class Critic:
    """Holds what is compiled for the critic; what it trains is in the TrainState that is passed through."""

    def __init__(self, config: ConfigDict, policy: ModelConfig, mesh: Mesh, compute: Compute):
        """`config` is resolved; `policy` is the model that the critic has the decoder of. Allocates nothing."""
        self.warmup_steps = config.critic.warmup_steps
        self._model, self._mesh, self._model_path = dataclasses.replace(policy, value_head=True), mesh, config.model.path
        graph, shapes = hf.abstract_params(self._model)
        self._sharding = parallel.parameter_sharding(mesh, shapes)
        self._parameters = parallel.with_sharding(shapes, self._sharding)
        self._optimizer = clipped_adamw(config.critic.learning_rate, config.learner, vision=policy.vision is not None)
        frozen_vision = config.learner.vision_rate == 0
        program = Program(graph, self._optimizer, mesh, compute, config.critic.value_clip, frozen_vision)
        self._update = compiled_for(mesh, functools.partial(update_critic, program=program), donate_argnames='state')
        self.score = compiled_for(mesh, functools.partial(score_values, graph=graph, mesh=mesh, compute=compute))

    def shapes(self) -> TrainState:
        """The state's shapes and where each array lives."""
        return state_shapes(self._optimizer, self._parameters, self._mesh)

    def init(self) -> TrainState:
        """The decoder of model.path and a value head of 0, on the mesh; zero moments."""
        return initial_state(self._optimizer, hf.load_params(self._model_path, self._model, self._sharding), self.shapes())

    def update_packed(
        self, state: TrainState, packed: Sequence[Targets], counts: Sequence[int], pixels: Sequence[Pixels | None]
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step per mini-batch, `counts[i]` non-empty micro-batches in `packed[i]`, its images in `pixels[i]`.

        All hosts do this.

        Metrics are means over the mini-batches whose update was not skipped.
        """
        sharding, parts = parallel.row_sharding(self._mesh, 1), []
        for targets, n, images in zip(packed, counts, pixels, strict=True):
            state, metrics = self._update(state, spread(targets, sharding), n, spread(images, parallel.row_sharding(self._mesh)))
            parts.append(metrics)
        parts, skipped = without_skipped(jax.device_get(parts), 'critic/skipped_updates')
        means = {name: float(np.mean([part[name] for part in parts], dtype=np.float64)) for name in (parts or [{}])[0]}
        return state, means | skipped if packed else {}


def pack_targets(part: Part, values: ByGroup, returns: ByGroup) -> Targets:
    """The targets of a mini-batch from the values and returns of the whole batch; every trained token counts alike."""
    trained = [[r.trained_on for r in g.responses] for g in part.batch.groups]
    lengths = [int(t.sum()) for of_group in trained for t in of_group]
    weights = iter(credit.token_weights(lengths, 'token_mean', max(lengths)))
    weight = [[np.where(t, next(weights), 0) for t in of_group] for of_group in trained]
    of_part = ([by_group[i] for i in part.indices] for by_group in (values, returns))
    return Targets(part.sequences(), *(part.on_responses(x, np.float32) for x in (*of_part, weight)))


def blank_targets(shape: tuple[int, int, int], images: bool = False) -> Targets:
    """Targets [M, R, T] without a token."""
    return Targets(blank_sequences(shape, images), *(np.zeros(shape, np.float32) for _ in range(3)))


def value_metrics(values: ByGroup, returns: ByGroup, trained: ByGroup) -> dict[str, float]:
    """Mean of the values over the trained tokens, and the variance of the returns that they explain, 1 - Var(R - V) / Var(R).

    Of nothing: {}. Returns that do not vary have no explained variance.
    """
    value, target = (credit.on_trained(x, trained) for x in (values, returns))
    if not len(value):
        return {}
    metrics = {'critic/value_mean': float(value.mean())}
    if np.ptp(target) > 1e-6:  # less is rounding
        metrics['critic/explained_variance'] = float(1 - (target - value).var() / target.var())
    return metrics
