"""Credit: from a batch's rewards to an advantage and a weight for every response token. Numpy; arrays in, arrays out.

    advantage(rewards [n]) -> [n]              of the responses of one normalisation group
    gae(rewards [N], values) -> advantages     of every token of N responses, from a critic's values
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
    """(r - mean) / (p + 1e-6) with p the mean of the positive parts: a prompt's weight is 1 / its pass rate (MaxRL).

    For rewards of 0 and 1, p is their mean. For others: a negative reward is no negative share of successes, so it does not lower p;
    of n responses p is at least 1/n, that of one right answer, so a small reward does not weigh more than a right answer; and where
    no reward is positive there is no pass rate, and p is 1. So the sign is that of r - mean, and the size at most n times the range.
    """
    p = np.maximum(rewards, 0).mean()
    p = max(p, 1 / len(rewards)) if p > 0 else 1.0
    return (rewards - rewards.mean()) / (p + 1e-6)


def token_mean(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Every token of the mini-batch counts alike; the weights of all tokens sum to 1."""
    return np.full(len(lengths), 1.0 / max(1, lengths.sum()))


def seq_mean_token_mean(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Every response counts alike (eq. 1); the weights of all tokens sum to 1."""
    return 1.0 / (len(lengths) * np.maximum(1, lengths))


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


def gae(rewards: np.ndarray, values: Sequence[np.ndarray], gamma: float, gae_lambda: float) -> list[np.ndarray]:
    """Generalised advantage estimation (arXiv 1506.02438) of N responses, float64: from N rewards and each response's V(s_t).

    A_t = δ_t + γλ A_{t+1} with δ_t = γ V(s_{t+1}) - V(s_t), and at the last token δ = reward - V.
    With γ = λ = 1: A_t = reward - V(s_t).
    """
    lengths = [len(v) for v in values]
    longest = max(lengths, default=0)
    # Every response ends in the last column but one, so one sweep over time serves all; the last is the state after the end.
    value, advantage = np.zeros((2, len(lengths), longest + 1))
    for row, of_response, n in zip(value, values, lengths, strict=True):
        row[longest - n : longest] = of_response
    delta = gamma * value[:, 1:] - value[:, :-1]
    if longest:
        delta[:, -1] += rewards
    for t in reversed(range(longest)):
        advantage[:, t] = delta[:, t] + gamma * gae_lambda * advantage[:, t + 1]
    return [row[longest - n : longest] for row, n in zip(advantage, lengths, strict=True)]


def value_advantages(batch: Batch, values: ByGroup, gamma: float, gae_lambda: float) -> tuple[ByGroup, ByGroup]:
    """(advantages by `gae`, returns A + V) of every response token, float32; 0 on tokens that are not trained on.

    Time passes on trained tokens alone. Another author's tokens within a response are part of the state, and no steps of their own.
    """
    trained = [r.trained_on for g in batch.groups for r in g.responses]
    value = [np.asarray(v, np.float64)[t] for v, t in zip((v for of_group in values for v in of_group), trained, strict=True)]
    rewards = np.concatenate([np.zeros(0), *(g.rewards for g in batch.groups)])
    advantage = gae(rewards, value, gamma, gae_lambda)
    returns = [a + v for a, v in zip(advantage, value, strict=True)]

    def by_group(of_trained: list[np.ndarray]) -> ByGroup:
        everywhere = iter(zip(of_trained, trained, strict=True))
        return [[_scatter(*next(everywhere)) for _ in g.responses] for g in batch.groups]

    return by_group(advantage), by_group(returns)


def whitened(advantage: ByGroup, trained: ByGroup) -> ByGroup:
    """(A - mean) / (std + 1e-8) over the trained tokens of the whole batch, float32; 0 on the others."""
    of_trained = on_trained(advantage, trained)
    if not len(of_trained):
        return advantage
    mean, std = of_trained.mean(), of_trained.std()
    return [
        [np.where(t, (a - mean) / (std + 1e-8), 0).astype(np.float32) for a, t in zip(*of_group, strict=True)]
        for of_group in zip(advantage, trained, strict=True)
    ]


def on_trained(values: ByGroup, trained: ByGroup) -> np.ndarray:
    """float64 [tokens], the values of all trained tokens; `trained` is True on those."""
    flat, where = ([x for of_group in by_group for x in of_group] for by_group in (values, trained))
    return np.concatenate([np.zeros(0), *flat])[np.concatenate([np.zeros(0, bool), *where])]


def _scatter(of_trained: np.ndarray, trained: np.ndarray) -> np.ndarray:
    result = np.zeros(len(trained), np.float32)
    result[trained] = of_trained
    return result


def token_weights(lengths: Sequence[int], aggregation: str, limit: int) -> np.ndarray:
    """float32 [N], the weight of one token of each of N responses; `limit` is the most tokens a response may have."""
    return AGGREGATIONS[aggregation](np.asarray(lengths), limit).astype(np.float32)
