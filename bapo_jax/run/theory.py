"""The theory monitors of a step (learner/monitors.py): the batch is scored before and after its update. They are only logged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ml_collections import ConfigDict

from bapo_jax.groups import Batch
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.monitors import monitor
from bapo_jax.learner.objective import PROXIMAL
from bapo_jax.rollout.schedule import is_due
from bapo_jax.run.checkpoint import RunState
from bapo_jax.run.run import Step


@contextlib.contextmanager
def monitored(
    config: ConfigDict, learner: Learner, state: RunState, batch: Batch, thresholds: dict[str, float], now: Step
) -> Iterator[None]:  # fmt: skip
    """Records the monitors of the update inside, every `theory.every` steps. `thresholds` holds the step's bapo/c2 and bapo/c3."""
    if not (is_due(config.theory.every, now.number) and batch.groups):
        yield
        return
    with now.timer('theory'):
        before = learner.score_batch(PROXIMAL, state.theta.params, batch)
    yield
    with now.timer('theory'):
        after = learner.score_batch(PROXIMAL, state.theta.params, batch)
        c1, low, high = config.replay.c1, thresholds.get('bapo/c2', 0.0), thresholds.get('bapo/c3', 1.0)
        now.record(monitor(batch, before, after, c1=c1, low=low, high=high))
