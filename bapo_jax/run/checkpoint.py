"""Where a run stands, and the Orbax checkpoints it continues from: each complete or absent, and checked bit for bit.

    policy   θ, α, the critic if any, optimizers' moments (arrays, sharded as they are)
    replay   what the row remembers: both buffers, r_tot (numpy arrays)
    host     step, α's version, counters, selector state, a checksum of every array and of itself (JSON)

Randomness needs no saving: every draw is keyed by (seed, step, purpose).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from bapo_jax import events
from bapo_jax.groups import REPLAY, X3, Batch, Group
from bapo_jax.learner.critic import CRITIC
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.objective import BEFORE, PREVIOUS, PROXIMAL, REFERENCE, ROLLOUT
from bapo_jax.learner.update import TrainState
from bapo_jax.models.parameters import is_rounded
from bapo_jax.run.checksums import checksum_of_text, checksums
from bapo_jax.run.remains import say_none_yet


def copy_params(params: Any) -> Any:
    """A copy that no donated update can delete."""
    return jax.tree.map(jax.numpy.copy, params)


def frozen_copy(params: Any, *, dtype: str, on_host: bool) -> Any:
    """A copy for computing, never for training; in host memory if asked. Matrices and biases have `dtype`, as the model rounds them.

    The scales of norms stay float32, since the model does not round those. `params` may be shapes with shardings.
    """

    def one(path, x):
        wanted = jnp.dtype(dtype) if is_rounded(path) else x.dtype
        sharding = x.sharding.with_memory_kind('pinned_host') if on_host else x.sharding
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, wanted, sharding=sharding)
        copy = jnp.copy(x) if x.dtype == wanted else x.astype(wanted)
        return jax.device_put(copy, sharding) if on_host else copy

    return jax.tree_util.tree_map_with_path(one, params)


# Responses since the run began: generated (re-evaluation included), fresh ones not trained on, re-evaluated, trained on once more.
TOTALS = ('responses', 'discarded', 'reevaluated', 'reused')


@dataclasses.dataclass
class RunState:
    """Where a run stands after `step` steps, the row's replay and the prompt stream aside."""

    theta: TrainState  # θ, and the critic where the row has one
    alpha: Any  # parameters of the rollout policy: a frozen copy, since the update donates θ's buffers
    alpha_version: int = 0  # the step after which θ became α
    step: int = 0
    totals: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    reference: Any = None  # where the row reads that role: θ_0, or θ_T after the row's switch at T
    recent: list[tuple[int, Any]] = dataclasses.field(default_factory=list)  # (version, parameters) of α before, newest first
    keep_recent: int = 0  # how many of those are kept
    switch_step: int = 0  # T; 0: there is none
    synced_after: int = -1  # the step after which α last became π_θ: a checkpoint within the next step has that sync
    skipped_in_a_row: int = 0  # steps up to now with an update that was skipped
    unwritten: dict[str, Any] = dataclasses.field(default_factory=dict)  # the row of `step`, where its evaluation was cut short
    initial: int = 0  # the checksum of θ_0
    before: Any = None  # α before the last sync, until servers have answered the probe; nothing saves it
    frozen: Callable[[Any], Any] = copy_params  # the copy of a policy that is not trained on: α, the reference, α before

    def sync(self) -> None:
        """α becomes π_θ."""
        self.recent = [(self.alpha_version, self.alpha), *self.recent][: self.keep_recent]
        self.before = self.alpha
        self.alpha, self.alpha_version, self.synced_after = self.frozen(self.theta.params), self.step, self.step

    def trained(self) -> None:
        """One more step is trained on."""
        self.step += 1
        if self.step == self.switch_step and self.reference is not None:
            self.reference = self.frozen(self.theta.params)

    def count(self, fresh: Sequence[Group], reevaluated: Sequence[Group], batch: Batch) -> None:
        """Adds a step's responses to the counters."""
        used = {id(g) for g in batch.groups}
        for name, groups in {
            'responses': [*fresh, *reevaluated],
            'discarded': [g for g in fresh if id(g) not in used],
            'reevaluated': reevaluated,
            'reused': [g for g, origin in zip(batch.groups, batch.origins, strict=True) if origin in (X3, REPLAY)],
        }.items():
            self.totals[name] += sum(g.size for g in groups)

    def metrics(self) -> dict[str, int]:
        """The counters, and how many steps older than the policy that the last step trained α is."""
        totals = {f'rollout/{name}_total': total for name, total in self.totals.items()}
        return {'bapo/lag': self.step - 1 - self.alpha_version, **totals}

    def policies(self) -> dict[str, Any]:
        """The parameters that every host knows by role; a role that the run does not have is None."""
        previous = self.recent[0][1] if self.recent else self.alpha
        critic = self.theta.critic.params if self.theta.critic else None
        return {
            ROLLOUT: self.alpha, BEFORE: self.before, PROXIMAL: self.theta.params, REFERENCE: self.reference, PREVIOUS: previous,
            CRITIC: critic,
        }  # fmt: skip


