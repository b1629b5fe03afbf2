"""Starts the engine that a config names: the in-process engine, or a client of vLLM servers."""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bapo_jax.cluster.devices import check_shares, device_memory
from bapo_jax.cluster.hosts import Hosts
from bapo_jax.machine.stopping import leaving_waits
from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.rollout.engine import Engine, results_of
from bapo_jax.rollout.episodes import Episodes
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits, room_for
from bapo_jax.rollout.schedule import policies_before
from bapo_jax.rollout.serve import check_python, command, reads_images
from bapo_jax.rollout.vllm.client import VllmEngine
from bapo_jax.rollout.vllm.gpus import named
from bapo_jax.rollout.vllm.supervise import SupervisedServer
from bapo_jax.rollout.vllm.token_guard import TOKEN_VARIABLE
from bapo_jax.tasks import get_task
from bapo_jax.tasks.sight import Sight

_SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM 0.32's --max-lora-rank
POLICIES = 'policy'  # folder of published policies, in the directory of a run or evaluation


def start_engine(
    config: ConfigDict, model: ModelConfig, graph: Any, ends: tuple[int, ...], mesh: Mesh, workdir: Path,
    hosts: Hosts = Hosts(), sight: Sight | None = None, tokenizer: Any = None,
) -> Engine:  # fmt: skip
    """The engine that `config` names, with the task's replies if task.turns asks for them.

    `sight` provides the images of prompts; `tokenizer` is for replies. With engine 'vllm' and no listed
    servers, starts servers, which takes a minute.
    """
    engine = _sampling(config, model, graph, ends, mesh, workdir, hosts, sight)
    if not config.task.turns:
        return engine
    return Episodes(engine, tokenizer, get_task(config.task.name).reply, config.task.turns)


def _sampling(
    config: ConfigDict, model: ModelConfig, graph: Any, ends: tuple[int, ...], mesh: Mesh, workdir: Path,
    hosts: Hosts, sight: Sight | None,
) -> Engine:  # fmt: skip
    r = config.rollout
    if r.engine == 'jax':
        devices = mesh.devices.flat
        limits = cache_limits(config, mesh.size, devices[0].platform, device_memory(devices))
        if said := slots_in_words(config, model, limits, mesh.size):
            print(said, file=sys.stderr, flush=True)
        return JaxEngine(graph, model, ends, limits, mesh, sight, config.model.attention)
    servers, token = list(r.servers), os.environ.get(TOKEN_VARIABLE)
    if not servers:
        servers = start_servers(config, workdir, sight)
        token = servers[0].token
    return VllmEngine(
        servers, workdir / POLICIES, model, token=token, dtype=r.dtype, stop_tokens=ends,
        concurrency=r.concurrency, deadline_s=r.deadline_s, hosts=hosts, sight=sight,
        base=config.model.path,
    )  # fmt: skip


def cache_limits(config: ConfigDict, devices: int, platform: str, device_bytes: int | None) -> Limits:
    """The in-process engine's limits on each of `devices` devices of a platform and memory size."""
    r = config.rollout
    prompt_tokens = max(longest_read(config), longest_evaluated(config))
    return Limits(
        max(1, r.rows // devices),
        prompt_tokens,
        device_bytes and int(r.cache_memory * device_bytes),
        platform == 'cpu',
    )


def slots_in_words(config: ConfigDict, model: ModelConfig, limits: Limits, devices: int) -> str:
    """Advice to the user if not all of rollout.rows can hold a response; '' if they can."""
    r = config.rollout
    fit = room_for(
        model, limits, limits.slots, r.group_size, limits.prompt_tokens, r.max_response_tokens
    ).slots
    if fit == limits.slots:
        return ''
    return (
        f'rollout.cache_memory={r.cache_memory:g} holds the KV cache of only {fit * devices} of '
        f'rollout.rows={r.rows} sequences, but every decode step computes all of them; set '
        f'rollout.rows={fit * devices}, or raise rollout.cache_memory'
    )


def start_servers(config: ConfigDict, workdir: Path, sight: Sight | None = None) -> list[SupervisedServer]:
    """Starts a server for each entry of rollout.gpus, or one server; all start in parallel.

    Raises ServerFailed, Stopped if a signal comes meanwhile, and ValueError as `check_commands` does. Then no
    server is left running.
    """
    token, options = (
        os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24),
        server_options(config, sight),
    )
    servers = [
        SupervisedServer(
            config.model.path, workdir / f'server{"-".join(gpus)}.log', gpus=gpus, token=token,
            deadline_s=config.rollout.deadline_s, **options,
        )
        for gpus in gpus_of_servers(config)
    ]  # fmt: skip
    print(
        f'starting {"a vLLM server" if len(servers) == 1 else f"{len(servers)} vLLM servers"} …', flush=True
    )
    given_up = threading.Event()
    with ThreadPoolExecutor(len(servers)) as pool:
        try:
            with leaving_waits():
                results_of([pool.submit(server.start, given_up) for server in servers])
        except BaseException:  # also evaluate's exit on a signal, which would wait until the model is loaded
            given_up.set()
            raise
    return servers


