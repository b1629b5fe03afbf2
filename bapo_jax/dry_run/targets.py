"""The devices of a dry run: those present, an absent TPU slice, or absent GPUs.

Absent TPUs and GPUs are compiled for with their real compilers.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from bapo_jax.cluster.devices import POOL, check_shares, device_memory, gpu_hosts, pool_share, present
from bapo_jax.cluster.mesh import MESH_AXES, make_mesh, mesh_sizes
from bapo_jax.learner.speed import TERAFLOPS
from bapo_jax.rollout.vllm.gpus import named

GB = 10**9
# Usable HBM per device in GiB, by JAX's device_kind: the limit in the compiler's error for a huge program.
TPU_GIB = {'TPU v4': 30.75, 'TPU v5 lite': 15.75, 'TPU v5': 95.74, 'TPU v6 lite': 31.25}
MOST_OF_CARD = 0.93  # largest share of a GPU's memory for JAX: CUDA and its libraries need the rest
_ANY = re.compile(r'([1-9]\d*)x(\d+)GB')  # GPUs of any kind


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU's figures from NVIDIA's data sheets and from CUDA; XLA's compiler plans with them."""

    gib: float  # memory as CUDA reports it
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    lanes: int  # float32 lanes per core
    shared_kib: int  # shared memory per core; a block may have one KiB less
    l2_mib: int
    gb_per_s: float  # memory bandwidth
    ghz: float
    link_gb_per_s: float  # bandwidth to another card of the host, one way
    kind: str  # JAX's device_kind

    @property
    def teraflops(self) -> float:
        """The peak for dense bfloat16 products."""
        return TERAFLOPS[self.kind]


CARDS = {
    'A100-40GB': Card(39.4, (8, 0), 108, 64, 164, 40, 1555, 1.41, 300, 'NVIDIA A100-SXM4-40GB'),
    'A100-80GB': Card(79.1, (8, 0), 108, 64, 164, 40, 2039, 1.41, 300, 'NVIDIA A100-SXM4-80GB'),
    'L40S': Card(44.4, (8, 9), 142, 128, 100, 96, 864, 2.52, 32, 'NVIDIA L40S'),
    'RTX4090': Card(23.5, (8, 9), 128, 128, 100, 72, 1008, 2.52, 32, 'NVIDIA GeForce RTX 4090'),
    'H100': Card(79.1, (9, 0), 132, 128, 228, 50, 3352, 1.98, 450, 'NVIDIA H100 80GB HBM3'),
    'H200': Card(139.8, (9, 0), 132, 128, 228, 50, 4800, 1.98, 450, 'NVIDIA H200'),
    'B200': Card(178.3, (10, 0), 148, 128, 228, 126, 8000, 1.965, 900, 'NVIDIA B200'),
}
_CARD_OF_KIND = {card.kind: card for card in CARDS.values()}
# Cards that JAX knows by another name. Since 0.12 it looks up the capability of an absent card by name.
_KINDS = {'L40S': 'L40', 'RTX4090': 'GeForce RTX 4090'}
_GPUS = re.compile(rf'(?:([1-9]\d*)x)?([1-9]\d*)x({"|".join(CARDS)})')


def for_absent_devices() -> None:
    """Keeps JAX from looking for devices here. Call this before JAX starts."""
    jax.config.update('jax_platforms', 'cpu')


class Target(NamedTuple):
    """The devices that the run would train on."""

    name: str  # shown to the user: '8 TPU v5 lite'
    platform: str  # 'cpu', 'gpu', 'tpu'
    mesh: Mesh | AbstractMesh  # abstract if there is no compiler for the devices
    device_bytes: int | None  # memory per device that JAX may use; None if unknown
    most: int | None = None  # for GPUs: bytes per device that JAX could use with a larger share
    card: Card | None = None  # for GPUs whose figures are known
    hosts: int = 1
    note: str = ''  # explains device_bytes
    servers: str = ''  # for absent GPUs: where the rollout servers run, in words


