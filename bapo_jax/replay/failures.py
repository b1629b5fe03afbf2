"""Measures what becomes of failed prompts, by asking them again 1, 5, 20 and 60 steps later.

X2 pays off if a failed prompt, all of whose responses were wrong, later gives a mixed group, and does so more
often than a fresh prompt. This measures both during the run. The answers are counted and discarded: they are
not trained on, and neither the buffer nor the selector sees them. Prompts that X2 asks again are not
excluded, since X2 changes what the policy knows of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bapo_jax.groups import Group, Prompt

LAGS = (1, 5, 20, 60)  # steps
_NOBODY = (-1, -1)  # sentinel at the end of the saved rows: array stores dislike empty arrays


class Again(NamedTuple):
    """A prompt that is asked again."""

    prompt: Prompt
    lag: int  # steps since it failed


class Failures:
    """Remembers which fresh prompts failed at each step, as far back as the longest lag."""

    def __init__(self, prompts: Sequence[Prompt], asked: int, every: int):
        """Asks `asked` of the training `prompts` again, the same number per lag, every `every` steps.

        If `asked` is 0, none are asked again.
        """
        self._share, self._every = asked // len(LAGS), every
        self._prompts = {prompt.id: prompt for prompt in prompts} if asked else {}
        self._failed: dict[int, list[int]] = {}  # step -> prompt ids

    def observe(self, step: int, fresh: Sequence[Group]) -> None:
        """Records the failed prompts of a step."""
        if self._share:
            self._failed[step] = [g.prompt.id for g in fresh if g.correct == 0 and not g.infra_error]
            self._failed.pop(step - max(LAGS), None)

    def choose(self, step: int, rng: np.random.Generator) -> list[Again]:
        """Returns the prompts to ask again, if `step` is due: per lag, a sample of those that failed then."""
        if not self._share or step % self._every:
            return []
        chosen: list[Again] = []
        # A prompt that failed more than once counts for its shortest lag: its answers would be the same.
        for lag in LAGS:
            failed = [
                i for i in self._failed.get(step - lag, []) if i not in {again.prompt.id for again in chosen}
            ]
            drawn = rng.permutation(len(failed))[: self._share]
            chosen += [Again(self._prompts[failed[i]], lag) for i in drawn]
        return chosen

    def state(self) -> dict[str, np.ndarray]:
        """Returns non-empty arrays for a checkpoint."""
        if not self._share:
            return {}
        rows = [(step, prompt_id) for step, ids in self._failed.items() for prompt_id in ids]
        return {'failures': np.array([*rows, _NOBODY], np.int64)}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `state` saved. A run without failures saved nothing."""
        self._failed = {}
        for step, prompt_id in arrays.get('failures', np.array([_NOBODY])).tolist():
            if (step, prompt_id) != _NOBODY:  # earlier versions did not save it
                self._failed.setdefault(step, []).append(prompt_id)


def measured(asked: Sequence[Again], groups: Sequence[Group]) -> dict[str, int]:
    """Counts prompts asked again and mixed groups, by lag. Groups with infrastructure errors are ignored."""
    counts = {}
    for lag in LAGS:
        of_lag = [g for again, g in zip(asked, groups, strict=True) if again.lag == lag and not g.infra_error]
        counts[f'failed_again/asked/{lag}'] = len(of_lag)
        counts[f'failed_again/mixed/{lag}'] = sum(0 < g.correct < g.size for g in of_lag)
    return counts
