"""Credit assignment: an advantage and a weight for every response token from a batch's rewards. Pure NumPy.

    advantage(rewards [n]) -> [n]              for the responses of one normalisation group
    gae(rewards [N], values) -> advantages     for every token of N responses, from a critic's values
    aggregation(lengths [N], limit) -> [N]     the weight of one token in each of a mini-batch's N responses

Token weights carry the reduction, so the jitted step only sums: Σ weight · token loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from bapo_jax.groups import Author, Batch, ByGroup

_FOCAL_GAMMA = 0.5  # of 0.5, 1 and 2, the value that F-GRPO's authors selected most often


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
    """(r - mean) / (p + 1e-6) with p the mean of the positive parts (MaxRL).

    A prompt's weight is thus 1 / its pass rate. For rewards of 0 and 1, p is their mean. For other rewards:
    negative rewards do not lower p. For n responses p is at least 1/n, the pass rate of one correct response,
    so a small reward does not outweigh a correct response. If no reward is positive, p is 1. The sign is thus
    that of r - mean, and the magnitude is at most n times the range.
    """
    p = np.maximum(rewards, 0).mean()
    p = max(p, 1 / len(rewards)) if p > 0 else 1.0
    return (rewards - rewards.mean()) / (p + 1e-6)


def focal(rewards: np.ndarray) -> np.ndarray:
    """(1 - p)^γ times `group_std`, with p the success rate of the group (F-GRPO, arXiv 2602.06717).

    p is the mean reward's place between the lowest and the highest reward. γ is 0.5.
    """
    p = (rewards.mean() - rewards.min()) / np.ptp(rewards)
    return (1 - p) ** _FOCAL_GAMMA * group_std(rewards)


def token_mean(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Every token of the mini-batch counts alike; the weights of all tokens sum to 1."""
    return np.full(len(lengths), 1.0 / max(1, lengths.sum()))


