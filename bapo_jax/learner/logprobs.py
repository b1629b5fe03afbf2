"""Log-probs and entropy of the response tokens under the policy, one micro-batch at a time."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bapo_jax.learner.head import Tile, head
from bapo_jax.learner.packed import Sequences
from bapo_jax.models.attention import Attention, xla
from bapo_jax.models.qwen import Qwen
from bapo_jax.models.split import Split


class Compute(NamedTuple):
    """How a model is computed: none of it changes what is computed, but for rounding."""

    attention: Attention = xla
    remat: str = 'none'  # a key of models.qwen.REMAT
    split: Split = Split()
    tile: Tile = Tile()


def token_logprobs(
    model: Qwen, sequences: Sequences, temperature, compute: Compute = Compute(), *, entropy_gradient: bool = False
) -> tuple[jax.Array, jax.Array]:
    """(log-prob, entropy), both float32 [B, T], of each response token given those before it; logits / temperature; 0 elsewhere.

    `sequences` is one micro-batch, [B, T]. Without `entropy_gradient` the entropy is a constant to the gradient.
    """
    B, T = sequences.tokens.shape
    hidden_BxTxD = hidden_states(model, sequences, compute)
    # Response tokens first, filled up to whole tiles: prompts and padding need no logits.
    tokens = min(compute.tile.tokens, B * T)
    N = -(-B * T // tokens) * tokens
    is_response_M = sequences.response.reshape(-1) > 0
    at_N = jnp.nonzero(is_response_M, size=N, fill_value=B * T)[0]
    state_N = jnp.clip(at_N - 1, 0, B * T - 1)  # state t predicts token t + 1, and no row begins with a response
    logp_N, entropy_N = head(
        hidden_BxTxD.reshape(B * T, -1)[state_N], model.head_VxD, sequences.tokens.reshape(-1)[jnp.minimum(at_N, B * T - 1)],
        jnp.sum(is_response_M), temperature, compute.split, entropy_gradient, Tile(tokens, compute.tile.words),
    )  # fmt: skip
    return tuple(jnp.zeros(B * T, jnp.float32).at[at_N].set(x_N, mode='drop').reshape(B, T) for x_N in (logp_N, entropy_N))


def hidden_states(model: Qwen, sequences: Sequences, compute: Compute = Compute()) -> jax.Array:
    """[B, T, D]; state t has seen the tokens of its segment up to t."""

    def attend(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH):
        return compute.attention(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, sequences.segment)

    return model(sequences.tokens, sequences.position, attend, remat=compute.remat, split=compute.split)


def shift_right(x_BxT: jax.Array) -> jax.Array:
    """What state t says of token t + 1 comes to stand at t + 1; column 0 is 0."""
    return jnp.concatenate([jnp.zeros_like(x_BxT[:, :1]), x_BxT[:, :-1]], axis=1)
