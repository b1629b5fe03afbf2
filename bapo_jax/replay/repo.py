"""RePO's batch (arXiv 2506.09340): each fresh group, and a group of earlier responses to the same prompt.

The objective is J_on + J_off. Fresh groups (origin X1) form the on-policy term, retrieved ones (origin
REPLAY) the off-policy term. Token weights cover the whole mini-batch, so the sequence mean divides both terms
by the number of all responses, as in the authors' code.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from bapo_jax.groups import REPLAY, X1, Batch, Begun, Group, make_batch, taken
from bapo_jax.replay.filters import sound
from bapo_jax.replay.histories import Histories
from bapo_jax.replay.protocol import Rng, ScoreBatch


def all_of_them(rewards: Sequence[float], count: int) -> list[int]:
    """Full-scope: every response, regardless of `count`."""
    return list(range(len(rewards)))


def recent(rewards: Sequence[float], count: int) -> list[int]:
    """Recency-based: the newest `count`."""
    return list(range(len(rewards)))[-count:]


def highest_reward(rewards: Sequence[float], count: int) -> list[int]:
    """Reward-oriented: the `count` highest rewards; ties go to the oldest, as in the authors' code."""
    return sorted(sorted(range(len(rewards)), key=lambda i: -rewards[i])[:count])


def highest_variance(rewards: Sequence[float], count: int) -> list[int]:
    """Variance-driven: the subset with the largest population variance of rewards.

    Ties go to the largest sum, and among equal rewards to the oldest. The result is exact: variance is
    strictly convex in each reward, so no chosen reward lies strictly between two that are left out. The best
    subset is thus the p lowest and the count - p highest for some p, and only count + 1 subsets are compared.
    """
    exact = sorted(Fraction(float(r)) for r in rewards)

    def variance_and_sum(subset: list[Fraction]) -> tuple[Fraction, Fraction]:
        """Returns count² × the population variance, and the sum."""
        total = sum(subset)
        return count * sum(x * x for x in subset) - total * total, total

    ends = [exact[:lowest] + exact[len(exact) - count + lowest :] for lowest in range(count + 1)]
    left = Counter(max(ends, key=variance_and_sum))
    chosen = []
    for i, reward in enumerate(rewards):
        if left[Fraction(float(reward))]:
            left[Fraction(float(reward))] -= 1
            chosen.append(i)
    return chosen


# Rules for the responses to replay: (rewards, oldest first; count) -> their indices, oldest first.
RETRIEVE = {'all': all_of_them, 'recent': recent, 'reward': highest_reward, 'variance': highest_variance}


class Repo:
    """RePO's memory: the last `per_prompt` responses to every prompt drawn so far, first in first out.

    The number of prompts is unbounded, as in the authors' code.
    """

    buffer = None

    def __init__(self, config: Any, batch_groups: int):
        """`config` is the `replay` section of a resolved config; `batch_groups` is B.

        A step has at most B fresh groups. A batch holds at most 2·B groups. With retrieve='all', each
        replayed group has `per_prompt` responses.
        """
        self._config, self._batch_groups = config, batch_groups
        self._histories = Histories('repo', config.repo.per_prompt)

    @property
    def history(self) -> dict[int, Group]:
        """The remembered groups by prompt id; read-only."""
        return self._histories.groups

    def hard_prompts(self, step: int, rng: Rng) -> list[Begun]:
        """Returns []: RePO re-evaluates nothing."""
        return []

    def compose(
        self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group], rng: Rng, score: ScoreBatch
    ) -> Batch:
        """Returns the fresh groups, then a retrieved group for each of their prompts that has a full history.

        A fresh group with an infrastructure error is left out, and nothing is replayed for its prompt.
        Retrieval reads the history from before this step. Raises ValueError if there are more than B fresh
        groups.
        """
        x1 = sound(step, fresh, self._batch_groups)
        full = [i for i, g in enumerate(x1) if self._full(g.prompt.id)]
        replayed = [self._retrieved(x1[i]) for i in full]
        batch = make_batch([*x1, *replayed], [X1] * len(x1) + [REPLAY] * len(replayed))
        if self._config.repo.normalisation == 'mixed':
            shared = (np.full(g.size, i, np.int32) for i, g in zip(full, replayed, strict=True))
            batch = dataclasses.replace(batch, normalisation=(*batch.normalisation[: len(x1)], *shared))
        return batch

    def times_trained(self, batch: Batch) -> list[int | None]:
        """Returns 1 for fresh groups, and None for replayed ones: their responses come from several steps."""
        return [1 if o == X1 else None for o in batch.origins]

    def add(self, step: int, fresh: Sequence[Group], batch: Batch) -> None:
        """Adds responses of groups without infrastructure errors to the histories, and drops the oldest."""
        for g in fresh:
            if not g.infra_error:
                self._histories.add(g)

    def metrics(self, step: int) -> dict[str, int]:
        """Returns the numbers of remembered prompts and responses, and their token and log-prob bytes."""
        return self._histories.metrics()

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `restore` needs, as arrays for a checkpoint."""
        return self._histories.state()

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores `state` exactly. Raises ValueError if a history is longer than replay.repo.per_prompt."""
        self._histories.restore(arrays)

    def _full(self, prompt_id: int) -> bool:
        return prompt_id in self.history and self.history[prompt_id].size == self._config.repo.per_prompt

    def _retrieved(self, fresh: Group) -> Group:
        """Returns a new group of earlier responses to the prompt.

        They keep their versions, log-probs, verdicts and rewards. The group's step is the one at which the
        history last grew.
        """
        history = self.history[fresh.prompt.id]
        count = min(fresh.size, history.size)
        return taken(history, RETRIEVE[self._config.repo.retrieve](history.rewards, count))
