"""A token of each row, chosen on a GPU: a few sums over the scores, and Gumbel noise in place of cumulative sums.

XLA makes several kernels of a cumulative sum, and one of the largest of scores and noise. Noise for every word of a large
vocabulary would cost more than reading its score. So scores are summed up in blocks of W words, once, and noise chooses a block and
then a word of it.

Shapes:  B rows · V vocabulary, N blocks of W words
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bapo_jax.rollout.drawing import BLOCK, likeliest

_NEVER = float(jnp.finfo(jnp.float32).min)  # the score of a word that is not drawn; with -∞ a block of such words would have no sum


def choose(logits_BxV: jax.Array, key_B: jax.Array, greedy: bool, top_p: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`drawing.choose`: the same probabilities, other random numbers."""
    score_BxNxW = in_blocks(logits_BxV)
    sum_BxN = log_sum(score_BxNxW)
    whole_B = log_sum(sum_BxN)
    if greedy:
        token_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
    else:
        if top_p is not None:
            p_BxV = likeliest(jnp.exp(logits_BxV - whole_B[:, None]), top_p)
            score_BxNxW = in_blocks(jnp.where(p_BxV > 0, logits_BxV, _NEVER))
            sum_BxN = log_sum(score_BxNxW)
        token_B = draw(score_BxNxW, sum_BxN, key_B)
    return token_B, jnp.take_along_axis(logits_BxV, token_B[:, None], axis=1)[:, 0] - whole_B


def in_blocks(score_BxV: jax.Array) -> jax.Array:
    """[B, N, W]"""
    return jnp.pad(score_BxV, ((0, 0), (0, -score_BxV.shape[1] % BLOCK)), constant_values=_NEVER).reshape(len(score_BxV), -1, BLOCK)


def log_sum(score_xW: jax.Array) -> jax.Array:
    """log Σ_w exp(score) in one pass: two sums are added up against the higher of their largest scores."""

    def add(a, b):
        top = jnp.maximum(a[0], b[0])
        return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)

    nothing = jnp.float32(_NEVER), jnp.float32(0)
    top_x, total_x = jax.lax.reduce((score_xW, jnp.ones_like(score_xW)), nothing, add, (score_xW.ndim - 1,))
    return top_x + jnp.log(total_x)


def draw(score_BxNxW: jax.Array, sum_BxN: jax.Array, key_B: jax.Array) -> jax.Array:
    """int32 [B]: a word of each row with probability proportional to exp(score); `sum` are the blocks' `log_sum`.

    The largest of scores plus Gumbel noise stands at each word with its probability. Float32 rounds such sums by about 2^-21, and a
    draw goes wrong where the first two are as near as that: a total variation of some 2^-20 a step (benchmarks/sampling.py).
    """
    B, N, W = score_BxNxW.shape
    noise_BxM = jax.vmap(lambda key: gumbel(key, N + W))(key_B)
    block_B = jnp.argmax(sum_BxN + noise_BxM[:, :N], axis=-1).astype(jnp.int32)
    of_block_BxW = jnp.take_along_axis(score_BxNxW, block_B[:, None, None], axis=1)[:, 0]
    return block_B * W + jnp.argmax(of_block_BxW + noise_BxM[:, N:], axis=-1).astype(jnp.int32)


def gumbel(key: jax.Array, n: int) -> jax.Array:
    """float32 [n] of Gumbel noise from 32 bits a number. JAX's own has 23, so that the largest of thousands are often equal."""
    uniform_n = (jax.random.bits(key, n).astype(jnp.float32) + 0.5) * 2.0**-32  # as fine near 0 as float32 is
    uniform_n = jnp.minimum(uniform_n, 1 - 2.0**-24)  # the highest are rounded to 1, whose noise would lose to a word that is not drawn
    return -jnp.log(-jnp.log1p(-uniform_n))
