"""The mesh, the sharding rules (which mesh axis splits which dimension of a parameter), and placing arrays on the mesh.

Mesh axes: 'data' (whole copies), 'fsdp' (parameters and rows split), 'tensor' (heads, MLP and vocabulary split).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from bapo_jax.models.parameters import PARAMETERS, VISION_PARAMETERS

CONTAINER = Path('/sys/fs/cgroup')  # where Linux says what a container may take
MESH_AXES = ('data', 'fsdp', 'tensor')


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Logical axis of the parameter table -> mesh axis (None: not split)."""

    layers: str | None = None
    embed: str | None = 'fsdp'
    heads: str | None = 'tensor'
    mlp: str | None = 'tensor'
    vocab: str | None = 'tensor'


_AXES = {parameter.path: parameter.axes for parameter in PARAMETERS + VISION_PARAMETERS}


# The packages by which JAX reaches an accelerator. Where one is installed, the CPU is computed on only if somebody asks for it.
PLUGINS = {'gpu': ('jax-cuda13-plugin', 'jax-cuda12-plugin'), 'tpu': ('libtpu',)}
_LOOK = 'see what JAX says above; on NVIDIA also `nvidia-smi`: CUDA 13 needs driver 580 or newer, CUDA 12 needs 525'
POOL, _EARLIER_POOL = 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'  # the share of a GPU that JAX takes when it starts


def present(platform: str = '') -> list[jax.Device]:
    """The devices that JAX computes on, those of all hosts.

    Raises ValueError if they are not of `platform` ('cpu', 'gpu', 'tpu'; '': any), if there are none of those that JAX_PLATFORMS names,
    or if JAX has fallen back on the CPU: it is installed for an accelerator, found none, and nobody asked for the CPU.
    """
    asked = jax.config.jax_platforms or ''
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as e:  # a platform that fails to start; one that JAX does not know
        said = str(e).splitlines()[0] if str(e) else 'no such device'
        raise ValueError(f'JAX_PLATFORMS={asked}: JAX cannot start it ({said}); {_LOOK}') from e
    found = devices[0].platform
    installed = [package for packages in PLUGINS.values() for package in packages if _folder_of(package)]
    fallen_back = found == 'cpu' and installed and platform != 'cpu' and 'cpu' not in asked.split(',')
    if fallen_back:
        of_environment = filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))
        if named := [folder for folder in of_environment if Path(folder).resolve() == _folder_of(installed[0])]:
            raise ValueError(f'PYTHONPATH names {named[0]}, so JAX finds {installed[0]} there, and no such device. Such a folder is for '
                             '--dry_run with --topology alone: take it out of PYTHONPATH')  # fmt: skip
    if platform and found != platform:
        raise ValueError(f'mesh.platform={platform}, but JAX computes on the {found}; {_LOOK}, or change mesh.platform. '
                         f'To evaluate or sample elsewhere, set JAX_PLATFORMS={found}')  # fmt: skip
    if fallen_back:
        raise ValueError(f'{installed[0]} is installed, but JAX found no such device and fell back on the CPU; {_LOOK}. '
                         'If the CPU is meant, set JAX_PLATFORMS=cpu')  # fmt: skip
    return devices