def seq_mean_token_mean(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Every response counts alike (eq. 1); the weights of all tokens sum to 1."""
    return 1.0 / (len(lengths) * np.maximum(1, lengths))


def seq_mean_token_sum(lengths: np.ndarray, limit: int) -> np.ndarray:
    """Every token counts alike: a sum over `limit` per response, and a mean over responses (Dr.GRPO)."""
    return np.full(len(lengths), 1.0 / (max(1, len(lengths)) * limit))


ADVANTAGES = {
    'group_std': group_std,
    'paper_eq2': paper_eq2,
    'centred': centred,
    'over_mean': over_mean,
    'focal': focal,
}
AGGREGATIONS = {
    'token_mean': token_mean,
    'seq_mean_token_mean': seq_mean_token_mean,
    'seq_mean_token_sum': seq_mean_token_sum,
}


Advantage = Callable[[np.ndarray], np.ndarray]  # of a normalisation group's rewards, float64 [n]


def group_advantages(batch: Batch, kind: str | Advantage) -> list[np.ndarray]:
    """Returns one advantage per response, float32 [G] per group. `kind` is of ADVANTAGES, or a function.

    A normalisation group of equal rewards gets exactly 0.
    """
    advantage = kind if callable(kind) else ADVANTAGES[kind]
    rewards = np.concatenate([np.zeros(0), *(g.rewards for g in batch.groups)]).astype(np.float64)
    number = np.concatenate([np.zeros(0, np.int32), *batch.normalisation])
    result = np.zeros(len(rewards), np.float32)
    for i in np.unique(number):
        group_values = number == i
        # Equal rewards may differ from their mean by rounding, and 1e-17 / 1e-6 is not the promised 0.
        if np.ptp(rewards[group_values]) > 0:
            result[group_values] = advantage(rewards[group_values])
    return np.split(result, np.cumsum([g.size for g in batch.groups]))[:-1]


def advantages(batch: Batch, kind: str | Advantage) -> ByGroup:
    """Returns the advantage of every response token, float32; all tokens of a response share it."""
    of_responses = group_advantages(batch, kind)
    return [
        [np.full(len(r.tokens), a, np.float32) for r, a in zip(g.responses, group_values, strict=True)]
        for g, group_values in zip(batch.groups, of_responses, strict=True)
    ]


def gae(
    rewards: np.ndarray, values: Sequence[np.ndarray], gamma: float, gae_lambda: float
) -> list[np.ndarray]:
    """Returns the generalised advantage estimates (arXiv 1506.02438) of N responses, float64.

    `rewards` holds one reward per response, and `values` each response's V(s_t).

    A_t = δ_t + γλ A_{t+1} with δ_t = γ V(s_{t+1}) - V(s_t), and at the last token δ = reward - V.
    With γ = λ = 1: A_t = reward - V(s_t).
    """
    lengths = [len(v) for v in values]
    longest = max(lengths, default=0)
    # Responses are right-aligned to end in the last column but one, so one sweep over time serves all of
    # them. The last column is the state after the end.
    value, advantage = np.zeros((2, len(lengths), longest + 1))
    for row, values_T, n in zip(value, values, lengths, strict=True):
        row[longest - n : longest] = values_T
    delta = gamma * value[:, 1:] - value[:, :-1]
    if longest:
        delta[:, -1] += rewards
    for t in reversed(range(longest)):
        advantage[:, t] = delta[:, t] + gamma * gae_lambda * advantage[:, t + 1]
    return [row[longest - n : longest] for row, n in zip(advantage, lengths, strict=True)]


def value_advantages(
    batch: Batch, values: ByGroup, gamma: float, gae_lambda: float
) -> tuple[ByGroup, ByGroup]:
    """Returns (advantages from `gae`, returns A + V) of every response token, float32; 0 on untrained tokens.

    Only trained tokens are time steps. Another author's tokens within a response are part of the state.
    """
    trained = [r.trained_on for g in batch.groups for r in g.responses]
    value = [
        np.asarray(v, np.float64)[t]
        for v, t in zip((v for group_values in values for v in group_values), trained, strict=True)
    ]
    rewards = np.concatenate([np.zeros(0), *(g.rewards for g in batch.groups)])
    advantage = gae(rewards, value, gamma, gae_lambda)
    returns = [a + v for a, v in zip(advantage, value, strict=True)]

    def by_group(trained_values: list[np.ndarray]) -> ByGroup:
        everywhere = iter(zip(trained_values, trained, strict=True))
        return [[_scatter(*next(everywhere)) for _ in g.responses] for g in batch.groups]

    return by_group(advantage), by_group(returns)


def whitened(advantage: ByGroup, trained: ByGroup) -> ByGroup:
    """Returns (A - mean) / (std + 1e-8) over all trained tokens of the batch, float32; 0 on the others."""
    trained_values = on_trained(advantage, trained)
    if not len(trained_values):
        return advantage
    mean, std = trained_values.mean(), trained_values.std()
    return [
        [
            np.where(t, (a - mean) / (std + 1e-8), 0).astype(np.float32)
            for a, t in zip(*group_values, strict=True)
        ]
        for group_values in zip(advantage, trained, strict=True)
    ]


def on_trained(values: ByGroup, trained: ByGroup) -> np.ndarray:
    """Returns the values of all tokens where `trained` is True, float64 [tokens]."""
    flat, where = ([x for group_values in by_group for x in group_values] for by_group in (values, trained))
    return np.concatenate([np.zeros(0), *flat])[np.concatenate([np.zeros(0, bool), *where])]


def _scatter(trained_values: np.ndarray, trained: np.ndarray) -> np.ndarray:
    result = np.zeros(len(trained), np.float32)
    result[trained] = trained_values
    return result


def weights(
    batch: Batch, author: Author, beside: Collection[Author], aggregation: str, limit: int
) -> ByGroup:
    """Returns the weight of every token by `author` in a mini-batch, float32; 0 on other tokens.

    The reduction covers these tokens and those `beside` them. Responses without any do not count, if other
    authors' tokens are trained on there. The batch's weights of its groups multiply the result.
    """
    responses = [r for g in batch.groups for r in g.responses]
    lengths = [int(r.by(author, *beside).sum()) for r in responses]
    counted = [n > 0 or not r.trained_on.any() for n, r in zip(lengths, responses, strict=True)]
    weight = np.zeros(len(responses), np.float32)
    weight[counted] = token_weights([n for n, c in zip(lengths, counted) if c], aggregation, limit)
    if batch.weights:
        weight *= np.repeat(np.float32(batch.weights), [g.size for g in batch.groups])
    of_responses = iter(weight)
    return [
        [np.where(r.by(author), next(of_responses), np.float32(0)) for r in g.responses] for g in batch.groups
    ]


def token_weights(lengths: Sequence[int], aggregation: str, limit: int) -> np.ndarray:
    """Returns one token's weight in each of N responses, float32 [N]; `limit` is the response limit."""
    return AGGREGATIONS[aggregation](np.asarray(lengths), limit).astype(np.float32)
