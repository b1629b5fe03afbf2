"""The devices that a dry run is for: those present, an absent TPU slice, or absent GPUs. Both kinds have their real compiler."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from bapo_jax import parallel
from bapo_jax.learner.speed import TERAFLOPS
from bapo_jax.rollout.gpus import named

GB = 10**9
# Usable HBM of a device, GiB, by JAX's device_kind: the limit in the compiler's error for a far too large program.
TPU_GIB = {'TPU v4': 30.75, 'TPU v5 lite': 15.75, 'TPU v5': 95.74, 'TPU v6 lite': 31.25}
MOST = 0.93  # of a GPU's memory that JAX can be given: CUDA and its libraries need the rest
_ANY = re.compile(r'([1-9]\d*)x(\d+)GB')  # GPUs of no particular kind


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU's own figures, of NVIDIA's data sheets and of what CUDA reports; XLA's compiler plans by them."""

    gib: float  # memory that CUDA reports
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    lanes: int  # of float32, a core
    shared_kib: int  # shared memory of a core; a block may have one less
    l2_mib: int
    gb_per_s: float  # to its memory
    ghz: float
    link_gb_per_s: float  # to each other card of its host, one way
    kind: str  # JAX's device_kind

    @property
    def teraflops(self) -> float:
        """Of dense bfloat16 products."""
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
# Where JAX knows a card by another name. Since 0.12 it takes the capability of a card that is not there from its own list of names.
_KINDS = {'L40S': 'L40', 'RTX4090': 'GeForce RTX 4090'}
_GPUS = re.compile(rf'(?:([1-9]\d*)x)?([1-9]\d*)x({"|".join(CARDS)})')


def for_absent_devices() -> None:
    """Before JAX starts: it looks for no device here."""
    jax.config.update('jax_platforms', 'cpu')


class Target(NamedTuple):
    """The devices that would train."""

    name: str  # shown to the user: '8 TPU v5 lite'
    platform: str  # 'cpu', 'gpu', 'tpu'
    mesh: Mesh | AbstractMesh  # abstract where no compiler for the devices exists
    device_bytes: int | None  # of memory a device that JAX may use; None: unknown
    most: int | None = None  # of GPUs: bytes a device that JAX could use, by another share of it
    card: Card | None = None  # of GPUs whose figures are known
    hosts: int = 1
    note: str = ''  # on device_bytes
    servers: str = ''  # where absent GPUs have them, in words


def find_target(topology: str, config: ConfigDict, compiles: bool = True) -> Target:
    """`topology` is '' for the devices present, '4xH100', '2x8xH200' (two hosts) or '8x80GB' for GPUs, or a TPU slice ('v5e:2x4').

    GPUs of rollout.gpus are not the trainer's. Without `compiles` the mesh of GPUs is abstract. Raises ValueError.
    """
    mesh = config.mesh
    absent = topology and ('gpu' if _ANY.fullmatch(topology) or _GPUS.fullmatch(topology) else 'tpu')
    if absent and mesh.platform not in ('', absent):
        raise ValueError(f'mesh.platform={mesh.platform}, but --topology={topology} is of {absent.upper()}s; change one of them')
    if wanted := _ANY.fullmatch(topology):
        count, servers = _of_the_trainer(1, int(wanted[1]), config)
        size = int(wanted[2]) * GB
        more = {'most': _most(size, config), 'note': _note(size), 'servers': servers}
        return _formula(f'{count} GPUs of {wanted[2]} GB', count, mesh, int(size * parallel.pool_share()), **more)
    if wanted := _GPUS.fullmatch(topology):
        return _gpus(int(wanted[1] or 1), int(wanted[2]), wanted[3], config, compiles)
    devices = tpu_devices(topology) if topology else parallel.present(mesh.platform)
    platform, kind = devices[0].platform, devices[0].device_kind
    name, more = f'{len(devices)} {kind}', {}
    if topology:
        device_bytes = int(TPU_GIB[kind] * 2**30) if kind in TPU_GIB else None
    else:
        device_bytes = parallel.device_memory(devices)
    if platform == 'gpu':
        more = {'card': _CARD_OF_KIND.get(kind), 'hosts': parallel.gpu_hosts(devices)}
        more['most'] = device_bytes and _most(device_bytes / parallel.pool_share(), config)
        if not compiles:
            return _formula(name, len(devices), mesh, device_bytes, **more)
    return Target(name, platform, parallel.make_mesh(mesh.data, mesh.fsdp, mesh.tensor, devices), device_bytes, **more)


def _formula(name: str, count: int, mesh: ConfigDict, device_bytes: int, **more: object) -> Target:
    """GPUs without their compiler."""
    sizes = parallel.mesh_sizes(mesh.data, mesh.fsdp, mesh.tensor, count, more.get('hosts', 1))
    return Target(name, 'gpu', AbstractMesh(sizes, parallel.MESH_AXES), device_bytes, **more)


def _most(whole: float, config: ConfigDict) -> int:
    """Bytes that JAX can be given of a GPU of `whole` bytes: nearly all, or what a server on it leaves with a tenth free."""
    r = config.rollout
    beside = r.server_memory if not r.gpus else 0  # with rollout.gpus a server is on others
    return int(whole * (max(parallel.pool_share(), 0.9 - beside) if beside else MOST))


def _note(whole: float) -> str:
    return f'JAX takes {parallel.pool_share():.0%} of the {whole / GB:.1f} GB of a card, by {parallel.POOL}'


