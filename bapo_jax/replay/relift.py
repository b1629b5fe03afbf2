"""ReLIFT's batch (arXiv 2506.07527): supervised learning of prompts that the policy fails, beside the RL.

Prompts of which all G responses are wrong wait in a queue, the newest first, as in the authors' code. When at
least N of them wait, the traces of the first N join the batch as groups of one response, which only the term
of learner.traces.loss trains on. The others stay. A prompt that fails again waits twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import X1, Batch, Begun, Group, make_batch
from bapo_jax.replay.filters import sound
from bapo_jax.replay.protocol import Rng, ScoreBatch

DEMONSTRATIONS = 'demonstrations'  # the origin of groups that are a trace alone
_NOBODY = -1  # sentinel at the end of the saved queue: array stores dislike empty arrays


class Relift:
    """The queue of failed prompts, and the traces, which `receive` gives."""

    buffer = None

    def __init__(self, config: Any, batch_groups: int):
        """`config` is the `replay` section of a resolved config; `batch_groups` is B.

        A batch has at most B + N groups, N = config.traces.demonstrations. For a mini-batch beyond `capacity`
        (learner/packing.py), its arrays are doubled: one more compiled program.
        """
        self._batch_groups, self._count = batch_groups, config.traces.demonstrations
        self._traces: Mapping[int, Group] = {}
        self._queue: list[int] = []  # prompt ids, newest first
        self._joined = 0  # demonstrations in the last batch

    def receive(self, traces: Mapping[int, Group]) -> None:
        """Gets a judged trace of each prompt that has one, by prompt id, as a group of one response.

        Wrong ones are left out: the cross-entropy would imitate them, too.
        """
        self._traces = {prompt_id: trace for prompt_id, trace in traces.items() if trace.correct}

    def hard_prompts(self, step: int, rng: Rng) -> list[Begun]:
        """Returns []: ReLIFT re-evaluates nothing."""
        return []

    def compose(
        self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group], rng: Rng, score: ScoreBatch
    ) -> Batch:
        """Returns the fresh groups, then N demonstrations if enough prompts wait, this step's included.

        Failed groups stay in the batch. Groups with an infrastructure error are left out. A prompt without a
        trace does not wait. Raises ValueError if more than B groups are fresh.
        """
        x1 = sound(step, fresh, self._batch_groups)
        failed = [g.prompt.id for g in x1 if g.correct == 0 and g.prompt.id in self._traces]
        waiting = [*failed, *self._queue]
        self._joined = self._count if len(waiting) >= self._count else 0
        self._queue = waiting[self._joined :]
        demonstrations = [self._traces[i] for i in waiting[: self._joined]]
        return make_batch([*x1, *demonstrations], [X1] * len(x1) + [DEMONSTRATIONS] * self._joined)

    def times_trained(self, batch: Batch) -> list[int | None]:
        """Returns 1 for fresh groups, and None for demonstrations, which nothing counts."""
        return [1 if origin == X1 else None for origin in batch.origins]

    def add(self, step: int, fresh: Sequence[Group], batch: Batch) -> None:
        """Does nothing: the batch was composed after the failed prompts of its step joined the queue."""

    def metrics(self, step: int) -> dict[str, int]:
        """Returns the demonstrations in the last batch, and the number of prompts that wait."""
        return {'traces/demonstrations': self._joined, 'traces/queued': len(self._queue)}

    def state(self) -> dict[str, np.ndarray]:
        """Returns the queue. A run that continues receives its traces again."""
        return {'queue': np.array([*self._queue, _NOBODY], np.int64)}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `state` saved, without prompts that have no trace any more.

        That happens if rollout.max_response_tokens was lowered.
        """
        self._queue = [i for i in arrays['queue'].tolist() if i in self._traces]
