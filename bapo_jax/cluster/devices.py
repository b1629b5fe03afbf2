"""The devices that JAX computes on: which are present, their memory, JAX's share of it, and their names."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, Mesh

CONTAINER = Path('/sys/fs/cgroup')  # where Linux states the limits of a container
# The packages through which JAX reaches an accelerator. If one is installed, the CPU is used only on request.
PLUGINS = {'gpu': ('jax-cuda13-plugin', 'jax-cuda12-plugin'), 'tpu': ('libtpu',)}
_LOOK = (
    "see JAX's messages above; on NVIDIA also run `nvidia-smi`: "
    'CUDA 13 needs driver 580 or newer, CUDA 12 needs 525'
)
# The share of a GPU's memory that JAX takes when it starts.
POOL, _EARLIER_POOL = 'XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION'


def present(platform: str = '') -> list[jax.Device]:
    """Returns the devices that JAX computes on, those of all hosts.

    Raises ValueError if they are not of `platform` ('cpu', 'gpu', 'tpu'; '': any), or if JAX cannot start the
    platform that JAX_PLATFORMS names. Also raises it if JAX fell back on the CPU: it is installed for an
    accelerator but found no such device, and the CPU was not requested.
    """
    asked = jax.config.jax_platforms or ''
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as e:  # a platform that fails to start, or is unknown to JAX
        said = str(e).splitlines()[0] if str(e) else 'no such device'
        raise ValueError(f'JAX_PLATFORMS={asked}: JAX cannot start this platform ({said}); {_LOOK}') from e
    found = devices[0].platform
    installed = [package for packages in PLUGINS.values() for package in packages if _folder_of(package)]
    fallen_back = found == 'cpu' and installed and platform != 'cpu' and 'cpu' not in asked.split(',')
    if fallen_back:
        of_environment = filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))
        if named := [
            folder for folder in of_environment if Path(folder).resolve() == _folder_of(installed[0])
        ]:
            raise ValueError(
                f'PYTHONPATH names {named[0]}, where JAX finds {installed[0]}, but there is no such device. '
                'That folder is only for --dry_run with --topology; remove it from PYTHONPATH'
            )
    if platform and found != platform:
        raise ValueError(
            f'mesh.platform={platform}, but JAX computes on the {found}; {_LOOK}, or change mesh.platform. '
            f'To evaluate or sample on the {found}, set JAX_PLATFORMS={found}'
        )
    if fallen_back:
        raise ValueError(
            f'{installed[0]} is installed, but JAX found no such device and fell back on the CPU; {_LOOK}. '
            'To use the CPU, set JAX_PLATFORMS=cpu'
        )
    return devices


def _folder_of(package: str) -> Path | None:
    """Returns the folder of an installed package; None if it is not installed."""
    try:
        return Path(importlib.metadata.distribution(package).locate_file('')).resolve()
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_hosts(devices: Sequence[jax.Device]) -> int:
    """Returns the number of hosts of these GPUs, between which links are slow; 1 for other devices."""
    return len({device.process_index for device in devices}) if devices[0].platform == 'gpu' else 1


def pool_share() -> float:
    """Returns the share of a GPU's memory that JAX takes when it starts, from the environment.

    Raises ValueError if the value is not in (0, 1], or if both variables are set: JAX uses only one of them.
    """
    said = {name: os.environ[name] for name in (POOL, _EARLIER_POOL) if os.environ.get(name)}
    if len(said) > 1:
        raise ValueError(
            f'{POOL} and {_EARLIER_POOL} are both set, but JAX uses only one; unset the second, the older '
            'name'
        )
    name, value = next(iter(said.items()), (POOL, '0.75'))
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f'{name}={value}: give a fraction above 0 and at most 1, such as .93')
    return share


def check_shares(server_memory: float) -> None:
    """Raises ValueError if the shares of JAX and of a server on the same GPU add up to more than 1."""
    if (share := pool_share()) + server_memory > 1:
        raise ValueError(
            f'JAX takes {share:.0%} of the memory of a GPU ({POOL}), and a server on it would take a '
            f'fraction of rollout.server.memory={server_memory:g}, together more than all of it; lower one '
            'of them (docs/vllm.md)'
        )


def device_memory(devices: Sequence[jax.Device]) -> int | None:
    """Returns the bytes of memory of each device; None if it does not say.

    CPU devices share the memory of the machine or the container.
    """
    if devices[0].platform == 'cpu':
        return min(
            [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'), *_limits_of_containers()]
        ) // len(devices)
    return (devices[0].memory_stats() or {}).get('bytes_limit')


def capability(mesh: Mesh | AbstractMesh) -> tuple[int, int] | None:
    """Returns the compute capability of a mesh's CUDA cards; None for other devices and undescribed cards."""
    said = getattr(mesh.devices.flat[0], 'compute_capability', '') if isinstance(mesh, Mesh) else ''
    major, _, minor = said.partition('.')
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def usable_cores() -> int:
    """Returns the number of cores that this process may use, by its affinity and the container's quota."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas_of_containers()]))


def _quotas_of_containers() -> Iterator[int]:
    """Yields the container's quotas in whole cores, if any: by the current interface and the earlier one."""
    for names in (('cpu.max',), ('cpu/cpu.cfs_quota_us', 'cpu/cpu.cfs_period_us')):
        with contextlib.suppress(OSError, ValueError):  # no such file, or 'max'
            quota, period = ' '.join((CONTAINER / name).read_text('ascii') for name in names).split()
            if int(quota) > 0:  # -1: no limit
                yield int(quota) // int(period)


