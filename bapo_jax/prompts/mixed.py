"""Half of each step from prompts whose last group was mixed, the rest from shuffled epochs.

A prompt whose last group was mixed will probably give a mixed group again, so more groups have a gradient.
The price is that half of the responses are spent on prompts that the policy solves already.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from bapo_jax.groups import Group, Prompt
from bapo_jax.prompts.epochs import ShuffledEpochs, check_enough
from bapo_jax.prompts.protocol import PromptSelector

_MIXED = (1 << 16) + 2  # the last part of a draw's seed, as in prioritised.py


class MixedLast(PromptSelector):
    """Draws half of a step's B prompts at random from those that were mixed last, or all if they are fewer.

    A prompt that an epoch reaches in a step that has drawn it already is passed over. Random numbers are
    keyed by (seed, number of the draw), so only the number is saved.
    """

    learns = True

    def __init__(self, prompts: Sequence[Prompt], batch: int, seed: int):
        """`batch` is B. Raises ValueError if there are fewer prompts than B."""
        check_enough(prompts, batch)
        self._stream = ShuffledEpochs(prompts, 1, seed)
        self._by_id = {p.id: p for p in prompts}
        self._batch, self._seed = batch, seed
        self._mixed: set[int] = set()  # ids of the prompts whose last group was mixed
        self._draws = self._again = 0

    def next(self) -> list[Prompt]:
        """B prompts; those that were mixed last come first."""
        rng = np.random.default_rng([self._seed, self._draws, _MIXED])
        self._draws += 1
        self._again = min(self._batch // 2, len(self._mixed))
        again = rng.choice(sorted(self._mixed), self._again, replace=False).tolist() if self._again else []
        chosen = {i: self._by_id[i] for i in again}
        while len(chosen) < self._batch:
            [prompt] = self._stream.next()
            chosen.setdefault(prompt.id, prompt)
        return list(chosen.values())

    def observe(self, groups: Sequence[Group]) -> None:
        """Notes whether each prompt's group is mixed; ignores groups with an infrastructure error."""
        for g in groups:
            if not g.infra_error:
                (self._mixed.add if 0 < g.correct < g.size else self._mixed.discard)(g.prompt.id)

    def metrics(self) -> dict[str, float]:
        """Metrics of the last draw and of the run so far.

        prompts/again  prompts of the step that were mixed last
        prompts/mixed  prompts whose last group was mixed
        """
        return {'prompts/again': self._again, 'prompts/mixed': len(self._mixed)}

    def state(self) -> str:
        """Everything `restore` needs, as JSON."""
        return json.dumps(
            {'mixed': sorted(self._mixed), 'stream': self._stream.state(), 'draws': self._draws}
        )

    def restore(self, state: str) -> None:
        """Restores exactly what `state` saved."""
        saved = json.loads(state)
        self._stream.restore(saved['stream'])
        self._mixed, self._draws = set(saved['mixed']), saved['draws']
