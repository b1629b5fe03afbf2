"""What X2 brings, in a simulation: mixed groups a response with it, less those without.

A policy never solves a share of the problems, the hopeless ones. It solves any other with probability
sigmoid(ability + spread * ease), where ease ~ N(0, 1). Ability and spread grow in training, alike for all
problems, whatever is asked.

Fresh groups are of problems drawn at random. A group with at most `most` right of GROUP is hard; asked again,
it enters X2 if more than `most` are right, but not all. In the paper `most` is 1, since c1 = 1/8; in
`bapo_mini` it is 0. All numbers are expectations: integrals over the ease, by the trapezoidal rule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import bdtr, expit

GROUP = 8  # responses of a group
PAPER, FAILED = 1, 0  # `most`, of the paper and of those who ask again only what failed entirely
EVERY, ASKED = 5, 0.5  # m, and how many prompts are asked again every m steps for each of a batch: 128 of 256
EPOCH = 157  # steps of an epoch in the paper; a prompt's next fresh group replaces it in B_bad
EASE = np.linspace(-6, 6, 121)
WEIGHT = np.exp(-(EASE**2) / 2) / np.exp(-(EASE**2) / 2).sum()


class Policy(NamedTuple):
    """A policy at a step, and how it changes from step to step."""

    ability: float
    spread: float
    hopeless: float = 0.0  # share of the problems
    growth: float = 0.0  # of the ability, a step
    sharpening: float = 0.0  # growth of the spread, a step

    def after(self, steps: float) -> Policy:
        """The policy so many steps later; a negative number looks back."""
        spread = max(0.0, self.spread + self.sharpening * steps)
        return self._replace(ability=self.ability + self.growth * steps, spread=spread)


class Retry(NamedTuple):
    """How X2 asks again, in the mean."""

    asked: float  # prompts that are asked again for each fresh one
    enters: float  # the share of them that enters X2
    lag: float  # steps since the fresh group


def right(policy: Policy) -> np.ndarray:
    """P(right) of the problems that are not hopeless, [EASE]."""
    return expit(policy.ability + policy.spread * EASE)


def among_all(policy: Policy, shares: np.ndarray, of_hopeless: float = 0.0) -> float:
    """The mean over all problems of shares [EASE]."""
    return float((1 - policy.hopeless) * (WEIGHT @ shares) + policy.hopeless * of_hopeless)


def partly(policy: Policy, most: int) -> np.ndarray:
    """P(more than `most` of a group are right, but not all), [EASE]."""
    p = right(policy)
    return bdtr(GROUP - 1, GROUP, p) - bdtr(most, GROUP, p)


def accuracy(policy: Policy) -> float:
    return among_all(policy, right(policy))


def mixed(policy: Policy) -> float:
    """P(mixed) of a fresh group."""
    return among_all(policy, partly(policy, 0))


def hard(policy: Policy, most: int) -> float:
    """P(a fresh group is hard)."""
    return among_all(policy, bdtr(most, GROUP, right(policy)), 1.0)


def again(policy: Policy, lag: float, most: int) -> float:
    """P(more than `most` right, but not all | a group was hard `lag` steps ago)."""
    then = policy.after(-lag)
    return among_all(policy, bdtr(most, GROUP, right(then)) * partly(policy, most)) / hard(then, most)


def fifo(policy: Policy, most: int = PAPER, oldest: int = EPOCH) -> Retry:
    """The paper's X2: a uniform sample of B_bad, which holds the latest hard prompts, as many as a batch has.

    Being asked again removes no entry, so entries differ in age alone. None is above `oldest` steps: a
    prompt's next fresh group replaces it, and the run has a beginning.
    """
    held, enters, age = 0.0, 0.0, 0.0
    for lag in range(1, oldest + 1):
        entries = min(hard(policy.after(-lag), most), 1 - held)
        held, enters, age = held + entries, enters + entries * again(policy, lag, most), age + entries * lag
        if held >= 1:
            break
    return Retry(min(ASKED, held) / EVERY, enters / held, age / held)


def delayed(policy: Policy, lag: float, most: int = PAPER, asked: float = ASKED / EVERY) -> Retry:
    """X2 that asks each hard prompt once, when it has waited for `lag` steps; at most `asked` for each fresh
    one, by default as many as the paper's.
    """
    return Retry(min(asked, hard(policy.after(-lag), most)), again(policy, lag, most), lag)


def gain(policy: Policy, retry: Retry) -> float:
    """Mixed groups a response with X2, less those without, in percent of those without."""
    return 100 * retry.asked / (1 + retry.asked) * (retry.enters / mixed(policy) - 1)


def with_accuracy(share: float, policy: Policy) -> Policy:
    """The policy with the ability that gives it this accuracy. Raises ValueError if none does."""
    ability = brentq(lambda x: accuracy(policy._replace(ability=x)) - share, -100, 100)
    return policy._replace(ability=ability)
