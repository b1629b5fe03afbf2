"""The programs of the in-process engine. A row of a batch is a slot: it samples one response after another.

Each device has its own slots and samples them independently, without communication across the mesh.

Shapes:  B slots per device, of which the first A have a KV cache and take responses · P prompts in line
         Q prompts prefilled at once · L prompt tokens (right-padded) · N waiting responses
         C places for responses · T maximum response tokens · R slots filled at once · D width · V vocabulary
         K, S, H as in rollout/inprocess/decoding.py.
         Arrays for the whole mesh are the devices' parts, concatenated along the first axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bapo_jax.cluster.devices import capability
from bapo_jax.cluster.mesh import per_device, replicated
from bapo_jax.models.kernels import missing
from bapo_jax.models.decoder import ImageFeatures, ModelConfig
from bapo_jax.models.vision.patches import Pixels
from bapo_jax.rollout.inprocess import drawing, gpu_drawing
from bapo_jax.rollout.inprocess.decoding import (
    AttendCached,
    KVCache,
    Weights,
    attend,
    decode,
    empty_cache,
    logits,
    look,
    prefill,
    unstacked,
)


class Ways(NamedTuple):
    """Platform-specific functions: `attend` (rollout/inprocess/decoding.py) and `choose` (drawing.py)."""

    attend: AttendCached
    choose: Callable[[jax.Array, jax.Array, bool, jax.Array | None], tuple[jax.Array, jax.Array]]


# Limit of the project's kernel: larger heads need more shared memory than small cards have, if many query
# heads share a key head.
_MOST_HEAD_BYTES = 512


def ways_of(mesh: Mesh, attention: str = 'auto', head_bytes: int = 0) -> Ways:
    """The functions for the devices of `mesh`. The engine's programs differ between platforms only in these.

    `attention` is model.attention. The project's kernel is not used with 'xla', without Pallas-Triton, or for
    heads that are too large for it; the log then says why. The learner's kernel has no influence.
    `head_bytes` is the size of one head in the cache.
    """
    if mesh.devices.flat[0].platform != 'gpu':
        return Ways(attend, drawing.choose)
    why = (
        'model.attention=xla disables it; use auto, also with learner.slot_tokens'
        if attention == 'xla'
        else ''
    )
    why = why or missing('triton', 'gpu', capability(mesh))
    if not why and head_bytes > _MOST_HEAD_BYTES:
        why = f"it supports heads of at most {_MOST_HEAD_BYTES} bytes, and the model's have {head_bytes}"
    if why:
        logging.log_first_n(
            logging.WARNING, 'the in-process engine uses XLA attention instead of the GPU kernel: %s', 1, why
        )
        return Ways(attend, gpu_drawing.choose)
    # Imported here because the import takes seconds and only GPUs need it.
    from bapo_jax.rollout.inprocess import gpu_decoding

    return Ways(gpu_decoding.attend, gpu_drawing.choose)


class WaitingLine(NamedTuple):
    """Prefilled prompts whose responses wait for a slot, the first prompt's responses first."""

    cache_P: KVCache  # of their tokens
    hidden_PxD: jax.Array  # of their last tokens
    length_P: jax.Array
    most_P: jax.Array  # the most tokens of a response
    key_Px2: jax.Array  # random key data
    shift_P: jax.Array | None  # with a vision tower: rotary position after the prompt, minus the token count


class Waiting(NamedTuple):
    """The responses to the prompts in line, in the order in which they get slots."""

    place_N: jax.Array  # int32; -1: no response. Those come last
    prompt_N: jax.Array  # the prompt's place in line
    j_N: jax.Array  # the response's index within its group


class SlotRows(NamedTuple):
    """The slots of a device. A slot without a response has place -1."""

    cache: KVCache
    hidden_BxD: jax.Array  # of the newest token; the next one is sampled from it
    prompt_B: jax.Array  # number of prompt tokens
    count_B: jax.Array  # number of sampled tokens
    most_B: jax.Array  # limit of that number
    place_B: jax.Array  # of the response
    key_Bx2: jax.Array
    shift_B: jax.Array | None


