"""Chooses each row's token from its logits: greedy, or sampled, with or without top-p. GPUs: gpu_drawing.py.

Shapes:  B rows · V vocabulary, N blocks of W words
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

VOCABULARY_BLOCK = 1024  # tokens of the vocabulary per partial sum


def choose(
    logits_BxV: jax.Array, key_B: jax.Array, greedy: bool, top_p: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """A token for each row and its log-prob; `top_p` is the nucleus threshold, or None to sample from all."""
    logp_BxV = jax.nn.log_softmax(logits_BxV)
    if greedy:  # an argmax costs several times as much as sampling
        token_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
        return token_B, jnp.take_along_axis(logp_BxV, token_B[:, None], axis=1)[:, 0]
    p_BxV = jnp.exp(logp_BxV)
    if top_p is not None:
        p_BxV = likeliest(p_BxV, top_p)
    token_B = draw(p_BxV, key_B)
    return token_B, jnp.take_along_axis(logp_BxV, token_B[:, None], axis=1)[:, 0]


def likeliest(p_BxV: jax.Array, top_p: jax.Array) -> jax.Array:
    """The probabilities, with zeros outside each row's nucleus of mass `top_p`."""
    falling_BxV = -jnp.sort(-p_BxV, axis=-1)
    kept_BxV = jnp.cumsum(falling_BxV, axis=-1) - falling_BxV < top_p  # the mass before it is below top_p
    least_Bx1 = jnp.min(jnp.where(kept_BxV, falling_BxV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(p_BxV >= least_Bx1, p_BxV, 0)


def draw(p_BxV: jax.Array, key_B: jax.Array) -> jax.Array:
    """int32 [B]: samples a token of each row with probability proportional to p, from uniform random numbers.

    Gumbel noise costs a CPU several times as much; GPUs use it (gpu_drawing.py).

    With a float32 sum over a large vocabulary and 23 random bits for all of it, probabilities would be off by
    some thousandths. So a vocabulary of more than one block is sampled in two steps: a block, and a token
    within it (benchmarks/engine/sampling.py).
    """
    B, V = p_BxV.shape
    if V <= VOCABULARY_BLOCK:
        return look_up(p_BxV, jax.vmap(jax.random.uniform)(key_B))
    uniform_Bx2 = jax.vmap(lambda key: jax.random.uniform(key, 2))(key_B)
    p_BxNxW = jnp.pad(p_BxV, ((0, 0), (0, -V % VOCABULARY_BLOCK))).reshape(B, -1, VOCABULARY_BLOCK)
    block_B = look_up(jnp.sum(p_BxNxW, axis=-1), uniform_Bx2[:, 0])
    block_BxW = jnp.take_along_axis(p_BxNxW, block_B[:, None, None], axis=1)[:, 0]
    return block_B * VOCABULARY_BLOCK + look_up(block_BxW, uniform_Bx2[:, 1])


def look_up(p_BxW: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """int32 [B]: each row's first index whose cumulative sum exceeds `uniform` (in [0, 1)) of the total."""
    cumulative_BxW = jnp.cumsum(p_BxW, axis=-1)
    return jnp.sum(cumulative_BxW <= (uniform_B * cumulative_BxW[:, -1])[:, None], axis=-1, dtype=jnp.int32)
