"""Log-probs and entropy of given tokens under the policy, in chunks, so that [tokens, vocabulary] logits never exist whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bapo_jax.models.attention import Attention
from bapo_jax.models.qwen import Qwen


def token_logprobs(
    model: Qwen, tokens_BxT, segment_BxT, position_BxT, temperature, *, attention: Attention, chunk: int, remat: bool
):
    """(log-prob, entropy), both float32 [B, T], of each token given those before it in its segment; logits / temperature.

    Column 0 predicts nothing and is 0. A segment's first token is scored from its neighbour's last state: mask it out.
    Raises ValueError where `chunk` does not divide T.
    """
    B, T = tokens_BxT.shape
    if T % chunk:
        raise ValueError(f'learner.logprob_chunk={chunk} does not divide learner.row_tokens={T}')

    hidden_BxTxD = hidden_states(model, tokens_BxT, segment_BxT, position_BxT, attention=attention, remat=remat)
    # Hidden state t predicts token t + 1; the last state of a row predicts nothing, so its target is a filler.
    target_BxT = jnp.concatenate([tokens_BxT[:, 1:], jnp.zeros((B, 1), tokens_BxT.dtype)], axis=1)

    @jax.checkpoint
    def one_chunk(_, inputs):
        hidden_BxCxD, target_BxC = inputs
        logits_BxCxV = model.logits(hidden_BxCxD) / temperature
        normaliser_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1)
        logp_BxC = jnp.take_along_axis(logits_BxCxV, target_BxC[..., None], axis=-1)[..., 0] - normaliser_BxC
        probability_BxCxV = jnp.exp(logits_BxCxV - normaliser_BxC[..., None])
        entropy_BxC = normaliser_BxC - jnp.sum(probability_BxCxV * logits_BxCxV, axis=-1)
        return None, (logp_BxC, entropy_BxC)

    def chunks_first(x):
        return x.reshape(B, T // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)

    _, scored = jax.lax.scan(one_chunk, None, (chunks_first(hidden_BxTxD), chunks_first(target_BxT)))
    logp_BxT, entropy_BxT = (x.swapaxes(0, 1).reshape(B, T) for x in scored)
    return shift_right(logp_BxT), shift_right(entropy_BxT)


def hidden_states(model: Qwen, tokens_BxT, segment_BxT, position_BxT, *, attention: Attention, remat: bool) -> jax.Array:
    """[B, T, D]; state t has seen the tokens of its segment up to t."""

    def attend(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH):
        return attention(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT)

    return model(tokens_BxT, position_BxT, attend, remat=remat)


def shift_right(x_BxT: jax.Array) -> jax.Array:
    """What state t says of token t + 1 comes to stand at t + 1; column 0 is 0."""
    return jnp.concatenate([jnp.zeros_like(x_BxT[:, :1]), x_BxT[:, :-1]], axis=1)
