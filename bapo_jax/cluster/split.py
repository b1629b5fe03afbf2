"""One device's operations on a split model, for programs in which every array is the device's own shard.

Rows are split over 'data' and 'fsdp', or over 'data' alone and their tokens over 'fsdp' (long_rows.py).
'fsdp' also splits every matrix along the model's width, and a layer's weights are gathered for use. 'tensor'
splits heads, MLP and vocabulary, and a layer's output is summed. Each function defines its own transpose:
weight gradients are summed in float32 as they are scattered, and nothing crosses the mesh twice.

Shapes:  B rows · T tokens · D width · V vocabulary · I, O inputs and outputs of a matrix · E experts ·
         P pairs of a token and an expert. A device's shard of a table is [V / tensor, D / fsdp], that of a
         matrix its part along 'fsdp'.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bapo_jax.cluster import grouped
from bapo_jax.cluster.long_rows import AXIS, token_splits


class Split(NamedTuple):
    """The numbers of devices that split the model; `Split()` is a whole model, even outside any mesh."""

    fsdp: int = 1
    tensor: int = 1
    tokens: int = 1  # those of 'fsdp' that split the tokens of each row, or 1

    @property
    def token_axis(self) -> str | None:
        """The mesh axis that splits the tokens of rows, if one does."""
        return AXIS if self.tokens > 1 else None

    def gather(self, part: jax.Array, axis: int) -> jax.Array:
        """Returns the whole of `part`, whose `axis` is split over 'fsdp'; not differentiated."""
        return part if self.fsdp == 1 else jax.lax.all_gather(part, 'fsdp', axis=axis, tiled=True)

    def scatter(self, whole: jax.Array, axis: int) -> jax.Array:
        """Returns the transpose of `gather`: this device's shard of the sum over 'fsdp'."""
        return (
            whole
            if self.fsdp == 1
            else jax.lax.psum_scatter(whole, 'fsdp', scatter_dimension=axis, tiled=True)
        )

    def enter(self, x: jax.Array) -> jax.Array:
        """Returns `x`, equal on all devices of 'tensor', for work they share; sums their gradients of it."""
        return x if self.tensor == 1 else _enter(x)

    def leave(self, part: jax.Array) -> jax.Array:
        """Returns the sum over 'tensor' of the devices' partial results."""
        return part if self.tensor == 1 else _leave(part)

    def look_up(self, table_VxD: jax.Array, tokens_BxT: jax.Array, dtype: str) -> jax.Array:
        """Returns the tokens' rows [B, T, D] of a table split both ways.

        Activations cross the mesh; the table does not.
        """
        if self.fsdp > 1:
            tokens_BxT = jax.lax.all_gather(tokens_BxT, 'fsdp', axis=0, tiled=True)
        if self.tensor == 1:
            x_BxTxD = jnp.take(table_VxD, tokens_BxT, axis=0).astype(dtype)
        else:
            tokens_BxT = tokens_BxT - jax.lax.axis_index('tensor') * table_VxD.shape[0]
            here_BxT = (tokens_BxT >= 0) & (tokens_BxT < table_VxD.shape[0])
            x_BxTxD = jnp.take(table_VxD, jnp.where(here_BxT, tokens_BxT, 0), axis=0).astype(dtype)
            x_BxTxD = self.leave(jnp.where(here_BxT[..., None], x_BxTxD, jnp.zeros((), dtype)))
        if self.fsdp > 1:  # from this device's columns of all rows to all columns of its own rows
            x_BxTxD = jax.lax.all_to_all(x_BxTxD, 'fsdp', split_axis=0, concat_axis=2, tiled=True)
        return x_BxTxD


def split_of(mesh: Mapping[str, int], rows: int, gather_once: bool) -> Split:
    """Returns how a mesh of those sizes splits the model, and micro-batches of `rows` rows.

    `gather_once` is that of the config. Raises as `token_splits` does.
    """
    return Split(1 if gather_once else mesh['fsdp'], mesh['tensor'], token_splits(mesh, rows))


