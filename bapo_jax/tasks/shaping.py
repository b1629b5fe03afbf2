"""Reward shaping in NumPy: terms added to the verifier's reward, for any task. k and accuracy stay."""

from __future__ import annotations

import dataclasses

import numpy as np

from bapo_jax.groups import Group


def overlong_penalty(lengths: np.ndarray, limit: int, share: float) -> np.ndarray:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) for lengths in tokens [G], in [-1, 0].

    It is 0 up to L_max - L_cache tokens, then falls linearly to -1 at L_max = `limit`.
    L_cache = `share` · L_max.
    """
    cache = share * limit
    return -np.clip((lengths - (limit - cache)) / cache, 0.0, 1.0)


def punish_overlong(group: Group, limit: int, share: float) -> Group:
    """Returns the group with the penalty added to its rewards; verdicts do not change."""
    lengths = np.array([len(r.tokens) for r in group.responses])
    return dataclasses.replace(
        group, rewards=(group.rewards + overlong_penalty(lengths, limit, share)).astype(np.float32)
    )
