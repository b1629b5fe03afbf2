"""Builds the learner that a config describes, and chooses its attention kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from bapo_jax.cluster import devices
from bapo_jax.cluster.devices import keep_programs, present
from bapo_jax.cluster.hosts import Hosts
from bapo_jax.cluster.long_rows import token_splits
from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.learner.learner import Learner
from bapo_jax.models import kernels
from bapo_jax.models.adapters import model_of
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.vision.layout import ImageSource


def build_learner(config: ConfigDict, hosts: Hosts = Hosts(), sight: ImageSource | None = None) -> Learner:
    """Returns the learner that every host needs for its part of the device work. Allocates nothing.

    `config` must be resolved; `sight` is as in `Learner`. Raises ValueError or FileNotFoundError, naming the
    field and the remedy, if the config cannot run on this host's devices.
    """
    found = present(config.mesh.platform)
    keep_programs()
    model = model_of(config.model)
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, found)
    check_engine(config, jax.process_count())
    kernel = choose_kernel(config, model, mesh, mesh.devices.flat[0].platform)
    return Learner(config, model, mesh, kernel, hosts, sight)


def check_engine(config: ConfigDict, hosts: int) -> None:
    """Raises ValueError if the rollout engine cannot run on that many hosts."""
    if config.rollout.engine == 'jax' and hosts > 1:
        raise ValueError('rollout.engine=jax supports only one host; set rollout.engine=vllm')


def choose_kernel(
    config: ConfigDict,
    model: ModelConfig,
    mesh: Mesh | AbstractMesh,
    platform: str,
    capability: tuple[int, int] | None = None,
) -> str:
    """Returns the attention kernel for a mesh of 'cpu', 'gpu' or 'tpu' devices.

    `capability` describes GPUs that the mesh itself does not have. Raises ValueError if the config cannot run
    on the mesh.
    """
    if config.rollout.overlap and config.rollout.engine == 'jax' and mesh.size > 1:
        raise ValueError(
            f'rollout.overlap=True with rollout.engine=jax on {mesh.size} devices: two programs that '
            'communicate over the same devices at once may deadlock, and would be no faster; set '
            'rollout.overlap=False, or rollout.engine=vllm'
        )
    c = config.learner
    if c.balance_coef and model.dense:
        raise ValueError(
            f'learner.balance_coef={c.balance_coef} evens out the loads of experts, and model.path has none; '
            'set it to 0'
        )
    tokens = token_splits(mesh.shape, c.micro_batch_rows)
    if model.delta:
        check_delta(c, model, mesh.shape, tokens)
    if tokens > 1 and model.num_heads % mesh.shape['tensor'] == 0:  # the kernel refuses others
        check_long_rows(c, model, mesh.shape)
    return kernels.kernel_for(
        config.model.attention,
        platform,
        model,
        row_tokens=c.row_tokens,
        tensor=mesh.shape['tensor'],
        tokens=tokens,
        rows=c.micro_batch_rows // (mesh.shape['data'] * (mesh.shape['fsdp'] if tokens == 1 else 1)),
        slot_tokens=c.slot_tokens,
        capability=capability or devices.capability(mesh),
    )


def rows_in_words(config: ConfigDict, mesh: Mesh | AbstractMesh) -> str:
    """Returns what a run says if the tokens of its rows are split, or ''."""
    tokens = token_splits(mesh.shape, config.learner.micro_batch_rows)
    return f'; the tokens of a row are split over mesh.fsdp={tokens}' if tokens > 1 else ''


def check_delta(learner: ConfigDict, model: ModelConfig, mesh: Mapping[str, int], tokens: int) -> None:
    """Raises ValueError if a hybrid model's linear attention does not support the config."""
    why = f'which the linear attention of {model.model_type} does not support'
    if learner.slot_tokens:
        raise ValueError(
            f'learner.slot_tokens={learner.slot_tokens} lets responses share a prompt, {why}; set it to 0'
        )
    if tokens > 1:
        raise ValueError(
            f'learner.micro_batch_rows={learner.micro_batch_rows} splits the tokens of a row over '
            f'mesh.fsdp={tokens}, {why}; set learner.micro_batch_rows={mesh["data"] * tokens}, to split rows'
        )
    if model.delta.key_heads % mesh['tensor']:
        raise ValueError(
            f'mesh.tensor={mesh["tensor"]} does not divide the {model.delta.key_heads} key heads of the '
            f'linear attention (linear_num_key_heads in config.json); lower it to a divisor'
        )


def check_long_rows(learner: ConfigDict, model: ModelConfig, mesh: Mapping[str, int]) -> None:
    """Raises ValueError if 'fsdp' cannot split the tokens of a row (cluster/long_rows.py)."""
    devices, heads = mesh['fsdp'], model.num_heads // mesh['tensor']
    splits = (
        f'learner.micro_batch_rows={learner.micro_batch_rows} splits the tokens of a row over '
        f'mesh.fsdp={devices} devices'
    )
    instead = f'learner.micro_batch_rows={mesh["data"] * devices}, to split rows'
    if learner.slot_tokens:
        raise ValueError(
            f'{splits}, which learner.slot_tokens does not support; set learner.slot_tokens=0 or {instead}'
        )
    if learner.row_tokens % devices:
        unit = math.lcm(devices, 128)  # of every kernel
        raise ValueError(
            f'{splits}, which do not divide learner.row_tokens={learner.row_tokens}; set it to '
            f'{-(-learner.row_tokens // unit) * unit}, or set {instead}'
        )
    if heads % devices:
        raise ValueError(
            f'{splits}, which do not divide the {heads} query heads of each; lower mesh.fsdp to a divisor of '
            f'{heads} and raise mesh.data, or set {instead}'
        )
