"""Score: the log-probs of a batch's responses under a named policy, one number a response token.

Shapes:  M micro-batches (the last ones may be empty) · R rows · T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from bapo_jax.learner.logprobs import token_logprobs
from bapo_jax.learner.packed import Sequences
from bapo_jax.models.attention import Attention


def score(
    params, sequences: Sequences, n_micro, temperature, *, graph: nnx.GraphDef, attention: Attention, chunk: int
) -> jax.Array:  # fmt: skip
    """Log-probs [M, R, T] of the response tokens under `params`, 0 elsewhere; of the first `n_micro` micro-batches."""

    def logprobs(micro: Sequences) -> jax.Array:
        return token_logprobs(
            nnx.merge(graph, params), micro.tokens, micro.segment, micro.position, temperature,
            attention=attention, chunk=chunk, remat=False,
        )[0]  # fmt: skip

    return on_response_tokens(logprobs, sequences, n_micro)


def on_response_tokens(of_micro_batch: Callable[[Sequences], jax.Array], sequences: Sequences, n_micro) -> jax.Array:
    """[M, R, T]: `of_micro_batch` [R, T] of the first `n_micro` micro-batches, 0 but on response tokens."""

    def score_micro_batch(i, scores_MxRxT):
        micro = jax.tree.map(lambda x: x[i], sequences)
        return scores_MxRxT.at[i].set(jnp.where(micro.response > 0, of_micro_batch(micro), 0.0))

    return jax.lax.fori_loop(0, n_micro, score_micro_batch, jnp.zeros(sequences.tokens.shape, jnp.float32))
