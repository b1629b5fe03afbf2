"""What is watched of an update: importance ratios for people to see, and the theory monitors (learner/monitors.py). Only logged."""

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
    """Scores what older policies sampled before the update inside, where the step's groups go into a file.

    Every `theory.every` steps the whole batch is scored before and after, and the monitors are recorded. `thresholds` holds the
    step's bapo/c2 and bapo/c3.
    """
    before, scored = [None] * len(batch.groups), []
    every = is_due(config.theory.every, now.number)
    if every:
        scored = list(range(len(batch.groups)))
    elif now.writes_rollouts:  # the importance ratios of what π_θ sampled are 1
        scored = [i for i, g in enumerate(batch.groups) if any(r.version < now.number - 1 for r in g.responses)]
    if scored:
        with now.timer('theory' if every else 'rollouts'):
            for i, logp in zip(scored, learner.score_batch(PROXIMAL, state.theta.params, batch.take(scored)), strict=True):
                before[i] = logp
    now.logp = before
    yield
    if not (batch.groups and every):
        return
    with now.timer('theory'):
        after = learner.score_batch(PROXIMAL, state.theta.params, batch)
        c1, low, high = config.replay.c1, thresholds.get('bapo/c2', 0.0), thresholds.get('bapo/c3', 1.0)
        now.record(monitor(batch, before, after, c1=c1, low=low, high=high))
