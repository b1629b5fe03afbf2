"""Diagnostics around an update, which are logged and do not affect training.

They are importance ratios for people to inspect, the theory monitors (run/theory.py), and failed prompts that
are sampled again (replay/failures.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.groups import Batch, Group, Prompt
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.objective import PROXIMAL
from bapo_jax.replay.failures import Failures, measured
from bapo_jax.rollout.rollouts import Rollouts
from bapo_jax.rollout.schedule import is_due
from bapo_jax.run.run import Step
from bapo_jax.run.state import RunState
from bapo_jax.run.theory import monitor


class Diagnostics:
    """Runs the diagnostics, and remembers the failed prompts that are to be sampled again."""

    def __init__(
        self,
        config: ConfigDict,
        prompts: Sequence[Prompt],
        learner: Learner,
        rollouts: Rollouts,
        state: RunState,
    ):
        """`config` must be resolved; `prompts` are the training prompts."""
        self._config, self._learner, self._rollouts, self._state = config, learner, rollouts, state
        self._failures = Failures(prompts, config.log.failed_again.prompts, config.log.failed_again.every)

    @contextlib.contextmanager
    def around_update(
        self, now: Step, fresh: Sequence[Group], batch: Batch, thresholds: dict[str, float]
    ) -> Iterator[None]:
        """Samples failed prompts again if that is due, and scores the batch around the enclosed update.

        `thresholds` holds the step's bapo/c2 and bapo/c3.
        """
        self._ask_failed(now, fresh)
        with self._scored(now, batch, thresholds):
            yield

    def state(self) -> dict[str, np.ndarray]:
        """Returns arrays for a checkpoint."""
        return self._failures.state()

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores the arrays that `state` returned."""
        self._failures.restore(arrays)

    def _ask_failed(self, now: Step, fresh: Sequence[Group]) -> None:
        """Measures what X2 could gain: samples prompts that failed some steps ago and only counts results."""
        if asked := self._failures.choose(now.number, now.rng('failures')):
            with now.timer('failed_again'):
                groups = self._rollouts.ask_failed(now.number, [again.prompt for again in asked])
                now.record(measured(asked, groups))
        self._failures.observe(now.number, fresh)

    @contextlib.contextmanager
    def _scored(self, now: Step, batch: Batch, thresholds: dict[str, float]) -> Iterator[None]:
        """Scores groups from older policies before the enclosed update, if the step's rollouts are written.

        Every `log.theory_every` steps it scores the whole batch before and after, and records the monitors.
        """
        c, before, scored = self._config, [None] * len(batch.groups), []
        every = is_due(c.log.theory_every, now.number)
        if every:
            scored = list(range(len(batch.groups)))
        elif now.writes_rollouts:  # responses sampled from π_θ have importance ratio 1
            scored = [i for i, g in enumerate(batch.groups) if g.older_than(now.number - 1)]
        if scored:
            with now.timer('theory' if every else 'rollouts'):
                for i, logp in zip(scored, self._score(batch.take(scored)), strict=True):
                    before[i] = logp
        now.logp = before
        yield
        if not (batch.groups and every):
            return
        with now.timer('theory'):
            low, high = thresholds.get('bapo/c2', 0.0), thresholds.get('bapo/c3', 1.0)
            now.record(monitor(batch, before, self._score(batch), c1=c.replay.c1, low=low, high=high))

    def _score(self, batch: Batch):
        return self._learner.score_batch(PROXIMAL, self._state.theta.params, batch)
