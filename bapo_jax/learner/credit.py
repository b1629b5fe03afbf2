"""Credit: from a batch's rewards to an advantage and a weight for every response token. Numpy; arrays in, arrays out.

    advantage(rewards [n]) -> [n]              of the responses of one normalisation group
    aggregation(lengths [N], limit) -> [N]     the weight of one token of each of a mini-batch's N responses

Token weights carry the reduction, so the jitted step only sums: Σ weight · token loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bapo_jax.groups import Batch, ByGroup


def group_std(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + 1e-6) with the sample standard deviation (ddof 1), as verl and TRL compute it."""
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def paper_eq2(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / sqrt(var + 1e-6) with the population variance, BAPO eq. 2."""
    return (rewards - rewards.mean()) / np.sqrt(rewards.var() + 1e-6)


def centred(rewards: np.ndarray) -> np.ndarray:
    """r - mean, not divided by the standard deviation (Dr.GRPO)."""
    return rewards - rewards.mean()


def over_mean(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / (mean + 1e-6): a prompt's weight is 1 / its pass rate (MaxRL). For rewards of 0 and 1."""
    return (rewards - rewards.mean()) / (rewards.mean() + 1e-6)


def token_mean(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Every token of the mini-batch counts alike; the weights of all tokens sum to 1."""
    return np.full(len(lengths), 1.0 / lengths.sum())


def seq_mean_token_mean(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Every response counts alike (eq. 1); the weights of all tokens sum to 1."""
    return 1.0 / (len(lengths) * lengths)


def seq_mean_token_sum(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Every token counts alike whatever its response's length: a sum over `limit`, and a mean over responses (Dr.GRPO)."""
    return np.full(len(lengths), 1.0 / (len(lengths) * limit))


ADVANTAGES = {'group_std': group_std, 'paper_eq2': paper_eq2, 'centred': centred, 'over_mean': over_mean}
AGGREGATIONS = {'token_mean': token_mean, 'seq_mean_token_mean': seq_mean_token_mean, 'seq_mean_token_sum': seq_mean_token_sum}


def group_advantages(batch: Batch, kind: str) -> list[np.ndarray]:
    """One advantage per response, float32 [G] for each group; a normalisation group of equal rewards gets exactly 0."""
    rewards = np.concatenate([np.zeros(0), *(g.rewards for g in batch.groups)]).astype(np.float64)
    number = np.concatenate([np.zeros(0, np.int32), *batch.normalisation])
    result = np.zeros(len(rewards), np.float32)
    for i in np.unique(number):
        of_group = number == i
        # All rewards equal: the mean may differ from them by rounding, and 1e-17 / 1e-6 is not the 0 that was promised.
        if np.ptp(rewards[of_group]) > 0:
            result[of_group] = ADVANTAGES[kind](rewards[of_group])
    return np.split(result, np.cumsum([g.size for g in batch.groups]))[:-1]


def advantages(batch: Batch, kind: str) -> ByGroup:
    """The advantage of every response token, float32; all tokens of a response share one."""
    of_responses = group_advantages(batch, kind)
    return [
        [np.full(len(r.tokens), a, np.float32) for r, a in zip(g.responses, of_group, strict=True)]
        for g, of_group in zip(batch.groups, of_responses, strict=True)
    ]


def token_weights(lengths: Sequence[int], aggregation: str, limit: int) -> np.ndarray:
    """float32 [N], the weight of one token of each of N responses; `limit` is the most tokens a response may have."""
    return AGGREGATIONS[aggregation](np.asarray(lengths), limit).astype(np.float32)