def gathered(params: Any, specs: Any, split: Split, fsdp: int) -> Any:
    """Returns the parameters that a model computes with under `split`.

    These are its shards as they are or, if the mesh splits over 'fsdp' and `split` does not, parameters
    gathered over 'fsdp'. `fsdp` is the mesh's size of that axis. The transpose scatters the gradient.
    """

    def one(part, spec):
        return (
            jax.lax.all_gather(part, 'fsdp', axis=spec.index('fsdp'), tiled=True) if 'fsdp' in spec else part
        )

    return params if split.fsdp == fsdp else jax.tree.map(one, params, specs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def matmul(x_xI: jax.Array, kernel_IxO: jax.Array, split: Split, axis: int) -> jax.Array:
    """Returns x @ kernel in `x`'s dtype, with the kernel gathered along `axis` and an explicit backward pass.

    The backward pass gathers the kernel again, so no whole weight is kept; its gradient is float32. By
    itself, XLA on CPU would transpose the output's wide gradient instead of the narrow input, which halves
    the speed of the gated MLP's gradient.
    """
    return x_xI @ split.gather(kernel_IxO.astype(x_xI.dtype), axis)


def _matmul_forward(x_xI, kernel_IxO, split, axis):
    return matmul(x_xI, kernel_IxO, split, axis), (x_xI, kernel_IxO)


def _matmul_backward(split, axis, saved, gradient_xO):
    x_xI, kernel_IxO = saved
    x_MxI, gradient_MxO = (a.reshape(-1, a.shape[-1]) for a in (x_xI, gradient_xO))
    d_x_xI = gradient_xO @ split.gather(kernel_IxO.astype(gradient_xO.dtype), axis).T
    product = functools.partial(jnp.matmul, preferred_element_type=kernel_IxO.dtype)
    if split.fsdp == 1:
        return d_x_xI, product(x_MxI.T, gradient_MxO)
    # The TPU compiler makes a scatter of the last axis a reduce-scatter, and of any other an all-reduce.
    if axis == 0:
        return d_x_xI, split.scatter(product(gradient_MxO.T, x_MxI), 1).T
    return d_x_xI, split.scatter(product(x_MxI.T, gradient_MxO), 1)


matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(
    x_PxI: jax.Array, kernel_ExIxO: jax.Array, size_E: jax.Array, split: Split, axis: int
) -> jax.Array:
    """Returns [P, O]: each row of `x` times its expert's matrix, as `matmul` does for one matrix.

    Rows are sorted by expert, `size_E` (int32) of each; together they must be all P rows. `axis` is that of
    a matrix.
    """
    return grouped.product(x_PxI, split.gather(kernel_ExIxO.astype(x_PxI.dtype), axis + 1), size_E)


def _grouped_forward(x_PxI, kernel_ExIxO, size_E, split, axis):
    return grouped_matmul(x_PxI, kernel_ExIxO, size_E, split, axis), (x_PxI, kernel_ExIxO, size_E)


def _grouped_backward(split, axis, saved, gradient_PxO):
    x_PxI, kernel_ExIxO, size_E = saved
    whole_ExIxO = split.gather(kernel_ExIxO.astype(gradient_PxO.dtype), axis + 1)
    d_x_PxI = grouped.product(gradient_PxO, whole_ExIxO.swapaxes(1, 2), size_E)
    product = functools.partial(grouped.outer, size_E=size_E, dtype=kernel_ExIxO.dtype)
    # As in `matmul`, the last axis is scattered.
    if split.fsdp > 1 and axis == 0:
        return d_x_PxI, split.scatter(product(gradient_PxO, x_PxI), 2).swapaxes(1, 2), None
    return d_x_PxI, split.scatter(product(x_PxI, gradient_PxO), 2), None


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


@jax.custom_vjp
def _enter(x):
    return x


_enter.defvjp(lambda x: (x, None), lambda _, gradient: (jax.lax.psum(gradient, 'tensor'),))


@jax.custom_vjp
def _leave(part):
    return jax.lax.psum(part, 'tensor')


_leave.defvjp(lambda part: (_leave(part), None), lambda _, gradient: (gradient,))
