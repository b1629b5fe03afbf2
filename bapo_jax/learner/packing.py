"""From mini-batches to fixed-shape rows: Grain packs sequences end to end, and per-token arrays are laid out as they were packed.

Host side, numpy. A sequence is a prompt and one response. Every packed array is [micro-batches M, rows R, tokens T].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from bapo_jax.groups import ORIGINS, Batch, ByGroup
from bapo_jax.learner.packed import Rows, Sequences


class Layout(NamedTuple):
    """Where the sequences of a mini-batch lie, [M, R, T]."""

    segment: np.ndarray  # as in Sequences
    position: np.ndarray
    token: np.ndarray  # int32, which of all tokens of the sequences, end to end, lies there; 0 on padding
    filled: int  # how many leading micro-batches hold any token; the rest is padding of the shape

    def place(self, per_sequence: Sequence[np.ndarray]) -> np.ndarray:
        """One number a token of every sequence, packed; 0 on padding."""
        values, n = np.concatenate(per_sequence), self.filled
        packed = np.zeros(self.segment.shape, values.dtype)  # what is never written takes no memory
        packed[:n] = np.where(self.segment[:n] > 0, values[self.token[:n]], values.dtype.type(0))
        return packed

    def pick(self, packed: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
        """The inverse of `place`, given the sequences' lengths."""
        values, n = np.empty(sum(lengths), packed.dtype), self.filled
        there = self.segment[:n] > 0
        values[self.token[:n][there]] = packed[:n][there]
        return np.split(values, np.cumsum(lengths)[:-1])


class Part(NamedTuple):
    """A mini-batch: some groups of a batch, and where their sequences lie."""

    indices: np.ndarray  # of its groups in the batch, in the order of the sequences
    batch: Batch  # of these groups alone
    layout: Layout

    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(g.prompt.tokens) + len(r.tokens) for g in self.batch.groups for r in g.responses]

    def sequences(self) -> Sequences:
        groups, place = self.batch.groups, self.layout.place
        tokens = place([part for g in groups for r in g.responses for part in (g.prompt.tokens, r.tokens)])
        trained_on = self.on_responses([[r.trained_on for r in g.responses] for g in groups], bool)
        return Sequences(tokens, self.layout.segment, self.layout.position, np.where(trained_on, self.layout.segment, 0))

    def on_responses(self, values: ByGroup, dtype: Any) -> np.ndarray:
        """[M, R, T] from one number for each response token; 0 on prompts and padding."""
        parts = []
        for g, of_group in zip(self.batch.groups, values, strict=True):
            blank = np.zeros(len(g.prompt.tokens), dtype)
            for of_response in of_group:
                parts += [blank, np.asarray(of_response, dtype)]
        return self.layout.place(parts)

    def of_responses(self, packed: np.ndarray) -> ByGroup:
        """The inverse of `on_responses`."""
        sequences = iter(self.layout.pick(packed, self.lengths()))
        return [[next(sequences)[len(g.prompt.tokens) :] for _ in g.responses] for g in self.batch.groups]


def mini_batches(groups: int, mini_batch_groups: int, partial: str) -> list[np.ndarray]:
    """Group indices of each optimizer step.

    'rebalance' (default): max(1, round(groups / mini_batch_groups)) parts, sizes equal within one: a full Adam step on a
    remainder of one or two groups was what ruined the prototype's runs. 'keep': full ones and a ragged last, as the
    authors' code does.
    """
    if groups == 0:
        return []
    indices = np.arange(groups)
    if partial == 'rebalance':
        return np.array_split(indices, max(1, int(groups / mini_batch_groups + 0.5)))
    if partial == 'keep':
        return np.split(indices, range(mini_batch_groups, groups, mini_batch_groups))
    raise ValueError(f"learner.partial_mini_batch={partial!r} is unknown; choose 'rebalance' or 'keep'")


