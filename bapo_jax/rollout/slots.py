"""The programs of the in-process engine: rows of a batch are slots, which take a response, sample it, and take the next in line.

Every device has slots of its own and samples them alone: it waits for no other, and nothing crosses the mesh.

Shapes:  B slots of a device, of which the first A have caches and take responses · P prompts in line · Q prompts read at once
         L prompt tokens (right-padded) · G responses a prompt · C places for responses · T most response tokens
         R slots filled at once · D width · V vocabulary; K, S, H as in models/decoding.py.
         Arrays of the whole mesh have the devices' parts one after the other on their first axis.
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

from bapo_jax.models.attention import missing
from bapo_jax.models.decoding import Attend, KVCache, Weights, attend, decode, empty_cache, logits, look, prefill, unstacked
from bapo_jax.models.patches import Pixels
from bapo_jax.models.decoder import ImageFeatures, ModelConfig
from bapo_jax.parallel import capability, per_device, replicated
from bapo_jax.rollout import drawing, gpu_drawing


class Ways(NamedTuple):
    """How devices attend to the cache and choose a token: `attend` of models/decoding.py, `choose` of drawing.py."""

    attend: Attend
    choose: Callable[[jax.Array, jax.Array, bool, jax.Array | None], tuple[jax.Array, jax.Array]]


_MOST_HEAD_BYTES = 512  # of our kernel: more need shared memory that small cards lack if many query heads share a key head


def ways_of(mesh: Mesh, attention: str = 'auto', head_bytes: int = 0) -> Ways:
    """Those of the devices of `mesh`: all in which the engine's programs differ between platforms.

    `attention` is model.attention: with 'xla' our kernel does not run, nor where Pallas-Triton does not, nor for larger heads than it
    takes; the log says so. What the learner's kernel is decides nothing. `head_bytes` are those of one head in the cache.
    """
    if mesh.devices.flat[0].platform != 'gpu':
        return Ways(attend, drawing.choose)
    why = 'model.attention=xla leaves it out; auto keeps it, also with learner.slot_tokens' if attention == 'xla' else ''
    why = why or missing('triton', 'gpu', capability(mesh))
    if not why and head_bytes > _MOST_HEAD_BYTES:
        why = f"it takes heads of up to {_MOST_HEAD_BYTES} bytes, and the model's have {head_bytes}"
    if why:
        logging.log_first_n(logging.WARNING, 'the in-process engine attends by XLA, without a kernel for GPUs: %s', 1, why)
        return Ways(attend, gpu_drawing.choose)
    # Imported here, since the import takes seconds and only a GPU needs it.
    from bapo_jax.models import gpu_decoding

    return Ways(gpu_decoding.attend, gpu_drawing.choose)


class Line(NamedTuple):
    """Prompts that were read, and whose responses wait for a slot: those of the first prompt first."""

    cache_P: KVCache  # of their tokens
    hidden_PxD: jax.Array  # of their last tokens
    length_P: jax.Array
    key_Px2: jax.Array  # random key data
    shift_P: jax.Array | None  # of a model with a vision tower: by how much rotary positions behind a prompt differ from the count


class Rows(NamedTuple):
    """The slots. One without a response has place -1."""

    cache: KVCache
    hidden_BxD: jax.Array  # of the newest token, which the next one is sampled from
    prompt_B: jax.Array  # the prompt's tokens
    count_B: jax.Array  # tokens sampled
    place_B: jax.Array  # of the response
    key_Bx2: jax.Array
    shift_B: jax.Array | None


class Images(NamedTuple):
    """The images of prompts that are read together, and what their tokens see."""

    pixels: Pixels
    feature_QxL: jax.Array  # int32: which feature of the device's images stands at a token; -1: none
    rope_QxLx3: jax.Array  # rotary positions
    shift_Q: jax.Array


class Places(NamedTuple):
    """Responses, of which there may be more than slots."""

    tokens_CxT: jax.Array
    logp_CxT: jax.Array  # under the policy at the sampling temperature
    count_C: jax.Array  # of tokens, once it has ended; until then 0
    stopped_C: jax.Array  # ended by a stop token, not by the limit


def split_rows(mesh: Mesh) -> NamedSharding:
    """The first axis is split over every axis of the mesh."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


@functools.partial(jax.jit, static_argnames=('model', 'mesh'))
def lay_out(params: Any, *, model: ModelConfig, mesh: Mesh) -> Weights:
    """Whole weights on every device, gathered where they are split."""
    return jax.lax.with_sharding_constraint(unstacked(params, model), replicated(mesh))


