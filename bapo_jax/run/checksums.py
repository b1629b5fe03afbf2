"""Checksums of a checkpoint's arrays, which detect a flipped bit and do not depend on the devices."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bapo_jax.cluster.mesh import on_device


def checksums(tree: Any) -> dict[str, int]:
    """Returns the checksum of every leaf by its path: `word_sum` for JAX arrays, CRC-32 for numpy arrays."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    # One at a time: arrays in host memory are moved to the devices, which may not hold all of them.
    return {jax.tree_util.keystr(path, simple=True, separator='.'): int(_of_array(x)) for path, x in leaves}


def checksum_of_text(values: Mapping[str, Any]) -> int:
    """The CRC-32 of the mapping as JSON."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _of_array(x: Any) -> Any:
    return (
        word_sum(on_device(x)) if isinstance(x, jax.Array) else zlib.crc32(np.ascontiguousarray(x).tobytes())
    )


@jax.jit
def word_sum(x: jax.Array) -> jax.Array:
    """Σ_i (2i + 1) w_i mod 2³² over the array's elements w_i as unsigned integers, i in row-major order.

    A flipped bit in one element changes the sum, since 2^k (2i + 1) is never 0 mod 2³². Integer addition does
    not depend on the order, so the sum is the same on any mesh.
    """
    words = (
        jax.lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}').astype(jnp.uint32)
        if x.dtype != bool
        else x
    )
    stride, i = 1, jnp.zeros(x.shape, jnp.uint32)
    for axis in reversed(range(x.ndim)):
        i += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride % 2**32)
        stride *= x.shape[axis]
    return jnp.sum(words.astype(jnp.uint32) * (2 * i + 1), dtype=jnp.uint32)
