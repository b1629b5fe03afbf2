"""Prioritised sampling (Kimi k1.5, arXiv 2501.12599): prompts that mostly fail are asked more often.

Prompt i has a success rate s_i, which is 0 until it is first observed and then follows its groups:
s_i ← s_i + rate · (k/G - s_i). A step's B prompts are drawn without replacement with probability ∝ 1 - s_i.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from bapo_jax.groups import Group, Prompt
from bapo_jax.prompts.epochs import check_enough
from bapo_jax.prompts.protocol import PromptSelector
from bapo_jax.prompts.weighted import without_replacement

# The last part of a draw's seed, as in mopps.py: no other generator of a run ends in it.
_PRIORITISED = (1 << 16) + 1


class Prioritised(PromptSelector):
    """Samples prompts in proportion to their failure rate, each step from all of them.

    Random numbers are keyed by (seed, number of the draw), so only the number is saved.
    """

    learns = True

    def __init__(self, prompts: Sequence[Prompt], batch: int, seed: int, *, rate: float):
        """`batch` is B; `rate` in (0, 1] is the weight of a prompt's newest group in its success rate.

        Raises ValueError if there are fewer prompts than B.
        """
        check_enough(prompts, batch)
        self._prompts, self._batch, self._seed, self._rate = prompts, batch, seed, rate
        self._success: dict[int, float] = {}  # s by prompt id, of the observed prompts
        self._draws = 0
        self._drawn: dict[str, float] = {}  # metrics of the last draw

    def next(self) -> list[Prompt]:
        """B prompts, in the order drawn."""
        success = np.array([self._success.get(p.id, 0.0) for p in self._prompts])
        rng = np.random.default_rng([self._seed, self._draws, _PRIORITISED])
        with np.errstate(divide='ignore'):  # a prompt with s = 1 is only drawn if too few others are left
            chosen = without_replacement(rng, np.log1p(-success), self._batch)
        self._draws += 1
        self._drawn = {'prompts/success_mean': float(success[chosen].mean())}
        return [self._prompts[i] for i in chosen]

    def observe(self, groups: Sequence[Group]) -> None:
        """Updates the success rates of the groups' prompts; ignores groups with an infrastructure error."""
        for g in groups:
            if not g.infra_error:
                before = self._success.get(g.prompt.id, 0.0)
                self._success[g.prompt.id] = before + self._rate * (g.accuracy - before)

    def metrics(self) -> dict[str, float]:
        """Metrics of the last draw and of the run so far.

        prompts/success_mean   mean s of the drawn prompts, before their results
        prompts/seen           prompts observed since the run began
        """
        return {**self._drawn, 'prompts/seen': len(self._success)}

    def state(self) -> str:
        """Everything `restore` needs, as JSON: success rates and the draw's number."""
        return json.dumps({'success': list(self._success.items()), 'draws': self._draws})

    def restore(self, state: str) -> None:
        """Restores exactly what `state` saved."""
        saved = json.loads(state)
        self._success, self._draws = dict(map(tuple, saved['success'])), saved['draws']
