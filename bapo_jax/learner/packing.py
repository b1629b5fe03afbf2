"""From mini-batches to fixed-shape rows, in which per-token arrays are laid out.

A sequence is a prompt and one response. Grain packs sequences end to end; or a row has a prompt once, in its first tokens, and slots
behind it in which responses lie end to end. Host side, numpy. Every packed array is [micro-batches M, rows R, tokens T].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from bapo_jax.groups import ORIGINS, Batch, ByGroup
from bapo_jax.learner.packed import Rows, Sequences
from bapo_jax.seen import Seen


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
        values, n = np.zeros(sum(lengths), packed.dtype), self.filled  # 0 on prompts that lie nowhere: they are shared
        there = self.segment[:n] > 0
        values[self.token[:n][there]] = packed[:n][there]
        return np.split(values, np.cumsum(lengths)[:-1])


class Part(NamedTuple):
    """A mini-batch: some groups of a batch, and where their sequences lie."""

    indices: np.ndarray  # of its groups in the batch, in the order of the sequences
    batch: Batch  # of these groups alone
    layout: Layout
    seen: Seen | None = None  # the images of its groups' prompts

    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(g.prompt.tokens) + len(r.tokens) for g in self.batch.groups for r in g.responses]

    def sequences(self) -> Sequences:
        groups, place = self.batch.groups, self.layout.place
        tokens = place([part for g in groups for r in g.responses for part in (g.prompt.tokens, r.tokens)])
        trained_on = self.on_responses([[r.trained_on for r in g.responses] for g in groups], bool)
        response = np.where(trained_on, self.layout.segment, 0)
        return Sequences(tokens, self.layout.segment, self.layout.position, response, *self._seen_at_tokens())

    def _seen_at_tokens(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The rotary positions and the features at all tokens, as in Sequences."""
        if self.seen is None:
            return None, None
        features, ropes = [], []
        for i, group in enumerate(self.batch.groups):
            for response in group.responses:
                n = len(response.tokens)
                features += [self.seen.feature[i], np.full(n, -1, np.int32)]
                behind = self.seen.following[i] + np.arange(n, dtype=np.int32)
                ropes += [self.seen.rope[i], np.repeat(behind[:, None], 3, axis=1)]
        place = self.layout.place
        rope = np.stack([place([rope[:, axis] for rope in ropes]) for axis in range(3)], axis=-1)
        return rope, place([feature + 1 for feature in features]) - 1  # padding is 0 in what is placed

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