def find_target(topology: str, config: ConfigDict, compiles: bool = True) -> Target:
    """Returns the devices that `topology` names.

    '' means the devices present; '4xH100', '2x8xH200' (two hosts) and '8x80GB' are GPUs; 'v5e:2x4' is a TPU
    slice. The GPUs in rollout.gpus are not the trainer's. Without `compiles`, the mesh of GPUs is abstract.
    Raises ValueError if the topology is unknown or does not suit the config.
    """
    mesh = config.mesh
    absent = topology and ('gpu' if _ANY.fullmatch(topology) or _GPUS.fullmatch(topology) else 'tpu')
    if absent and mesh.platform not in ('', absent):
        raise ValueError(
            f'mesh.platform={mesh.platform}, but --topology={topology} names {absent.upper()}s; change one '
            'of them'
        )
    if wanted := _ANY.fullmatch(topology):
        count, servers = _of_the_trainer(1, int(wanted[1]), config)
        size = int(wanted[2]) * GB
        more = {'most': _most(size, config), 'note': _note(size), 'servers': servers}
        return _formula(f'{count} GPUs of {wanted[2]} GB', count, mesh, int(size * pool_share()), **more)
    if wanted := _GPUS.fullmatch(topology):
        return _gpus(int(wanted[1] or 1), int(wanted[2]), wanted[3], config, compiles)
    devices = tpu_devices(topology) if topology else present(mesh.platform)
    platform, kind = devices[0].platform, devices[0].device_kind
    name, more = f'{len(devices)} {kind}', {}
    if topology:
        device_bytes = int(TPU_GIB[kind] * 2**30) if kind in TPU_GIB else None
    else:
        device_bytes = device_memory(devices)
    if platform == 'gpu':
        more = {'card': _CARD_OF_KIND.get(kind), 'hosts': gpu_hosts(devices)}
        more['most'] = device_bytes and _most(device_bytes / pool_share(), config)
        if not compiles:
            return _formula(name, len(devices), mesh, device_bytes, **more)
    return Target(name, platform, make_mesh(mesh.data, mesh.fsdp, mesh.tensor, devices), device_bytes, **more)


def _formula(name: str, count: int, mesh: ConfigDict, device_bytes: int, **more: object) -> Target:
    """The target for GPUs without their compiler."""
    sizes = mesh_sizes(mesh.data, mesh.fsdp, mesh.tensor, count, more.get('hosts', 1))
    return Target(name, 'gpu', AbstractMesh(sizes, MESH_AXES), device_bytes, **more)


def _most(whole: float, config: ConfigDict) -> int:
    """Most bytes that JAX can use of a GPU with `whole` bytes.

    That is nearly all, or what a server on the same GPU leaves with a tenth kept free.
    """
    r = config.rollout
    beside = r.server.memory if not r.gpus else 0  # with rollout.gpus, servers use other GPUs
    return int(whole * (max(pool_share(), 0.9 - beside) if beside else MOST_OF_CARD))


def _note(whole: float) -> str:
    return f'{POOL} gives JAX {pool_share():.0%} of the {whole / GB:.1f} GB of a card'


def _of_the_trainer(hosts: int, count: int, config: ConfigDict) -> tuple[int, str]:
    """How many of a host's `count` GPUs the trainer uses, and where the servers run, in words.

    The in-process engine runs on the trainer's GPUs, and so do servers that have a share of the memory.
    Raises ValueError if no GPU is left for the trainer, or rollout.gpus names one that is not there.
    """
    r = config.rollout
    if r.engine != 'vllm' or r.servers:
        return count, ''
    if r.server.memory:
        if not r.gpus:  # else they may be on other GPUs
            check_shares(r.server.memory)
        return count, f"on the trainer's GPUs, each with rollout.server.memory={r.server.memory:g} of a GPU"
    servers = [gpu for word in r.gpus for gpu in named(word)]
    if not servers:
        return (
            count,
            f'none: the trainer uses all {hosts * count} GPUs; give vLLM others with rollout.gpus or '
            'rollout.servers',
        )
    if hosts > 1 or len(servers) >= count:
        raise ValueError(
            f'rollout.gpus={tuple(r.gpus)} must leave the trainer a GPU of --topology, which must be one '
            'host; name fewer GPUs in rollout.gpus, give a --topology with more, or set rollout.servers'
        )
    if beyond := [gpu for gpu in servers if gpu.isdigit() and int(gpu) >= count]:
        raise ValueError(
            f'rollout.gpus={tuple(r.gpus)} names GPU {beyond[0]}, but --topology has GPUs 0 to {count - 1}; '
            'choose from those'
        )
    return count - len(servers), f'{len(r.gpus)}, on {len(servers)} other GPUs of this machine'


