"""Chooses hard prompts by the posterior probability that their next group is mixed.

The paper's X2 asks any hard prompt again, five steps later. Nearly all prompts that failed every time fail
again. Here the success rate of a prompt has a Beta posterior given all its responses so far. The prior is a
Beta fitted to the mean and variance of all prompts' success rates. Prompts with one correct response thus
come before those with none.

A prompt is asked again after at least `after` steps, and never again once RETIRED responses were all wrong.
If π_θ has moved little since its earlier group, the two groups are pooled into one of twice the size
(adaptive group size, as in Reinforce-Ada, arXiv 2510.04996).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import Begun, Group, joined, make_batch, unscored
from bapo_jax.replay.arrays import groups_from_arrays, groups_to_arrays
from bapo_jax.replay.bapo import X2
from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.replay.protocol import ScoreBatch

RETIRED = 16  # a prompt with this many responses, all wrong, is not asked again


@dataclasses.dataclass(slots=True)
class Known:
    """The evidence on a prompt."""

    asked: int  # responses so far
    right: int
    step: int  # the step at which it was last asked


class Posterior:
    """Chooses the eligible hard prompts whose next group is most probably mixed."""

    def __init__(self, most: int, group_size: int, after: int, pool_within: float):
        """Asks at most `most` prompts at a time, for `group_size` responses each.

        A prompt becomes eligible `after` steps after its newest group. `pool_within` is the largest mean
        |log π_θ - log behaviour policy| per token at which an earlier group is pooled; 0 turns pooling off.
        """
        self._most, self._group_size, self._after, self._pool_within = most, group_size, after, pool_within
        self._known: dict[int, Known] = {}
        self._earlier: dict[int, Group] = {}  # newest groups of hard prompts, if pooling is on
        self._last: dict[str, Any] = {}  # metrics of the last choice

    def choose(self, step: int, buffer: ReplayBuffer, rng: np.random.Generator) -> list[Begun]:
        """Returns the most probable prompts first; the one held longest wins ties. Does not use `rng`."""
        may = [i for i in buffer.bad if i in self._known and self._may_be_asked(self._known[i], step)]
        a, b = prior(*_counts(self._known.values()))
        asked, right = _counts(self._known[i] for i in may)
        probability = mixed_probability(a + right, b + asked - right, self._group_size)
        chosen = np.argsort(-probability, kind='stable')[: self._most]
        self._last = {
            'retries/may_be_asked': len(may),
            'retries/prior_mean': a / (a + b),
            'retries/prior_strength': a + b,
            'retries/expected_mixed': float(probability[chosen].sum()),
            'retries/pooled': 0,
        }
        return [Begun(buffer.bad[may[i]].prompt) for i in chosen]

    def pooled(self, reevaluated: Sequence[Group], score: ScoreBatch) -> list[Group]:
        """Joins each group with the prompt's previous one, if that was sampled by policies near π_θ."""
        may = [i for i, g in enumerate(reevaluated) if g.prompt.id in self._earlier and not g.infra_error]
        groups = list(reevaluated)
        if not may:
            return groups
        earlier = [self._earlier[groups[i].prompt.id] for i in may]
        for i, old, logp in zip(may, earlier, score(make_batch(earlier, [X2] * len(earlier))), strict=True):
            if mean_log_ratio(old, logp) <= self._pool_within:
                groups[i] = joined(old, groups[i])
                self._last['retries/pooled'] += 1
        return groups

    def observe(self, groups: Sequence[Group], buffer: ReplayBuffer) -> None:
        """Counts the responses of groups without an infrastructure error."""
        for g in groups:
            if not g.infra_error:
                old = self._known.get(g.prompt.id, Known(0, 0, g.step))
                self._known[g.prompt.id] = Known(old.asked + g.size, old.right + g.correct, g.step)
                if self._pool_within:
                    # A copy, as after a resume: scores cached on the buffer's responses must not reach these.
                    self._earlier[g.prompt.id] = unscored(g)
        self._earlier = {i: g for i, g in self._earlier.items() if i in buffer.bad}

    def metrics(self) -> dict[str, Any]:
        """Returns metrics of the last choice; docs/reference/metrics.py has the names."""
        return self._last

    def state(self) -> dict[str, np.ndarray]:
        known = [(i, k.asked, k.right, k.step) for i, k in self._known.items()]
        return {
            **groups_to_arrays(list(self._earlier.values())),
            'known': np.array([*known, (-1, 0, 0, 0)], np.int64),
        }

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `state` saved. Arrays of another kind of retries, or no arrays, change nothing."""
        if 'known' in arrays:
            self._known = {i: Known(*of_prompt) for i, *of_prompt in arrays['known'][:-1].tolist()}
            self._earlier = {g.prompt.id: g for g in groups_from_arrays(arrays)}

    def _may_be_asked(self, known: Known, step: int) -> bool:
        return step - known.step >= self._after and not (known.right == 0 and known.asked >= RETIRED)


def _counts(known: Iterable[Known]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of responses and of correct ones, float64 [prompts] each."""
    asked, right = np.array([(k.asked, k.right) for k in known], float).reshape(-1, 2).T
    return asked, right


def prior(asked: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Returns (a, b) of the Beta distribution of success rates, fitted by moments to right / asked.

    For a beta-binomial count, var(right / asked) = m (1 - m) (1/n + (1 - 1/n) / (a + b + 1))
    with m = a / (a + b). n is the mean of `asked`. Half a response of each kind is added to m, so that it is
    neither 0 nor 1. Returns (1, 1) for fewer than two prompts.
    """
    if len(asked) < 2:
        return 1.0, 1.0
    m, n = (right.sum() + 0.5) / (asked.sum() + 1), asked.mean()
    spread = np.var(right / asked, ddof=1) / (m * (1 - m))
    # 1 / (a + b + 1): near 0 if all prompts are equally hard, near 1 if each is always or never solved.
    correlation = np.clip((spread - 1 / n) / (1 - 1 / n), 1e-3, 0.99)
    strength = 1 / correlation - 1
    return float(m * strength), float((1 - m) * strength)


def mixed_probability(a: np.ndarray, b: np.ndarray, size: int) -> np.ndarray:
    """Returns the probability that a group of `size` responses is mixed, for a success rate p ~ Beta(a, b).

    1 - E[(1-p)^n] - E[p^n], and E[p^n] is the product of (a + i) / (a + b + i) over i < n.
    """
    i = np.arange(size)
    all_right, all_wrong = ((x[:, None] + i) / ((a + b)[:, None] + i) for x in (a, b))
    return 1 - all_right.prod(axis=1) - all_wrong.prod(axis=1)


def mean_log_ratio(group: Group, logp: Sequence[np.ndarray]) -> float:
    """Returns the mean |log π_θ - log behaviour policy| of a group's tokens.

    `logp` holds the log-probs under π_θ, one array per response.
    """
    ratios = [np.abs(now - r.logp)[r.trained_on] for r, now in zip(group.responses, logp, strict=True)]
    return float(np.concatenate(ratios).mean())