def capacity(config: Any, group_size: int, shared: int) -> int:
    """Micro-batches that hold any mini-batch of groups of that size, were each response alone in its row or slot.

    `config` and `shared` are as in `cut`.
    """
    return -(-most_groups(config) * rows_of_a_group(config, group_size, shared) // config.micro_batch_rows)


def rows_of_a_group(config: Any, group_size: int, shared: int) -> int:
    """Rows that a group takes, were each response alone in its row or slot."""
    return -(-group_size * config.slot_tokens // (config.row_tokens - shared)) if shared else group_size


def most_groups(config: Any) -> int:
    """Groups of the largest mini-batch: rebalanced ones have up to 3/2 as many as asked for."""
    groups = config.mini_batch_groups if config.partial_mini_batch == 'keep' else (3 * config.mini_batch_groups + 1) // 2
    return min(groups, config.batch_groups)


def cut(
    batch: Batch, order: np.ndarray, config: Any, micro_batches: int = 1, shared: int = 0, *, most_segments: int | None = None
) -> list[Part]:
    """The mini-batches of one pass over a batch, its groups taken in `order`; `config` is the learner's part of the config.

    Each has a multiple of `micro_batches` of them. With `shared` > 0, a row begins with a prompt of up to so many tokens. No other row
    has more than `most_segments` sequences.
    """
    parts = []
    for indices in mini_batches(len(batch.groups), config.mini_batch_groups, config.partial_mini_batch):
        of_part = batch.take(order[indices])
        if shared:
            lengths = [(len(g.prompt.tokens), [len(r.tokens) for r in g.responses]) for g in of_part.groups]
            rows = rows_of_slots(lengths, shared=shared, slot=config.slot_tokens, row_tokens=config.row_tokens)
        else:
            lengths = [len(g.prompt.tokens) + len(r.tokens) for g in of_part.groups for r in g.responses]
            rows = rows_end_to_end(lengths, config.row_tokens, most_segments)
        layout = lay_out(rows, row_tokens=config.row_tokens, rows=config.micro_batch_rows, multiple=micro_batches)
        parts.append(Part(order[indices], of_part, layout))
    return parts


class Row(NamedTuple):
    """One row of a layout; arrays as in Layout, of as many tokens as it holds."""

    segment: np.ndarray
    position: np.ndarray
    token: np.ndarray


def rows_end_to_end(lengths: Sequence[int], row_tokens: int, most_segments: int | None = None) -> list[Row]:
    """Packs sequences of these lengths, each with a prompt of its own, at most `most_segments` into a row.

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
        max_sequences_per_bin=most_segments,
    )
    names = ('token_segment_ids', 'token_positions', 'token')  # Grain's
    return [Row(*(row[name] for name in names)) for row in packed if row['token_segment_ids'][0]]


def rows_of_slots(groups: Sequence[tuple[int, Sequence[int]]], *, shared: int, slot: int, row_tokens: int) -> list[Row]:
    """Packs groups of (prompt's length, responses' lengths): a row has one prompt, and whole slots of its responses behind it.

    A prompt whose responses fill more slots than a row has begins several rows. Raises ValueError for a prompt longer than `shared`
    or a response longer than `slot`.
    """
    rows, end = [], 0
    for prompt, responses in groups:
        for what, n, field, room in (('prompt', prompt, 'rollout.max_prompt_tokens', shared),
                                     ('response', max(responses), 'learner.slot_tokens', slot)):  # fmt: skip
            if n > room:
                raise ValueError(f'a {what} of {n} tokens does not fit {field}={room}; raise it')
        ends = end + np.cumsum([prompt + n for n in responses])
        slots, in_a_row = first_fit(responses, slot), (row_tokens - shared) // slot
        for first in range(0, len(slots), in_a_row):
            row, number = Row(*np.zeros((3, row_tokens), np.int32)), 1
            of_row = slots[first : first + in_a_row]
            own = ends[of_row[0][0]] - responses[of_row[0][0]]  # where that response begins, its prompt before it
            _write(row, 0, np.arange(own - prompt, own), 0, number)
            for i, of_slot in enumerate(of_row):
                at = shared + i * slot
                for j in of_slot:
                    number += 1
                    _write(row, at, np.arange(ends[j] - responses[j], ends[j]), prompt, number)
                    at += responses[j]
            rows.append(row)
        end = ends[-1]
    return rows


def _write(row: Row, at: int, token: np.ndarray, position: int, segment: int) -> None:
    """Writes tokens into a row from `at` on, the first of them at that position of its sequence."""
    there = slice(at, at + len(token))
    row.token[there], row.segment[there], row.position[there] = token, segment, position + np.arange(len(token))


def first_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of `lengths` in bins of that size, longest first, each in the first bin with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for j in sorted(range(len(lengths)), key=lambda j: -lengths[j]):
        b = next((b for b, left in enumerate(room) if left >= lengths[j]), len(bins))
        if b == len(bins):
            bins.append([])
            room.append(size)
        bins[b].append(j)
        room[b] -= lengths[j]
    return bins


def lay_out(packed: Sequence[Row], *, row_tokens: int, rows: int, multiple: int = 1) -> Layout:
    """Cuts rows into micro-batches of `rows`; their number is rounded up to a multiple with empty ones."""
    micro_batches = -(-len(packed) // rows)
    shape = (-(-micro_batches // multiple) * multiple, rows, row_tokens)
    arrays = [np.zeros(shape, np.int32) for _ in Row._fields]
    for array, of_rows in zip(arrays, zip(*packed, strict=True), strict=True):
        flat = array.reshape(-1, row_tokens)
        for i, row in enumerate(of_rows):
            flat[i] = row
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
