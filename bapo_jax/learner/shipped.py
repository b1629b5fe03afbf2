"""The parameters as servers have them: rounded, and with an adapter merged if it does not travel alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bapo_jax.models.adapters import travels_alone
from bapo_jax.models.decoder import ModelConfig


def as_shipped(params: Any, dtype: str, model: ModelConfig) -> Any:
    """Returns the parameters rounded to the shipped `dtype`, but in their own dtype.

    An adapter that does not travel alone is merged first, and then B is 0.
    """
    if dtype != 'bfloat16':
        return params
    if model.adapter and not travels_alone(model):
        params = _merged(params, scale=model.adapter.scale)
    return jax.tree.map(lambda x: _rounded(x) if x.dtype == jnp.float32 else x, params)


@functools.partial(jax.jit, static_argnames='scale')
def _merged(params: Any, *, scale: float) -> Any:
    def of(tree):
        if not isinstance(tree, dict):
            return tree
        if 'a' not in tree:
            return {name: of(part) for name, part in tree.items()}
        added = jnp.matmul(tree['a'], tree['b'], precision='highest', preferred_element_type=jnp.float32)
        kernel = _rounded(tree['kernel'].astype(jnp.float32) + scale * added).astype(tree['kernel'].dtype)
        return {**tree, 'kernel': kernel, 'b': jnp.zeros_like(tree['b'])}

    return of(params)


@jax.jit
def _rounded(x: jax.Array) -> jax.Array:
    # XLA may remove a cast to bfloat16 and back.
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
