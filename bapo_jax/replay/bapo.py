"""BAPO's batch X1 ∪ X2 ∪ X3: fresh, re-evaluated, replayed groups (Algorithm 1, lines 8-9, 11-17, 19)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import X1, Batch, Begun, Group, make_batch
from bapo_jax.replay.buffer import ReplayBuffer, sample
from bapo_jax.replay.filters import fresh_filter
from bapo_jax.replay.protocol import Rng, ScoreBatch
from bapo_jax.replay.retries import Retries, Uniform
from bapo_jax.replay.thresholds import in_range, on_grid, threshold, update_r_tot

X2, X3 = 'x2', 'x3'  # origins of groups in a batch: re-evaluated hard prompts; the buffer
RULES = ('threshold', 'strict_increase', 'mixed')


class Bapo:
    """BAPO's state: the buffer and the average performance r_tot. GRPO has no filter and no replay."""

    def __init__(
        self,
        config: Any,
        batch_groups: int,
        reevaluation_due: Callable[[int], bool],
        retries: Retries | None = None,
    ):
        """`config` is the `replay` section of a resolved config; `batch_groups` is B.

        `reevaluation_due(step)` is the condition of line 12. `retries` chooses the hard prompts to ask again,
        and how to ask them; None means as in the paper.
        """
        self._config, self._batch_groups, self._reevaluation_due = config, batch_groups, reevaluation_due
        self._retries = retries or Uniform(config.max_reevaluate)
        self.buffer = ReplayBuffer(
            config.bad_capacity,
            config.high_capacity,
            config.high_recent_steps,
            config.c1,
            shared=config.shared_pool,
        )
        self.r_tot: float | None = None
        self._composed: dict[str, Any] = {}  # metrics of the last batch

    def hard_prompts(self, step: int, rng: Rng) -> list[Begun]:
        """Returns the hard prompts that π_θ re-evaluates, every m steps (lines 12-13)."""
        if not self._reevaluation_due(step):
            return []
        return self._retries.choose(step, self.buffer, rng('reevaluate'))

    def compose(
        self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group], rng: Rng, score: ScoreBatch
    ) -> Batch:
        """Composes the adaptive batch (lines 11 and 14-17, eq. 5-8).

        `score` gives the log-probs of a batch under π_θ, if the row needs them.
        """
        c = self._config
        # Line 11: X1.
        # A step with refills may have more than B groups.
        kept = fresh_filter(fresh, c.fresh_filter, rng('filter'))[: self._batch_groups]
        # Lines 14-15, eq. 6: X2, the hard prompts that π_θ now sometimes solves.
        self.buffer.mark_reevaluated(reevaluated)
        before = {g.prompt.id: self.buffer.bad[g.prompt.id].accuracy for g in reevaluated}
        asked_again = self._retries.pooled(reevaluated, score)
        self._retries.observe(reevaluated, self.buffer)
        if c.improved_rule == 'strict_increase':
            better = increased(asked_again, before)
        else:
            better = improved(asked_again, c.c1 if c.improved_rule == 'threshold' else 0.0)
        # Eq. 8: thresholds that follow performance.
        if c.shared_pool:
            self.r_tot = self.buffer.mean_accuracy()
        else:
            self.r_tot = update_r_tot(
                self.r_tot, np.mean([g.accuracy for g in fresh if not g.infra_error] or [np.nan])
            )
        low, high = (threshold(x, self.r_tot or 0.0, c.thresholds) for x in (c.c2, c.c3))
        low, high = on_grid(low, high, max((g.size for g in fresh), default=0))
        # Lines 16-17, eq. 5 and 7: X3, and the batch.
        batch = fill(
            kept,
            better,
            self.buffer,
            size=self._batch_groups,
            step=step,
            low=low,
            high=high,
            rng=rng('compose'),
            use_x3=c.use_x3,
            x3_untrained=c.x3_untrained,
        )
        self._composed = {
            **replayed_metrics(batch, self.buffer, step),
            'bapo/r_tot': self.r_tot,
            'bapo/c2': low,
            'bapo/c3': high,
            'bapo/reevaluated': len(reevaluated),
            'bapo/improved': len(better),
            **(self._retries.metrics() if reevaluated else {}),
        }
        return batch

    def times_trained(self, batch: Batch) -> list[int]:
        """Returns how often each group of the last batch has been trained on, this time included."""
        return [
            self.buffer.uses(g) if o == X3 else 1 for g, o in zip(batch.groups, batch.origins, strict=True)
        ]

    def add(self, step: int, fresh: Sequence[Group], batch: Batch) -> None:
        """Adds the fresh groups to the buffer, after this step's draws from it (lines 8-9 and 19)."""
        self.buffer.add(fresh, step, x1={g.prompt.id for g in batch.of_origin(X1)})
        self._retries.observe(fresh, self.buffer)

    def metrics(self, step: int) -> dict[str, Any]:
        """Returns metrics of the last batch, and of the buffer at `step`."""
        return {**self._composed, **self.buffer.metrics(step)}

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `restore` needs, as arrays for a checkpoint."""
        retries = {f'retries_{name}': array for name, array in self._retries.state().items()}
        return {
            **self.buffer.state(),
            **retries,
            'r_tot': np.array([np.nan if self.r_tot is None else self.r_tot]),
        }

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `state` saved. Raises ValueError if the saved buffer exceeds the capacities."""
        self.buffer.restore(arrays)
        self._retries.restore(
            {n.removeprefix('retries_'): a for n, a in arrays.items() if n.startswith('retries_')}
        )
        r_tot = float(arrays['r_tot'][0])
        self.r_tot = None if np.isnan(r_tot) else r_tot


