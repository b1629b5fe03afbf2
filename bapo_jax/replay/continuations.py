"""Makes hard prompts easier: the policy continues part of a correct response (PrefixRL, arXiv 2601.18795).

The given tokens are context: they are a span of their own, which no loss covers. They come from
a response that `solve` writes, or from an earlier correct response of the policy itself. The prefix is a
fraction of that response, one of 1/16 … 15/16. If more than half of the responses with that prefix were
correct, the next prefixes are a sixteenth shorter, otherwise a sixteenth longer. This staircase stays near
the point where half are correct, so prefixes shrink as the policy improves.

Two things differ from the paper. Its prefixed problems are a fixed set, made before training according to the
base model's success rate. Here they are the prompts that the policy currently fails, and the prefix length
follows its current success.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import Author, Begun, Group, Prompt, Span, last_success, taken
from bapo_jax.replay.arrays import groups_from_arrays, groups_to_arrays
from bapo_jax.replay.buffer import ReplayBuffer, sample
from bapo_jax.replay.protocol import ScoreBatch

SHARES = 16  # a prefix is a multiple of 1/16 of its response
Solve = Callable[[Prompt, np.random.Generator], np.ndarray | None]  # tokens of a correct response, or None


class Continuations:
    """Samples hard prompts not continued since they entered the buffer, and gives each a response prefix."""

    def __init__(self, most: int, longest: int, solve: Solve | None):
        """Asks at most `most` prompts at a time, with prefixes of responses of at most `longest` tokens.

        If `solve` is None, prefixes come from the policy's newest correct response.
        """
        self._most, self._longest, self._solve = most, longest, solve
        self._own: dict[int, Group] = {}  # prompt id -> newest correct response, as a group of one
        self._given = SHARES // 2  # prefix length in units of 1/SHARES
        self._last: dict[str, Any] = {}

    def choose(self, step: int, buffer: ReplayBuffer, rng: np.random.Generator) -> list[Begun]:
        held = [entry.prompt for entry in buffer.bad.values() if entry.sampled == 0]
        if self._solve is None:
            held = [prompt for prompt in held if prompt.id in self._own]
        begun = [self._with_prefix(prompt, rng) for prompt in sample(rng, held, self._most)]
        self._last = {'retries/may_be_asked': len(held), 'retries/given_share': self._given / SHARES}
        return [one for one in begun if one is not None]

    def pooled(self, reevaluated: Sequence[Group], score: ScoreBatch) -> list[Group]:
        """Returns the groups unchanged: earlier responses answered another question."""
        return list(reevaluated)

    def observe(self, groups: Sequence[Group], buffer: ReplayBuffer) -> None:
        """Keeps the policy's own correct responses, and adapts the prefix length to the continuations."""
        right = asked = 0
        for g in groups:
            if g.infra_error:
                continue
            if g.continued:
                right, asked = right + g.correct, asked + g.size
            elif self._solve is None and (newest := last_success(g)) is not None:
                self._own[g.prompt.id] = taken(g, [newest])
        if asked:
            self._given = int(np.clip(self._given + (-1 if 2 * right > asked else 1), 1, SHARES - 1))
            self._last['retries/continued_right'] = right / asked

    def metrics(self) -> dict[str, Any]:
        """Returns metrics of the last choice; docs/reference/metrics.py has the names."""
        return self._last

    def state(self) -> dict[str, np.ndarray]:
        return {**groups_to_arrays(list(self._own.values())), 'given': np.array([self._given], np.int64)}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `state` saved. Arrays of another kind of retries, or no arrays, change nothing."""
        if 'given' in arrays:
            self._given = int(arrays['given'][0])
            self._own = {g.prompt.id: g for g in groups_from_arrays(arrays)}

    def _with_prefix(self, prompt: Prompt, rng: np.random.Generator) -> Begun | None:
        """Returns the prompt with a response prefix; None if there is no response that fits."""
        response = (
            self._own[prompt.id].responses[0].tokens if self._solve is None else self._solve(prompt, rng)
        )
        if response is None or not 2 <= len(response) <= self._longest:
            return None
        given = min(len(response) - 1, max(1, round(len(response) * self._given / SHARES)))
        return Begun(prompt, (Span(response[:given], None, Author.PREFIX),))
