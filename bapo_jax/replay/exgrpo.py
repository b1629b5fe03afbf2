"""ExGRPO's batch (arXiv 2510.02245): fresh groups, and groups that an earlier success of the prompt leads.

Prompts with stored successes are asked again, mostly those of medium difficulty. The stored success that π_θ
finds most likely takes the first place among the new responses. It is a trace: it has a loss of its own
(learner.traces), with the log-probs of the policy that sampled it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import REPLAY, X1, Author, Batch, Begun, Group, Response, Verdict, make_batch, taken
from bapo_jax.replay.arpo import led_by
from bapo_jax.replay.filters import sound
from bapo_jax.replay.histories import Histories
from bapo_jax.replay.protocol import Rng, ScoreBatch

_LEAST_WEIGHT = 1e-200  # of a bucket, so that large groups have no weight of 0: it may be the only one left


class Exgrpo:
    """ExGRPO's memory: the successes of prompts that are neither failed nor solved.

    It remembers nothing until more than `start_above` of the responses of a batch are correct. A prompt whose
    whole group was once correct is retired: its successes are dropped, and no others are stored.
    """

    buffer = None

    def __init__(self, config: Any, batch_groups: int):
        """`config` is the `replay` section of a resolved config; `batch_groups` is B."""
        self._config, self._batch_groups = config.exgrpo, batch_groups
        self._successes = Histories('exgrpo', config.exgrpo.per_prompt)
        self._latest: dict[int, tuple[int, int]] = {}  # prompt id -> k and G of its latest group that stored
        self._retired: set[int] = set()
        self._started = False
        self._composed: dict[str, float] = {}  # metrics of the last batch

    @property
    def history(self) -> dict[int, Group]:
        """The stored successes by prompt id, one group each; read-only."""
        return self._successes.groups

    def hard_prompts(self, step: int, rng: Rng) -> list[Begun]:
        """Returns prompts with stored successes: as many as are the config's share of a full batch."""
        chosen = self._choose(rng('reevaluate')) if self.history else []
        return [Begun(self.history[prompt_id].prompt) for prompt_id in chosen]

    def compose(
        self, step: int, fresh: Sequence[Group], reevaluated: Sequence[Group], rng: Rng, score: ScoreBatch
    ) -> Batch:
        """Returns the fresh groups, then a new group for each re-evaluated one (origin REPLAY).

        The new group is a stored success, and all re-evaluated responses but the first. Groups with
        infrastructure errors are left out.
        """
        x1, again = sound(step, fresh, self._batch_groups), [g for g in reevaluated if not g.infra_error]
        stored = [self.history[g.prompt.id] for g in again]
        likeliest = most_likely(stored, again[0].size, score) if stored else []
        mixed = [
            led_by(dataclasses.replace(one, responses=(as_trace(one.responses[0]),)), g)
            for one, g in zip(likeliest, again, strict=True)
        ]
        self._composed = {'bapo/reevaluated': len(reevaluated)}
        return make_batch([*x1, *mixed], [X1] * len(x1) + [REPLAY] * len(mixed))

    def times_trained(self, batch: Batch) -> list[int | None]:
        """Returns 1 for fresh groups, and None for mixed ones: their responses come from several steps."""
        return [1 if o == X1 else None for o in batch.origins]

    def add(self, step: int, fresh: Sequence[Group], batch: Batch) -> None:
        """Stores new successes of the fresh and the mixed groups, and retires the prompts that were solved.

        A stored success counts in the accuracy of the group that it leads.
        """
        whole, mixed = [g for g in fresh if not g.infra_error], batch.of_origin(REPLAY)
        if self._started:
            for g, new in [*((g, g) for g in whole), *((g, taken(g, range(1, g.size))) for g in mixed)]:
                if 0 < g.correct < g.size:
                    self._latest[g.prompt.id] = g.correct, g.size
                    self._store(new)
        self._retired |= {g.prompt.id for g in [*whole, *mixed] if g.correct == g.size}
        for prompt_id in self._retired & self.history.keys():
            self._successes.drop(prompt_id)
            del self._latest[prompt_id]
        responses = sum(g.size for g in batch.groups)
        self._started |= sum(g.correct for g in batch.groups) > self._config.start_above * responses

    def metrics(self, step: int) -> dict[str, float]:
        """Returns metrics of the last batch, and of the memory."""
        return {
            **self._composed,
            **self._successes.metrics(),
            'buffer/exgrpo/retired': len(self._retired),
            'buffer/exgrpo/started': int(self._started),
        }

    def state(self) -> dict[str, np.ndarray]:
        """Returns everything that `restore` needs, as arrays for a checkpoint."""
        latest = [self._latest[prompt_id] for prompt_id in self.history]
        return {
            **self._successes.state(),
            'latest': np.array([*latest, (0, 0)], np.int64),  # none is empty
            'retired': np.array([*sorted(self._retired), -1], np.int64),
            'started': np.array([self._started]),
        }

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores `state` exactly. Raises ValueError if a prompt has more than replay.exgrpo.per_prompt."""
        self._successes.restore(arrays)
        self._latest = dict(zip(self.history, map(tuple, arrays['latest'].tolist())))
        self._retired = set(arrays['retired'][:-1].tolist())
        self._started = bool(arrays['started'][0])

    def _choose(self, rng: np.random.Generator) -> list[int]:
        """Draws prompts bucket by bucket; a bucket has the prompts whose latest group had k of G correct."""
        buckets: dict[tuple[int, int], list[int]] = {}
        for prompt_id in self.history:
            buckets.setdefault(self._latest[prompt_id], []).append(prompt_id)
        far = np.array([(k - G / 2) ** 2 / 2 for k, G in buckets])
        weight = np.maximum(np.exp(far.min() - far), _LEAST_WEIGHT)
        sizes = np.array([len(ids) for ids in buckets.values()])
        count = min(led_groups(self._batch_groups, self._config.share), len(self.history))
        counts = dealt(count, weight, sizes, rng)
        return [
            ids[i]
            for ids, n in zip(buckets.values(), counts, strict=True)
            for i in np.sort(rng.choice(len(ids), n, replace=False))
        ]

    def _store(self, group: Group) -> None:
        """Stores the correct responses whose tokens are new."""
        held = self.history.get(group.prompt.id)
        known = {r.tokens.tobytes() for r in held.responses} if held else set()
        for i, (response, verdict) in enumerate(zip(group.responses, group.verdicts, strict=True)):
            tokens = response.tokens.tobytes()
            if verdict == Verdict.CORRECT and tokens not in known:
                known.add(tokens)
                self._successes.add(taken(group, [i]))


def led_groups(batch_groups: int, share: float) -> int:
    """Returns how many groups, beside B fresh ones, are `share` of all."""
    return round(batch_groups * share / (1 - share))


def dealt(count: int, weight: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Deals `count` draws to buckets of these sizes, int [buckets]: multinomial by weight.

    Draws beyond a bucket's size are dealt again one by one, among the buckets that have room. `count` is at
    most the sum of the sizes.
    """
    counts = rng.multinomial(count, weight / weight.sum())
    counts = np.minimum(counts, sizes)
    while counts.sum() < count:
        chance = np.where(counts < sizes, weight, 0)
        counts[rng.choice(len(counts), p=chance / chance.sum())] += 1
    return counts


