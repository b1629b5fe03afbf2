"""A model in training, the policy or the critic: its compiled programs, and the loop over mini-batches."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from bapo_jax.cluster.mesh import compiled_for, fetch, row_sharding, with_sharding
from bapo_jax.learner.logprobs import Compute
from bapo_jax.learner.mini_batch import MiniBatch
from bapo_jax.learner.score import OfTokens, score
from bapo_jax.learner.sums import Updated
from bapo_jax.learner.update import Loss, Program, TrainState, initial_state, state_shapes, update
from bapo_jax.models import hf
from bapo_jax.models.adapters import draw_first
from bapo_jax.models.decoder import ModelConfig, trained_parameters
from bapo_jax.models.parameters import is_rounded, parted, united
from bapo_jax.models.sharding import parameter_sharding


class Trainee:
    """Holds the compiled programs. The arrays that it trains are in the TrainState that callers pass in."""

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        optimizer: optax.GradientTransformation,
        compute: Compute,
        *,
        loss: Loss,
        of_tokens: OfTokens,
        model_path: str,
        seed: int,
        vision: bool,
        moments_on_host: bool = False,
    ):
        """`loss` and `of_tokens` take one micro-batch. `model_path` has the first parameters.

        `seed` is that of an adapter. `vision`: the vision tower is trained. `moments_on_host`: only an update
        has Adam's moments on the devices.

        Allocates nothing.
        """
        self.graph, shapes = hf.abstract_params(model)
        self._trained = trained_parameters(model, vision)
        trained, frozen = parted(shapes, self._trained)
        shapes = united(trained, as_rounded(frozen, model.dtype))
        self._model, self._mesh, self._optimizer = model, mesh, optimizer
        self._model_path, self._seed = model_path, seed
        self._sharding = parameter_sharding(mesh, shapes)
        self.parameters = with_sharding(shapes, self._sharding)  # shapes with shardings
        self._on_host = moments_on_host
        self.rows = row_sharding(mesh, 1, compute.split.tokens > 1)
        program = Program(self.graph, loss, optimizer, mesh, compute, moments_on_host)
        self.step = compiled_for(mesh, functools.partial(update, program=program), donate_argnames='state')
        scoring = functools.partial(score, of_tokens=of_tokens, graph=self.graph, mesh=mesh, compute=compute)
        self._score = compiled_for(mesh, scoring)

    def read_initial(self) -> Any:
        """Reads the first parameters onto the mesh."""
        params = hf.load_params(self._model_path, self._model, self._sharding, self.parameters)
        draw_first(params, self._model, self._seed)
        return params

    def shapes(self) -> TrainState:
        """Returns the state's shapes with shardings; the moments are sharded like the parameters."""
        trained, frozen = parted(self.parameters, self._trained)
        shapes = state_shapes(self._optimizer, trained, self._mesh, self._on_host)
        return shapes._replace(frozen=frozen)

    def init(self, params: Any) -> TrainState:
        """Returns the first state: `params` on the mesh and zero moments of those that are trained."""
        trained, frozen = parted(params, self._trained)
        shapes = self.shapes()
        frozen = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), frozen, shapes.frozen)
        return initial_state(self._optimizer, trained, shapes._replace(frozen=None))._replace(frozen=frozen)

    def train(
        self, state: TrainState, batches: Iterable[MiniBatch], numbers: Any = ()
    ) -> tuple[TrainState, list[Updated]]:
        """Takes one optimizer step per mini-batch, on all hosts. Donates the buffers of `state`.

        `numbers` are the scalars for the loss.
        """
        updates, frozen, state = [], state.frozen, state._replace(frozen=None)
        for batch in batches:
            rows, filled, pixels = batch.spread(self.rows)
            state, updated = self.step(state, rows, filled, numbers, pixels, frozen)
            updates.append(updated)
        return state._replace(frozen=frozen), jax.device_get(updates)

    def score(self, params: Any, batches: Sequence[MiniBatch], numbers: Any = ()) -> list[np.ndarray]:
        """Returns [M, R, T] per mini-batch of sequences, 0 except on response tokens; on all hosts."""
        scored = []
        for batch in batches:
            sequences, filled, pixels = batch.spread(self.rows)
            scored.append(jax.tree.leaves(self._score(params, sequences, filled, numbers, pixels))[0])
        return [fetch(x) for x in scored]

    def updates_done(self, state: TrainState) -> int:
        """Returns the number of optimizer steps, if the rate has a schedule."""
        return int(
            optax.tree.get(
                state.opt_state, 'count', filtering=lambda path, _: 'ScaleByScheduleState' in str(path)
            )
        )


def as_rounded(shapes: Any, dtype: str) -> Any:
    """Returns the shapes with the dtype to which the model rounds each: all that a frozen parameter needs."""

    def one(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype) if is_rounded(path) else x.dtype)

    return jax.tree_util.tree_map_with_path(one, shapes)
