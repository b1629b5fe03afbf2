"""Scoring: one number per response token of a batch, its log-prob under a named policy or the critic's value.

Log-probs equal those that an update of the same policy computes, bit for bit, so that its first ratio is
exactly 1. Scoring therefore rounds where an update does (models/remat.py).

Shapes:  M micro-batches (the last ones may be empty) · R rows · T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from bapo_jax.cluster.mesh import per_device, row_spec
from bapo_jax.cluster.split import gathered
from bapo_jax.learner.logprobs import Compute, image_features
from bapo_jax.learner.mini_batch import Sequences
from bapo_jax.models.decoder import Decoder
from bapo_jax.models.sharding import parameter_specs
from bapo_jax.models.vision.patches import Pixels

# (model, image features, sequences, numbers) -> [R, T] for one micro-batch.
OfTokens = Callable[[Decoder, Any, Sequences, Any], Any]


def score(
    params,
    sequences: Sequences,
    n_micro,
    numbers: Any,
    pixels: Pixels | None = None,
    *,
    of_tokens: OfTokens,
    graph: nnx.GraphDef,
    mesh: Mesh,
    compute: Compute,
) -> Any:
    """Scores the response tokens of the first `n_micro` micro-batches under `params`, [M, R, T]; 0 elsewhere.

    `of_tokens` computes [R, T] for one micro-batch; it may return several arrays, and so does this. `pixels`
    are the images of the mini-batch. Devices share the work as in `accumulate`.
    """

    def on_device(params, sequences, pixels, n_micro, numbers):
        params = gathered(params, specs, compute.split, mesh.shape['fsdp'])
        features = image_features(nnx.merge(graph, params), pixels, compute)

        def micro_scores(i):
            return of_tokens(
                nnx.merge(graph, params), features, jax.tree.map(lambda x: x[i], sequences), numbers
            )

        def score_micro_batch(i, scores):
            return jax.tree.map(
                lambda all_MxRxT, one_RxT: all_MxRxT.at[i].set(one_RxT), scores, micro_scores(i)
            )

        zeros = jax.tree.map(
            lambda _: jnp.zeros(sequences.tokens.shape, jnp.float32), jax.eval_shape(micro_scores, 0)
        )
        return jax.lax.fori_loop(0, n_micro, score_micro_batch, zeros)

    specs, rows = parameter_specs(mesh, params), row_spec(1, compute.split.tokens > 1)
    in_specs = (specs, rows, row_spec(), PartitionSpec(), PartitionSpec())
    return per_device(on_device, mesh, in_specs, rows)(params, sequences, pixels, n_micro, numbers)