def improved(groups: Sequence[Group], c1: float) -> list[Group]:
    """Returns X2 of eq. 6: the re-evaluated groups with c1 < mu' < 1.

    A group with an infrastructure error has no mu' and is left out.
    """
    return [
        g
        for g in groups
        if not g.infra_error and g.correct < g.size and not in_range(g.correct, g.size, 0, c1)
    ]


def increased(groups: Sequence[Group], before: Mapping[int, float]) -> list[Group]:
    """Returns X2 of the authors' code: the re-evaluated groups with mu' > mu, including all-correct ones.

    `before` maps prompt ids to mu.
    """
    return [g for g in groups if not g.infra_error and g.accuracy > before[g.prompt.id]]


def fill(
    fresh: Sequence[Group],
    better: Sequence[Group],
    buffer: ReplayBuffer,
    *,
    size: int,
    step: int,
    low: float,
    high: float,
    rng: np.random.Generator,
    use_x3: bool,
    x3_untrained: bool = False,
) -> Batch:
    """Builds a batch of at most `size` (= B) intact groups of distinct prompts, in the order X1, X2, X3.

    fresh     X1, the filtered fresh groups. The batch holds all of them.
    better    X2 (`improved` or `increased`), without prompts of X1. A random subset if not all of them fit.
    buffer    X3 is a uniform sample of its groups with low = c2(t) <= mu <= c3(t) = high, of other prompts,
              up to `size` (eq. 7). Sampled groups are counted as such. Not read if use_x3 is False.
    rng       the generator of this step, which the caller derives from (seed, step).
    x3_untrained   excludes groups already trained on from X3.

    The batch may be smaller than `size`, or empty. Groups with an infrastructure error are left out of X1 and
    X2; the buffer holds no such groups. Raises ValueError if X1 exceeds `size`, or if a prompt occurs twice
    in X1 or in X2.
    """
    x1 = [g for g in fresh if not g.infra_error]
    if len(x1) > size:
        raise ValueError(
            f'{len(x1)} fresh groups of step {step} exceed learner.batch_groups={size}; pass fewer'
        )
    taken = {g.prompt.id for g in x1}
    x2 = sample(rng, [g for g in better if not g.infra_error and g.prompt.id not in taken], size - len(x1))
    taken |= {g.prompt.id for g in x2}
    if len(taken) < len(x1) + len(x2):
        raise ValueError(
            f'a prompt occurs twice among the {len(x1)} fresh or the {len(x2)} re-evaluated groups of step '
            f'{step}; pass each once'
        )
    x3 = []
    if use_x3:
        x3 = sample(rng, buffer.high_groups(step, low, high, taken, x3_untrained), size - len(x1) - len(x2))
        buffer.mark_sampled(x3)
    return make_batch([*x1, *x2, *x3], [X1] * len(x1) + [X2] * len(x2) + [X3] * len(x3))


def replayed_metrics(batch: Batch, buffer: ReplayBuffer, step: int) -> dict[str, float]:
    """Returns means over X3 of the new batch: age in steps, accuracy, and earlier uses in training."""
    x3 = batch.of_origin(X3)
    if not x3:
        return {}
    return {
        'bapo/x3/age': float(np.mean([step - g.step for g in x3])),
        'bapo/x3/mean_reward': float(np.mean([g.accuracy for g in x3])),
        # The use in this batch is already counted.
        'bapo/x3/uses': float(np.mean([buffer.uses(g) - 1 for g in x3])),
    }
