"""Tile sizes of the GPU attention kernel, and which tiles of keys and queries a block needs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


class KernelTile(NamedTuple):
    """The block sizes of one kernel program, in tokens (powers of two), and its launch settings."""

    queries: int
    keys: int
    warps: int
    stages: int  # of the block-loading pipeline


class Tiles(NamedTuple):
    """A tile for each kernel."""

    forward: KernelTile
    dq: KernelTile
    dkv: KernelTile


# Keys: the most bytes of one head's vector (64, 128 and 256 numbers in bfloat16). Compiled for an H200, all
# rows use its matrix instructions (wgmma); the first two spill no registers, the third almost none. All fit
# the shared memory of an A100. The first two also fit that of an L40S or RTX 4090, the third only with heads
# of 128 numbers in float32 (tests/gpu_compiled.py compiles them).
TILES = {
    128: Tiles(KernelTile(128, 128, 8, 3), KernelTile(128, 64, 8, 3), KernelTile(64, 128, 8, 3)),
    256: Tiles(KernelTile(128, 64, 8, 3), KernelTile(128, 64, 8, 2), KernelTile(64, 128, 8, 2)),
    512: Tiles(KernelTile(128, 32, 8, 2), KernelTile(64, 32, 8, 2), KernelTile(32, 64, 8, 2)),
}


# Programs over key blocks that fill a GPU of 132 multiprocessors evenly although early blocks take longer.
ENOUGH_PROGRAMS = 512


def tiles_of(head_bytes: int) -> Tiles:
    """Returns the tiles for a head's vector of `head_bytes` bytes. Raises ValueError if it is too large."""
    for most, tiles in TILES.items():
        if head_bytes <= most:
            return tiles
    raise ValueError(
        f'a head has {head_bytes} bytes, and the kernel supports at most {most}; set model.attention=xla'
    )


def key_bounds(id_BxT: jax.Array, Q: int, S: int) -> jax.Array:
    """Returns int32 [B, T/Q, 4]: first <= whole <= edge <= last for each block of Q queries.

    A query block reads the key blocks [first, last), of S keys each. It sees all pairs in [whole, edge),
    which therefore need no mask. Adjacent equal ids in `id_BxT` form a segment.
    """
    at_M = jnp.arange(0, id_BxT.shape[1], Q, dtype=jnp.int32)
    first_BxM = _segment_start(id_BxT, at_M) // S
    edge_BxM = jnp.broadcast_to(at_M // S, first_BxM.shape)  # start of the diagonal
    whole_BxM = jnp.clip(pl.cdiv(_segment_start(id_BxT, at_M + Q - 1), S), first_BxM, edge_BxM)
    last_BxM = jnp.broadcast_to(pl.cdiv(at_M + Q, S), first_BxM.shape)
    return jnp.stack([first_BxM, whole_BxM, edge_BxM, last_BxM], axis=-1)


def query_bounds(id_BxT: jax.Array, Q: int, S: int) -> jax.Array:
    """Returns, like `key_bounds`, the query blocks that read each block of S keys, int32 [B, T/S, 4]."""
    at_M = jnp.arange(0, id_BxT.shape[1], S, dtype=jnp.int32)
    last_BxM = _segment_end(id_BxT, at_M + S - 1) // Q + 1
    first_BxM = jnp.broadcast_to(at_M // Q, last_BxM.shape)
    whole_BxM = jnp.broadcast_to(pl.cdiv(at_M + S, Q), last_BxM.shape)  # past the diagonal
    edge_BxM = jnp.maximum((_segment_end(id_BxT, at_M) + 1) // Q, whole_BxM)
    return jnp.stack([first_BxM, whole_BxM, edge_BxM, last_BxM], axis=-1)


def _segment_start(id_BxT: jax.Array, at_M: jax.Array) -> jax.Array:
    """Returns the segment starts of the tokens `at_M`, int32 [B, M]; a running maximum takes many kernels."""
    token_T, same_BxMxT = _same(id_BxT, at_M)
    return jnp.min(jnp.where(same_BxMxT, token_T[None, None], token_T.size), axis=-1)


def _segment_end(id_BxT: jax.Array, at_M: jax.Array) -> jax.Array:
    """Returns the last tokens of the segments of the tokens `at_M`, int32 [B, M]."""
    token_T, same_BxMxT = _same(id_BxT, at_M)
    return jnp.max(jnp.where(same_BxMxT, token_T[None, None], -1), axis=-1)


def _same(id_BxT: jax.Array, at_M: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.arange(id_BxT.shape[1], dtype=jnp.int32), id_BxT[:, None, :] == id_BxT[:, at_M][:, :, None]
