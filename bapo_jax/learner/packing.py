"""Packs mini-batches into rows of a fixed shape.

A sequence is a prompt and one response. Either Grain packs sequences end to end, or a row begins with a
prompt that its responses share, packed end to end into slots behind it. NumPy on the host. Every packed array
is [micro-batches M, rows R, tokens T].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from bapo_jax.groups import TRAINED_ON, Author, Batch, ByGroup
from bapo_jax.learner.mini_batch import MiniBatch, Rows, Sequences, Shape
from bapo_jax.models.vision.layout import Seen


class Layout(NamedTuple):
    """The positions of a mini-batch's sequences in its rows, [M, R, T]."""

    segment: np.ndarray  # as in Sequences
    position: np.ndarray
    token: np.ndarray  # int32, index into the concatenated tokens of all sequences; 0 on padding
    filled: int  # number of leading micro-batches that hold tokens; the rest is padding

    def place(self, per_sequence: Sequence[np.ndarray]) -> np.ndarray:
        """Packs one number per token of every sequence; 0 on padding."""
        values, n = np.concatenate(per_sequence), self.filled
        packed = np.zeros(self.segment.shape, values.dtype)  # pages never written take no memory
        packed[:n] = np.where(self.segment[:n] > 0, values[self.token[:n]], values.dtype.type(0))
        return packed

    def pick(self, packed: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
        """Inverts `place`, given the sequences' lengths."""
        values, n = np.zeros(sum(lengths), packed.dtype), self.filled  # stays 0 on copies of a shared prompt
        there = self.segment[:n] > 0
        values[self.token[:n][there]] = packed[:n][there]
        return np.split(values, np.cumsum(lengths)[:-1])


class Part(NamedTuple):
    """A mini-batch: some groups of a batch, and their layout in rows."""

    indices: np.ndarray  # of its groups in the whole batch, in the order of the sequences
    batch: Batch  # only these groups
    layout: Layout
    seen: Seen | None = None  # the images of the groups' prompts

    def lengths(self) -> list[int]:
        """Returns the number of tokens of each sequence."""
        return [len(g.prompt.tokens) + len(r.tokens) for g in self.batch.groups for r in g.responses]

    def mini_batch(self, rows: Any) -> MiniBatch:
        """Returns the mini-batch with rows packed from it: its sequences, or the result of `pack`."""
        return MiniBatch(rows, self.layout.filled, self.seen)

    def shape(self) -> Shape:
        """Returns the shape that other hosts need."""
        return Shape(self.layout.segment.shape, self.layout.filled, self.seen and self.seen.pixel_shape)

    def sequences(self) -> Sequences:
        groups, place = self.batch.groups, self.layout.place
        tokens = place([part for g in groups for r in g.responses for part in (g.prompt.tokens, r.tokens)])
        trained_on = self.on_responses([[r.trained_on for r in g.responses] for g in groups], bool)
        response = np.where(trained_on, self.layout.segment, 0)
        return Sequences(tokens, self.layout.segment, self.layout.position, response, *self._seen_at_tokens())

    def _seen_at_tokens(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Returns the rotary positions and image features at all tokens, as in Sequences."""
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
        # `place` fills padding with 0; here padding must be -1.
        return rope, place([feature + 1 for feature in features]) - 1

    def on_responses(self, values: ByGroup, dtype: Any) -> np.ndarray:
        """Packs one number per response token into [M, R, T]; 0 on prompts and padding."""
        parts = []
        for g, group_values in zip(self.batch.groups, values, strict=True):
            blank = np.zeros(len(g.prompt.tokens), dtype)
            for values_T in group_values:
                parts += [blank, np.asarray(values_T, dtype)]
        return self.layout.place(parts)

    def of_responses(self, packed: np.ndarray) -> ByGroup:
        """Inverts `on_responses`."""
        sequences = iter(self.layout.pick(packed, self.lengths()))
        return [[next(sequences)[len(g.prompt.tokens) :] for _ in g.responses] for g in self.batch.groups]


def mini_batches(groups: int, mini_batch_groups: int, rule: str) -> list[np.ndarray]:
    """Returns the group indices of each optimizer step.

    'even' (default): max(1, round(groups / mini_batch_groups)) parts, whose sizes differ by at most one. A
    full Adam step on a remainder of one or two groups ruined the prototype's runs. 'released': full
    mini-batches and a smaller last one, as in the authors' code. Raises ValueError if the rule is unknown.
    """
    if groups == 0:
        return []
    indices = np.arange(groups)
    if rule == 'even':
        return np.array_split(indices, max(1, int(groups / mini_batch_groups + 0.5)))
    if rule == 'released':
        return np.split(indices, range(mini_batch_groups, groups, mini_batch_groups))
    raise ValueError(f'learner.mini_batches={rule!r} is unknown; choose one of even, released')


def capacity(config: Any, group_size: int, shared: int) -> int:
    """Returns the number of micro-batches that can hold any mini-batch of groups of that size.

    This assumes a separate row or slot for each response. `config` and `shared` are as in `cut`.
    """
    return -(-most_groups(config) * rows_of_a_group(config, group_size, shared) // config.micro_batch_rows)


def rows_of_a_group(config: Any, group_size: int, shared: int) -> int:
    """Returns the number of rows of a group, if each response has a row or slot of its own."""
    return -(-group_size * config.slot_tokens // (config.row_tokens - shared)) if shared else group_size


def most_groups(config: Any) -> int:
    """Returns the groups of the largest mini-batch: even ones have up to 3/2 of the configured size."""
    groups = (
        config.mini_batch_groups
        if config.mini_batches == 'released'
        else (3 * config.mini_batch_groups + 1) // 2
    )
    return min(groups, config.batch_groups)


def cut(
    batch: Batch,
    order: np.ndarray,
    config: Any,
    micro_batches: int = 1,
    shared: int = 0,
    *,
    most_segments: int | None = None,
) -> list[Part]:
    """Cuts a batch, its groups taken in `order`, into the mini-batches of one pass.

    `config` is the config's learner section. The number of micro-batches of each is a multiple of
    `micro_batches`. If `shared` > 0, every row begins with a prompt of at most `shared` tokens; otherwise a
    row has at most `most_segments` sequences.
    """
    parts = []
    for indices in mini_batches(len(batch.groups), config.mini_batch_groups, config.mini_batches):
        part_batch = batch.take(order[indices])
        if shared:
            lengths = [
                (len(g.prompt.tokens), [len(r.tokens) for r in g.responses]) for g in part_batch.groups
            ]
            rows = rows_of_slots(
                lengths, shared=shared, slot=config.slot_tokens, row_tokens=config.row_tokens
            )
        else:
            lengths = [len(g.prompt.tokens) + len(r.tokens) for g in part_batch.groups for r in g.responses]
            rows = rows_end_to_end(lengths, config.row_tokens, most_segments)
        layout = lay_out(
            rows, row_tokens=config.row_tokens, rows=config.micro_batch_rows, multiple=micro_batches
        )
        parts.append(Part(order[indices], part_batch, layout))
    return parts


class Row(NamedTuple):
    """One row of a layout. Arrays are as in Layout, one element per token that the row holds."""

    segment: np.ndarray
    position: np.ndarray
    token: np.ndarray


def rows_end_to_end(lengths: Sequence[int], row_tokens: int, most_segments: int | None = None) -> list[Row]:
    """Packs sequences of these lengths, each with its own prompt, at most `most_segments` per row.

    Raises ValueError if a sequence is longer than `row_tokens`.
    """
    if max(lengths) > row_tokens:
        raise ValueError(
            f'a sequence of {max(lengths)} tokens does not fit learner.row_tokens={row_tokens}; raise it'
        )
    ends = np.cumsum(lengths)
    sequences = [
        {'token': np.arange(end - n, end, dtype=np.int32)} for n, end in zip(lengths, ends, strict=True)
    ]
    # Longest first wastes least. Every row stays open, so none is closed half empty.
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


def rows_of_slots(
    groups: Sequence[tuple[int, Sequence[int]]], *, shared: int, slot: int, row_tokens: int
) -> list[Row]:
    """Packs groups of (prompt length, response lengths): a row has one prompt, then slots of its responses.

    If the responses of a prompt fill more slots than a row has, the prompt is repeated in further rows.
    Raises ValueError if a prompt is longer than `shared` or a response is longer than `slot`.
    """
    rows, end = [], 0
    for prompt, responses in groups:
        for what, n, field, room in (
            ('prompt', prompt, 'rollout.max_prompt_tokens', shared),
            ('response', max(responses), 'learner.slot_tokens', slot),
        ):
            if n > room:
                raise ValueError(f'a {what} of {n} tokens does not fit {field}={room}; raise it')
        ends = end + np.cumsum([prompt + n for n in responses])
        slots, in_a_row = first_fit(responses, slot), (row_tokens - shared) // slot
        for first in range(0, len(slots), in_a_row):
            row, number = Row(*np.zeros((3, row_tokens), np.int32)), 1
            row_slots = slots[first : first + in_a_row]
            # The start of the row's first response; its prompt ends there.
            own = ends[row_slots[0][0]] - responses[row_slots[0][0]]
            _write(row, 0, np.arange(own - prompt, own), 0, number)
            for i, in_slot in enumerate(row_slots):
                at = shared + i * slot
                for j in in_slot:
                    number += 1
                    _write(row, at, np.arange(ends[j] - responses[j], ends[j]), prompt, number)
                    at += responses[j]
            rows.append(row)
        end = ends[-1]
    return rows


def _write(row: Row, at: int, token: np.ndarray, position: int, segment: int) -> None:
    """Writes tokens into a row from `at` on. `position` is that of the first token in its sequence."""
    there = slice(at, at + len(token))
    row.token[there], row.segment[there], row.position[there] = (
        token,
        segment,
        position + np.arange(len(token)),
    )


def first_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Packs indices of `lengths` into bins of that size: longest first, each into the first bin with room."""
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
    """Cuts rows into micro-batches of `rows` rows, and appends empty ones up to a multiple of `multiple`."""
    micro_batches = -(-len(packed) // rows)
    shape = (-(-micro_batches // multiple) * multiple, rows, row_tokens)
    arrays = [np.zeros(shape, np.int32) for _ in Row._fields]
    for array, of_rows in zip(arrays, zip(*packed, strict=True), strict=True):
        flat = array.reshape(-1, row_tokens)
        for i, row in enumerate(of_rows):
            flat[i] = row
    return Layout(*arrays, micro_batches)


def pack(
    part: Part,
    lanes: Sequence[str],
    advantage: ByGroup,
    weight: Mapping[str, ByGroup],
    roles: Mapping[str, ByGroup],
    factors: Mapping[str, ByGroup] = {},
) -> Rows:
    """Packs a mini-batch's rows from token advantages, the weights of each term, and scores by role.

    `lanes` are those of the whole batch. `factors` are those of learner.trust, if it has any.
    """
    groups = part.batch.groups

    def on_tokens(value_of: Callable[[int, int], Any], dtype: Any, *authors: Author) -> np.ndarray:
        """Packs `value_of(group index, response index)` onto the tokens of that response by the authors."""
        values = [
            [np.where(r.by(*authors), value_of(i, j), 0) for j, r in enumerate(g.responses)]
            for i, g in enumerate(groups)
        ]
        return part.on_responses(values, dtype)

    return Rows(
        sequences=part.sequences(),
        origin=on_tokens(lambda i, j: 1 + lanes.index(part.batch.origins[i]), np.int8, Author.POLICY),
        behaviour=on_tokens(lambda i, j: groups[i].responses[j].logp, np.float32, *TRAINED_ON),
        advantage=on_tokens(lambda i, j: advantage[i][j], np.float32, *TRAINED_ON),
        weight={name: part.on_responses(values, np.float32) for name, values in weight.items()},
        roles={role: part.on_responses(scores, np.float32) for role, scores in roles.items()},
        factors={name: part.on_responses(values, np.float32) for name, values in factors.items()},
    )
