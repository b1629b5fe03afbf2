"""Log-probs and entropy of the response tokens under the policy, one micro-batch at a time."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bapo_jax.cluster import long_rows
from bapo_jax.cluster.mesh import ROWS
from bapo_jax.cluster.split import Split
from bapo_jax.learner.head import Tile, head
from bapo_jax.learner.mini_batch import Sequences
from bapo_jax.models.attention import Attention, xla
from bapo_jax.models import delta
from bapo_jax.models.decoder import Decoder, ImageFeatures
from bapo_jax.models.experts import Counted, Routed, loads
from bapo_jax.models.vision.patches import Pixels


class Compute(NamedTuple):
    """How a model is computed. Nothing here changes the result, except for rounding."""

    attention: Attention = xla
    remat: str = 'none'  # a key of models.remat.REMAT
    split: Split = Split()
    tile: Tile = Tile()
    # The leading tokens of a row, for a prompt that its responses share; 0: each sequence has its own.
    shared: int = 0


class TokenLogprobs(NamedTuple):
    """What a policy says of a micro-batch; values of tokens are float32 [B, T], and 0 off responses."""

    logp: jax.Array
    entropy: jax.Array
    load_LxE: jax.Array | None = None  # int32: how many tokens chose each expert, if there are experts
    imbalance: jax.Array | None = None  # the mean over layers of `experts.imbalance`, if asked for


def token_logprobs(
    model: Decoder,
    sequences: Sequences,
    temperature,
    compute: Compute = Compute(),
    features: jax.Array | None = None,
    *,
    entropy_gradient: bool = False,
    balance_BxT: jax.Array | None = None,
) -> TokenLogprobs:
    """Returns the log-prob and entropy of each response token given those before it.

    Logits are divided by the temperature. `sequences` is one micro-batch, [B, T]; `features` [I, D] are those
    of its mini-batch's images. Without `entropy_gradient` the entropy is treated as a constant. `balance_BxT`
    are the tokens' weights in the experts' imbalance; None: it is not computed.
    """
    B, T = sequences.tokens.shape
    counted = None if balance_BxT is None else Counted(sequences.response, balance_BxT)
    hidden_BxTxD, routed = hidden_states(model, sequences, compute, features, counted)
    # Gather the response tokens into whole tiles: prompts and padding need no logits.
    tokens = min(compute.tile.tokens, B * T)
    N = -(-B * T // tokens) * tokens
    is_response_M = sequences.response.reshape(-1) > 0
    at_N = jnp.nonzero(is_response_M, size=N, fill_value=B * T)[0]
    state_SxD, before_BxT = states_before(hidden_BxTxD, sequences, compute)
    state_N, token_N = (x.reshape(-1)[jnp.minimum(at_N, B * T - 1)] for x in (before_BxT, sequences.tokens))
    logp_N, entropy_N = head(
        state_SxD[state_N],
        model.head_VxD,
        token_N,
        jnp.sum(is_response_M),
        temperature,
        compute.split,
        entropy_gradient,
        Tile(tokens, compute.tile.words),
    )
    logp_BxT, entropy_BxT = (
        jnp.zeros(B * T, jnp.float32).at[at_N].set(x_N, mode='drop').reshape(B, T)
        for x_N in (logp_N, entropy_N)
    )
    if routed is None:
        return TokenLogprobs(logp_BxT, entropy_BxT)
    load_LxE = loads(routed.expert_BxTxS, sequences.segment > 0, model.config.routing.experts)
    return TokenLogprobs(
        logp_BxT, entropy_BxT, load_LxE, None if counted is None else jnp.mean(routed.imbalance)
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
    model: Decoder, sequences: Sequences, compute: Compute = Compute(), features: jax.Array | None = None,
    counted: Counted | None = None,
) -> tuple[jax.Array, Routed | None]:  # fmt: skip
    """Returns hidden states [B, T, D]; state t has seen its segment's tokens and images up to t.

    Also returns what was routed, as `Decoder.and_routed` does.
    """

    segment = long_rows.whole(sequences.segment, compute.split.tokens)

    def attend(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH):
        return compute.attention(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment)

    if features is None:
        positions, images = sequences.position, None
    else:
        positions, images = jnp.moveaxis(sequences.rope, -1, 0), ImageFeatures(features, sequences.feature)
    return model.and_routed(
        sequences.tokens,
        positions,
        long_rows.by_heads(attend, compute.split.tokens),
        images,
        recur=delta.of_segments(segment) if model.config.hybrid else None,
        remat=compute.remat,
        split=compute.split,
        counted=counted,
    )


def states_before(
    hidden_BxTxD: jax.Array, sequences: Sequences, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    """Returns states [S, D], and which of them precedes each response token, int32 [B, T]."""
    B, T, D = hidden_BxTxD.shape
    at_BxT = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    if compute.split.tokens > 1:
        last_Bx1xD = long_rows.last_before(hidden_BxTxD, compute.split.tokens)
        state_SxD = jnp.concatenate([last_Bx1xD, hidden_BxTxD], axis=1).reshape(-1, D)
        return state_SxD, at_BxT + jnp.arange(B, dtype=jnp.int32)[:, None]
    if not compute.shared:
        return hidden_BxTxD.reshape(B * T, D), jnp.maximum(at_BxT - 1, 0)
    prompt_B = jnp.sum(sequences.segment[:, : compute.shared] > 0, axis=1)
    # A response's first token follows the prompt, wherever its slot is.
    first_BxT = sequences.position == prompt_B[:, None]
    before_BxT = jnp.where(first_BxT, at_BxT[:, :1] + prompt_B[:, None] - 1, at_BxT - 1)
    return hidden_BxTxD.reshape(B * T, D), before_BxT
