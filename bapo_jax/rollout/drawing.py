"""A token of each row, chosen by the scores: the likeliest, or one drawn from all or from the likeliest. GPUs: gpu_drawing.py.

Shapes:  B rows · V vocabulary, N blocks of W words
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 1024  # words of a vocabulary that one sum takes


def choose(logits_BxV: jax.Array, key_B: jax.Array, greedy: bool, top_p: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """A token of each row and its log-prob: the likeliest, or one drawn; `top_p` is a share, or None for the whole distribution."""
    logp_BxV = jax.nn.log_softmax(logits_BxV)
    if greedy:  # an argmax costs several times what a draw does
        token_B = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
        return token_B, jnp.take_along_axis(logp_BxV, token_B[:, None], axis=1)[:, 0]
    p_BxV = jnp.exp(logp_BxV)
    if top_p is not None:
        p_BxV = likeliest(p_BxV, top_p)
    token_B = draw(p_BxV, key_B)
    return token_B, jnp.take_along_axis(logp_BxV, token_B[:, None], axis=1)[:, 0]


def likeliest(p_BxV: jax.Array, top_p: jax.Array) -> jax.Array:
    """The probabilities with zeros but for the likeliest words of each row that make up `top_p`."""
    falling_BxV = -jnp.sort(-p_BxV, axis=-1)
    kept_BxV = jnp.cumsum(falling_BxV, axis=-1) - falling_BxV < top_p  # what is before a token makes up less than top_p
    least_Bx1 = jnp.min(jnp.where(kept_BxV, falling_BxV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(p_BxV >= least_Bx1, p_BxV, 0)


def draw(p_BxV: jax.Array, key_B: jax.Array) -> jax.Array:
    """int32 [B]: a token of each row with probability proportional to p, by uniform numbers.

    Gumbel noise costs a CPU several times as much; a GPU draws by it (gpu_drawing.py).

    A float32 sum over a large vocabulary, and 23 random bits for all of it, would miss the probabilities by some thousandths. So a
    vocabulary of more than one block is drawn from in two steps: a block, and a token within it (benchmarks/sampling.py).
    """
    B, V = p_BxV.shape
    if V <= BLOCK:
        return look_up(p_BxV, jax.vmap(jax.random.uniform)(key_B))
    uniform_Bx2 = jax.vmap(lambda key: jax.random.uniform(key, 2))(key_B)
    p_BxNxW = jnp.pad(p_BxV, ((0, 0), (0, -V % BLOCK))).reshape(B, -1, BLOCK)
    block_B = look_up(jnp.sum(p_BxNxW, axis=-1), uniform_Bx2[:, 0])
    of_block_BxW = jnp.take_along_axis(p_BxNxW, block_B[:, None, None], axis=1)[:, 0]
    return block_B * BLOCK + look_up(of_block_BxW, uniform_Bx2[:, 1])


def look_up(p_BxW: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """int32 [B]: the first place of each row whose cumulative sum exceeds `uniform`, in [0, 1), of the whole sum."""
    cumulative_BxW = jnp.cumsum(p_BxW, axis=-1)
    return jnp.sum(cumulative_BxW <= (uniform_B * cumulative_BxW[:, -1])[:, None], axis=-1, dtype=jnp.int32)
