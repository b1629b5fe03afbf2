"""A model in training, the policy or the critic: its compiled programs, and the loop over mini-batches."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from bapo_jax.cluster.mesh import compiled_for, fetch, with_sharding
from bapo_jax.learner.logprobs import Compute
from bapo_jax.learner.mini_batch import MiniBatch
from bapo_jax.learner.score import OfTokens, score
from bapo_jax.learner.sums import Updated
from bapo_jax.learner.update import Loss, Program, TrainState, initial_state, state_shapes, update
from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig
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
        frozen_vision: bool,
    ):
        """`loss` and `of_tokens` take one micro-batch. `model_path` has the first parameters.

        Allocates nothing.
        """
        self.graph, shapes = hf.abstract_params(model)
        self._model, self._mesh, self._optimizer, self._model_path = model, mesh, optimizer, model_path
        self._sharding = parameter_sharding(mesh, shapes)
        self.parameters = with_sharding(shapes, self._sharding)  # shapes with shardings
        program = Program(self.graph, loss, optimizer, mesh, compute, frozen_vision)
        self.step = compiled_for(mesh, functools.partial(update, program=program), donate_argnames='state')
        scoring = functools.partial(score, of_tokens=of_tokens, graph=self.graph, mesh=mesh, compute=compute)
        self._score = compiled_for(mesh, scoring)

    def read_initial(self) -> Any:
        """Reads the first parameters onto the mesh."""
        return hf.load_params(self._model_path, self._model, self._sharding)

    def shapes(self) -> TrainState:
        """Returns the state's shapes with shardings; the moments are sharded like the parameters."""
        return state_shapes(self._optimizer, self.parameters, self._mesh)

    def init(self, params: Any) -> TrainState:
        """Returns the first state: `params` on the mesh and zero moments."""
        return initial_state(self._optimizer, params, self.shapes())

    def train(
        self, state: TrainState, batches: Iterable[MiniBatch], numbers: Any = ()
    ) -> tuple[TrainState, list[Updated]]:
        """Takes one optimizer step per mini-batch, on all hosts. Donates the buffers of `state`.

        `numbers` are the scalars for the loss.
        """
        updates = []
        for batch in batches:
            rows, filled, pixels = batch.spread(self._mesh)
            state, updated = self.step(state, rows, filled, numbers, pixels)
            updates.append(updated)
        return state, jax.device_get(updates)

    def score(self, params: Any, batches: Sequence[MiniBatch], numbers: Any = ()) -> list[np.ndarray]:
        """Returns [M, R, T] per mini-batch of sequences, 0 except on response tokens; on all hosts."""
        scored = []
        for batch in batches:
            sequences, filled, pixels = batch.spread(self._mesh)
            scored.append(jax.tree.leaves(self._score(params, sequences, filled, numbers, pixels))[0])
        return [fetch(x) for x in scored]

    def updates_done(self, state: TrainState) -> int:
        """Returns the number of optimizer steps, if the rate has a schedule."""
        return int(
            optax.tree.get(
                state.opt_state, 'count', filtering=lambda path, _: 'ScaleByScheduleState' in str(path)
            )
        )
