"""Opens a run: at θ_0 if it is new, else at its newest intact checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from bapo_jax.learner.learner import Learner
from bapo_jax.learner.objective import REFERENCE
from bapo_jax.machine import events
from bapo_jax.machine.ending import Ending
from bapo_jax.models.parameters import parted, united
from bapo_jax.run.checkpoint import Checkpoints, DamagedCheckpoint, copied_gb
from bapo_jax.run.checksums import checksum_of_text, checksums
from bapo_jax.run.remains import say_none_yet
from bapo_jax.run.state import RunState, frozen_copy


class OtherWeights(Ending, ValueError):
    """The weights of θ_0 differ from those that the run began with."""


class Opened(NamedTuple):
    """The state from which a run starts."""

    state: RunState
    of_host: Sequence[Any] | None  # the replay's arrays and the selector's state; None for a new run
    checkpoints: Checkpoints


def open_run(learner: Learner, config: ConfigDict, directory: Path) -> Opened:
    """Starts at θ_0, or resumes from the newest intact checkpoint in `directory`. Every host must call it.

    `config` must be resolved. Newer, damaged checkpoints are moved aside. Raises DamagedCheckpoint if
    checkpoints exist but none is intact, and OtherWeights if weights have changed that are read again from
    model.path and model.adapter.start: those of the reference policy, and those that are never trained.
    """
    like, switch_step = learner.shapes(), config.learner.switch_step
    checkpoints = Checkpoints(directory, config.checkpoint.keep, copied_gb=copied_gb(like.params))
    wants_reference = REFERENCE in learner.objective.roles
    frozen = functools.partial(frozen_copy, dtype=config.model.dtype, on_host=config.mesh.frozen_on_host)
    reads_initial = wants_reference or like.frozen is not None or not checkpoints.steps()
    initial = learner.read_initial() if reads_initial else None
    # Without a reference, an adapter is in the checkpoint, and model.adapter.start need not be there again.
    adapts = learner.model.adapter is not None
    read_again = parted(initial, like.trained)[1] if adapts and not wants_reference else initial
    checksum = checksum_of_text(checksums(read_again)) if initial is not None else 0
    restored = _newest_whole(checkpoints, like, switch_step if wants_reference else 0, frozen, initial)
    if restored is None:
        if jax.process_index() == 0:
            say_none_yet(directory)
        state = RunState(
            learner.init(initial), None, switch_step=switch_step, initial=checksum, frozen=frozen
        )
        state.alpha, of_host = state.kept(), None
    else:
        state, *of_host = restored
        if initial is not None and checksum != state.initial:
            named, what = f'model.path={config.model.path}', 'its files'
            if adapts and wants_reference:
                named, what = f'{named} with model.adapter.start={config.model.adapter.start!r}', 'both'
            raise OtherWeights(
                f'{named} holds other weights than at the start of the run, and '
                f'those that training does not change are read from there; restore {what}'
            )
        state.frozen = frozen
    if wants_reference and state.reference is None:
        trained, _ = parted(initial, state.theta.trained)
        state.reference = state.alpha if restored is None else united(frozen(trained), state.theta.frozen)
    state.keep_recent = config.rollout.mixture.policies if config.rollout.mixture.share else 0
    return Opened(state, of_host, checkpoints)


def _newest_whole(checkpoints: Checkpoints, *like: Any) -> tuple[RunState, dict[str, np.ndarray], str] | None:
    """The newest intact checkpoint, or None if there are none.

    Raises DamagedCheckpoint if all are damaged.
    """
    damaged: dict[int, DamagedCheckpoint] = {}
    for step in checkpoints.steps():
        try:
            restored = checkpoints.restore(step, *like)
        except DamagedCheckpoint as e:
            damaged[step] = e
            continue
        for newer, e in damaged.items():
            aside = checkpoints.put_aside(newer)
            events.report(
                'checkpoint damaged',
                f'{e}. It was moved to {aside}; continuing after step {step}',
                step=newer,
            )
        return restored
    if damaged:
        raise next(iter(damaged.values()))
    return None
