"""Hard prompts made easier: the policy continues the first tokens of a right response (PrefixRL, arXiv 2601.18795).

The given tokens are context: they are masked from the loss, and the response names its author. Where they come from: `solve` writes
a response, or the policy itself wrote a right one once. How many are given is a share of that response, one of 1/16 … 15/16. Where
more than half of the responses were right with so much help, the next have a sixteenth less, else a sixteenth more: a staircase,
which stays about where half are right. So the help falls as the policy improves.

Two things differ from the paper. Its prefixed problems are a fixed set, made before training with the base's success rate in mind.
Here they are the prompts that the policy fails at now, and the length follows what it now succeeds at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import Author, Group, Prompt, Verdict, groups_from_arrays, groups_to_arrays, taken
from bapo_jax.replay.buffer import ReplayBuffer, sample
from bapo_jax.replay.retries import Score

SHARES = 16  # a response is cut after a multiple of 1/16 of its tokens
Solve = Callable[[Prompt, np.random.Generator], np.ndarray | None]  # the tokens of a right response; None where it has none


class Continuations:
    """A random choice of the hard prompts that were not continued since they entered the buffer, each with its first tokens."""

    def __init__(self, most: int, longest: int, solve: Solve | None):
        """`most` prompts are asked at a time. A response of more than `longest` tokens is none: it has no room.

        Where `solve` is None, the newest right response of the policy is continued.
        """
        self._most, self._longest, self._solve = most, longest, solve
        self._own: dict[int, Group] = {}  # by prompt id, the newest right response, as a group of one
        self._given = SHARES // 2  # of SHARES, so many are given
        self._last: dict[str, Any] = {}

    def choose(self, step: int, buffer: ReplayBuffer, rng: np.random.Generator) -> list[Prompt]:
        held = [entry.prompt for entry in buffer.bad.values() if entry.sampled == 0]
        if self._solve is None:
            held = [prompt for prompt in held if prompt.id in self._own]
        prompts = [self._with_prefix(prompt, rng) for prompt in sample(rng, held, self._most)]
        self._last = {'retries/may_be_asked': len(held), 'retries/given_share': self._given / SHARES}
        return [prompt for prompt in prompts if prompt is not None]

    def pooled(self, reevaluated: Sequence[Group], score: Score) -> list[Group]:
        """The groups as they are: earlier responses answered another question."""
        return list(reevaluated)

    def observe(self, groups: Sequence[Group], buffer: ReplayBuffer) -> None:
        """Keeps right responses of the policy's own. Continuations decide how much is given next."""
        right = asked = 0
        for g in groups:
            if g.infra_error:
                continue
            if g.responses[0].author == Author.PREFIX:
                right, asked = right + g.correct, asked + g.size
            elif self._solve is None and g.correct:
                self._own[g.prompt.id] = taken(g, [g.size - 1 - g.verdicts[::-1].index(Verdict.CORRECT)])
        if asked:
            self._given = int(np.clip(self._given + (-1 if 2 * right > asked else 1), 1, SHARES - 1))
            self._last['retries/continued_right'] = right / asked

    def metrics(self) -> dict[str, Any]:
        """Of the last choice: run/metric_table.py has the names."""
        return self._last

    def state(self) -> dict[str, np.ndarray]:
        return {**groups_to_arrays(list(self._own.values())), 'given': np.array([self._given], np.int64)}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Puts back what `state` saved. With the arrays of another choice, or none, nothing is known."""
        if 'given' in arrays:
            self._given = int(arrays['given'][0])
            self._own = {g.prompt.id: g for g in groups_from_arrays(arrays)}

    def _with_prefix(self, prompt: Prompt, rng: np.random.Generator) -> Prompt | None:
        """The prompt with the first tokens of a response; None where there is no response, or one without room."""
        response = self._own[prompt.id].responses[0].tokens if self._solve is None else self._solve(prompt, rng)
        if response is None or not 2 <= len(response) <= self._longest:
            return None
        given = min(len(response) - 1, max(1, round(len(response) * self._given / SHARES)))
        return dataclasses.replace(prompt, given=response[:given])