def most_likely(groups: Sequence[Group], size: int, score: ScoreBatch) -> list[Group]:
    """Returns of each group its response with the lowest mean of -log π_θ per token; of equals, the oldest.

    -log π_θ at a sampled token estimates the entropy there, and needs no program of its own. The groups are
    scored in pieces of at most `size` responses, that of a sampled group, so that few shapes are compiled.
    """
    pieces = [
        (i, taken(g, range(first, min(first + size, g.size))))
        for i, g in enumerate(groups)
        for first in range(0, g.size, size)
    ]
    scored = score(make_batch([piece for _, piece in pieces], [REPLAY] * len(pieces)))
    likely: list[list[float]] = [[] for _ in groups]
    for (i, piece), logp in zip(pieces, scored, strict=True):
        likely[i] += [float(x[r.trained_on].mean()) for x, r in zip(logp, piece.responses, strict=True)]
    return [taken(g, [int(np.argmax(of_group))]) for g, of_group in zip(groups, likely, strict=True)]


def as_trace(response: Response) -> Response:
    """Returns a new response in which what the policy wrote is a trace, with its log-probs and version."""
    spans = tuple(
        dataclasses.replace(s, author=Author.TRACE) if s.author == Author.POLICY else s
        for s in response.spans
    )
    return dataclasses.replace(response, spans=spans)
