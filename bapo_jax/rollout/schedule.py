"""The schedule of syncs of α with π_θ, re-evaluations, and rollouts ahead of training. Steps count from 1."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

PHASES = ('paper', 'code')
_MIXTURE = 100  # random stream of `ages`; differs from the numbers of replay.PURPOSES


class Schedule(NamedTuple):
    """A configuration's choice of which policy answers when. A period of 0 means never."""

    steps: int  # of the run
    sync_every: int  # v
    reevaluate_every: int  # m
    evaluate_every: int
    sync_phase: str = 'paper'
    mixture: float = 0.0  # p, the fraction of prompts answered by older policies, until `switch_step`
    mixture_policies: int = 0  # N, the number of older policies
    switch_step: int = 0
    seed: int = 0  # seed of the mixture
    most_behind: int = 0  # η, how many steps past a sync may be requested before it

    @property
    def reevaluation_syncs(self) -> bool:
        """Whether α stays π_θ after a re-evaluation, as in the authors' code, which restores only a flag."""
        return self.sync_phase == 'code'

    def sync_due(self, step: int) -> bool:
        """Returns whether α becomes π_θ before `step`. Algorithm 1, line 3: t mod v = 0; α starts as π_θ0.

        The lag cycles through 0..v-1 (v=1: always 0). Phase 'code' (the authors' code): (t - 1) mod v = 0.
        """
        return (step - (self.sync_phase == 'code')) % self.sync_every == 0

    def ages(self, step: int, prompts: int) -> np.ndarray:
        """Each prompt's policy at a step, int [prompts]: 0 is α, i that of i syncs before (ReMix: i ~ 1..N).

        If a policy does not exist yet, the caller uses the oldest. Keyed by (seed, step), so a resumed run
        gets the same values.
        """
        if not self.mixture or self.switch_step and step > self.switch_step:
            return np.zeros(prompts, int)
        rng = np.random.default_rng([self.seed, step, _MIXTURE])
        older = rng.random(prompts) < self.mixture
        return np.where(older, rng.integers(1, self.mixture_policies + 1, prompts), 0)

    def reevaluation_due(self, step: int) -> bool:
        """Returns whether hard prompts are re-evaluated at `step`. Algorithm 1, line 12: t mod m = 0."""
        return is_due(self.reevaluate_every, step)

    def last_ahead(self, step: int) -> int:
        """The last step whose fresh prompts can be answered while `step` trains.

        That is the last step before the next sync, since only α is needed until then, and the η steps after
        it, which α answers in place of the next rollout policy (AReaL, arXiv 2505.24298).

        The engine needs π_θ for an evaluation, which follows a step, and for a re-evaluation, which follows
        that step's fresh prompts. The re-evaluation of `step` itself has already happened.
        """
        t, behind = step, 0
        while t < self.steps and not is_due(self.evaluate_every, t):
            if t > step and self.reevaluation_due(t):
                break
            behind += behind > 0 or self.sync_due(t + 1)  # whether a sync precedes step t + 1
            if behind > self.most_behind:
                break
            t += 1
        return t


def is_due(period: int, step: int) -> bool:
    """Returns whether t mod period = 0; False if the period is 0."""
    return period > 0 and step % period == 0


def policies_before(rollout: ConfigDict) -> int:
    """Returns how many policies before α pending steps may have been requested of: ⌈η / v⌉."""
    return -(-rollout.most_behind // rollout.sync_every)


def schedule_of(config: ConfigDict, steps: int) -> Schedule:
    """The schedule of a resolved config, for a run of `steps` steps."""
    reevaluate_every = config.replay.reevaluate_every if config.replay.use_x2 else 0
    delayed = config.replay.use_x2 and config.replay.reevaluate == 'delayed'
    if delayed or config.replay.kind == 'exgrpo':  # which ask prompts again at every step
        reevaluate_every = 1
    r = config.rollout
    return Schedule(
        steps, r.sync_every, reevaluate_every, config.evaluate.every, r.sync_phase, r.mixture.share,
        r.mixture.policies if r.mixture.share else 0, config.learner.switch_step, config.seed, r.most_behind,
    )  # fmt: skip