class ImagesInSlots(NamedTuple):
    """The images of prompts that are prefilled together, and which features their tokens stand for."""

    pixels: Pixels
    feature_QxL: jax.Array  # int32: index of the token's feature among the device's images; -1: no feature
    rope_QxLx3: jax.Array  # rotary positions
    shift_Q: jax.Array


class Places(NamedTuple):
    """Buffers for responses; there may be more of them than slots."""

    tokens_CxT: jax.Array
    logp_CxT: jax.Array  # under the policy at the sampling temperature
    count_C: jax.Array  # number of tokens once the response has ended; 0 until then
    stopped_C: jax.Array  # ended by a stop token, not by the length limit


def split_rows(mesh: Mesh) -> NamedSharding:
    """The sharding that splits the first axis over all axes of the mesh."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


@functools.partial(jax.jit, static_argnames=('model', 'mesh'))
def lay_out_weights(params: Any, *, model: ModelConfig, mesh: Mesh) -> Weights:
    """The weights replicated on every device; shards are gathered."""
    return jax.lax.with_sharding_constraint(unstacked(params, model), replicated(mesh))


@functools.partial(
    jax.jit,
    static_argnames=(
        'model',
        'mesh',
        'rows',
        'places',
        'line',
        'prompt_tokens',
        'response_tokens',
        'cached',
        'key_slots',
    ),
)
def nothing_yet(
    *, model: ModelConfig, mesh: Mesh, rows: int, places: int, line: int, prompt_tokens: int,
    response_tokens: int, cached: int, key_slots: int,
) -> tuple[SlotRows, Places, WaitingLine]:  # fmt: skip
    """Empty slots and places for each device, and an empty line for `line` prompts.

    The first `cached` slots have a KV cache of `key_slots` keys each.
    """

    def of_device() -> tuple[SlotRows, Places, WaitingLine]:
        B, C, T, P = rows, places, response_tokens, line
        shift_B, shift_P = (jnp.zeros(n, jnp.int32) if model.vision else None for n in (B, P))
        return SlotRows(
            empty_cache(model, cached, key_slots), jnp.zeros((B, model.hidden_size), model.dtype),
            *(jnp.zeros(B, jnp.int32) for _ in range(3)), jnp.full(B, -1, jnp.int32),
            jnp.zeros((B, 2), jnp.uint32), shift_B,
        ), Places(
            jnp.zeros((C, T), jnp.int32), jnp.zeros((C, T), jnp.float32), jnp.zeros(C, jnp.int32),
            jnp.zeros(C, bool),
        ), WaitingLine(
            empty_cache(model, P, prompt_tokens), jnp.zeros((P, model.hidden_size), model.dtype),
            jnp.zeros(P, jnp.int32), jnp.zeros(P, jnp.int32), jnp.zeros((P, 2), jnp.uint32), shift_P,
        )  # fmt: skip

    return per_device(of_device, mesh, (), split_rows(mesh).spec)()


@functools.partial(jax.jit, static_argnames=('graph', 'mesh'), donate_argnames='line')
def prefill_prompts(
    weights: Weights, line: WaitingLine, at_Q, tokens_QxL, length_Q, most_Q, id_Q, key_Qx2,
    images: ImagesInSlots | None = None, *, graph: nnx.GraphDef, mesh: Mesh,
) -> WaitingLine:  # fmt: skip
    """Prefills Q prompts per device into their places `at` in line; out-of-range places are dropped padding.

    Each image is encoded once for all responses to its prompt. Random keys depend on the prompt's key and id.
    """

    def of_device(weights, line, at_Q, tokens_QxL, length_Q, most_Q, id_Q, key_Qx2, images):
        seen = ()
        if images is not None:
            features = ImageFeatures(look(graph, weights, images.pixels), images.feature_QxL)
            seen = (jnp.moveaxis(images.rope_QxLx3, -1, 0), features)
        hidden_QxD, cache = prefill(graph, weights, tokens_QxL, length_Q, *seen)
        shift_Q = 0 if images is None else images.shift_Q
        key_Q = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(key_Qx2), id_Q)

        def copy(old_PxKxSxH, new_QxKxLxH):
            return old_PxKxSxH.at[at_Q, :, : new_QxKxLxH.shape[2]].set(new_QxKxLxH, mode='drop')

        return WaitingLine(
            jax.tree.map(copy, line.cache_P, cache),
            line.hidden_PxD.at[at_Q].set(hidden_QxD, mode='drop'),
            line.length_P.at[at_Q].set(length_Q, mode='drop'),
            line.most_P.at[at_Q].set(most_Q, mode='drop'),
            line.key_Px2.at[at_Q].set(jax.random.key_data(key_Q), mode='drop'),
            None if line.shift_P is None else line.shift_P.at[at_Q].set(shift_Q, mode='drop'),
        )

    rows = split_rows(mesh).spec
    return per_device(of_device, mesh, (PartitionSpec(), *[rows] * 8), rows)(
        weights, line, at_Q, tokens_QxL, length_Q, most_Q, id_Q, key_Qx2, images
    )


@functools.partial(
    jax.jit,
    static_argnames=('graph', 'mesh', 'stop_tokens', 'greedy', 'nucleus', 'attention'),
    donate_argnames=('rows', 'places'),
)
def sample_responses(
    weights: Weights, rows: SlotRows, places: Places, line: WaitingLine, waiting: Waiting, begun_1, few_1,
    most, temperature, top_p, *, graph: nnx.GraphDef, mesh: Mesh, stop_tokens: tuple[int, ...], greedy: bool,
    nucleus: bool, attention: str = 'auto',
) -> tuple[SlotRows, Places, jax.Array, jax.Array]:  # fmt: skip
    """Samples until the line is empty and at most `few` responses are in progress, or for `most` steps.

    `begun`, the number of waiting responses that have left the line, and `few` have one integer per device.
    Also returns the new `begun` and the number of steps.

    `nucleus` enables nucleus (top-p) sampling with threshold `top_p`; `greedy` takes the most likely token.
    Log-probs are always those of the full distribution at `temperature`.
    """
    k_AxKxSxH = rows.cache.k_AxKxSxH[0]
    ways = ways_of(mesh, attention, k_AxKxSxH.shape[-1] * k_AxKxSxH.dtype.itemsize)

    def of_device(weights, rows, places, line, waiting, begun_1, few_1, most, temperature, top_p):
        place_N, C = waiting.place_N, len(places.count_C)
        wanted = jnp.sum(place_N >= 0)
        # A place may still hold the length of an earlier response. One that waits for a slot has not ended.
        waits_N = (place_N >= 0) & (jnp.arange(len(place_N)) >= begun_1[0])
        places = places._replace(
            count_C=places.count_C.at[jnp.where(waits_N, place_N, C)].set(0, mode='drop')
        )

        def one_step(state):
            rows, places, steps = state
            key_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(rows.key_Bx2), rows.count_B)
            logits_BxV = logits(graph, weights, rows.hidden_BxD) / temperature
            token_B, logp_B = ways.choose(logits_BxV, key_B, greedy, top_p if nucleus else None)
            position_B = rows.prompt_B + rows.count_B
            used = jnp.max(jnp.where(rows.place_B >= 0, position_B + 1, 0))
            hidden_BxD, cache = decode(
                graph, weights, token_B, position_B, rows.cache, used, rows.shift_B, ways.attend
            )
            rows, places = written(rows, places, token_B, logp_B, jnp.isin(token_B, jnp.array(stop_tokens)))
            return rows._replace(cache=cache, hidden_BxD=hidden_BxD), places, steps + 1

        A = rows.cache.rows

        def free_slots(rows):
            return jnp.sum(rows.place_B[:A] < 0)

        def nobody_moves_up(begun, state):
            rows, _, steps = state
            many = A - free_slots(rows) > few_1[0]
            return (steps < most) & jnp.where(begun < wanted, free_slots(rows) == 0, many)

        def refill_and_sample(state):
            rows, places, begun, steps = state
            rows, begun = refill(rows, line, waiting, begun, wanted)
            stay = functools.partial(nobody_moves_up, begun)
            rows, places, steps = jax.lax.while_loop(stay, one_step, one_step((rows, places, steps)))
            return rows, places, begun, steps

        def go_on(state):
            rows, _, begun, steps = state
            return (steps < most) & ((begun < wanted) | (A - free_slots(rows) > few_1[0]))

        rows, places, begun, steps = jax.lax.while_loop(
            go_on, refill_and_sample, (rows, places, begun_1[0], jnp.int32(0))
        )
        return rows, places, begun[None], steps[None]

    split, whole = split_rows(mesh).spec, PartitionSpec()
    return per_device(of_device, mesh, (whole, *[split] * 6, *[whole] * 3), split)(
        weights, rows, places, line, waiting, begun_1, few_1, most, temperature, top_p
    )


def written(rows: SlotRows, places: Places, token_B, logp_B, stopped_B) -> tuple[SlotRows, Places]:
    """Writes one token of each response to its place, and frees the slots whose response has ended."""
    C = len(places.count_C)
    in_use_B, count_B = rows.place_B >= 0, rows.count_B + 1
    done_B = stopped_B | (count_B == rows.most_B)
    place_B = jnp.where(in_use_B, rows.place_B, C)  # C is out of range, so the write is dropped
    ended_B = jnp.where(done_B, place_B, C)
    places = Places(
        places.tokens_CxT.at[place_B, rows.count_B].set(token_B, mode='drop'),
        places.logp_CxT.at[place_B, rows.count_B].set(logp_B, mode='drop'),
        places.count_C.at[ended_B].set(count_B, mode='drop'),
        places.stopped_C.at[ended_B].set(stopped_B, mode='drop'),
    )
    return rows._replace(
        count_B=jnp.where(in_use_B, count_B, 0), place_B=jnp.where(done_B, -1, rows.place_B)
    ), places


def refill(
    rows: SlotRows, line: WaitingLine, waiting: Waiting, begun: jax.Array, wanted: jax.Array
) -> tuple[SlotRows, jax.Array]:
    """Gives free slots to the responses that wait, after the first `begun`; also returns the new `begun`.

    The random key of response j depends on the prompt's key and on j.
    """
    A, B = rows.cache.rows, len(rows.place_B)
    R = min(A, max(4, A // 8))  # most slots to fill at once
    [slot_R] = jnp.nonzero(rows.place_B[:A] < 0, size=R, fill_value=B)
    number_R = begun + jnp.arange(R)
    takes_R = (slot_R < B) & (number_R < wanted)
    slot_R = jnp.where(takes_R, slot_R, B)
    place_R, prompt_R, j_R = jax.tree.map(lambda x_N: x_N[jnp.minimum(number_R, len(x_N) - 1)], waiting)

    def set_(old_B, new_R):
        return old_B.at[slot_R].set(new_R, mode='drop')

    def copy(rows_AxKxSxH, line_PxKxLxH):
        return rows_AxKxSxH.at[slot_R, :, : line_PxKxLxH.shape[2]].set(line_PxKxLxH[prompt_R], mode='drop')

    key_R = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(line.key_Px2[prompt_R]), j_R)
    rows = SlotRows(
        jax.tree.map(copy, rows.cache, line.cache_P), set_(rows.hidden_BxD, line.hidden_PxD[prompt_R]),
        set_(rows.prompt_B, line.length_P[prompt_R]), set_(rows.count_B, jnp.zeros(R, jnp.int32)),
        set_(rows.most_B, line.most_P[prompt_R]), set_(rows.place_B, place_R),
        set_(rows.key_Bx2, jax.random.key_data(key_R)),
        None if rows.shift_B is None else set_(rows.shift_B, line.shift_P[prompt_R]),
    )  # fmt: skip
    return rows, begun + jnp.sum(takes_R)
