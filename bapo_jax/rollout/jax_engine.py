"""The in-process engine: batched sampling with a key/value cache in one jitted loop. No server, no second copy of the model.

Shapes:  P prompts · L prompt slots (left-padded) · G responses a prompt · B = P·G rows · T most response tokens · V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bapo_jax.groups import Prompt, Response
from bapo_jax.models.qwen import KVCache, empty_cache
from bapo_jax.rollout.engine import Draw, Sampling

_PROMPT_BUCKET = 16  # prompt slots are padded to a multiple of this: few shapes, so few compilations


class JaxEngine:
    """`graph` is the model's nnx graph; `stop_tokens` end a response; at most `rows` responses are sampled at once."""

    servers = 0

    def __init__(
        self, graph: nnx.GraphDef, stop_tokens: tuple[int, ...], rows: int, row_sharding: jax.sharding.Sharding | None = None
    ):
        self._graph, self._stop_tokens, self._rows, self._row_sharding = graph, stop_tokens, rows, row_sharding
        self._params, self._version = None, None

    def load(self, params: Any, version: int) -> None:
        self._params, self._version = params, version

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
    ) -> list[tuple[Response, ...]]:
        if self._params is None:
            raise RuntimeError('the engine holds no policy yet: call load(params, version) before generate')
        at_once = 1 << (max(1, self._rows // group_size).bit_length() - 1)  # the largest power of two that fits
        answers: list[tuple[Response, ...]] = []
        for first in range(0, len(prompts), at_once):
            chunk = slice(first, first + at_once)
            answers += self._generate_chunk(prompts[chunk], draws[chunk], at_once, group_size, sampling)
        return answers

    def close(self) -> None:
        self._params = None

    def _generate_chunk(
        self, prompts: Sequence[Prompt], draws: Sequence[Draw], at_once: int, group_size: int, sampling: Sampling
    ) -> list[tuple[Response, ...]]:
        devices = 1 if self._row_sharding is None else self._row_sharding.num_devices
        # A chunk is padded to a power of two of prompts, for few shapes. Filler rows repeat the first prompt and are dropped.
        padded = max(1 << (len(prompts) - 1).bit_length(), at_once // 4)
        padded = -(-padded // devices) * devices
        filled, draws = [*prompts, *[prompts[0]] * (padded - len(prompts))], [*draws, *[draws[0]] * (padded - len(prompts))]
        longest = max(len(p.tokens) for p in filled)
        slots = -(-longest // _PROMPT_BUCKET) * _PROMPT_BUCKET
        tokens_PxL = np.zeros((padded, slots), np.int32)
        for row, prompt in zip(tokens_PxL, filled, strict=True):
            row[slots - len(prompt.tokens) :] = prompt.tokens
        lengths_P = np.array([len(p.tokens) for p in filled], np.int32)
        ids_P = np.array([p.id for p in filled], np.int32)
        key_of = {draw: draw.key() for draw in set(draws)}
        keys_P = jnp.stack([key_of[draw] for draw in draws])
        inputs = jax.device_put((tokens_PxL, lengths_P, ids_P, keys_P), self._row_sharding)
        tokens_BxT, logp_BxT, length_B, stopped_B = jax.device_get(
            _sample(self._graph, self._params, *inputs, jnp.float32(sampling.temperature),
                    group_size=group_size, max_tokens=sampling.max_tokens, stop_tokens=self._stop_tokens)
        )  # fmt: skip

        def response(row: int) -> Response:
            n = length_B[row]
            finish = 'stop' if stopped_B[row] else 'length'
            return Response(tokens_BxT[row, :n].copy(), logp_BxT[row, :n].copy(), finish, self._version)

        return [tuple(response(i * group_size + j) for j in range(group_size)) for i in range(len(prompts))]


@functools.partial(jax.jit, static_argnames=('graph', 'group_size', 'max_tokens', 'stop_tokens'))
def _sample(graph, params, tokens_PxL, length_P, id_P, key_P, temperature, *, group_size, max_tokens, stop_tokens):
    """Samples `group_size` rows for each prompt. Returns tokens, log-probs [B, T], lengths and whether a stop token came [B]."""
    model = nnx.merge(graph, params)
    (P, L), B, S = tokens_PxL.shape, tokens_PxL.shape[0] * group_size, tokens_PxL.shape[1] + max_tokens

    # Each prompt is prefilled once; its cache is then repeated for its G rows.
    slot_1xS = jnp.arange(S)[None]
    real_PxS = (slot_1xS >= L - length_P[:, None]) & (slot_1xS < L)
    # A padding query attends to its own slot alone, so that the softmax stays finite.
    key_1x1xS, query_1xLx1 = slot_1xS[:, None, :], slot_1xS[:, :L, None]
    mask_PxLxS = (real_PxS[:, None, :] & (key_1x1xS <= query_1xLx1)) | (key_1x1xS == query_1xLx1)
    positions_PxL = jnp.maximum(slot_1xS[:, :L] - (L - length_P[:, None]), 0)
    hidden_PxLxD, cache = model.decode(tokens_PxL, positions_PxL, mask_PxLxS, empty_cache(model.config, P, S))
    logits_BxV = jnp.repeat(model.logits(hidden_PxLxD[:, -1]), group_size, axis=0)
    keys, values = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), cache[:2])
    cache = KVCache(keys, values, cache.next_slot)
    length_B, prompt_start_B = jnp.repeat(length_P, group_size), jnp.repeat(L - length_P, group_size)

    prompt_key_P = jax.vmap(jax.random.fold_in)(key_P, id_P)
    row_key_B = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(prompt_key_P, jnp.arange(group_size)).reshape(B)

    def not_finished(state):
        t, _, _, _, _, done_B, _ = state
        return (t < max_tokens) & ~done_B.all()

    def next_token(state):
        t, tokens_BxT, logp_BxT, logits_BxV, cache, done_B, count_B = state
        logits_BxV = logits_BxV / temperature
        logp_BxV = jax.nn.log_softmax(logits_BxV)
        # One uniform number a row, looked up in the cumulative distribution: on CPU, Gumbel noise costs four times as much.
        cumulative_BxV = jnp.cumsum(jnp.exp(logp_BxV), axis=-1)
        uniform_B = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, t)))(row_key_B)
        token_B = jnp.sum(cumulative_BxV <= (uniform_B * cumulative_BxV[:, -1])[:, None], axis=-1, dtype=jnp.int32)
        logp_B = jnp.take_along_axis(logp_BxV, token_B[:, None], axis=1)[:, 0]
        tokens_BxT = tokens_BxT.at[:, t].set(token_B)
        logp_BxT = logp_BxT.at[:, t].set(logp_B)
        count_B = count_B + (~done_B).astype(jnp.int32)
        done_B = done_B | jnp.isin(token_B, jnp.array(stop_tokens))
        mask_BxS = (slot_1xS >= prompt_start_B[:, None]) & (slot_1xS <= L + t)
        hidden_Bx1xD, cache = model.decode(token_B[:, None], (length_B + t)[:, None], mask_BxS[:, None], cache)
        return t + 1, tokens_BxT, logp_BxT, model.logits(hidden_Bx1xD[:, 0]), cache, done_B, count_B

    start = (
        jnp.int32(0), jnp.zeros((B, max_tokens), jnp.int32), jnp.zeros((B, max_tokens), jnp.float32), logits_BxV, cache,
        jnp.zeros(B, bool), jnp.zeros(B, jnp.int32),
    )  # fmt: skip
    _, tokens_BxT, logp_BxT, _, _, done_B, count_B = jax.lax.while_loop(not_finished, next_token, start)
    return tokens_BxT, logp_BxT, count_B, done_B