def _limits_of_containers() -> Iterator[int]:
    """Yields the container's memory limits in bytes, if any: by the current interface and the earlier one."""
    for name in ('memory.max', 'memory/memory.limit_in_bytes'):
        with contextlib.suppress(OSError, ValueError):  # no such file, or 'max'
            yield int((CONTAINER / name).read_text('ascii'))


# Parameters. The matrix products of a policy this small gain nothing from XLA's own threads.
SMALL_POLICY = 10**7
_DEVICE_COUNT = '--xla_force_host_platform_device_count'  # XLA's own flag for the number of CPU devices


def use_cores(parameters: int, rows: int, recorded: int = 0) -> None:
    """Gives a small policy a CPU device for each core, as far as they divide `rows`; else JAX has one.

    A run keeps the number that it `recorded` (0: none), since the last bits of results depend on it.
    `parameters` is the size of the policy; 0 if unknown, which counts as large. XLA's threads share the cores
    well for a large one, and each device would hold a copy of the training state.

    Call it before JAX starts; an accelerator takes no notice. It does nothing if the environment sets the
    number. Raises ValueError if JAX has started and has another number.
    """
    if 'JAX_NUM_CPU_DEVICES' in os.environ or _DEVICE_COUNT in os.environ.get('XLA_FLAGS', ''):
        return
    most = usable_cores() if 0 < parameters < SMALL_POLICY else 1
    here = max(n for n in range(1, most + 1) if rows % n == 0)
    devices = recorded if recorded and rows % recorded == 0 else here
    if devices != here:
        print(
            f'CPU devices: {devices}, as config.json records, so that results stay the same; this machine '
            f'would take {here}: set JAX_NUM_CPU_DEVICES={here} to change that',
            flush=True,
        )
    if devices > 1:
        try:
            jax.config.update('jax_num_cpu_devices', devices)
        except RuntimeError as e:
            raise ValueError(
                f'JAX has already started, so it cannot get {devices} CPU devices; call no function of JAX '
                f'in your config file or modules, or set JAX_NUM_CPU_DEVICES={devices}'
            ) from e


def describe_devices() -> str:
    """Returns the devices of all hosts: '1 NVIDIA H200', '2 cpu', …"""
    devices = jax.devices()
    return f'{len(devices)} {devices[0].device_kind}'


def keep_programs() -> None:
    """Caches compiled programs across processes in ~/.cache/bapo_jax, or in JAX_COMPILATION_CACHE_DIR.

    Only on accelerators, where a step compiles for minutes: on a CPU, XLA warns about every cached program.
    """
    if jax.default_backend() != 'cpu' and not jax.config.jax_compilation_cache_dir:
        jax.config.update('jax_compilation_cache_dir', str(Path.home() / '.cache' / 'bapo_jax'))
