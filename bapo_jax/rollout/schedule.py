"""When the rollout policy α becomes π_θ, when hard prompts are re-evaluated, and how far ahead α may answer. Steps count from 1."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

PHASES = ('paper', 'code')
_MIXTURE = 100  # the random stream of `ages`; its number differs from those of replay.PURPOSES


class Schedule(NamedTuple):
    """A row's choice of which policy answers when. A period of 0 means never."""

    steps: int  # of the run
    sync_every: int  # v
    reevaluate_every: int  # m
    evaluate_every: int
    sync_phase: str = 'paper'
    mixture: float = 0.0  # p, the share of prompts that older policies answer, until `switch_step`
    mixture_policies: int = 0  # N, how many older policies
    switch_step: int = 0
    reevaluation_syncs: bool = False  # after a re-evaluation α is π_θ
    seed: int = 0  # of the mixture's draws

    def sync_due(self, step: int) -> bool:
        """Returns whether α becomes π_θ before `step` generates. Algorithm 1, line 3: t mod v = 0; α starts as π_θ0.

        The lag cycles through 0..v-1 (v=1: always 0). The phase 'code' is that of the authors' code: (t - 1) mod v = 0.
        """
        return (step - (self.sync_phase == 'code')) % self.sync_every == 0

    def ages(self, step: int, prompts: int) -> np.ndarray:
        """Which policy answers each prompt of a step, int [prompts]: 0 is α, i the one of i syncs before (ReMix: i ~ 1..N).

        For a policy that does not exist yet the caller takes the oldest. Keyed by (seed, step), so a resumed run draws the same.
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
        """The last step whose fresh prompts can be answered while `step` trains. Until then the engine need hold α alone.

        It must hold π_θ for an evaluation, which comes after a step. It must also hold π_θ for a re-evaluation, which comes after
        that step's fresh prompts. The re-evaluation of `step` itself is over.
        """
        t = step
        while t < self.steps and not self.sync_due(t + 1):
            if is_due(self.evaluate_every, t) or t > step and self.reevaluation_due(t):
                break
            t += 1
        return t


def is_due(period: int, step: int) -> bool:
    """Returns whether t mod period = 0; never where the period is 0."""
    return period > 0 and step % period == 0


def schedule_of(config: ConfigDict, steps: int) -> Schedule:
    """The schedule of a resolved config, for a run of `steps` steps."""
    reevaluate_every = config.replay.reevaluate_every if config.replay.use_x2 else 0
    r = config.rollout
    return Schedule(
        steps, r.sync_every, reevaluate_every, config.evaluate.every, r.sync_phase, r.mixture,
        r.mixture_policies if r.mixture else 0, config.learner.switch_step, r.reevaluation_syncs, config.seed,
    )  # fmt: skip
