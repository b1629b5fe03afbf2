"""Where a token's time goes in the in-process engine at a real size, part by part.

python -m benchmarks.engine.rate --model=pretrained/SmolLM2-135M-Instruct       # prints this table behind the
engines'
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.table import Table

from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.rollout.inprocess import decoding, drawing, slots
from bapo_jax.rollout.inprocess.room import READ, bytes_of_a_token

_TURNS, _REPEATS = 10, 4


def seconds_of_a_turn(body: Callable[..., Any], given: Any, state: Any) -> float:
    """Of `state = body(given, state)` in a compiled loop, whose arrays are reused as in the engine's; the
    least of some.
    """
    state = jax.tree.map(jnp.copy, state)
    turns = jax.jit(
        lambda given, state: jax.lax.fori_loop(0, _TURNS, lambda _, s: body(given, s), state),
        donate_argnums=1,
    )
    state, found = jax.block_until_ready(turns(given, state)), []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        state = jax.block_until_ready(turns(given, state))
        found.append((time.perf_counter() - started) / _TURNS)
    return min(found)


def seconds(f: Callable[..., Any], *given: Any) -> float:
    """Of one call of a compiled function; the least of some."""
    run, found = jax.jit(f), []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(run(*given))
        found.append(time.perf_counter() - started)
    return min(found)


def parts(directory: str, model: ModelConfig, rows: int, prompt_tokens: int, response_tokens: int) -> Table:
    """On the first device. A step gives each row a token."""
    graph, params = hf.abstract_params(model)[0], jax.tree.map(jnp.asarray, hf.load_params(directory, model))
    mesh, B, S = Mesh(jax.devices()[:1], 'rows'), rows, prompt_tokens + response_tokens
    weights = jax.block_until_ready(slots.lay_out_weights(params, model=model, mesh=mesh))
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((B, model.hidden_size)), model.dtype)
    position = jnp.full(B, S * 2 // 3, jnp.int32)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), B))

    def cache() -> decoding.KVCache:
        return decoding.empty_cache(model, B, S)

    def head(weights, hidden):
        return (
            hidden + decoding.logits(graph, weights, hidden)[:, : hidden.shape[1]].astype(hidden.dtype) * 1e-9
        )

    def draw(_, logits):
        token, logp = drawing.choose(logits, jax.random.wrap_key_data(keys), False, None)
        return logits + (logp + token)[:, None] * 1e-9

    def layers(weights, state):
        hidden, cache = state
        return decoding.decode(
            graph, weights, (hidden[:, 0] > 0).astype(jnp.int32), position, cache, jnp.max(position) + 1
        )

    def attention(_, state):
        q, cache = state
        for k, v in zip(cache.k_AxKxSxH, cache.v_AxKxSxH, strict=True):
            q = decoding.attend_to(q, k, v, position + 1, jnp.max(position) + 1).reshape(q.shape)
        return q, cache

    def step(weights, state):
        hidden, cache = state
        token, _ = drawing.choose(
            decoding.logits(graph, weights, hidden), jax.random.wrap_key_data(keys), False, None
        )
        return decoding.decode(graph, weights, token, position, cache, jnp.max(position) + 1)

    q = jnp.asarray(rng.standard_normal((B, 1, model.num_heads, model.head_dim)), model.dtype)
    logits = jax.jit(lambda weights, hidden: decoding.logits(graph, weights, hidden))(weights, hidden)
    prompts = jnp.ones((READ, prompt_tokens), jnp.int32), jnp.full(READ, prompt_tokens)
    of_step = {
        'a step: layers, scores, draw': seconds_of_a_turn(step, weights, (hidden, cache())),
        'layers, attention included': seconds_of_a_turn(layers, weights, (hidden, cache())),
        'attention': seconds_of_a_turn(attention, None, (q, cache())),
        'scores over the vocabulary': seconds_of_a_turn(head, weights, hidden),
        'the draw': seconds_of_a_turn(draw, None, logits),
    }
    once = {
        f'{READ} prompts of {prompt_tokens} tokens are read': seconds(
            lambda w, *p: decoding.prefill(graph, w, *p), weights, *prompts
        ),
        'weights are laid out, at each load': seconds(
            lambda params: decoding.unstacked(params, model), params
        ),
    }
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves(weights))
    read_bytes = weight_bytes + B * S * bytes_of_a_token(model)
    whole = of_step['a step: layers, scores, draw']
    title = (
        f'{rows} rows, {S} key slots; a step reads {read_bytes / 1e6:.0f} MB, {read_bytes / whole / 1e9:.1f} '
        'GB/s'
    )
    table = Table('part', 'ms', 'of a step', title=title)
    for what, s in of_step.items():
        table.add_row(what, f'{1e3 * s:.1f}', f'{100 * s / whole:.0f} %')
    for what, s in once.items():
        table.add_row(what, f'{1e3 * s:.0f}', '')
    return table
