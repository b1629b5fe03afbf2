"""Where a run stands, and the Orbax checkpoints it continues from: each complete or absent.

    policy   θ, the optimizer's moments, α               (arrays, sharded as they are)
    replay   what the row remembers: both buffers, r_tot (numpy arrays)
    host     step, α's version, counters, selector state (JSON)

Randomness needs no saving: every draw is keyed by (seed, step, purpose).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from bapo_jax.groups import Group
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.objective import PROXIMAL, REFERENCE
from bapo_jax.learner.update import TrainState


@dataclasses.dataclass
class RunState:
    """Where a run stands after `step` steps, the row's replay and the prompt stream aside."""

    theta: TrainState  # θ
    alpha: Any  # parameters of the rollout policy: a copy, since the update donates θ's buffers
    alpha_version: int = 0  # the step after which θ became α
    step: int = 0
    responses_total: int = 0  # generated so far, re-evaluation included
    frozen: dict[str, Any] = dataclasses.field(default_factory=dict)  # role -> parameters that no update changes; not saved

    def sync(self) -> None:
        """α becomes π_θ."""
        self.alpha, self.alpha_version = copy_params(self.theta.params), self.step

    def count(self, step: int, sampled: Sequence[Group]) -> None:
        """Notes that `step` is trained on, and the groups that were sampled for it."""
        self.step = step
        self.responses_total += sum(g.size for g in sampled)

    def metrics(self) -> dict[str, int]:
        """The counters, and how many steps older than the policy that the last step trained α is."""
        return {'bapo/lag': self.step - 1 - self.alpha_version, 'rollout/responses_total': self.responses_total}

    def params_of(self, role: str) -> Any:
        """The parameters that every host knows under the name `role`."""
        return {ROLLOUT: self.alpha, PROXIMAL: self.theta.params, **self.frozen}[role]


ROLLOUT = 'rollout'  # the role of α, where its log-probs are compared with the servers'

# What the other hosts give in place of the replay: Orbax wants an item of every host, and writes the first's.
NOT_WRITTEN = {'none': np.zeros(1)}


class DamagedCheckpoint(ValueError):
    """A checkpoint that was complete once and can no longer be read."""


class Checkpoints:
    """The checkpoints of a run directory, newest last."""

    def __init__(self, directory: Path, keep: int):
        # Synchronous: the next update donates θ's buffers, which on CPU an asynchronous save would still be reading.
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, run: RunState, replay: dict[str, np.ndarray] = NOT_WRITTEN, selector: str = '') -> None:
        """Every host saves its part of the policy, host 0 the rest. RuntimeError where Orbax did not write (a step already saved)."""
        host = {
            'step': run.step,
            'alpha_version': run.alpha_version,
            'responses_total': run.responses_total,
            'selector': selector,
        }
        items = ocp.args.Composite(
            policy=ocp.args.StandardSave(_arrays(run)), replay=ocp.args.StandardSave(replay), host=ocp.args.JsonSave(host)
        )
        if not self._manager.save(run.step, args=items):
            raise RuntimeError(f'no checkpoint was written at step {run.step}: one is there already')
        self._manager.wait_until_finished()

    def restore(self, step: int, like: TrainState) -> tuple[RunState, dict[str, np.ndarray], str]:
        """The checkpoint of `step` as (run, replay's arrays, selector state); `like` has the policy's shapes and shardings.

        Raises DamagedCheckpoint where parts of it are missing or cut short.
        """
        shapes = ocp.args.StandardRestore(_arrays(RunState(like, alpha=like.params)))
        items = self._read(
            step, ocp.args.Composite(policy=shapes, replay=ocp.args.StandardRestore(), host=ocp.args.JsonRestore())
        )
        host = dict(items.host)
        selector = host.pop('selector')
        policy = items.policy
        run = RunState(TrainState(policy['params'], policy['opt_state']), policy['alpha'], **host)
        return run, {name: np.asarray(a) for name, a in items.replay.items()}, selector

    def restore_params(self, params_like: Any) -> tuple[Any, int]:
        """θ alone of the newest checkpoint and its step, as `params_like` (shapes with shardings) says, for evaluation and export.

        Raises FileNotFoundError where there is no checkpoint, ValueError where its tensors are those of another model,
        DamagedCheckpoint where parts of it are missing or cut short.
        """
        step = self._manager.latest_step()
        if step is None:
            raise FileNotFoundError(f'{self._manager.directory} holds no complete checkpoint')
        # A partial restore would leave out tensors that the model lacks, and leave those alone that the checkpoint lacks.
        directory = self._manager.directory / str(step) / 'policy'
        saved, wanted = _shapes(ocp.PyTreeCheckpointHandler().metadata(directory).tree['params']), _shapes(params_like)
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                raise ValueError(
                    f'{directory} is of another model: {name} has shape {saved.get(name)} there and {wanted.get(name)} in this one'
                )
        like = {'params': params_like}
        only_params = ocp.args.PyTreeRestore(
            like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
        )
        return self._read(step, ocp.args.Composite(policy=only_params)).policy['params'], step

    def _read(self, step: int, items: ocp.args.Composite) -> Any:
        try:
            return self._manager.restore(step, args=items)
        except (RuntimeError, MemoryError):  # such as no room on the devices: no fault of the files
            raise
        except Exception as e:  # Orbax raises KeyError, ValueError or a bare Exception, by which of its layers notices
            reason = next(iter(str(e).splitlines()), '')[:200]
            raise DamagedCheckpoint(
                f'{self._manager.directory / str(step)} cannot be read ({type(e).__name__}: {reason}); restore its files, or move '
                'that directory away to go on from the checkpoint before it'
            ) from e

    def close(self) -> None:
        self._manager.close()


def _arrays(run: RunState) -> dict[str, Any]:
    return {'params': run.theta.params, 'opt_state': run.theta.opt_state, 'alpha': run.alpha}


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {'.'.join(key.key for key in path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def copy_params(params: Any) -> Any:
    """A copy that no donated update can delete."""
    return jax.tree.map(jax.numpy.copy, params)


class Beginning(NamedTuple):
    """Where a run begins."""

    state: RunState
    of_host: tuple[dict[str, np.ndarray], str] | None  # of a run that continues: the replay's arrays and the selector's state
    checkpoints: Checkpoints


def begin_run(learner: Learner, directory: Path, keep: int) -> Beginning:
    """Starts at θ_0, or continues from the newest checkpoint in `directory`; every host calls it at once."""
    checkpoints = Checkpoints(directory, keep)
    step, frozen = checkpoints.latest_step(), {}
    wants_reference = REFERENCE in learner.objective.roles
    initial = learner.read_initial() if step is None or wants_reference else None
    if wants_reference:
        frozen[REFERENCE] = initial
    if step is None:
        # θ is donated at the first update, so it is a copy; α never is.
        return Beginning(RunState(learner.init(copy_params(initial)), alpha=initial, frozen=frozen), None, checkpoints)
    state, *of_host = checkpoints.restore(step, learner.shapes())
    state.frozen = frozen
    return Beginning(state, tuple(of_host), checkpoints)