@functools.partial(
    jax.jit,
    static_argnames=('model', 'mesh', 'rows', 'places', 'line', 'prompt_tokens', 'response_tokens', 'cached', 'key_slots'),
)
def nothing_yet(
    *, model: ModelConfig, mesh: Mesh, rows: int, places: int, line: int, prompt_tokens: int, response_tokens: int, cached: int,
    key_slots: int,
) -> tuple[Rows, Places, Line]:  # fmt: skip
    """Slots and places of each device, without responses, and a line of `line` prompts that are still to be read.

    The first `cached` slots hold `key_slots` keys each.
    """

    def of_device() -> tuple[Rows, Places, Line]:
        B, C, T, P = rows, places, response_tokens, line
        shift_B, shift_P = (jnp.zeros(n, jnp.int32) if model.vision else None for n in (B, P))
        return Rows(
            empty_cache(model, cached, key_slots), jnp.zeros((B, model.hidden_size), model.dtype),
            jnp.zeros(B, jnp.int32), jnp.zeros(B, jnp.int32), jnp.full(B, -1, jnp.int32), jnp.zeros((B, 2), jnp.uint32),
            shift_B,
        ), Places(
            jnp.zeros((C, T), jnp.int32), jnp.zeros((C, T), jnp.float32), jnp.zeros(C, jnp.int32), jnp.zeros(C, bool)
        ), Line(
            empty_cache(model, P, prompt_tokens), jnp.zeros((P, model.hidden_size), model.dtype), jnp.zeros(P, jnp.int32),
            jnp.zeros((P, 2), jnp.uint32), shift_P,
        )  # fmt: skip

    return per_device(of_device, mesh, (), split_rows(mesh).spec)()


@functools.partial(jax.jit, static_argnames=('graph', 'mesh'), donate_argnames='line')
def read(
    weights: Weights, line: Line, at_Q, tokens_QxL, length_Q, id_Q, key_Qx2, images: Images | None = None, *,
    graph: nnx.GraphDef, mesh: Mesh,
) -> Line:  # fmt: skip
    """Reads Q prompts of each device to their places `at` in line; a place that does not exist is none.

    Each image is seen once, for all responses to its prompt. Their random numbers depend on the prompt's key and its id.
    """

    def of_device(weights, line, at_Q, tokens_QxL, length_Q, id_Q, key_Qx2, images):
        seen = ()
        if images is not None:
            features = ImageFeatures(look(graph, weights, images.pixels), images.feature_QxL)
            seen = (jnp.moveaxis(images.rope_QxLx3, -1, 0), features)
        hidden_QxD, cache = prefill(graph, weights, tokens_QxL, length_Q, *seen)
        shift_Q = 0 if images is None else images.shift_Q
        key_Q = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(key_Qx2), id_Q)
        L = tokens_QxL.shape[1]
        return Line(
            jax.tree.map(lambda old, new: old.at[at_Q, :, :L].set(new, mode='drop'), line.cache_P, cache),
            line.hidden_PxD.at[at_Q].set(hidden_QxD, mode='drop'), line.length_P.at[at_Q].set(length_Q, mode='drop'),
            line.key_Px2.at[at_Q].set(jax.random.key_data(key_Q), mode='drop'),
            None if line.shift_P is None else line.shift_P.at[at_Q].set(shift_Q, mode='drop'),
        )  # fmt: skip

    rows = split_rows(mesh).spec
    return per_device(of_device, mesh, (PartitionSpec(), *[rows] * 7), rows)(
        weights, line, at_Q, tokens_QxL, length_Q, id_Q, key_Qx2, images
    )


