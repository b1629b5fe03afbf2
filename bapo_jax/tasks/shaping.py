"""Reward shaping in NumPy: terms added to the verifier's reward, for any task. k and accuracy stay."""

from __future__ import annotations

import dataclasses

import numpy as np

from bapo_jax.groups import Author, Group, Verdict


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


def length_reward(lengths: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3) of a group's lengths [G], in [-0.5, 0.5].

    λ = 0.5 - (length - shortest) / (longest - shortest); a wrong response gets min(0, λ). It is 0 if all
    lengths are equal.
    """
    shortest, longest = lengths.min(), lengths.max()
    if shortest == longest:
        return np.zeros(len(lengths))
    share = 0.5 - (lengths - shortest) / (longest - shortest)
    return np.where(correct, share, np.minimum(0, share))


def reward_length(group: Group, weight: float) -> Group:
    """Returns the group with `weight` times the length reward added to its rewards.

    Lengths do not count the replies of a tool.
    """
    if not group.responses:
        return group
    lengths = np.array([np.count_nonzero(~r.by(Author.ENVIRONMENT)) for r in group.responses])
    correct = np.array([v == Verdict.CORRECT for v in group.verdicts])
    rewards = group.rewards + weight * length_reward(lengths, correct)
    return dataclasses.replace(group, rewards=rewards.astype(np.float32))


def shaped_rewards(group: Group, limit: int, overlong_share: float, length_weight: float) -> Group:
    """Returns the group with both terms, each if it is on; `limit` is that of a response's tokens."""
    if overlong_share:
        group = punish_overlong(group, limit, overlong_share)
    return reward_length(group, length_weight) if length_weight else group
