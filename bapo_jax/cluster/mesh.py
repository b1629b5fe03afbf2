"""The device mesh, and the placement of arrays on it.

Mesh axes: 'data' (whole copies), 'fsdp' (parameters split, and rows or their tokens), 'tensor' (heads, MLP,
vocabulary split).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bapo_jax.cluster.devices import gpu_hosts, present

MESH_AXES = ('data', 'fsdp', 'tensor')


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh of data × fsdp × tensor devices, laid out along their interconnect by JAX's mesh_utils.

    `devices` defaults to those `present`. On a TPU slice each axis follows the slice's own axes. If there are
    several slices (TPU slices, GPU hosts), the outermost possible axes cross them: 'data' if the sizes allow,
    so that 'fsdp' and 'tensor' stay within one slice. A host's devices need not be neighbours.

    Sizes and errors are as in `mesh_sizes`. Also raises the errors of `present`.
    """
    devices = sorted(
        present() if devices is None else devices, key=lambda device: (device.process_index, device.id)
    )
    sizes = mesh_sizes(data, fsdp, tensor, len(devices), gpu_hosts(devices))
    slices = len({getattr(device, 'slice_index', 0) for device in devices})
    if slices == 1:
        laid_out = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        across = sizes_across(sizes, slices)
        within = tuple(size // n for size, n in zip(sizes, across, strict=True))
        laid_out = mesh_utils.create_hybrid_device_mesh(
            within, across, devices, allow_split_physical_axes=True
        )
    return Mesh(laid_out, MESH_AXES)


def sizes_across(sizes: Sequence[int], slices: int) -> tuple[int, ...]:
    """Returns how many slices each mesh axis crosses: as many as possible for the first axis, then the next.

    The result multiplies to `slices`. The product of `sizes` must be a multiple of `slices`.
    """
    across = []
    for size in sizes:
        across.append(math.gcd(size, slices))
        slices //= across[-1]
    return tuple(across)


def mesh_sizes(data: int, fsdp: int, tensor: int, devices: int, hosts: int = 1) -> tuple[int, int, int]:
    """Returns the mesh's sizes on `devices` devices; one size may be -1, for all devices that are left.

    With `data` = 0, each of the `hosts` of GPUs has a copy, so that `fsdp` gathers weights within a host. If
    `fsdp` is stated, `data` takes all devices that are left.

    Raises ValueError if the sizes do not multiply to the number of devices.
    """
    if data == 0:
        data = hosts if fsdp == -1 else max(1, devices // max(1, fsdp * tensor))
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) == 1 and 0 not in sizes:
        sizes[sizes.index(-1)] = max(1, devices // -int(np.prod(sizes)))
    if min(sizes) < 1 or int(np.prod(sizes)) != devices:
        raise ValueError(
            f'mesh.data={data} × mesh.fsdp={fsdp} × mesh.tensor={tensor} must multiply to the {devices} '
            'devices present; choose sizes that do (one of them may be -1, for all devices that are left)'
        )
    return tuple(sizes)


def on_device(arrays: Any) -> Any:
    """Returns the arrays in the devices' own memory; arrays already there are not copied."""

    def one(x):
        return jax.device_put(x, x.sharding.with_memory_kind('device')) if isinstance(x, jax.Array) else x

    return jax.tree.map(one, arrays)


def with_sharding(shapes: Any, sharding: Any) -> Any:
    """Returns the shapes, each with its sharding."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, sharding)


# XLA options beyond the defaults, by platform. TPU: weights are gathered while the product before them runs;
# without this, v5p chips wait twice as long for each other (docs/reference/performance.md).
COMPILER_OPTIONS: dict[str, dict[str, bool]] = {
    'tpu': {
        'xla_enable_async_all_gather': True,
        'xla_tpu_enable_async_collective_fusion': True,
        'xla_tpu_enable_async_collective_fusion_fuse_all_gather': True,
    },
}


def compiled_for(mesh: Mesh, function: Callable, **options: Any) -> Callable:
    """Returns `function` under `jax.jit` for the devices of `mesh`; `options` are passed to jit."""
    return jax.jit(function, compiler_options=COMPILER_OPTIONS.get(mesh.devices.flat[0].platform), **options)


ROWS = ('data', 'fsdp')  # the mesh axes that split rows, or the latter their tokens


def row_spec(leading_axes: int = 0, tokens: bool = False) -> PartitionSpec:
    """Returns how rows are split: over 'data' and 'fsdp' or, with `tokens`, theirs over the latter.

    `leading_axes` axes before rows are not split.
    """
    return PartitionSpec(*[None] * leading_axes, *(ROWS if tokens else [ROWS]))


def row_sharding(mesh: Mesh, leading_axes: int = 0, tokens: bool = False) -> NamedSharding:
    """Returns a sharding of rows; arguments are as for `row_spec`."""
    return NamedSharding(mesh, row_spec(leading_axes, tokens))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def per_device(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """Returns `function` applied on each device to its shards of the arguments, split by `in_specs`.

    Its results are shards too, split by `out_specs`. A shard that is not split over an axis must be equal on
    all devices of that axis.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def spread(arrays: Any, sharding: NamedSharding) -> Any:
    """Places a tree of host 0's NumPy arrays on the mesh of all hosts; each device holds its shard.

    Each device contributes an array to a sum: one device of host 0 the array itself, all others zeros.
    """
    if jax.process_count() == 1:
        return jax.device_put(arrays, sharding)
    mesh = sharding.mesh
    one_each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))  # whatever the order of the hosts' devices
    first = next(i for i, device in enumerate(mesh.devices.flat) if device.process_index == 0)

    def one(x: np.ndarray) -> jax.Array:
        zeros = np.zeros_like(x)
        parts = jax.make_array_from_callback(
            (mesh.size, *x.shape), one_each, lambda index: (x if index[0].start == first else zeros)[None]
        )
        return _sum_over_devices(parts, sharding=sharding)

    return jax.tree.map(one, arrays)


@functools.partial(jax.jit, static_argnames='sharding')
def _sum_over_devices(x: jax.Array, *, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x.sum(axis=0, dtype=x.dtype), sharding)


def fetch(array: jax.Array | np.ndarray) -> np.ndarray:
    """Returns the whole array on every host. If it is spread over hosts, each of them must call this."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)