def _folder_of(package: str) -> Path | None:
    """Where an installed package lies; None if it is not installed."""
    try:
        return Path(importlib.metadata.distribution(package).locate_file('')).resolve()
    except importlib.metadata.PackageNotFoundError:
        return None


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of data × fsdp × tensor devices, by default those `present`, laid out by their interconnect: by JAX's mesh_utils.

    On a TPU slice each axis follows the slice's own. Several slices (TPU slices, GPU hosts) are crossed by the outermost axes that
    can be: 'data' where the sizes allow, so that 'fsdp' and 'tensor' stay within one. A host's devices need not be neighbours.

    Sizes and errors as `mesh_sizes`; errors of `present`, too.
    """
    devices = sorted(present() if devices is None else devices, key=lambda device: (device.process_index, device.id))
    sizes = mesh_sizes(data, fsdp, tensor, len(devices), gpu_hosts(devices))
    slices = len({getattr(device, 'slice_index', 0) for device in devices})
    if slices == 1:
        laid_out = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        across = sizes_across(sizes, slices)
        within = tuple(size // n for size, n in zip(sizes, across, strict=True))
        laid_out = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    return Mesh(laid_out, MESH_AXES)


def sizes_across(sizes: Sequence[int], slices: int) -> tuple[int, ...]:
    """Of each mesh axis, how many slices it crosses: as many as can be the first axis, then the next. They multiply to `slices`.

    The product of `sizes` is a multiple of `slices`.
    """
    across = []
    for size in sizes:
        across.append(math.gcd(size, slices))
        slices //= across[-1]
    return tuple(across)


def gpu_hosts(devices: Sequence[jax.Device]) -> int:
    """Hosts of these GPUs, between which the links are slow; 1 for other devices."""
    return len({device.process_index for device in devices}) if devices[0].platform == 'gpu' else 1


def mesh_sizes(data: int, fsdp: int, tensor: int, devices: int, hosts: int = 1) -> tuple[int, int, int]:
    """The mesh's sizes on that many devices; one size may be -1, for all devices that are left.

    `data` = 0 is a copy for each of the `hosts` of GPUs, so that `fsdp` gathers weights within a host; or all that a stated `fsdp` leaves.

    Raises ValueError if the sizes do not multiply to the number of devices.
    """
    if data == 0:
        data = hosts if fsdp == -1 else max(1, devices // max(1, fsdp * tensor))
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) == 1 and 0 not in sizes:
        sizes[sizes.index(-1)] = max(1, devices // -int(np.prod(sizes)))
    if min(sizes) < 1 or int(np.prod(sizes)) != devices:
        raise ValueError(
            f'mesh.data={data} × mesh.fsdp={fsdp} × mesh.tensor={tensor} must multiply to the {devices} devices present; '
            'one of them may be -1, for all devices that are left'
        )
    return tuple(sizes)


def pool_share() -> float:
    """The share of a GPU's memory that JAX takes when it starts, by the environment.

    Raises ValueError if it names none, or two: JAX, too, takes the newer name or the earlier one.
    """
    said = {name: os.environ[name] for name in (POOL, _EARLIER_POOL) if os.environ.get(name)}
    if len(said) > 1:
        raise ValueError(f'{POOL} and {_EARLIER_POOL} are set, and JAX takes one; unset the second, which is the earlier name')
    name, value = next(iter(said.items()), (POOL, '0.75'))
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f'{name}={value}: give a share in (0, 1], such as .93')
    return share


def check_shares(server_memory: float) -> None:
    """Raises ValueError if JAX's share of a GPU and that of a server on the same one make more than a whole."""
    if (share := pool_share()) + server_memory > 1:
        raise ValueError(
            f'JAX takes {share:.0%} of a GPU, by {POOL}, and a server on it would take rollout.server_memory={server_memory:g}: '
            'more than there is; lower one of them (docs/vllm.md)'
        )


