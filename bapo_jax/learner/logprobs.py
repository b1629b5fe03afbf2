"""Log-probs and entropy of the response tokens under the policy, one micro-batch at a time."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bapo_jax.cluster.mesh import ROWS
from bapo_jax.cluster.split import Split
from bapo_jax.learner.head import Tile, head
from bapo_jax.learner.mini_batch import Sequences
from bapo_jax.models.attention import Attention, xla
from bapo_jax.models.decoder import Decoder, ImageFeatures
from bapo_jax.models.vision.patches import Pixels


class Compute(NamedTuple):
    """How a model is computed. Nothing here changes the result, except for rounding."""

    attention: Attention = xla
    remat: str = 'none'  # a key of models.remat.REMAT
    split: Split = Split()
    tile: Tile = Tile()
    # The leading tokens of a row, for a prompt that its responses share; 0: each sequence has its own.
    shared: int = 0


def token_logprobs(
    model: Decoder,
    sequences: Sequences,
    temperature,
    compute: Compute = Compute(),
    features: jax.Array | None = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns (log-prob, entropy) of each response token given those before it, float32 [B, T]; 0 elsewhere.

    Logits are divided by the temperature. `sequences` is one micro-batch, [B, T]; `features` [I, D] are those
    of its mini-batch's images. Without `entropy_gradient` the entropy is treated as a constant.
    """
    B, T = sequences.tokens.shape
    hidden_BxTxD = hidden_states(model, sequences, compute, features)
    # Gather the response tokens into whole tiles: prompts and padding need no logits.
    tokens = min(compute.tile.tokens, B * T)
    N = -(-B * T // tokens) * tokens
    is_response_M = sequences.response.reshape(-1) > 0
    at_N = jnp.nonzero(is_response_M, size=N, fill_value=B * T)[0]
    state_N, token_N = (
        x.reshape(-1)[jnp.minimum(at_N, B * T - 1)]
        for x in (state_before(sequences, compute), sequences.tokens)
    )
    logp_N, entropy_N = head(
        hidden_BxTxD.reshape(B * T, -1)[state_N],
        model.head_VxD,
        token_N,
        jnp.sum(is_response_M),
        temperature,
        compute.split,
        entropy_gradient,
        Tile(tokens, compute.tile.words),
    )
    return tuple(
        jnp.zeros(B * T, jnp.float32).at[at_N].set(x_N, mode='drop').reshape(B, T)
        for x_N in (logp_N, entropy_N)
    )


def image_features(model: Decoder, pixels: Pixels | None, compute: Compute) -> jax.Array | None:
    """Returns the vision tower's features of a mini-batch's images, float32 [I, D]; None without images.

    Each device computes its own rows and gets all features. They are float32 because the gradients of all
    responses to a prompt are summed in them.
    """
    if pixels is None:
        return None
    own_IxD = model.vision(*pixels, remat=compute.remat, split=compute.split)
    return jax.lax.all_gather(own_IxD.astype(jnp.float32), ROWS, tiled=True)


def hidden_states(
    model: Decoder, sequences: Sequences, compute: Compute = Compute(), features: jax.Array | None = None
) -> jax.Array:
    """Returns hidden states [B, T, D]; state t has seen its segment's tokens and images up to t."""

    def attend(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH):
        return compute.attention(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, sequences.segment)

    if features is None:
        positions, images = sequences.position, None
    else:
        positions, images = jnp.moveaxis(sequences.rope, -1, 0), ImageFeatures(features, sequences.feature)
    return model(sequences.tokens, positions, attend, images, remat=compute.remat, split=compute.split)


def state_before(sequences: Sequences, compute: Compute) -> jax.Array:
    """Returns the index, among the B · T states, of the state before each response token, int32 [B, T]."""
    B, T = sequences.tokens.shape
    at_BxT = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    if not compute.shared:
        return jnp.maximum(at_BxT - 1, 0)
    prompt_B = jnp.sum(sequences.segment[:, : compute.shared] > 0, axis=1)
    # A response's first token follows the prompt, wherever its slot is.
    first_BxT = sequences.position == prompt_B[:, None]
    return jnp.where(first_BxT, at_BxT[:, :1] + prompt_B[:, None] - 1, at_BxT - 1)
