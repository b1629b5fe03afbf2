"""When the rollout policy α becomes π_θ, when hard prompts are re-evaluated, how far ahead α may answer. Steps count from 1."""

from __future__ import annotations

from typing import NamedTuple

from ml_collections import ConfigDict


class Schedule(NamedTuple):
    """A row's choice of who answers when. A period of 0 means never."""

    steps: int  # of the run
    sync_every: int  # v
    reevaluate_every: int  # m
    evaluate_every: int

    def sync_due(self, step: int) -> bool:
        """Algorithm 1, line 3: t mod v = 0, before generating; α starts as π_θ0. The lag cycles through 0..v-1 (v=1: always 0)."""
        return step % self.sync_every == 0

    def reevaluation_due(self, step: int) -> bool:
        """Algorithm 1, line 12: t mod m = 0."""
        return is_due(self.reevaluate_every, step)

    def last_ahead(self, step: int) -> int:
        """The last step whose fresh prompts can be answered while `step` trains: until then the engine has to hold α and nothing else.

        It holds π_θ for an evaluation, which comes after a step, and for a re-evaluation, which comes after that step's fresh
        prompts and, in `step` itself, is over.
        """
        t = step
        while t < self.steps and not self.sync_due(t + 1):
            if is_due(self.evaluate_every, t) or t > step and self.reevaluation_due(t):
                break
            t += 1
        return t


def is_due(period: int, step: int) -> bool:
    """t mod period = 0; never where the period is 0."""
    return period > 0 and step % period == 0


def schedule_of(config: ConfigDict, steps: int) -> Schedule:
    """The schedule of a resolved config for a run of so many steps."""
    reevaluate_every = config.replay.reevaluate_every if config.replay.use_x2 else 0
    return Schedule(steps, config.rollout.sync_every, reevaluate_every, config.evaluate.every)