def capacity(config: Any, group_size: int) -> int:
    """Micro-batches that hold any mini-batch of groups of that size, were each sequence alone in its row.

    Rebalanced mini-batches have up to 3/2 as many groups as asked for. `config` is the learner's part of the config.
    """
    groups = config.mini_batch_groups if config.partial_mini_batch == 'keep' else (3 * config.mini_batch_groups + 1) // 2
    return -(-min(groups, config.batch_groups) * group_size // config.micro_batch_rows)


def cut(batch: Batch, order: np.ndarray, config: Any, micro_batches: int = 1) -> list[Part]:
    """The mini-batches of one pass over a batch, its groups taken in `order`; `config` is the learner's part of the config.

    Each has a multiple of `micro_batches` of them.
    """
    parts = []
    for indices in mini_batches(len(batch.groups), config.mini_batch_groups, config.partial_mini_batch):
        of_part = batch.take(order[indices])
        lengths = [len(g.prompt.tokens) + len(r.tokens) for g in of_part.groups for r in g.responses]
        layout = lay_out(lengths, row_tokens=config.row_tokens, rows=config.micro_batch_rows, multiple=micro_batches)
        parts.append(Part(order[indices], of_part, layout))
    return parts


def lay_out(lengths: Sequence[int], *, row_tokens: int, rows: int, multiple: int = 1) -> Layout:
    """Packs sequences of these lengths; the number of micro-batches is rounded up to a multiple with empty ones.

    Raises ValueError for a sequence longer than `row_tokens`.
    """
    if max(lengths) > row_tokens:
        raise ValueError(f'a sequence of {max(lengths)} tokens does not fit learner.row_tokens={row_tokens}; raise it')
    ends = np.cumsum(lengths)
    sequences = [{'token': np.arange(end - n, end, dtype=np.int32)} for n, end in zip(lengths, ends, strict=True)]
    # Longest first wastes least; every row stays open, so that no row is closed half empty.
    sequences.sort(key=lambda s: -len(s['token']))
    packed = grain.experimental.FirstFitPackIterDataset(
        grain.MapDataset.source(sequences).to_iter_dataset(grain.ReadOptions(num_threads=0)),
        length_struct={'token': row_tokens},
        num_packing_bins=len(sequences),
        shuffle_bins=False,
    )
    filled = [row for row in packed if row['token_segment_ids'][0]]
    micro_batches = -(-len(filled) // rows)
    shape = (-(-micro_batches // multiple) * multiple, rows, row_tokens)
    arrays = []
    for name in ('token_segment_ids', 'token_positions', 'token'):  # Grain's names
        arrays.append(np.zeros(shape, np.int32))
        flat = arrays[-1].reshape(-1, row_tokens)
        for i, row in enumerate(filled):
            flat[i] = row[name]
    return Layout(*arrays, micro_batches)


def pack(part: Part, advantage: ByGroup, weight: Sequence[float], roles: Mapping[str, ByGroup]) -> Rows:
    """The rows of a mini-batch from the advantage of every response token, one token weight a sequence [N], and scores by role."""
    groups, weights = part.batch.groups, iter(weight)

    def on_trained(of_response: Callable[[int, int], Any], dtype: Any) -> np.ndarray:
        """`of_response(group index, response index)` on the tokens of that response that are trained on."""
        values = [[np.where(r.trained_on, of_response(i, j), 0) for j, r in enumerate(g.responses)] for i, g in enumerate(groups)]
        return part.on_responses(values, dtype)

    return Rows(
        sequences=part.sequences(),
        origin=on_trained(lambda i, j: 1 + ORIGINS.index(part.batch.origins[i]), np.int8),
        behaviour=on_trained(lambda i, j: groups[i].responses[j].logp, np.float32),
        advantage=on_trained(lambda i, j: advantage[i][j], np.float32),
        weight=on_trained(lambda i, j: next(weights), np.float32),
        roles={role: part.on_responses(scores, np.float32) for role, scores in roles.items()},
    )
