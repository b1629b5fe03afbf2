"""Rows whose tokens are split over 'fsdp': for micro-batches of fewer rows than devices, as long rows need.

Each of C devices has T / C successive tokens of every row. All of the model works on its own tokens, but for
attention: there, devices exchange tokens for heads (DeepSpeed-Ulysses, arXiv 2309.14509), so that each has
N / C heads of whole rows. Every attention kernel thus runs as it is, and causal masks give all devices equal
work. To gather keys and values instead would cross fewer bytes if a model has few key heads, but a causal
mask would give the device with a row's last tokens almost twice the mean work.

Shapes:  B rows · T tokens of a device, of C T in a row · N query heads · K key/value heads · H head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

AXIS = 'fsdp'


def token_splits(mesh: Mapping[str, int], rows: int) -> int:
    """Returns over how many devices the tokens of each of a micro-batch's rows are split; 1: rows are.

    `mesh` has the sizes of its axes. Raises ValueError if neither rows nor tokens can be split.
    """
    splits = mesh['data'] * mesh[AXIS]
    if rows % splits == 0:
        return 1
    if rows < splits and rows % mesh['data'] == 0:
        return mesh[AXIS]
    raise ValueError(
        f'learner.micro_batch_rows={rows} is not a multiple of mesh.data × mesh.fsdp = {splits}, over which '
        f'rows are split; set it to {max(1, rows // splits) * splits} or, to split the tokens of rows over '
        f'mesh.fsdp, to a smaller multiple of mesh.data = {mesh["data"]}'
    )


def whole(x_BxT: jax.Array, devices: int) -> jax.Array:
    """Returns the values of all tokens of the rows, [B, C T]; not differentiated."""
    return x_BxT if devices == 1 else jax.lax.all_gather(x_BxT, AXIS, axis=1, tiled=True)


def summed(x: jax.Array, devices: int) -> jax.Array:
    """Returns the sum of what the devices' tokens of the same rows add to `x`."""
    return x if devices == 1 else jax.lax.psum(x, AXIS)


def last_before(x_BxTxD: jax.Array, devices: int) -> jax.Array:
    """Returns the state before this device's first token of each row, [B, 1, D]; 0 where a row begins."""
    return jax.lax.ppermute(x_BxTxD[:, -1:], AXIS, [(i, i + 1) for i in range(devices - 1)])


def by_heads(attend: Callable[..., jax.Array], devices: int) -> Callable[..., jax.Array]:
    """Returns `attend`, which takes whole rows, for devices that have T tokens of each."""
    if devices == 1:
        return attend

    def exchanged(q_BxTxNxH: jax.Array, k_BxKxTxH: jax.Array, v_BxKxTxH: jax.Array) -> jax.Array:
        N, K = q_BxTxNxH.shape[2], k_BxKxTxH.shape[1]
        copies = copies_of_key_heads(N, K, devices)
        out = attend(
            _exchange(q_BxTxNxH, heads=2, tokens=1),
            *(_exchange(jnp.repeat(x, copies, axis=1), heads=1, tokens=2) for x in (k_BxKxTxH, v_BxKxTxH)),
        )
        return jax.lax.all_to_all(out, AXIS, split_axis=1, concat_axis=2, tiled=True)

    return exchanged


def _exchange(x: jax.Array, heads: int, tokens: int) -> jax.Array:
    return jax.lax.all_to_all(x, AXIS, split_axis=heads, concat_axis=tokens, tiled=True)


def copies_of_key_heads(N: int, K: int, devices: int) -> int:
    """Returns how often to repeat each key head, so that every device gets those that its query heads read.

    If devices share a key head, each gets a copy. If a device's query heads share no whole number of key
    heads, each gets one of its own.
    """
    if K % devices == 0:
        return 1
    return devices // K if devices % K == 0 else N // K