def longest_read(config: ConfigDict) -> int:
    """The most tokens that an engine prefills in training: the prompt's and, if continued, the response's."""
    r, p = config.rollout, config.replay
    continues = p.use_x2 and p.reevaluate == 'continue' or r.step_share < 1
    continues = continues or config.prompts.selector == 'adaprefix' or config.task.turns
    return r.max_prompt_tokens + (r.max_response_tokens if continues else 0)


def longest_evaluated(config: ConfigDict) -> int:
    """The same of an evaluation."""
    e = config.evaluate
    return e.max_prompt_tokens + (e.max_response_tokens if config.task.turns else 0)


def server_options(config: ConfigDict, sight: Sight | None = None) -> dict[str, Any]:
    """The arguments of each started server's command, except its port and GPUs."""
    r, e, stated = config.rollout, config.evaluate, []
    if changes := hf.overrides(config.model):
        stated += [
            '--hf-overrides',
            json.dumps({'text_config': changes} if reads_images(config.model.path) else changes),
        ]
    if sight:  # images are sent in the trainer's sizes; a server with the same limits does not resize them
        least, most = sight.limits()
        stated += [
            '--mm-processor-kwargs',
            json.dumps({'size': {'shortest_edge': least, 'longest_edge': most}}),
        ]
    if config.model.adapter.rank and not reads_images(config.model.path):
        stated += ['--enable-lora', '--max-lora-rank', str(served_rank(config.model.adapter.rank))]
        stated += ['--max-loras', str(adapters_under_way(config))]
    return {
        'python': r.server.python,
        'dtype': r.dtype,
        'max_tokens': max(
            r.max_prompt_tokens + r.max_response_tokens, e.max_prompt_tokens + e.max_response_tokens
        ),
        'memory': r.server.memory,
        'extra': (*stated, *r.server.args),
    }


def served_rank(rank: int) -> int:
    """The least rank that vLLM can be started with to serve adapters of `rank`."""
    for fits in _SERVED_RANKS:
        if rank <= fits:
            return fits
    raise ValueError(f'model.adapter.rank={rank}: vLLM serves at most {_SERVED_RANKS[-1]}; set it to that')


def adapters_under_way(config: ConfigDict) -> int:
    """The most policies that answer at once: α, π_θ, those of syncs that did not wait, and ReMix's."""
    r = config.rollout
    return 2 + policies_before(r) + (r.mixture.policies if r.mixture.share else 0)


def starts_servers(config: ConfigDict) -> bool:
    """Whether the engine is vLLM and no servers are listed."""
    return config.rollout.engine == 'vllm' and not config.rollout.servers


def check_start(config: ConfigDict) -> None:
    """Raises ValueError if servers must be started, but vLLM's interpreter or GPUs are not available.

    Also as `check_commands`. Call it after JAX has found its devices.
    """
    if starts_servers(config):
        check_python(config.rollout.server.python, 'rollout.server.python')
        check_commands(config)
        check_gpus(gpus_of_servers(config), config.rollout.server.memory)


def check_commands(config: ConfigDict) -> None:
    """Raises ValueError if a server's vLLM flags are refused or the model cannot be split over its GPUs."""
    options = server_options(config)
    for gpus in gpus_of_servers(config):
        command(config.model.path, port=0, gpus=gpus, **options)


def gpus_of_servers(config: ConfigDict) -> list[tuple[str, ...]]:
    """The GPUs of each server to start; () for a server that uses what vLLM finds."""
    return [named(gpus) for gpus in config.rollout.gpus] or [()]


def check_gpus(of_servers: Sequence[tuple[str, ...]], memory: float) -> None:
    """Raises ValueError if a server needs a GPU that JAX has taken and no share of its `memory` is left."""
    if jax.default_backend() != 'gpu':
        return
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    numbers = [device.local_hardware_id for device in jax.local_devices()]
    taken = (
        [visible.split(',')[number] for number in numbers] if visible else [str(number) for number in numbers]
    )
    shares = any(not gpus or {*gpus} & {*taken} for gpus in of_servers)
    if shares and memory:
        check_shares(memory)
    elif shares:
        words = ' '.join(','.join(gpus) for gpus in of_servers)
        raise ValueError(
            f'rollout.gpus names {words or "no GPU"}, but JAX has already reserved memory on GPU '
            f'{", ".join(taken)}. Start the trainer with CUDA_VISIBLE_DEVICES set to its own GPUs, and set '
            'rollout.gpus to others; or list running servers in rollout.servers; or set '
            'rollout.server.memory to share a GPU (docs/vllm.md)'
        )
