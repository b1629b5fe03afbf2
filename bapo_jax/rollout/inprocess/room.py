"""The memory that the in-process engine reserves on a device: as needed, in few sizes, within a limit."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from bapo_jax.cluster.grouped import tiles_for
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.delta import CHUNK
from bapo_jax.rollout.inprocess.decoding import CACHE_BLOCK as ATTENDED, cache_slots
from bapo_jax.rollout.inprocess.drawing import VOCABULARY_BLOCK

LINE = 4  # a device's line holds this many times the prompts that fill its slots
READ = 8  # prompts that a device prefills at once, if its line has that many places
SHORTEST_PROMPT = 128  # prompts are padded to at least this power of two: few shapes
# Lower bounds if the engine chooses: a CPU's attention rounds differently for fewer than five rows, and if a
# block has fewer than 4,096 scores over all rows and heads.
FEWEST, SCORES = 8, 4096
SMALL_CACHE = 2**28  # bytes of KV cache that are always reserved: one size, so one program


class Room(NamedTuple):
    """Reserved places on a device."""

    slots: int  # concurrent sequences
    line: int  # prefilled prompts that wait for slots
    prompt_tokens: int  # maximum, after padding
    key_slots: int  # per slot, for a prompt and its response
    at_once: int  # prompts prefilled together; padding fills up the number

    def cache_bytes(self, model: ModelConfig) -> int:
        """The size of the KV cache in bytes."""
        tokens = self.slots * self.key_slots + self.line * self.prompt_tokens
        return tokens * bytes_of_a_token(model) + (self.slots + self.line) * bytes_of_a_state(model)


class Limits(NamedTuple):
    """Limits of what an engine may reserve on a device."""

    slots: int
    prompt_tokens: int  # maximum prompt length
    cache_bytes: int | None = None  # of the KV cache; None: unbounded
    fewer: bool = True  # use fewer slots for few responses: tested on CPUs, where results are bit-identical


def bytes_of_a_token(model: ModelConfig) -> int:
    """The size of a token's keys and values in bytes."""
    layers = model.num_layers // model.period
    return 2 * layers * model.num_kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize


def bytes_of_a_state(model: ModelConfig) -> int:
    """The size of what layers with linear attention keep of a sequence, in bytes; 0 without any."""
    if not model.delta:
        return 0
    d, layers = model.delta, model.num_layers - model.num_layers // model.period
    inputs = (d.conv - 1) * d.channels * jnp.dtype(model.dtype).itemsize
    return layers * (inputs + 4 * d.value_heads * d.key_dim * d.value_dim)


def padded_length(tokens: int, most: int) -> int:
    """The length to which a prompt is padded: a power of two, or `most` if that is less."""
    return min(most, max(SHORTEST_PROMPT, 1 << (tokens - 1).bit_length()))


def room_for(
    model: ModelConfig, limits: Limits, groups: int, size: int, longest: int, response_tokens: int
) -> Room:
    """Room for `groups` groups of `size` responses, to prompts of up to `longest` tokens.

    Uses all slots that fit into `cache_bytes`, at least one. With `fewer`, uses a quarter of them, a
    sixteenth and so on, if the rest would be idle and every response stays bit-identical. Caches up to
    SMALL_CACHE have one size.
    """

    def line(slots: int) -> int:
        return max(1, LINE * slots // size)

    def room(slots: int, prompt_tokens: int) -> Room:
        tokens, most = prompt_tokens + response_tokens, limits.prompt_tokens + response_tokens
        return Room(
            slots, line(slots), prompt_tokens, cache_slots(tokens, most), min(READ, line(limits.slots))
        )

    whole = room(limits.slots, limits.prompt_tokens)
    slots = limits.slots
    if limits.cache_bytes is not None and whole.cache_bytes(model) > limits.cache_bytes:
        slots = max(1, limits.slots * limits.cache_bytes // whole.cache_bytes(model))
        while slots > 1 and room(slots, limits.prompt_tokens).cache_bytes(model) > limits.cache_bytes:
            slots -= 1  # its line can have a place more than its proportional share
    if room(slots, limits.prompt_tokens).cache_bytes(model) <= SMALL_CACHE:
        return room(slots, limits.prompt_tokens)
    prompt_tokens = padded_length(longest, limits.prompt_tokens)
    scores_of_a_row = model.num_heads * min(room(slots, prompt_tokens).key_slots, ATTENDED)
    while limits.fewer and slots // 4 >= max(FEWEST, -(-SCORES // scores_of_a_row), groups * size):
        slots //= 4
    return room(slots, prompt_tokens)


def bytes_of_a_layer(model: ModelConfig, tokens: int, platform: str) -> int:
    """The most bytes that a layer's activations take, for so many tokens.

    Off TPUs, experts compute tiles of rows, some partly empty. XLA copies their three matrices to all tiles
    before the first product (cluster/grouped.py).
    """
    b, D, F = jnp.dtype(model.dtype).itemsize, model.hidden_size, model.intermediate_size
    wide = 4 * D + 2 * model.num_heads * model.head_dim
    if model.delta:  # the chunks' decays and two products, and what enters them, float32
        wide += 4 * (3 * model.delta.value_heads * CHUNK + 3 * model.delta.channels) // b
    if not model.routing:
        return tokens * (wide + 3 * F) * b
    rows, copied = tokens * model.routing.chosen, 0
    if platform != 'tpu':
        tiles, of_a_tile = tiles_for(rows, model.routing.experts)
        rows, copied = tiles * of_a_tile, 3 * tiles * D * F
    return (tokens * wide + rows * (3 * F + 2 * D) + copied) * b


def memory_of(
    model: ModelConfig, parameters: int, limits: Limits, *, group_size: int, response_tokens: int,
    policies: int = 1, platform: str = 'gpu',
) -> int:  # fmt: skip
    """The most bytes that sampling takes on a device; `parameters` is the size of a full float32 copy.

    Counts the full weights of `policies` in the compute dtype, the KV cache of slots and of prompts in line,
    the responses, and the largest of the logits and a layer's activations in prefill and in decoding.
    """
    room = room_for(model, limits, limits.slots, group_size, limits.prompt_tokens, response_tokens)
    b = jnp.dtype(model.dtype).itemsize
    responses = 8 * (room.slots + room.line * group_size) * response_tokens
    words = (
        model.vocab_size
        if model.vocab_size <= VOCABULARY_BLOCK
        else -(-model.vocab_size // VOCABULARY_BLOCK) * VOCABULARY_BLOCK
    )
    scores = 4 * 4 * limits.slots * words
    prefilled, decoded = (
        bytes_of_a_layer(model, tokens, platform)
        for tokens in (room.at_once * room.prompt_tokens, limits.slots)
    )
    at_work = max(prefilled, decoded, scores)
    return policies * parameters * b // 4 + room.cache_bytes(model) + responses + at_work