# What the other hosts give in place of the replay: Orbax wants an item of every host, and writes the first's.
NOT_WRITTEN = {'none': np.zeros(1)}


class DamagedCheckpoint(ValueError):
    """A checkpoint that was complete once and can no longer be read."""


class NotSaved(RuntimeError):
    """A checkpoint could not be written; the one before it is whole."""


class OtherWeights(ValueError):
    """The weights of θ_0 are not those of before."""


class Checkpoints:
    """The checkpoints of a run directory, newest last."""

    def __init__(self, directory: Path, keep: int | None, read_only: bool = False, copied_gb: int = 1):
        """The newest `keep` stay. Writing holds copies of `copied_gb` of a policy's arrays at once, of which each must be smaller."""
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=not read_only, read_only=read_only)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options, handler_registry=_handlers(copied_gb))
        self._there = os.stat(directory)

    def steps(self) -> list[int]:
        """The steps that have one, newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, run: RunState, replay: dict[str, np.ndarray] = NOT_WRITTEN, selector: str = '') -> int:
        """Every host saves its part of the policy, host 0 the rest. Returns the bytes of all arrays.

        Returns once the arrays are copied to the host, and writes them while training goes on; the next save, or `close`, waits for
        that, and raises NotSaved where it failed. On a CPU nothing is copied: there JAX reuses no donated buffer that is still being
        read. Raises RuntimeError where Orbax did not write (a step already saved).
        """
        host = {
            'step': run.step,
            'alpha_version': run.alpha_version,
            'totals': run.totals,
            'synced_after': run.synced_after,
            'skipped_in_a_row': run.skipped_in_a_row,
            'unwritten': run.unwritten,
            'initial': run.initial,
            'recent': [version for version, _ in run.recent],
            'selector': selector,
        }
        arrays = _arrays(run)
        host['checksums'] = checksums({'policy': arrays, 'replay': replay})
        host['checksum'] = checksum_of_text(host)
        self._check_directory()
        items = ocp.args.Composite(
            policy=ocp.args.StandardSave(arrays), replay=ocp.args.StandardSave(replay), host=ocp.args.JsonSave(host)
        )
        with self._saying_what_failed():
            saved = self._manager.save(run.step, args=items)
        if not saved:
            raise RuntimeError(f'no checkpoint was written at step {run.step}: one is there already')
        return sum(x.nbytes for x in jax.tree.leaves((arrays, replay)))

    def restore(
        self, step: int, like: TrainState, switch_step: int = 0, frozen: Callable[[Any], Any] = lambda params: params
    ) -> tuple[RunState, dict[str, np.ndarray], str]:
        """The checkpoint of `step` as (run, replay's arrays, selector state); `like` has the policy's shapes and shardings.

        `switch_step` is the row's: a checkpoint after it holds its own reference policy. `frozen` gives such policies' shapes.

        Raises DamagedCheckpoint where parts of it are missing or cut short, or a bit has changed.
        """
        host = self._host_part(step)
        saved, selector, versions = host.pop('checksums'), host.pop('selector'), host.pop('recent')
        copy = frozen(like.params)
        shapes = RunState(like, alpha=copy, recent=[(v, copy) for v in versions], step=step, switch_step=switch_step,
                          reference=copy if 0 < switch_step <= step else None)  # fmt: skip
        items = self._read(
            step, ocp.args.Composite(policy=ocp.args.StandardRestore(_arrays(shapes)), replay=ocp.args.StandardRestore())
        )
        self._compare(step, saved, {'policy': items.policy, 'replay': items.replay})
        policy = items.policy
        recent = [(v, policy['recent'][str(i)]) for i, v in enumerate(versions)]
        critic = TrainState(**policy['critic']) if like.critic else None
        run = RunState(
            TrainState(policy['params'], policy['opt_state'], critic), policy['alpha'], recent=recent,
            reference=policy.get('reference'), switch_step=switch_step, **host,
        )  # fmt: skip
        return run, {name: np.asarray(a) for name, a in items.replay.items()}, selector

    def restore_params(self, params_like: Any) -> tuple[Any, int]:
        """θ alone of the newest checkpoint and its step, as `params_like` (shapes with shardings) says, for evaluation and export.

        Raises FileNotFoundError where there is no checkpoint, ValueError where its tensors are those of another model,
        DamagedCheckpoint where parts of it are missing or cut short, or a bit has changed.
        """
        step = self._manager.latest_step()
        if step is None:
            directory = self._manager.directory
            raise FileNotFoundError(f'{directory} holds no complete checkpoint; train until checkpoint.every steps are done')
        # A partial restore would leave out tensors that the model lacks, and leave those alone that the checkpoint lacks.
        directory = self._manager.directory / str(step) / 'policy'
        saved, wanted = _shapes(ocp.PyTreeCheckpointHandler().metadata(directory).tree['params']), _shapes(params_like)
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                raise ValueError(
                    f'{directory} is of another model: {name} has shape {saved.get(name)} there and {wanted.get(name)} in this one; '
                    'restore model.path'
                )
        like = {'params': params_like}
        only_params = ocp.args.PyTreeRestore(
            like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
        )
        params = self._read(step, ocp.args.Composite(policy=only_params)).policy['params']
        self._compare(step, self._host_part(step)['checksums'], {'policy': {'params': params}})
        return params, step

    def restore_replay(self, step: int) -> dict[str, np.ndarray]:
        """The replay's arrays alone, without a weight. Raises DamagedCheckpoint as `restore`."""
        saved = self._host_part(step)['checksums']
        replay = self._read(step, ocp.args.Composite(replay=ocp.args.StandardRestore())).replay
        self._compare(step, saved, {'replay': replay})
        return {name: np.asarray(a) for name, a in replay.items()}

    def put_aside(self, step: int) -> Path:
        """Moves a damaged checkpoint out of the way; where it is now. Every host calls it."""
        damaged = self._manager.directory / str(step)
        names = (damaged.with_name(f'damaged-{step}' + f'.{i}' * bool(i)) for i in itertools.count())
        aside = next(path for path in names if not path.exists())
        if jax.process_index() == 0:
            os.rename(damaged, aside)
        multihost_utils.sync_global_devices('damaged checkpoint put aside')
        self._manager.reload()
        return aside

    def _host_part(self, step: int) -> dict[str, Any]:
        host = self._read(step, ocp.args.Composite(host=ocp.args.JsonRestore())).host
        if not isinstance(host, dict) or host.pop('checksum', None) != checksum_of_text(host):
            raise self._damaged(step, 'its host part is not what was saved')
        return host

    def _compare(self, step: int, saved: dict[str, int], restored: Any) -> None:
        for name, checksum in checksums(restored).items():
            if saved.get(name) != checksum:
                raise self._damaged(step, f'{name} is not what was saved')

    def _damaged(self, step: int, reason: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f'{self._manager.directory / str(step)} cannot be read ({reason}); restore its files, or move that directory away to go '
            'on from the checkpoint before it'
        )

    def _read(self, step: int, items: ocp.args.Composite) -> Any:
        try:
            return self._manager.restore(step, args=items)
        except (jax.errors.JaxRuntimeError, MemoryError):  # no room: no fault of the files
            raise
        except Exception as e:  # Orbax raises KeyError, ValueError or a bare Exception, by which of its layers notices
            reason = next(iter(str(e).splitlines()), '')[:200]
            raise self._damaged(step, f'{type(e).__name__}: {reason}') from e

    def _check_directory(self) -> None:
        """Raises NotSaved where it is another directory by now, or none: Orbax makes it anew, with what it is writing alone."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._manager.directory), self._there):
                return
        raise NotSaved(
            f'{self._manager.directory} was removed or renamed, so no checkpoint can be written; put it back, in the place of what '
            'lies there now'
        )

    def finish(self, seconds: float) -> None:
        """Waits for what is being written, so long at most. Where that fails nothing is said: another error ends the run."""

        def wait() -> None:
            with contextlib.suppress(Exception):
                self._manager.wait_until_finished()

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(seconds)

    def close(self) -> None:
        """Waits until all is written. Raises NotSaved where that failed."""
        with self._saying_what_failed():
            self._manager.wait_until_finished()
        self._manager.close()

    @contextlib.contextmanager
    def _saying_what_failed(self) -> Iterator[None]:
        try:
            yield
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise
        except Exception as e:  # Orbax raises ValueError, OSError and others, by which of its layers cannot write
            self._check_directory()
            raise NotSaved(f'a checkpoint could not be written to {self._manager.directory}: {str(e)[-300:]}') from e


def read_replay(directory: Path) -> tuple[int, dict[str, np.ndarray]]:
    """Step and replay's arrays of the newest whole checkpoint in `directory`. Writes nothing, so a trainer may go on beside it.

    Raises FileNotFoundError where there is no checkpoint, DamagedCheckpoint where none is whole.
    """
    checkpoints = Checkpoints(directory, keep=None, read_only=True) if directory.is_dir() else None
    damaged = None
    for step in checkpoints.steps() if checkpoints else ():
        try:
            return step, checkpoints.restore_replay(step)
        except DamagedCheckpoint as e:
            damaged = damaged or e
    raise damaged or FileNotFoundError(f'{directory} holds no complete checkpoint; train until checkpoint.every steps are done')


def _arrays(run: RunState) -> dict[str, Any]:
    """What only the run knows: θ_0 as the reference is read from its files again."""
    tree = {'params': run.theta.params, 'opt_state': run.theta.opt_state, 'alpha': run.alpha}
    if run.theta.critic:
        tree['critic'] = {'params': run.theta.critic.params, 'opt_state': run.theta.critic.opt_state}
    if run.recent:
        tree['recent'] = {str(i): params for i, (_, params) in enumerate(run.recent)}
    if run.reference is not None and 0 < run.switch_step <= run.step:
        tree['reference'] = run.reference
    return tree


def copied_gb(params: Any) -> int:
    """GB of arrays that a checkpoint's writing may copy at once. `params` are shapes, float32: nothing is larger."""
    return 1 + max(x.size * 4 for x in jax.tree.leaves(params)) // 10**9


def _handlers(save_gb: int) -> ocp.handlers.CheckpointHandlerRegistry:
    """Orbax's own, but for the memory of writing a policy, which is all of it by default."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    whole = ocp.StandardCheckpointHandler(save_concurrent_gb=save_gb)
    registry.add('policy', ocp.args.StandardSave, whole)
    registry.add('policy', ocp.args.StandardRestore, whole)
    registry.add('policy', ocp.args.PyTreeRestore, ocp.PyTreeCheckpointHandler())
    return registry


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {'.'.join(key.key for key in path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


class OpenedRun(NamedTuple):
    """Where a run begins."""

    state: RunState
    of_host: Sequence[Any] | None  # of a run that continues: the replay's arrays and the selector's state
    checkpoints: Checkpoints


def open_run(learner: Learner, config: ConfigDict, directory: Path) -> OpenedRun:
    """Starts at θ_0, or continues from the newest whole checkpoint in `directory`; every host calls it at once.

    `config` is resolved. Damaged checkpoints newer than that are put aside. Raises DamagedCheckpoint where none is whole, and
    OtherWeights where the reference policy's weights are not those of before.
    """
    like, switch_step = learner.shapes(), config.learner.switch_step
    checkpoints = Checkpoints(directory, config.checkpoint.keep, copied_gb=copied_gb(like.params))
    wants_reference = REFERENCE in learner.objective.roles
    frozen = functools.partial(frozen_copy, dtype=config.model.dtype, on_host=config.mesh.frozen_on_host)
    restored = _newest_whole(checkpoints, like, switch_step if wants_reference else 0, frozen)
    initial = learner.read_initial() if restored is None or wants_reference else None
    checksum = checksum_of_text(checksums(initial)) if initial is not None else 0
    if restored is None:
        if jax.process_index() == 0:
            say_none_yet(directory)
        state, of_host = RunState(learner.init(initial), frozen(initial), switch_step=switch_step, initial=checksum), None
    else:
        state, *of_host = restored
        if initial is not None and checksum != state.initial:
            raise OtherWeights(
                f'model.path={config.model.path} holds other weights than those that the run began with, and its reference '
                'policy is read there; restore its files'
            )
    state.frozen = frozen
    if wants_reference and state.reference is None:
        state.reference = state.alpha if restored is None else frozen(initial)
    state.keep_recent = config.rollout.mixture_policies if config.rollout.mixture else 0
    return OpenedRun(state, of_host, checkpoints)


def _newest_whole(checkpoints: Checkpoints, *like: Any) -> tuple[RunState, dict[str, np.ndarray], str] | None:
    """`restore` of the newest checkpoint that is whole, None where there is none at all. Raises DamagedCheckpoint where all are."""
    damaged: dict[int, DamagedCheckpoint] = {}
    for step in checkpoints.steps():
        try:
            restored = checkpoints.restore(step, *like)
        except DamagedCheckpoint as e:
            damaged[step] = e
            continue
        for newer, e in damaged.items():
            aside = checkpoints.put_aside(newer)
            events.report('checkpoint damaged', f'{e}. It lies in {aside} now; going on after step {step}', step=newer)
        return restored
    if damaged:
        raise next(iter(damaged.values()))
    return None
