"""Score: the log-probs of a batch's responses under a named policy, one number a response token.

They are those that an update of the same policy computes, bit for bit, so that its first ratio is exactly 1. For that a score rounds
where an update does (models/remat.py), and gives the entropy too, which nobody reads: without it XLA would sum the head in another
order.

Shapes:  M micro-batches (the last ones may be empty) · R rows · T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from bapo_jax import parallel
from bapo_jax.learner.logprobs import Compute, image_features, token_logprobs
from bapo_jax.learner.packed import Sequences
from bapo_jax.models.patches import Pixels
from bapo_jax.models.decoder import Decoder
from bapo_jax.models.split import gathered


def score(
    params, sequences: Sequences, n_micro, temperature, pixels: Pixels | None = None, *, graph: nnx.GraphDef, mesh: Mesh,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(log-probs, entropy) [M, R, T] of the response tokens under `params`, 0 elsewhere; of the first `n_micro` micro-batches.

    `pixels` are the images of the mini-batch.
    """

    def logprobs(model: Decoder, features, micro: Sequences, temperature) -> tuple[jax.Array, jax.Array]:
        return token_logprobs(model, micro, temperature, compute, features)

    return over_micro_batches(logprobs, params, sequences, pixels, n_micro, temperature, graph, mesh, compute)


def over_micro_batches(
    of_micro_batch: Callable[..., Any], params: Any, sequences: Sequences, pixels: Pixels | None, n_micro, numbers: Any,
    graph: nnx.GraphDef, mesh: Mesh, compute: Compute,
) -> Any:  # fmt: skip
    """[M, R, T]: `of_micro_batch(model, features, micro-batch, numbers)` [R, T] of the first `n_micro` micro-batches, 0 beyond.

    It may give several arrays.

    Each device works on its own rows and its own part of the parameters, or on all, gathered once: as `accumulate`.
    """

    def on_device(params, sequences, pixels, n_micro, numbers):
        params = gathered(params, specs, compute.split, mesh.shape['fsdp'])
        features = image_features(nnx.merge(graph, params), pixels, compute)

        def of_number(i):
            return of_micro_batch(nnx.merge(graph, params), features, jax.tree.map(lambda x: x[i], sequences), numbers)

        def score_micro_batch(i, scores):
            return jax.tree.map(lambda all_MxRxT, one_RxT: all_MxRxT.at[i].set(one_RxT), scores, of_number(i))

        zeros = jax.tree.map(lambda _: jnp.zeros(sequences.tokens.shape, jnp.float32), jax.eval_shape(of_number, 0))
        return jax.lax.fori_loop(0, n_micro, score_micro_batch, zeros)

    specs, rows = parallel.parameter_specs(mesh, params), PartitionSpec(None, parallel.ROWS)
    in_specs = (specs, rows, PartitionSpec(parallel.ROWS), PartitionSpec(), PartitionSpec())
    return parallel.per_device(on_device, mesh, in_specs, rows)(params, sequences, pixels, n_micro, numbers)


def as_shipped(params: Any, dtype: str) -> Any:
    """Parameters as servers have them, which were shipped in `dtype`: rounded to it, in the dtype that they have here."""
    return jax.tree.map(lambda x: _rounded(x) if x.dtype == jnp.float32 else x, params) if dtype == 'bfloat16' else params


@jax.jit
def _rounded(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # XLA may leave out a cast to bfloat16 and back
