"""Products of rows with their group's matrix, where rows are sorted by group: a mixture's experts.

On TPUs XLA has an instruction for the product, and JAX a kernel for its gradient by the matrices, for which
the instruction would multiply every row once per group. Elsewhere it always would, and mask: for 30B-A3B
that takes 200 GB on a GPU. There, rows are cut into tiles of one group each, whose last may be partly empty,
and the tiles are one batched product.

Shapes:  P rows · I, O inputs and outputs of a matrix · A, B widths of rows · E groups · N tiles of C rows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

_FEWEST, _MOST = 8, 256  # rows of a tile
_ON_TPU = (512, 256, 128)  # the kernel's tiles of rows, which must divide them, in order of choice
# Its tiles of A and of B: with 512 rows they fill 12 of the 16 MB that a kernel may use.
_WIDTHS = (1024, 512)


def product(x_PxI: jax.Array, matrix_ExIxO: jax.Array, size_E: jax.Array) -> jax.Array:
    """Returns [P, O]: each row times its group's matrix. `size_E` are all rows' counts by group, int32."""

    def in_tiles(x_PxI, matrix_ExIxO, size_E):
        tiles = _cut(len(x_PxI), size_E)
        y_NxCxO = jnp.matmul(_rows(x_PxI, tiles), matrix_ExIxO[tiles.group_N])
        zeros_PxO = jnp.zeros((len(x_PxI), y_NxCxO.shape[-1]), y_NxCxO.dtype)
        return zeros_PxO.at[tiles.row_NxC].set(y_NxCxO, mode='drop')

    return jax.lax.platform_dependent(x_PxI, matrix_ExIxO, size_E, tpu=jax.lax.ragged_dot, default=in_tiles)


def outer(x_PxA: jax.Array, y_PxB: jax.Array, size_E: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns x.T @ y of each group's rows, [E, A, B] of `dtype`; of an empty group, zeros."""

    def in_tiles(x_PxA, y_PxB, size_E):
        tiles = _cut(len(x_PxA), size_E)
        x_NxCxA, y_NxCxB = (_rows(rows, tiles) for rows in (x_PxA, y_PxB))
        of_tile_NxAxB = jnp.matmul(x_NxCxA.swapaxes(1, 2), y_NxCxB, preferred_element_type=dtype)
        # A product, since a GPU adds scattered numbers in random order. Unused tiles are 0.
        is_of_ExN = (jnp.arange(len(size_E))[:, None] == tiles.group_N[None]).astype(dtype)
        return jnp.tensordot(is_of_ExN, of_tile_NxAxB, 1)

    if not any(len(x_PxA) % rows == 0 for rows in _ON_TPU):
        return in_tiles(x_PxA, y_PxB, size_E)
    kernel = functools.partial(outer_on_tpu, dtype=dtype)
    return jax.lax.platform_dependent(x_PxA, y_PxB, size_E, tpu=kernel, default=in_tiles)


def outer_on_tpu(
    x_PxA: jax.Array, y_PxB: jax.Array, size_E: jax.Array, dtype: jnp.dtype, interpret: bool = False
) -> jax.Array:
    """Returns `outer` by JAX's kernel for TPUs; `interpret` runs it anywhere, slowly."""
    # Here, as other platforms need none of it. It relies on NumPy's rules for dtypes and shapes.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows = next(rows for rows in _ON_TPU if len(x_PxA) % rows == 0)
    widths = (min(tile, w) for tile, w in zip(_WIDTHS, (x_PxA.shape[1], y_PxB.shape[1]), strict=True))
    with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
        return tgmm(x_PxA.T, y_PxB, size_E, dtype, (rows, *widths), interpret=interpret)


class _Tiles(NamedTuple):
    row_NxC: jax.Array  # the rows of each tile; P: none
    group_N: jax.Array


def tiles_for(rows: int, groups: int) -> tuple[int, int]:
    """Returns the number of tiles and the rows of one, enough for any sizes of the groups.

    Each group has at most one that is not full.
    """
    C = min(_MOST, max(_FEWEST, 1 << (rows // groups).bit_length()))
    return -(-rows // C) + groups, C


def _cut(rows: int, size_E: jax.Array) -> _Tiles:
    groups = len(size_E)
    N, C = tiles_for(rows, groups)
    tiles_E = (size_E + C - 1) // C
    last_E = jnp.cumsum(tiles_E)
    at_N = jnp.arange(N, dtype=size_E.dtype)
    group_N = jnp.minimum(jnp.searchsorted(last_E, at_N, side='right'), groups - 1)
    end_N = jnp.cumsum(size_E)[group_N]
    first_N = end_N - size_E[group_N] + C * (at_N - (last_E - tiles_E)[group_N])
    row_NxC = first_N[:, None] + jnp.arange(C, dtype=size_E.dtype)[None]
    return _Tiles(jnp.where(row_NxC < end_N[:, None], row_NxC, rows), group_N)


def _rows(x_PxI: jax.Array, tiles: _Tiles) -> jax.Array:
    return x_PxI.at[tiles.row_NxC].get(mode='fill', fill_value=0)