def _gpus(hosts: int, count: int, name: str, config: ConfigDict, compiles: bool) -> Target:
    """The target for `count` cards on each of `hosts` hosts, with XLA's compiler if it is installed."""
    card, mesh = CARDS[name], config.mesh
    whole = card.gib * 2**30
    count, servers = _of_the_trainer(hosts, count, config)
    title = f'{hosts} × {count} {name}' if hosts > 1 else f'{count} {name}'
    more = {
        'most': _most(whole, config), 'card': card, 'hosts': hosts, 'servers': servers, 'note': _note(whole),
    }  # fmt: skip
    device_bytes = int(pool_share() * whole)
    if not compiles or importlib.util.find_spec('jax_cuda13_plugin') is None:
        return _formula(title, hosts * count, mesh, device_bytes, **more)
    from jax.experimental import topologies  # only a dry run for absent devices needs it

    described = topologies.get_topology_desc(
        platform='cuda',
        topology_name=name,
        topology=f'{hosts}x1x{count}',
        target_config=as_xla_reads_it(name, card),
    )
    on_cards = make_mesh(mesh.data, mesh.fsdp, mesh.tensor, described.devices)
    return Target(title, 'gpu', on_cards, device_bytes, **more)


def as_xla_reads_it(name: str, card: Card) -> str:
    """XLA's description of a GPU: a GpuTargetConfigProto in text format."""
    major, minor = card.capability
    # Kernels for Hopper and later may use features that only those cards have (wgmma, TMA).
    features = 'feature_extension: ACCELERATED_FEATURES' if major >= 9 else ''
    return (
        'gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: '
        f'{1536 if (major, minor) == (8, 9) else 2048} block_dim_limit_x: 2147483647 block_dim_limit_y: '
        '65535 block_dim_limit_z: 65535 registers_per_core_limit: 65536 registers_per_block_limit: 65536 '
        f'shared_memory_per_block: 49152 shared_memory_per_core: {card.shared_kib * 1024} '
        f'shared_memory_per_block_optin: {(card.shared_kib - 1) * 1024} core_count: {card.cores} '
        f'fpus_per_core: {card.lanes} memory_bandwidth: {int(card.gb_per_s * GB)} l2_cache_size: '
        f'{card.l2_mib * 2**20} clock_rate_ghz: {card.ghz} device_memory_size: {int(card.gib * 2**30)} '
        f'cuda_compute_capability {{ major: {major} minor: {minor} {features} }} }} platform_name: "CUDA" '
        f'dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "NVIDIA {_KINDS.get(name, name)}"'
    )


def tpu_devices(topology: str) -> list[jax.Device]:
    """The devices of an absent TPU slice.

    Raises ValueError if the TPU compiler is missing or does not know the slice.
    """
    if not re.fullmatch(r'[a-z0-9]+:\d+(x\d+)+', topology):
        raise ValueError(
            f"--topology={topology!r}: give a TPU slice such as 'v5e:2x4'; or GPUs, such as '4xH100', "
            "'2x8xH200' for two hosts (of "
            f"{', '.join(CARDS)}) or '8x80GB' for any; or nothing for the devices here"
        )
    if importlib.util.find_spec('libtpu') is None:
        raise ValueError(
            f'--topology={topology!r}: the TPU compiler is missing; run `make tpu-compiler` and set '
            'PYTHONPATH=.tpu-compiler, or '
            "pip install 'bapo_jax[tpu-compiler]'. No TPU is needed"
        )
    from jax.experimental import topologies  # only a dry run for an absent slice needs it

    # libtpu uses no chip here: it need not ask the network for its slice, and others may compile too.
    os.environ |= {
        'TPU_SKIP_MDS_QUERY': '1',
        'TPU_WORKER_HOSTNAMES': 'localhost',
        'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    }
    # libtpu describes a v4 chip as two devices, but a real one is one device.
    chip = {'chip_config_name': 'megacore'} if topology.startswith('v4:') else {}
    if set(topology.split(':')[1].split('x')) == {'1'}:
        chip['chips_per_host_bounds'] = (1, 1, 1)  # it assumes hosts of four chips
    try:
        return list(topologies.get_topology_desc(platform='tpu', topology_name=topology, **chip).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError) as e:
        raise ValueError(f'--topology={topology!r}: {e}; give a slice that the TPU compiler knows') from e
