"""When the rollout policy α becomes π_θ, when hard prompts are asked again, and how far ahead α may be asked. Steps count from 1."""

from __future__ import annotations


def sync_due(step: int, every: int) -> bool:
    """Algorithm 1, line 3: t mod v = 0, before generating; α starts as π_θ0. The lag cycles through 0..v-1 (v=1: always 0)."""
    return step % every == 0


def reevaluation_due(step: int, every: int) -> bool:
    """Algorithm 1, line 12: t mod m = 0; never where m is 0."""
    return every > 0 and step % every == 0


def last_ahead(step: int, last: int, sync_every: int, reevaluate_every: int, evaluate_every: int) -> int:
    """The last step whose fresh prompts can be asked while `step` trains: until then the engine has to hold α and nothing else.

    It holds π_θ for an evaluation, which comes after a step, and for a re-evaluation, which comes after that step's fresh prompts and,
    in `step` itself, is over. A period of 0 means never.
    """
    t = step
    while t < last and not sync_due(t + 1, sync_every):
        if evaluate_every and t % evaluate_every == 0 or t > step and reevaluation_due(t, reevaluate_every):
            break
        t += 1
    return t
