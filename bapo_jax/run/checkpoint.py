"""The Orbax checkpoints from which a run resumes: each is complete or absent, and verified bit for bit.

    policy   θ, α, the critic if any, the optimizers' moments (arrays with their sharding)
    replay   the state of the replay: both buffers, r_tot (numpy arrays)
    host     step, α's version, counters, selector state, a checksum of every array and of itself (JSON)

Random state is not saved, because every draw is keyed by (seed, step, purpose).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from bapo_jax.learner.update import TrainState, with_frozen
from bapo_jax.machine.ending import CONTINUES, Ending
from bapo_jax.models.parameters import parted, united
from bapo_jax.run.checksums import checksum_of_text, checksums
from bapo_jax.run.directory import part_of, read_run_config
from bapo_jax.run.state import RunState

# Other hosts pass this in place of the replay: Orbax expects an item from each host, and writes the first's.
NOT_WRITTEN = {'none': np.zeros(1)}


class DamagedCheckpoint(Ending, ValueError):
    """A checkpoint that was once complete can no longer be read."""


class NotSaved(Ending, RuntimeError):
    """A checkpoint could not be written; the previous one is intact."""

    remedy = CONTINUES


class Checkpoints:
    """The checkpoints of a run directory, newest last."""

    def __init__(self, directory: Path, keep: int | None, read_only: bool = False, copied_gb: int = 1):
        """Keeps the newest `keep` checkpoints.

        Writing copies at most `copied_gb` GB of a policy's arrays at once; each array must be smaller.
        """
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=not read_only, read_only=read_only
        )
        self._manager = ocp.CheckpointManager(
            directory.absolute(), options=options, handler_registry=_handlers(copied_gb)
        )
        self._there = os.stat(directory)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, run: RunState, replay: dict[str, np.ndarray] = NOT_WRITTEN, selector: str = '') -> int:
        """Saves the policy's shards on every host, and the rest on host 0. Returns the bytes of all arrays.

        Returns once the arrays are copied to the host; they are written while training goes on. The next
        save, or `close`, waits for the writing, and raises NotSaved if it failed. On a CPU nothing is copied:
        JAX does not reuse a donated buffer there while it is being read. Raises RuntimeError if the step is
        already saved.
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
            policy=ocp.args.StandardSave(arrays),
            replay=ocp.args.StandardSave(replay),
            host=ocp.args.JsonSave(host),
        )
        with self._saying_what_failed():
            saved = self._manager.save(run.step, args=items)
        if not saved:
            raise RuntimeError(f'no checkpoint was written at step {run.step}: one is there already')
        return sum(x.nbytes for x in jax.tree.leaves((arrays, replay)))

    def restore(
        self,
        step: int,
        like: TrainState,
        switch_step: int = 0,
        frozen: Callable[[Any], Any] = lambda params: params,
        initial: Any = None,
    ) -> tuple[RunState, dict[str, np.ndarray], str]:
        """Returns the checkpoint of `step` as (run state, replay arrays, selector state).

        `like` has the policy's shapes and shardings. A checkpoint after `switch_step` holds its own reference
        policy. `frozen` maps parameters to the shapes of a frozen policy. `initial` is θ_0 if some parameters
        are not trained, since a checkpoint does not hold those.

        Raises DamagedCheckpoint if parts of it are missing or truncated, or if a bit has changed.
        """
        host = self._host_part(step)
        saved, selector, versions = host.pop('checksums'), host.pop('selector'), host.pop('recent')
        if any(f'policy.params.{name}' in saved for name in _shapes(like.frozen)):
            raise ValueError(
                f'{self._manager.directory / str(step)} is of an earlier version, which also stored weights '
                'that are not trained; continue with that version, or export the policy and start from it'
            )
        copy = frozen(like.trained)
        shapes = RunState(
            like, alpha=copy, recent=[(v, copy) for v in versions], step=step, switch_step=switch_step,
            reference=copy if 0 < switch_step <= step else None,
        )  # fmt: skip
        items = self._read(
            step,
            ocp.args.Composite(
                policy=ocp.args.StandardRestore(_arrays(shapes)), replay=ocp.args.StandardRestore()
            ),
        )
        self._compare(step, saved, {'policy': items.policy, 'replay': items.replay})
        policy = items.policy
        critic = policy.get('critic') and _of_tree(policy['critic'], like.critic)
        theta = with_frozen(_of_tree(policy, like)._replace(critic=critic), initial)
        recent = [(v, united(policy['recent'][str(i)], theta.frozen)) for i, v in enumerate(versions)]
        reference = policy.get('reference') and united(policy['reference'], theta.frozen)
        run = RunState(
            theta, united(policy['alpha'], theta.frozen), recent=recent, reference=reference,
            switch_step=switch_step, **host,
        )  # fmt: skip
        return run, {name: np.asarray(a) for name, a in items.replay.items()}, selector

    def restore_params(self, like: Any, frozen: Any = None) -> tuple[Any, int]:
        """Returns θ of the newest checkpoint and its step, for evaluation and export.

        `like` has the shapes and shardings of what the run trains, and `frozen` those of its other
        parameters, which only older checkpoints hold. Raises FileNotFoundError if there is no checkpoint,
        ValueError if its tensors are those of another model, and DamagedCheckpoint if parts of it are missing
        or truncated, or if a bit has changed.
        """
        step = self._manager.latest_step()
        if step is None:
            directory = self._manager.directory
            raise none_complete(directory)
        # A partial restore would ignore tensors that the model lacks, and leave those untouched that the
        # checkpoint lacks.
        directory = self._manager.directory / str(step) / 'policy'
        saved = _shapes(ocp.PyTreeCheckpointHandler().metadata(directory).tree['params'])
        if saved.keys() & _shapes(frozen).keys():
            like = united(like, frozen)
        wanted = _shapes(like)
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                raise ValueError(
                    f'{directory} is of another model: {name} has shape {saved.get(name)} there and '
                    f'{wanted.get(name)} in its base, which is model.path or --base; give the model that the '
                    'run started from'
                )
        tree = {'params': like}
        only_params = ocp.args.PyTreeRestore(
            tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
        )
        params = self._read(step, ocp.args.Composite(policy=only_params)).policy['params']
        self._compare(step, self._host_part(step)['checksums'], {'policy': {'params': params}})
        return params, step

    def restore_replay(self, step: int) -> dict[str, np.ndarray]:
        """Returns only the replay's arrays, no weights. Raises DamagedCheckpoint, like `restore`."""
        saved = self._host_part(step)['checksums']
        replay = self._read(step, ocp.args.Composite(replay=ocp.args.StandardRestore())).replay
        self._compare(step, saved, {'replay': replay})
        return {name: np.asarray(a) for name, a in replay.items()}

    def put_aside(self, step: int) -> Path:
        """Moves a damaged checkpoint out of the way and returns its new path. Every host must call it."""
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
            f'{self._manager.directory / str(step)} cannot be read ({reason}); restore its files, or move '
            'that directory away to continue from the previous checkpoint'
        )

    def _read(self, step: int, items: ocp.args.Composite) -> Any:
        try:
            return self._manager.restore(step, args=items)
        except (jax.errors.JaxRuntimeError, MemoryError):  # out of memory, not damage to the files
            raise
        except Exception as e:  # KeyError, ValueError or a bare Exception, depending on Orbax's layer
            reason = next(iter(str(e).splitlines()), '')[:200]
            raise self._damaged(step, f'{type(e).__name__}: {reason}') from e

    def _check_directory(self) -> None:
        """Raises NotSaved if the directory was moved or removed: Orbax would recreate it almost empty."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._manager.directory), self._there):
                return
        raise NotSaved(
            f'{self._manager.directory} was removed or renamed, so no checkpoint can be written; put it '
            'back, in place of anything that is there now'
        )

    def finish(self, seconds: float) -> None:
        """Waits up to `seconds` for pending writes; ignores their errors, as another error ends the run."""

        def wait() -> None:
            with contextlib.suppress(Exception):
                self._manager.wait_until_finished()

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(seconds)

    def close(self) -> None:
        """Waits until everything is written. Raises NotSaved if that failed."""
        with self._saying_what_failed():
            self._manager.wait_until_finished()
        self._manager.close()

    @contextlib.contextmanager
    def _saying_what_failed(self) -> Iterator[None]:
        try:
            yield
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise
        except Exception as e:  # Orbax raises ValueError, OSError and others, depending on the layer
            self._check_directory()
            raise NotSaved(
                f'a checkpoint could not be written to {self._manager.directory}; make room or check '
                f'permissions: {str(e)[-300:]}'
            ) from e


def read_replay(directory: Path) -> tuple[int, dict[str, np.ndarray]]:
    """Returns the step and the replay's arrays of the newest intact checkpoint in `directory`.

    It writes nothing, so it is safe while a trainer runs. Raises FileNotFoundError if there is no checkpoint,
    and DamagedCheckpoint if none is intact.
    """
    checkpoints = Checkpoints(directory, keep=None, read_only=True) if directory.is_dir() else None
    damaged = None
    for step in checkpoints.steps() if checkpoints else ():
        try:
            return step, checkpoints.restore_replay(step)
        except DamagedCheckpoint as e:
            damaged = damaged or e
    raise damaged or none_complete(directory)


def none_complete(directory: Path) -> FileNotFoundError:
    """The error for a directory without a complete checkpoint; it names the step of the first one."""
    file = directory.parent / 'config.json'
    config = read_run_config(file) if file.is_file() else {}
    every = part_of(config, 'checkpoint').get('every')
    first = f'step {every} (checkpoint.every)' if every else 'checkpoint.every steps'
    return FileNotFoundError(f'{directory} holds no complete checkpoint; train until {first}')


def _arrays(run: RunState) -> dict[str, Any]:
    """The policy's arrays to save: what is trained, of each policy.

    Frozen parameters, and a reference that is θ_0, are read from the model's files again instead.
    """
    theta = run.theta

    def trained(params: Any) -> Any:
        return parted(params, theta.trained)[0]

    tree = {'params': theta.trained, 'opt_state': theta.opt_state, 'alpha': trained(run.alpha)}
    if theta.critic:
        tree['critic'] = {'params': theta.critic.trained, 'opt_state': theta.critic.opt_state}
    if run.recent:
        tree['recent'] = {str(i): trained(params) for i, (_, params) in enumerate(run.recent)}
    if run.reference is not None and 0 < run.switch_step <= run.step:
        tree['reference'] = trained(run.reference)
    return tree


def _of_tree(tree: dict[str, Any], like: TrainState) -> TrainState:
    return TrainState(tree['params'], tree['opt_state'], frozen=like.frozen)


def copied_gb(params: Any) -> int:
    """GB of arrays that may be copied at once during a save. `params` are shapes, in float32 at most."""
    return 1 + max(x.size * 4 for x in jax.tree.leaves(params)) // 10**9


def _handlers(save_gb: int) -> ocp.handlers.CheckpointHandlerRegistry:
    """Orbax's default handlers, but writing a policy copies `save_gb` GB at once instead of all of it."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    whole = ocp.StandardCheckpointHandler(save_concurrent_gb=save_gb)
    registry.add('policy', ocp.args.StandardSave, whole)
    registry.add('policy', ocp.args.StandardRestore, whole)
    registry.add('policy', ocp.args.PyTreeRestore, ocp.PyTreeCheckpointHandler())
    return registry


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {
        '.'.join(key.key for key in path): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
