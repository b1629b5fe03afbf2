"""Builds the learner that a config describes, and chooses its attention kernel."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from bapo_jax.cluster import devices
from bapo_jax.cluster.devices import keep_programs, present
from bapo_jax.cluster.hosts import Hosts
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
    splits = mesh.shape['data'] * mesh.shape['fsdp']
    if config.learner.micro_batch_rows % splits:
        raise ValueError(
            f'learner.micro_batch_rows={config.learner.micro_batch_rows} is not a multiple of mesh.data × '
            f'mesh.fsdp = {splits}, over which rows are split; set it to '
            f'{max(1, config.learner.micro_batch_rows // splits) * splits}'
        )
    return kernels.kernel_for(
        config.model.attention,
        platform,
        model,
        row_tokens=config.learner.row_tokens,
        tensor=mesh.shape['tensor'],
        rows=config.learner.micro_batch_rows // splits,
        slot_tokens=config.learner.slot_tokens,
        capability=capability or devices.capability(mesh),
    )
