"""What the in-process engine sets aside on a device: room for what waits, in few sizes, within a share of the device's memory."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.decoding import BLOCK as ATTENDED
from bapo_jax.models.decoding import cache_slots
from bapo_jax.rollout.drawing import BLOCK

LINE = 4  # so many times more prompts wait in a device's line than fill its slots
READ = 8  # prompts that a device reads at once, if its line has as many places
SHORTEST = 128  # prompts are padded to a power of two from here on: few shapes, so few programs
# Where it is for us to choose: a CPU's attention rounds otherwise for fewer than five rows, and where a block has fewer scores than
# 4,096, of all rows and heads.
FEWEST, SCORES = 8, 4096
SMALL = 2**28  # bytes of keys and values that are set aside whatever waits: one size, so one program


class Room(NamedTuple):
    """Places on a device."""

    slots: int  # responses that are sampled at once
    line: int  # prompts that were read, and wait for slots
    prompt_tokens: int  # of the longest of them
    key_slots: int  # of a slot: for a prompt and its response
    at_once: int  # prompts that are read together, whatever waits: padding fills their number

    def cache_bytes(self, model: ModelConfig) -> int:
        """Bytes of keys and values."""
        return (self.slots * self.key_slots + self.line * self.prompt_tokens) * bytes_of_a_token(model)


class Limits(NamedTuple):
    """What an engine may set aside on a device."""

    slots: int
    prompt_tokens: int  # no prompt is longer
    cache_bytes: int | None = None  # of keys and values; None: unbounded
    fewer: bool = True  # fewer slots where few responses wait: tried on CPUs, where it changes no bit of a response


def bytes_of_a_token(model: ModelConfig) -> int:
    """Of its keys and values."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize


def padded_length(tokens: int, most: int) -> int:
    """The length to which a prompt is padded: a power of two, but no more than the longest prompt has."""
    return min(most, max(SHORTEST, 1 << (tokens - 1).bit_length()))


def room_for(model: ModelConfig, limits: Limits, groups: int, size: int, longest: int, response_tokens: int) -> Room:
    """Room for `groups` groups of `size` responses, to prompts of up to `longest` tokens.

    All slots that fit into `cache_bytes`, at least one; with `fewer` a quarter of them, or a sixteenth, and so on, where the
    rest would stand empty and each response keeps its bits. Caches that are SMALL have one size.
    """

    def line(slots: int) -> int:
        return max(1, LINE * slots // size)

    def room(slots: int, prompt_tokens: int) -> Room:
        tokens, most = prompt_tokens + response_tokens, limits.prompt_tokens + response_tokens
        return Room(slots, line(slots), prompt_tokens, cache_slots(tokens, most), min(READ, line(limits.slots)))

    whole = room(limits.slots, limits.prompt_tokens)
    slots = limits.slots
    if limits.cache_bytes is not None and whole.cache_bytes(model) > limits.cache_bytes:
        slots = max(1, limits.slots * limits.cache_bytes // whole.cache_bytes(model))
        while slots > 1 and room(slots, limits.prompt_tokens).cache_bytes(model) > limits.cache_bytes:
            slots -= 1  # its line has a place more than its share
    if room(slots, limits.prompt_tokens).cache_bytes(model) <= SMALL:
        return room(slots, limits.prompt_tokens)
    prompt_tokens = padded_length(longest, limits.prompt_tokens)
    scores_of_a_row = model.num_heads * min(room(slots, prompt_tokens).key_slots, ATTENDED)
    while limits.fewer and slots // 4 >= max(FEWEST, -(-SCORES // scores_of_a_row), groups * size):
        slots //= 4
    return room(slots, prompt_tokens)


def memory_of(model: ModelConfig, parameters: int, limits: Limits, *, group_size: int, response_tokens: int) -> int:
    """Bytes that sampling takes on a device at most; `parameters` is the size of a whole float32 copy of them.

    Whole weights in the compute dtype, keys and values of the slots and of the prompts in line, responses, and the larger of a
    layer's activations while prompts are read and of the scores over the vocabulary.
    """
    room = room_for(model, limits, limits.slots, group_size, limits.prompt_tokens, response_tokens)
    b = jnp.dtype(model.dtype).itemsize
    responses = 8 * (room.slots + room.line * group_size) * response_tokens
    wide = 4 * model.hidden_size + 3 * model.intermediate_size + 2 * model.num_heads * model.head_dim
    words = model.vocab_size if model.vocab_size <= BLOCK else -(-model.vocab_size // BLOCK) * BLOCK
    scores = 4 * 4 * limits.slots * words
    at_work = max(room.at_once * room.prompt_tokens * wide * b, scores)
    return parameters * b // 4 + room.cache_bytes(model) + responses + at_work
