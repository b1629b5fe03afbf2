"""What a model of this package says of whole rows of tokens."""

import jax
import jax.numpy as jnp
from flax import nnx

from bapo_jax.models import delta
from bapo_jax.models.attention import xla


def causal(tokens_BxT):
    """Positions and attention of rows without padding."""
    B, T = tokens_BxT.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    return positions, lambda *qkv: xla(*qkv, jnp.ones((B, T), jnp.int32))


def logits_in(graph, params, tokens_BxT, **kwargs):
    model = nnx.merge(graph, params)
    if model.config.hybrid:
        kwargs['recur'] = delta.of_segments(jnp.ones(tokens_BxT.shape, jnp.int32))
    return model.logits(model(tokens_BxT, *causal(tokens_BxT), **kwargs))


def forward(policy, tokens_BxT, **kwargs):
    """Logits [B, T, V]; `policy` has a graph and params."""
    return jax.jit(lambda params, tokens: logits_in(policy.graph, params, tokens, **kwargs))(policy.params, tokens_BxT)
