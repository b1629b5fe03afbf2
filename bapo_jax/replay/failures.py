"""What became of prompts that failed: asked again 1, 5, 20 and 60 steps later, with whatever the policy has learned by then.

X2 pays if a prompt that failed, all of whose responses were wrong, gives a mixed group later, and more often than a fresh prompt does.
This measures both on the run itself. The answers are counted and forgotten: nothing is trained on them, and neither the buffer nor
the selector hears of them. Prompts that X2 asks again are not left out, as X2 changes what the policy knows of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bapo_jax.groups import Group, Prompt

LAGS = (1, 5, 20, 60)  # steps
_NOBODY = (-1, -1)  # ends the saved rows: array stores dislike empty arrays


class Again(NamedTuple):
    """A prompt that is asked again."""

    prompt: Prompt
    lag: int  # steps since it failed


class Failures:
    """Which fresh prompts failed, step by step, as far back as the longest lag."""

    def __init__(self, prompts: Sequence[Prompt], asked: int, every: int):
        """`asked` of the training `prompts` are asked again, in equal shares for each lag, at steps that `every` divides; 0: none."""
        self._share, self._every = asked // len(LAGS), every
        self._prompts = {prompt.id: prompt for prompt in prompts} if asked else {}
        self._failed: dict[int, list[int]] = {}  # step -> prompt ids

    def observe(self, step: int, fresh: Sequence[Group]) -> None:
        """Notes the failed prompts of a step."""
        if self._share:
            self._failed[step] = [g.prompt.id for g in fresh if g.correct == 0 and not g.infra_error]
            self._failed.pop(step - max(LAGS), None)

    def choose(self, step: int, rng: np.random.Generator) -> list[Again]:
        """Those that are asked again at `step`, where it is due: for each lag a draw from those that failed so many steps ago."""
        if not self._share or step % self._every:
            return []
        chosen: list[Again] = []
        for lag in LAGS:  # a prompt that failed more than once is asked for the shortest: its answers would be the same
            failed = [i for i in self._failed.get(step - lag, []) if i not in {again.prompt.id for again in chosen}]
            drawn = rng.permutation(len(failed))[: self._share]
            chosen += [Again(self._prompts[failed[i]], lag) for i in drawn]
        return chosen

    def state(self) -> dict[str, np.ndarray]:
        """Arrays for a checkpoint; none is empty."""
        if not self._share:
            return {}
        rows = [(step, prompt_id) for step, ids in self._failed.items() for prompt_id in ids]
        return {'failures': np.array([*rows, _NOBODY], np.int64)}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Puts back what `state` saved; of a run without failures there is nothing to put back."""
        self._failed = {}
        for step, prompt_id in arrays.get('failures', np.array([_NOBODY])).tolist():
            if (step, prompt_id) != _NOBODY:  # earlier versions did not save it
                self._failed.setdefault(step, []).append(prompt_id)


def measured(asked: Sequence[Again], groups: Sequence[Group]) -> dict[str, int]:
    """How many were asked again, and how many of these are mixed, by lag. A group with an infrastructure error counts as not asked."""
    counts = {}
    for lag in LAGS:
        of_lag = [g for again, g in zip(asked, groups, strict=True) if again.lag == lag and not g.infra_error]
        counts[f'failed_again/asked/{lag}'] = len(of_lag)
        counts[f'failed_again/mixed/{lag}'] = sum(0 < g.correct < g.size for g in of_lag)
    return counts
