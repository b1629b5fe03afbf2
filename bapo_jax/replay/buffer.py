"""The replay buffer: two FIFO parts that take in each step's fresh groups (Algorithm 1, lines 8-9 and 19).

`bad` (the paper's B_bad) holds the hard prompts, on which the rollout policy's accuracy was mu <= c1. A newer
policy re-evaluates them (X2). `high` (B_high) holds whole groups with both correct and wrong responses
(0 < k < G), to be replayed (X3). The thresholds c2(t) and c3(t) change over time, so they are applied when X3
is drawn. A hard prompt with a correct response is in both parts.

Each part holds a prompt at most once, and the newest evidence wins. A fresh group replaces its prompt's older
entries in both parts, even if it enters neither. A prompt that is now mostly solved is thus no longer
re-evaluated, and its older responses are no longer trained on. Sampling does not remove an entry (the paper
never removes one).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from bapo_jax.groups import Group, Prompt
from bapo_jax.replay.arrays import groups_from_arrays, groups_to_arrays
from bapo_jax.replay.thresholds import in_range


@dataclasses.dataclass(slots=True)
class BadEntry:
    prompt: Prompt  # its old responses are never trained on, so they are not kept
    accuracy: float  # mu of the group that put it here
    stored: int  # the step at whose end it was added
    order: int = 0  # rank among that step's groups; (stored, order) is an entry's age in either part
    sampled: int = 0  # number of re-evaluations
    best: float = math.nan  # highest accuracy over its re-evaluations; nan before the first

    @property
    def nbytes(self) -> int:
        return self.prompt.tokens.nbytes


@dataclasses.dataclass(slots=True)
class HighEntry:
    group: Group
    stored: int
    order: int = 0
    was_x1: bool = False  # trained on in the step that sampled it
    sampled: int = 0  # number of times in X3

    @property
    def nbytes(self) -> int:
        return self.group.prompt.tokens.nbytes + sum(r.nbytes for r in self.group.responses)


@dataclasses.dataclass(frozen=True, slots=True)
class Eviction:
    """An entry that left the buffer, with its whole history."""

    part: str  # 'bad' or 'high'
    prompt_id: int
    stored: int
    sampled: int
    step: int  # the step at whose end it was evicted
    reason: str  # 'capacity', 'age' or 'replaced' (by a newer group of the same prompt)


class ReplayBuffer:
    """The two parts: dicts from prompt id to entry, oldest first. An evicted entry becomes an `Eviction`."""

    def __init__(
        self, bad_capacity: int, high_capacity: int, high_recent_steps: int, c1: float, shared: bool = False
    ):
        """Capacities count entries: prompts in `bad`, groups in `high`. c1 bounds a hard prompt's accuracy.

        With `shared`, both parts share one first-in-first-out pool of `bad_capacity` prompts. Raises
        ValueError if a capacity or `high_recent_steps` is below 1.
        """
        if min(bad_capacity, high_capacity, high_recent_steps) < 1:
            raise ValueError(
                'replay.bad_capacity, replay.high_capacity and replay.high_recent_steps must be at least 1'
            )
        self.capacity = {'bad': bad_capacity, 'high': high_capacity}
        self.high_recent_steps = high_recent_steps
        self.c1 = c1
        self.shared = shared
        self.bad: dict[int, BadEntry] = {}
        self.high: dict[int, HighEntry] = {}
        self.step = -1  # the last step added
        self.last = {
            'bad/added': 0,
            'bad/evicted': 0,
            'bad/evicted_unseen': 0,
            'high/added': 0,
            'high/evicted': 0,
        }

    def add(self, groups: Sequence[Group], step: int, x1: Collection[int] = ()) -> list[Eviction]:
        """Adds the fresh groups of `step`, at the end of that step. Returns the evictions, in order.

        `x1` holds the prompt ids of the step's X1. A group with an infrastructure error is ignored: it
        neither enters nor replaces an entry. If a prompt has two groups, the later one counts, so (part,
        prompt id, stored) identifies an entry. All groups of a step enter before the oldest entries are
        evicted for capacity. Groups are kept by reference. Raises ValueError if `step` is not after the last
        step added.
        """
        if step <= self.step:
            raise ValueError(f'step {step} was added after step {self.step}; add each step once, in order')
        parts = {'bad': self.bad, 'high': self.high}
        added = {'bad': 0, 'high': 0}
        evictions = []

        def evict(part: str, prompt_id: int, reason: str) -> None:
            entry = parts[part].pop(prompt_id)
            evictions.append(Eviction(part, prompt_id, entry.stored, entry.sampled, step, reason))

        # The next reader, step + 1, looks back at most to step + 1 - high_recent_steps. Drop older entries.
        for prompt_id in [i for i, e in self.high.items() if e.stored <= step - self.high_recent_steps]:
            evict('high', prompt_id, 'age')

        newest = {g.prompt.id: g for g in groups if not g.infra_error}
        for order, (prompt_id, group) in enumerate(newest.items()):
            for part, entries in parts.items():
                if prompt_id in entries:
                    evict(part, prompt_id, 'replaced')
            if in_range(group.correct, group.size, 0, self.c1):
                self.bad[prompt_id] = BadEntry(group.prompt, group.accuracy, step, order)
                added['bad'] += 1
            if 0 < group.correct < group.size:
                self.high[prompt_id] = HighEntry(group, step, order, prompt_id in x1)
                added['high'] += 1

        for part, entries in parts.items():
            for prompt_id in list(entries)[: max(0, len(entries) - self.capacity[part])]:
                evict(part, prompt_id, 'capacity')
        if self.shared:
            # The two entries of a prompt have the same age: a newer group would have replaced both.
            age = {
                i: (entry.stored, entry.order) for entries in parts.values() for i, entry in entries.items()
            }
            for prompt_id in sorted(age, key=age.__getitem__)[: max(0, len(age) - self.capacity['bad'])]:
                for part in [name for name, entries in parts.items() if prompt_id in entries]:
                    evict(part, prompt_id, 'capacity')

        self.step = step
        self.last = {
            'bad/added': added['bad'],
            'bad/evicted': sum(e.part == 'bad' for e in evictions),
            'bad/evicted_unseen': sum(e.part == 'bad' and e.sampled == 0 for e in evictions),
            'high/added': added['high'],
            'high/evicted': sum(e.part == 'high' for e in evictions),
        }
        return evictions

    def hard_prompts(self, rng: np.random.Generator, limit: int) -> list[Prompt]:
        """Samples up to `limit` hard prompts to re-evaluate (line 13), uniformly without replacement.

        They are returned oldest first. This does not count them as sampled; `mark_reevaluated` does.
        """
        return [entry.prompt for entry in sample(rng, list(self.bad.values()), limit)]

    def mark_reevaluated(self, groups: Iterable[Group]) -> None:
        """Counts one re-evaluation of each group's prompt, and updates its best accuracy.

        Groups that continue given tokens do not count towards the best accuracy. Raises KeyError if the
        bad part does not hold the prompt.
        """
        for group in groups:
            entry = self.bad[group.prompt.id]
            entry.sampled += 1
            if not group.infra_error and not group.continued:
                entry.best = float(np.fmax(entry.best, group.accuracy))

    def high_groups(
        self, step: int, low: float, high: float, exclude_ids: Collection[int], untrained: bool = False
    ) -> list[Group]:
        """Returns the candidates for X3 at `step` (lines 9 and 16), oldest first.

        Prompts in `exclude_ids` are left out. The groups have low <= mu <= high and come from the
        `high_recent_steps` steps before `step`. `untrained` excludes groups already trained on, as X1 or X3.
        This does not count the candidates as sampled; `mark_sampled` does.
        """
        return [
            entry.group
            for prompt_id, entry in self.high.items()
            if step - self.high_recent_steps <= entry.stored < step
            and in_range(entry.group.correct, entry.group.size, low, high)
            and prompt_id not in exclude_ids
            and not (untrained and self.uses(entry.group))
        ]

    def uses(self, group: Group) -> int:
        """Returns how often a high group was trained on. Raises KeyError if its prompt is not held."""
        entry = self.high[group.prompt.id]
        return entry.was_x1 + entry.sampled

    def mark_sampled(self, groups: Sequence[Group]) -> None:
        """Counts one sampling of each high group. Raises KeyError if the part does not hold a prompt."""
        for group in groups:
            self.high[group.prompt.id].sampled += 1

    def mean_accuracy(self) -> float | None:
        """Returns the mean accuracy of the prompts held, each counted once; None if the buffer is empty."""
        accuracy = {i: entry.accuracy for i, entry in self.bad.items()} | {
            i: e.group.accuracy for i, e in self.high.items()
        }
        return float(np.mean(list(accuracy.values()))) if accuracy else None

    def metrics(self, step: int) -> dict[str, float]:
        """Returns size, mean age in steps and bytes of each part at `step`, and the counts of the last `add`.

        Bytes are those of the token and log-prob arrays. `evicted` counts evictions for any reason.
        `evicted_unseen` counts hard prompts that were evicted without a re-evaluation.
        """
        result = {f'buffer/{name}': value for name, value in self.last.items()}
        for part, entries in [('bad', self.bad.values()), ('high', self.high.values())]:
            result[f'buffer/{part}/size'] = len(entries)
            result[f'buffer/{part}/age_mean'] = (
                float(np.mean([step - e.stored for e in entries])) if entries else 0.0
            )
            result[f'buffer/{part}/bytes'] = sum(e.nbytes for e in entries)
        return result

    def state(self) -> dict[str, np.ndarray]:
        """Returns the whole buffer as non-empty arrays for a checkpoint. `restore` is the exact inverse."""
        bad, high = list(self.bad.values()), list(self.high.values())
        # A hard prompt is saved as a group without responses, so that `groups_to_arrays` serves both parts.
        bad_arrays = groups_to_arrays(
            [Group(e.prompt, (), (), np.zeros(0, np.float32), e.stored) for e in bad]
        )
        high_arrays = groups_to_arrays([e.group for e in high])
        return {
            'step': np.array([self.step], np.int64),
            'last': np.array(list(self.last.values()), np.int64),
            **{f'bad_{name}': value for name, value in bad_arrays.items()},
            'bad_accuracy': np.array([e.accuracy for e in bad] + [0], np.float64),
            'bad_stored': np.array([e.stored for e in bad] + [0], np.int64),
            'bad_order': np.array([e.order for e in bad] + [0], np.int64),
            'bad_sampled': np.array([e.sampled for e in bad] + [0], np.int64),
            'bad_best': np.array([e.best for e in bad] + [0], np.float64),
            **{f'high_{name}': value for name, value in high_arrays.items()},
            'high_stored': np.array([e.stored for e in high] + [0], np.int64),
            'high_order': np.array([e.order for e in high] + [0], np.int64),
            'high_was_x1': np.array([e.was_x1 for e in high] + [0], np.int64),
            'high_sampled': np.array([e.sampled for e in high] + [0], np.int64),
        }

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replaces the buffer's contents by what `state` saved. The groups are views into `arrays`.

        Raises ValueError if the saved parts exceed the capacities.
        """

        def part(prefix: str) -> list[Group]:
            return groups_from_arrays(
                {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
            )

        bad, high = part('bad_'), part('high_')
        if len(bad) > self.capacity['bad'] or len(high) > self.capacity['high']:
            raise ValueError(
                f'the saved buffer holds {len(bad)} hard prompts and {len(high)} groups, more than '
                f'replay.bad_capacity={self.capacity["bad"]} and '
                f'replay.high_capacity={self.capacity["high"]}; set these '
                'fields to the values that the run started with'
            )
        # An earlier version saved neither of these arrays.
        best = arrays.get('bad_best', np.full(len(bad) + 1, math.nan))
        bad_order, high_order = (
            arrays.get(f'{name}_order', np.arange(len(p) + 1)) for name, p in (('bad', bad), ('high', high))
        )
        self.step = int(arrays['step'][0])
        self.last = dict(zip(self.last, (int(value) for value in arrays['last'])))
        self.bad = {
            g.prompt.id: BadEntry(g.prompt, float(mu), int(stored), int(order), int(sampled), float(best))
            for g, mu, stored, order, sampled, best in zip(
                bad, arrays['bad_accuracy'], arrays['bad_stored'], bad_order, arrays['bad_sampled'], best
            )
        }
        self.high = {
            g.prompt.id: HighEntry(g, int(stored), int(order), bool(was_x1), int(sampled))
            for g, stored, order, was_x1, sampled in zip(
                high, arrays['high_stored'], high_order, arrays['high_was_x1'], arrays['high_sampled']
            )
        }


def sample(rng: np.random.Generator, items: Sequence, count: int) -> list:
    """S(items, count) of eq. 7: a uniform sample without replacement, in the order of `items`.

    Returns all items if there are at most `count`.
    """
    if count >= len(items):
        return list(items)
    return [items[i] for i in np.sort(rng.choice(len(items), count, replace=False))]
