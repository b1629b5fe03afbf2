"""The state of a run: its policies and counters. Checkpoints store it, and it is the same on every host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bapo_jax.groups import REPLAY, Batch, Group
from bapo_jax.learner.critic import CRITIC
from bapo_jax.learner.objective import BEFORE, PREVIOUS, PROXIMAL, REFERENCE, ROLLOUT
from bapo_jax.learner.update import TrainState
from bapo_jax.models.parameters import is_rounded, united
from bapo_jax.replay.bapo import X3


def copy_params(params: Any) -> Any:
    """Returns a copy that an update with donated buffers cannot delete."""
    return jax.tree.map(jax.numpy.copy, params)


def frozen_copy(params: Any, *, dtype: str, on_host: bool) -> Any:
    """Returns a copy for inference only, in host memory if `on_host`.

    Matrices and biases have `dtype`, to which the model rounds them. The scales of norms stay float32, since
    the model does not round them. `params` may be shapes with shardings.
    """

    def one(path, x):
        wanted = jnp.dtype(dtype) if is_rounded(path) else x.dtype
        sharding = x.sharding.with_memory_kind('pinned_host') if on_host else x.sharding
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, wanted, sharding=sharding)
        copy = jnp.copy(x) if x.dtype == wanted else x.astype(wanted)
        return jax.device_put(copy, sharding) if on_host else copy

    return jax.tree_util.tree_map_with_path(one, params)


# Responses since the run began: generated (including re-evaluation), fresh but not trained on, re-evaluated,
# replayed.
TOTALS = ('responses', 'discarded', 'reevaluated', 'reused')


@dataclasses.dataclass
class RunState:
    """The state of a run after `step` steps, without the replay and the prompt stream."""

    theta: TrainState  # θ, and the critic if there is one
    alpha: Any  # parameters of the rollout policy: a frozen copy, since the update donates θ's buffers
    alpha_version: int = 0  # the step after which θ became α
    step: int = 0
    totals: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    reference: Any = None  # θ_0, or θ_T after the switch at step T; None if the objective has no reference
    # (version, parameters) of earlier α, newest first.
    recent: list[tuple[int, Any]] = dataclasses.field(default_factory=list)
    keep_recent: int = 0  # how many of those are kept
    switch_step: int = 0  # T; 0 for no switch
    # The step after which α last became π_θ: a checkpoint within the next step includes that sync.
    synced_after: int = -1
    skipped_in_a_row: int = 0  # consecutive steps with a skipped update
    # The row of `step`, if its evaluation was interrupted.
    unwritten: dict[str, Any] = dataclasses.field(default_factory=dict)
    initial: int = 0  # the checksum of the weights of θ_0 that are read at each start
    before: Any = None  # α before the last sync, until the servers have answered the probe; never saved
    # Copies a policy that is not trained: α, the reference, earlier α.
    frozen: Callable[[Any], Any] = copy_params

    def has_ended(self, steps: int) -> bool:
        """Whether the run has finished its `steps` and the evaluation after the last one."""
        return self.step >= steps and not self.unwritten

    def kept(self) -> Any:
        """Returns π_θ's parameters as they are now: copies of the trained ones, and the frozen ones."""
        return united(self.frozen(self.theta.trained), self.theta.frozen)

    def sync(self) -> None:
        """Sets α to π_θ."""
        self.recent = [(self.alpha_version, self.alpha), *self.recent][: self.keep_recent]
        self.before = self.alpha
        self.alpha, self.alpha_version, self.synced_after = (
            self.kept(),
            self.step,
            self.step,
        )

    def trained(self) -> None:
        """Counts one more training step, and switches the reference policy if that is due."""
        self.step += 1
        if self.step == self.switch_step and self.reference is not None:
            self.reference = self.kept()

    def count(self, fresh: Sequence[Group], reevaluated: Sequence[Group], batch: Batch) -> None:
        """Adds a step's responses to the counters. A replayed group may also have new ones."""

        def ids(groups: Iterable[Group]) -> set[int]:
            return {id(r) for g in groups for r in g.responses}

        replayed = ids([*batch.of_origin(X3), *batch.of_origin(REPLAY)])
        for name, responses in {
            'responses': ids([*fresh, *reevaluated]),
            'discarded': ids(fresh) - ids(batch.groups),
            'reevaluated': ids(reevaluated),
            'reused': replayed - ids([*fresh, *reevaluated]),
        }.items():
            self.totals[name] += len(responses)

    def metrics(self) -> dict[str, int]:
        """Returns the counters, and α's lag in steps behind the policy that the last step started from."""
        totals = {f'rollout/{name}_total': total for name, total in self.totals.items()}
        return {'bapo/lag': self.step - 1 - self.alpha_version, **totals}

    def policies(self) -> dict[str, Any]:
        """Returns the parameters of every role, the same on all hosts; None for a role that the run lacks."""
        previous = self.recent[0][1] if self.recent else self.alpha
        critic = self.theta.critic.params if self.theta.critic else None
        return {
            ROLLOUT: self.alpha, BEFORE: self.before, PROXIMAL: self.theta.params, REFERENCE: self.reference,
            PREVIOUS: previous, CRITIC: critic,
        }  # fmt: skip