def _of_the_trainer(hosts: int, count: int, config: ConfigDict) -> tuple[int, str]:
    """How many of a host's `count` GPUs the trainer has, and in words where its servers are.

    The in-process engine is on the trainer's own, as are servers with a share of the memory. Raises ValueError if none is left.
    """
    r = config.rollout
    if r.engine != 'vllm' or r.servers:
        return count, ''
    if r.server_memory:
        if not r.gpus:  # else they may be others
            parallel.check_shares(r.server_memory)
        return count, f"one on the trainer's own, with rollout.server_memory={r.server_memory:g} of it"
    servers = [gpu for word in r.gpus for gpu in named(word)]
    if not servers:
        return count, f'none: the trainer has all {hosts * count} GPUs; give vLLM others, by rollout.gpus or rollout.servers'
    if hosts > 1 or len(servers) >= count:
        raise ValueError(
            f'rollout.gpus={tuple(r.gpus)} leaves the trainer no GPU of --topology; a topology of several hosts has trainers alone'
        )
    if beyond := [gpu for gpu in servers if gpu.isdigit() and int(gpu) >= count]:
        raise ValueError(f'rollout.gpus={tuple(r.gpus)} names GPU {beyond[0]}, and --topology has GPUs 0 to {count - 1}')
    return count - len(servers), f'{len(r.gpus)}, on {len(servers)} other GPUs of this machine'


def _gpus(hosts: int, count: int, name: str, config: ConfigDict, compiles: bool) -> Target:
    """`count` cards on each of so many hosts, with XLA's own compiler for them if it is installed."""
    card, mesh = CARDS[name], config.mesh
    whole = card.gib * 2**30
    count, servers = _of_the_trainer(hosts, count, config)
    title = f'{hosts} × {count} {name}' if hosts > 1 else f'{count} {name}'
    more = {
        'most': _most(whole, config), 'card': card, 'hosts': hosts, 'servers': servers, 'note': _note(whole),
    }  # fmt: skip
    device_bytes = int(parallel.pool_share() * whole)
    if not compiles or importlib.util.find_spec('jax_cuda13_plugin') is None:
        return _formula(title, hosts * count, mesh, device_bytes, **more)
    from jax.experimental import topologies  # imported here, since only a dry run for absent devices needs it

    described = topologies.get_topology_desc(
        platform='cuda', topology_name=name, topology=f'{hosts}x1x{count}', target_config=as_xla_reads_it(name, card)
    )
    on_cards = parallel.make_mesh(mesh.data, mesh.fsdp, mesh.tensor, described.devices)
    return Target(title, 'gpu', on_cards, device_bytes, **more)


def as_xla_reads_it(name: str, card: Card) -> str:
    """XLA's description of a GPU, a protobuf as text: GpuTargetConfigProto."""
    major, minor = card.capability
    # Kernels for Hopper and later may use what those cards alone have (wgmma, TMA).
    features = 'feature_extension: ACCELERATED_FEATURES' if major >= 9 else ''
    return (
        'gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: '
        f'{1536 if (major, minor) == (8, 9) else 2048} '
        'block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 '
        'registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152 '
        f'shared_memory_per_core: {card.shared_kib * 1024} shared_memory_per_block_optin: {(card.shared_kib - 1) * 1024} '
        f'core_count: {card.cores} fpus_per_core: {card.lanes} memory_bandwidth: {int(card.gb_per_s * GB)} '
        f'l2_cache_size: {card.l2_mib * 2**20} clock_rate_ghz: {card.ghz} device_memory_size: {int(card.gib * 2**30)} '
        f'cuda_compute_capability {{ major: {major} minor: {minor} {features} }} }} '
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "NVIDIA {_KINDS.get(name, name)}"'
    )


def tpu_devices(topology: str) -> list[jax.Device]:
    """The devices of an absent TPU slice. Raises ValueError where the TPU compiler is missing or does not know the slice."""
    if not re.fullmatch(r'[a-z0-9]+:\d+(x\d+)+', topology):
        raise ValueError(
            f"--topology={topology!r}: give a TPU slice such as 'v5e:2x4'; or GPUs, such as '4xH100', '2x8xH200' for two hosts (of "
            f"{', '.join(CARDS)}) or '8x80GB' for any; or nothing for the devices here"
        )
    if importlib.util.find_spec('libtpu') is None:
        raise ValueError(
            f"--topology={topology!r}: the TPU compiler is missing; run `make tpu-compiler` and set PYTHONPATH=.tpu-compiler, or "
            "pip install 'bapo_jax[tpu-compiler]'. No TPU is needed"
        )
    from jax.experimental import topologies  # imported here, since only a dry run for an absent slice needs it

    # libtpu touches no chip here: it need not ask the network for its place in a slice, and other processes may compile too.
    os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
    # As libtpu describes it, a v4 chip is two devices; a chip that is there is one.
    chip = {'chip_config_name': 'megacore'} if topology.startswith('v4:') else {}
    if set(topology.split(':')[1].split('x')) == {'1'}:
        chip['chips_per_host_bounds'] = (1, 1, 1)  # it takes hosts of four chips for granted
    try:
        return list(topologies.get_topology_desc(platform='tpu', topology_name=topology, **chip).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError) as e:
        raise ValueError(f'--topology={topology!r}: {e}') from e
