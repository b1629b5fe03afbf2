"""Log-probs and entropy of the response tokens under the policy, one micro-batch at a time."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bapo_jax import parallel
from bapo_jax.learner.head import Tile, head
from bapo_jax.learner.packed import Sequences
from bapo_jax.models.attention import Attention, xla
from bapo_jax.models.patches import Pixels
from bapo_jax.models.decoder import Decoder, ImageFeatures
from bapo_jax.models.split import Split


class Compute(NamedTuple):
    """How a model is computed: none of it changes what is computed, but for rounding."""

    attention: Attention = xla
    remat: str = 'none'  # a key of models.remat.REMAT
    split: Split = Split()
    tile: Tile = Tile()
    shared: int = 0  # a row's first tokens are a prompt that slots of responses share; 0: each sequence has its own


def token_logprobs(
    model: Decoder, sequences: Sequences, temperature, compute: Compute = Compute(), features: jax.Array | None = None, *,
    entropy_gradient: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(log-prob, entropy), both float32 [B, T], of each response token given those before it; logits / temperature; 0 elsewhere.

    `sequences` is one micro-batch, [B, T]; `features` [I, D] are those of its mini-batch's images. Without `entropy_gradient` the
    entropy is a constant to the gradient.
    """
    B, T = sequences.tokens.shape
    hidden_BxTxD = hidden_states(model, sequences, compute, features)
    # Response tokens first, filled up to whole tiles: prompts and padding need no logits.
    tokens = min(compute.tile.tokens, B * T)
    N = -(-B * T // tokens) * tokens
    is_response_M = sequences.response.reshape(-1) > 0
    at_N = jnp.nonzero(is_response_M, size=N, fill_value=B * T)[0]
    state_N, token_N = (x.reshape(-1)[jnp.minimum(at_N, B * T - 1)] for x in (state_before(sequences, compute), sequences.tokens))
    logp_N, entropy_N = head(
        hidden_BxTxD.reshape(B * T, -1)[state_N], model.head_VxD, token_N, jnp.sum(is_response_M), temperature, compute.split,
        entropy_gradient, Tile(tokens, compute.tile.words),
    )  # fmt: skip
    return tuple(jnp.zeros(B * T, jnp.float32).at[at_N].set(x_N, mode='drop').reshape(B, T) for x_N in (logp_N, entropy_N))


def image_features(model: Decoder, pixels: Pixels | None, compute: Compute) -> jax.Array | None:
    """Float32 [I, D], on every device: what the tower makes of a mini-batch's images, each device of its own rows.

    They are float32 since the gradients of all responses to a prompt are summed in them. Without images: None.
    """
    if pixels is None:
        return None
    own_IxD = model.vision(*pixels, remat=compute.remat, split=compute.split)
    return jax.lax.all_gather(own_IxD.astype(jnp.float32), parallel.ROWS, tiled=True)


def hidden_states(
    model: Decoder, sequences: Sequences, compute: Compute = Compute(), features: jax.Array | None = None
) -> jax.Array:
    """[B, T, D]; state t has seen the tokens of its segment up to t, and the images among them."""

    def attend(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH):
        return compute.attention(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, sequences.segment)

    if features is None:
        positions, images = sequences.position, None
    else:
        positions, images = jnp.moveaxis(sequences.rope, -1, 0), ImageFeatures(features, sequences.feature)
    return model(sequences.tokens, positions, attend, images, remat=compute.remat, split=compute.split)


def state_before(sequences: Sequences, compute: Compute) -> jax.Array:
    """int32 [B, T]: which of the B · T states is the one before each response token."""
    B, T = sequences.tokens.shape
    at_BxT = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    if not compute.shared:
        return jnp.maximum(at_BxT - 1, 0)
    prompt_B = jnp.sum(sequences.segment[:, : compute.shared] > 0, axis=1)
    first_BxT = sequences.position == prompt_B[:, None]  # a response's first token follows the prompt, wherever its slot is
    return jnp.where(first_BxT, at_BxT[:, :1] + prompt_B[:, None] - 1, at_BxT - 1)
