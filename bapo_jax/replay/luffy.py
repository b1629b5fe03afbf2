"""LUFFY's batch (arXiv 2504.14945): in each fresh group, a trace takes the place of the first response.

A group of G = 8 thus has 7 responses of the policy and one of another author, and all 8 rewards share a mean.
A prompt without a trace keeps its G responses. The trace's tokens have a term of their own in the objective,
learner.traces.loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import X1, Batch, Begun, Group, Verdict, make_batch
from bapo_jax.replay.arpo import led_by
from bapo_jax.replay.filters import sound
from bapo_jax.replay.protocol import Rng, ScoreBatch


class Luffy:
    """The traces, which `receive` gives, and the number of those that were trained on."""

    buffer = None

    def __init__(self, config: Any, batch_groups: int):
        """`config` is the `replay` section of a resolved config; `batch_groups` is B."""
        self._batch_groups = batch_groups
        self._traces: Mapping[int, Group] = {}
        self._total = 0
        self._composed: dict[str, int] = {}  # metrics of the last batch

    def receive(self, traces: Mapping[int, Group]) -> None:
        """Gets a judged trace of each prompt that has one, by prompt id, as a group of one response."""
        self._traces = traces

    def hard_prompts(self, step: int, rng: Rng) -> list[Begun]:
        """Returns []: LUFFY re-evaluates nothing."""
        return []

    def compose(
        self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group], rng: Rng, score: ScoreBatch
    ) -> Batch:
        """Returns the fresh groups, new ones with the trace where there is one, all of origin X1.

        Fresh groups with an infrastructure error are left out. Raises ValueError if more than B are left.
        """
        x1 = sound(step, fresh, self._batch_groups)
        traces = [self._traces.get(g.prompt.id) for g in x1]
        there = [trace for trace in traces if trace is not None]
        self._total += len(there)
        self._composed = {
            'traces/groups': len(there),
            'traces/correct': sum(trace.verdicts[0] == Verdict.CORRECT for trace in there),
            'traces/groups_total': self._total,
        }
        groups = [g if trace is None else led_by(trace, g) for g, trace in zip(x1, traces, strict=True)]
        return make_batch(groups, [X1] * len(groups))

    def times_trained(self, batch: Batch) -> list[int | None]:
        """Returns 1 for each group: its own responses are fresh."""
        return [1] * len(batch.groups)

    def add(self, step: int, fresh: Sequence[Group], batch: Batch) -> None:
        """Does nothing: the traces stay as they are."""

    def metrics(self, step: int) -> dict[str, int]:
        """Returns how many groups of the last batch have a trace, and how many of these are correct."""
        return self._composed

    def state(self) -> dict[str, np.ndarray]:
        """Returns the count. A run that continues receives its traces again."""
        return {'traces_total': np.array([self._total], np.int64)}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `state` saved."""
        self._total = int(arrays['traces_total'][0])