@functools.partial(
    jax.jit, static_argnames=('graph', 'mesh', 'stop_tokens', 'greedy', 'nucleus', 'attention'), donate_argnames=('rows', 'places')
)
def sample(
    weights: Weights, rows: Rows, places: Places, line: Line, place_PxG, begun_1, few_1, most, temperature, top_p, *,
    graph: nnx.GraphDef, mesh: Mesh, stop_tokens: tuple[int, ...], greedy: bool, nucleus: bool, attention: str = 'auto',
) -> tuple[Rows, Places, jax.Array, jax.Array]:  # fmt: skip
    """Samples until nobody is left in line and at most `few` responses are under way, or for `most` tokens of each slot.

    `place` says where the responses to the prompts in line go, -1 that none is wanted; prompts without responses come last. `begun`,
    how many in line have left it, and `few` are an integer a device. Returns `begun` and the steps made, too.

    With `nucleus`, draws from the likeliest tokens that make up `top_p`; with `greedy`, takes the likeliest token. Log-probs are of
    the whole distribution at `temperature` always.
    """
    k_AxKxSxH = rows.cache.k_AxKxSxH[0]
    ways = ways_of(mesh, attention, k_AxKxSxH.shape[-1] * k_AxKxSxH.dtype.itemsize)

    def of_device(weights, rows, places, line, place_PxG, begun_1, few_1, most, temperature, top_p):
        wanted, (P, G), C = jnp.sum(place_PxG >= 0), place_PxG.shape, len(places.count_C)
        # A place may still say how long an earlier response was. One that waits for a slot has not ended.
        waits_PxG = (place_PxG >= 0) & (jnp.arange(P * G).reshape(P, G) >= begun_1[0])
        places = places._replace(count_C=places.count_C.at[jnp.where(waits_PxG, place_PxG, C)].set(0, mode='drop'))

        def one_step(state):
            rows, places, steps = state
            key_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(rows.key_Bx2), rows.count_B)
            logits_BxV = logits(graph, weights, rows.hidden_BxD) / temperature
            token_B, logp_B = ways.choose(logits_BxV, key_B, greedy, top_p if nucleus else None)
            position_B = rows.prompt_B + rows.count_B
            used = jnp.max(jnp.where(rows.place_B >= 0, position_B + 1, 0))
            hidden_BxD, cache = decode(graph, weights, token_B, position_B, rows.cache, used, rows.shift_B, ways.attend)
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
            rows, begun = refill(rows, line, place_PxG, begun, wanted)
            stay = functools.partial(nobody_moves_up, begun)
            rows, places, steps = jax.lax.while_loop(stay, one_step, one_step((rows, places, steps)))
            return rows, places, begun, steps

        def go_on(state):
            rows, _, begun, steps = state
            return (steps < most) & ((begun < wanted) | (A - free_slots(rows) > few_1[0]))

        rows, places, begun, steps = jax.lax.while_loop(go_on, refill_and_sample, (rows, places, begun_1[0], jnp.int32(0)))
        return rows, places, begun[None], steps[None]

    split, whole = split_rows(mesh).spec, PartitionSpec()
    return per_device(of_device, mesh, (whole, *[split] * 6, *[whole] * 3), split)(
        weights, rows, places, line, place_PxG, begun_1, few_1, most, temperature, top_p
    )


def written(rows: Rows, places: Places, token_B, logp_B, stopped_B) -> tuple[Rows, Places]:
    """Writes a token of each response to its place; a slot whose response has ended is free."""
    C, T = places.tokens_CxT.shape
    in_use_B, count_B = rows.place_B >= 0, rows.count_B + 1
    done_B = stopped_B | (count_B == T)
    place_B = jnp.where(in_use_B, rows.place_B, C)  # C is no place, so nothing is written there
    ended_B = jnp.where(done_B, place_B, C)
    places = Places(
        places.tokens_CxT.at[place_B, rows.count_B].set(token_B, mode='drop'),
        places.logp_CxT.at[place_B, rows.count_B].set(logp_B, mode='drop'),
        places.count_C.at[ended_B].set(count_B, mode='drop'),
        places.stopped_C.at[ended_B].set(stopped_B, mode='drop'),
    )
    return rows._replace(count_B=jnp.where(in_use_B, count_B, 0), place_B=jnp.where(done_B, -1, rows.place_B)), places


def refill(rows: Rows, line: Line, place_PxG: jax.Array, begun: jax.Array, wanted: jax.Array) -> tuple[Rows, jax.Array]:
    """Gives free slots to responses in line, of which `begun` have had theirs; returns how many have now.

    The random numbers of response j depend on the prompt's and on j.
    """
    A, B, (P, G) = rows.cache.rows, len(rows.place_B), place_PxG.shape
    R = min(A, max(4, A // 8))  # at most so many at once
    [slot_R] = jnp.nonzero(rows.place_B[:A] < 0, size=R, fill_value=B)
    number_R = begun + jnp.arange(R)
    takes_R = (slot_R < B) & (number_R < wanted)
    slot_R, (prompt_R, j_R) = jnp.where(takes_R, slot_R, B), jnp.divmod(jnp.minimum(number_R, P * G - 1), G)

    def set_(old_B, new_R):
        return old_B.at[slot_R].set(new_R, mode='drop')

    def copy(of_rows_AxKxSxH, of_line_PxKxLxH):
        return of_rows_AxKxSxH.at[slot_R, :, : of_line_PxKxLxH.shape[2]].set(of_line_PxKxLxH[prompt_R], mode='drop')

    key_R = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(line.key_Px2[prompt_R]), j_R)
    place_R = place_PxG[prompt_R, j_R]
    rows = Rows(
        jax.tree.map(copy, rows.cache, line.cache_P), set_(rows.hidden_BxD, line.hidden_PxD[prompt_R]),
        set_(rows.prompt_B, line.length_P[prompt_R]), set_(rows.count_B, jnp.zeros(R, jnp.int32)),
        set_(rows.place_B, place_R), set_(rows.key_Bx2, jax.random.key_data(key_R)),
        None if rows.shift_B is None else set_(rows.shift_B, line.shift_P[prompt_R]),
    )  # fmt: skip
    return rows, begun + jnp.sum(takes_R)
