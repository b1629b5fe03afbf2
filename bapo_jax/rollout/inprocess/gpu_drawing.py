"""Chooses each row's token on a GPU, with a few sums of logits, and Gumbel noise in place of cumulative sums.

XLA compiles a cumulative sum to several kernels, but the argmax of logits plus noise to one. Noise for every
token of a large vocabulary would cost more than reading its logit. So the logits are summed once in blocks of
W tokens, and noise chooses a block and then a token in it.

Shapes:  B rows · V vocabulary, N blocks of W words
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bapo_jax.rollout.inprocess.drawing import VOCABULARY_BLOCK, likeliest

_NEVER = float(jnp.finfo(jnp.float32).min)  # of an excluded token; with -∞ a block of these would have no sum


def choose(
    logits_BxV: jax.Array, key_B: jax.Array, greedy: bool, top_p: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """As `drawing.choose`: the same probabilities, with different random numbers."""
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
    """The logits in blocks, [B, N, W], with padding."""
    return jnp.pad(
        score_BxV, ((0, 0), (0, -score_BxV.shape[1] % VOCABULARY_BLOCK)), constant_values=_NEVER
    ).reshape(len(score_BxV), -1, VOCABULARY_BLOCK)


def log_sum(score_xW: jax.Array) -> jax.Array:
    """log Σ_w exp(score) in one pass; two partial sums are added relative to the larger of their maxima."""

    def add(a, b):
        top = jnp.maximum(a[0], b[0])
        return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)

    nothing = jnp.float32(_NEVER), jnp.float32(0)
    top_x, total_x = jax.lax.reduce((score_xW, jnp.ones_like(score_xW)), nothing, add, (score_xW.ndim - 1,))
    return top_x + jnp.log(total_x)


def draw(score_BxNxW: jax.Array, sum_BxN: jax.Array, key_B: jax.Array) -> jax.Array:
    """int32 [B]: samples a token of each row with probability proportional to exp(score).

    `sum` holds the blocks' `log_sum`. The argmax of scores plus Gumbel noise is each token with its
    probability. Float32 rounds these sums by about 2^-21, and a sample is wrong if the top two are that
    close: a total variation of some 2^-20 per step (benchmarks/engine/sampling.py).
    """
    B, N, W = score_BxNxW.shape
    noise_BxM = jax.vmap(lambda key: gumbel(key, N + W))(key_B)
    block_B = jnp.argmax(sum_BxN + noise_BxM[:, :N], axis=-1).astype(jnp.int32)
    block_scores_BxW = jnp.take_along_axis(score_BxNxW, block_B[:, None, None], axis=1)[:, 0]
    return block_B * W + jnp.argmax(block_scores_BxW + noise_BxM[:, N:], axis=-1).astype(jnp.int32)


def gumbel(key: jax.Array, n: int) -> jax.Array:
    """float32 [n] of Gumbel noise from 32 bits per number.

    JAX's own uses 23 bits, so the largest of thousands are often equal.
    """
    uniform_n = (jax.random.bits(key, n).astype(jnp.float32) + 0.5) * 2.0**-32  # near 0, as fine as float32
    # The highest numbers round to 1, whose noise would lose to an excluded token.
    uniform_n = jnp.minimum(uniform_n, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform_n))