def device_memory(devices: Sequence[jax.Device]) -> int | None:
    """Bytes of memory that each of these has; None where it does not say. CPU devices share the machine's, or the container's."""
    if devices[0].platform == 'cpu':
        return min([os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'), *_limits_of_containers()]) // len(devices)
    return (devices[0].memory_stats() or {}).get('bytes_limit')


def capability(mesh: Mesh | AbstractMesh) -> tuple[int, int] | None:
    """The compute capability of a mesh's CUDA cards; None for other devices, and for cards that nothing describes."""
    said = getattr(mesh.devices.flat[0], 'compute_capability', '') if isinstance(mesh, Mesh) else ''
    major, _, minor = said.partition('.')
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _limits_of_containers() -> Iterator[int]:
    """Bytes that this process may take, where a container limits it: by the interface of now and by the one before."""
    for name in ('memory.max', 'memory/memory.limit_in_bytes'):
        with contextlib.suppress(OSError, ValueError):  # no such file, or 'max'
            yield int((CONTAINER / name).read_text('ascii'))


SMALL_POLICY = 10**7  # parameters; matrix products as small as such a policy's gain nothing from XLA's own threads


def describe_devices(params: Any) -> str:
    """'1 NVIDIA H200', '2 cpu', …; adds a hint where one CPU device stands for many cores, and a small policy trains."""
    devices, cores, size = jax.devices(), os.cpu_count(), sum(x.size for x in jax.tree.leaves(params))
    text = f'{len(devices)} {devices[0].device_kind}'
    if devices[0].platform == 'cpu' and len(devices) == 1 and cores > 1 and size < SMALL_POLICY:
        text += ' (a policy as small as this is faster with a device for each core: JAX_NUM_CPU_DEVICES=2 or more in the environment)'
    return text


def parameter_sharding(mesh: Mesh, params: Any, rules: ShardingRules = ShardingRules()) -> Any:
    """A NamedSharding for every leaf of `params` (arrays or shapes), by the parameter table's axes.

    Raises ValueError, naming the parameter, where two of its dimensions share a mesh axis, or a mesh axis does not divide the
    dimension it splits.
    """

    def one(path, leaf):
        names = tuple(key.key for key in path)
        axes = tuple(getattr(rules, axis) if axis else None for axis in _AXES[names])
        for i, (size, axis) in enumerate(zip(leaf.shape, axes, strict=True)):
            if axis and axis in axes[:i]:
                raise ValueError(
                    f'the sharding rules split two dimensions of {".".join(names)} {leaf.shape}, {_AXES[names]}, over mesh.{axis}; '
                    'give each a mesh axis of its own'
                )
            if axis and size % mesh.shape[axis]:
                raise ValueError(
                    f'mesh.{axis}={mesh.shape[axis]} does not divide {size}, a dimension of {".".join(names)} {leaf.shape}; '
                    f'choose a mesh.{axis} that does'
                )
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(one, params)


def parameter_specs(mesh: Mesh, params: Any) -> Any:
    """The PartitionSpec of every leaf of `params`; raises as `parameter_sharding` does."""
    return jax.tree.map(lambda sharding: sharding.spec, parameter_sharding(mesh, params))


def on_device(arrays: Any) -> Any:
    """The arrays in the devices' own memory; those that are there already are not copied."""

    def one(x):
        return jax.device_put(x, x.sharding.with_memory_kind('device')) if isinstance(x, jax.Array) else x

    return jax.tree.map(one, arrays)


def with_sharding(shapes: Any, sharding: Any) -> Any:
    """The shapes, each with where it lives."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, sharding)


# What XLA is asked for beyond its defaults, by platform. TPU: weights are gathered while the product before them runs; without it v5p
# chips wait twice as long for each other (docs/performance.md).
COMPILER_OPTIONS: dict[str, dict[str, bool]] = {
    'tpu': {
        'xla_enable_async_all_gather': True,
        'xla_tpu_enable_async_collective_fusion': True,
        'xla_tpu_enable_async_collective_fusion_fuse_all_gather': True,
    },
}


def compiled_for(mesh: Mesh, function: Callable, **options: Any) -> Callable:
    """`jax.jit` for the devices of `mesh`; `options` are jit's."""
    return jax.jit(function, compiler_options=COMPILER_OPTIONS.get(mesh.devices.flat[0].platform), **options)


def keep_programs() -> None:
    """Keeps compiled programs between processes in ~/.cache/bapo_jax, or in JAX_COMPILATION_CACHE_DIR.

    On accelerators alone, where a step compiles for minutes: XLA warns of every program that it reads again on a CPU.
    """
    if jax.default_backend() != 'cpu' and not jax.config.jax_compilation_cache_dir:
        jax.config.update('jax_compilation_cache_dir', str(Path.home() / '.cache' / 'bapo_jax'))


ROWS = ('data', 'fsdp')  # the mesh axes that split rows


def row_sharding(mesh: Mesh, leading_axes: int = 0) -> NamedSharding:
    """Splits rows over 'data' and 'fsdp'; the `leading_axes` axes before the rows are not split."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading_axes, ROWS))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def per_device(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`function` of each device's own parts of its arguments, split by `in_specs`; what it gives are parts, split by `out_specs`.

    A part that is not split over an axis must be equal on that axis's devices.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def spread(arrays: Any, sharding: NamedSharding) -> Any:
    """Places a tree of host 0's numpy arrays on the mesh of all hosts, each device holding its part.

    Every device contributes an array to a sum: one device of host 0 the array itself, all others zeros.
    """
    if jax.process_count() == 1:
        return jax.device_put(arrays, sharding)
    mesh = sharding.mesh
    one_each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))  # in whatever order the hosts' devices are
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
    """Returns the whole array on every host. An array spread over hosts needs a call from each of them."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)
