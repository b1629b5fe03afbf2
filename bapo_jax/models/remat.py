"""Rematerialisation: what a layer keeps for the backward pass, which recomputes the rest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

ATTENTION = 'attention'  # a kernel's result, and what its backward pass needs
MLP_INPUT, PRODUCT = 'mlp_input', 'product'  # the residual stream between attention and MLP; x @ kernel

# What each policy keeps besides the layer's input.
REMAT = {
    'none': jax.checkpoint_policies.everything_saveable,
    'matrix_products': jax.checkpoint_policies.save_only_these_names(ATTENTION, MLP_INPUT, PRODUCT),
    'attention_and_mlp_inputs': jax.checkpoint_policies.save_only_these_names(ATTENTION, MLP_INPUT),
    'offload': jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[ATTENTION, MLP_INPUT],
        offload_src='device',
        offload_dst='pinned_host',
    ),
    'full': jax.checkpoint_policies.nothing_saveable,
}


def kept(x: jax.Array, name: str) -> jax.Array:
    """Returns `x`, which a policy may keep under `name`, rounded to its dtype in every program.

    JAX rounds what a policy keeps, and keeps nothing if nothing is differentiated; XLA computes the rest in
    more than bfloat16. So an update would round where scoring does not, and the importance ratio of a policy
    to itself would not be 1.
    """
    if x.dtype != jnp.float32:
        info = jnp.finfo(x.dtype)
        x = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    return checkpoint_name(x, name)
