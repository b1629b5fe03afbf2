"""When the rollout policy α becomes π_θ, and when hard prompts are asked again. Steps count from 1."""

from __future__ import annotations


def sync_due(step: int, every: int) -> bool:
    """Algorithm 1, line 3: t mod v = 0, before generating; α starts as π_θ0. The lag cycles through 0..v-1 (v=1: always 0)."""
    return step % every == 0


def reevaluation_due(step: int, every: int) -> bool:
    """Algorithm 1, line 12: t mod m = 0."""
    return step % every == 0
