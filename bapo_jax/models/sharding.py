"""The sharding rules: which mesh axis splits which dimension of a parameter."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bapo_jax.models.parameters import ADAPTER_PARAMETERS, PARAMETERS, VISION_PARAMETERS


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Maps each logical axis of the parameter table to a mesh axis (None: not split)."""

    layers: str | None = None
    experts: str | None = None
    embed: str | None = 'fsdp'
    heads: str | None = 'tensor'
    mlp: str | None = 'tensor'
    vocab: str | None = 'tensor'


_AXES = {parameter.path: parameter.axes for parameter in PARAMETERS + VISION_PARAMETERS + ADAPTER_PARAMETERS}


def parameter_sharding(mesh: Mesh, params: Any, rules: ShardingRules = ShardingRules()) -> Any:
    """Returns a NamedSharding for every leaf of `params` (arrays or shapes), by the parameter table's axes.

    Raises ValueError, naming the parameter, if two of its dimensions share a mesh axis, or a mesh axis does
    not divide the dimension it splits.
    """

    def one(path, leaf):
        names = tuple(key.key for key in path)
        axes = tuple(getattr(rules, axis) if axis else None for axis in _AXES[names])
        for i, (size, axis) in enumerate(zip(leaf.shape, axes, strict=True)):
            if axis and axis in axes[:i]:
                raise ValueError(
                    f'the sharding rules split two dimensions of {".".join(names)} {leaf.shape}, '
                    f'{_AXES[names]}, over mesh.{axis}; give each a mesh axis of its own'
                )
            if axis and size % mesh.shape[axis]:
                raise ValueError(
                    f'mesh.{axis}={mesh.shape[axis]} does not divide {size}, a dimension of '
                    f'{".".join(names)} {leaf.shape}; choose a mesh.{axis} that does'
                )
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(one, params)


def parameter_specs(mesh: Mesh, params: Any) -> Any:
    """Returns the PartitionSpec of every leaf of `params`; raises as `parameter_sharding` does."""
    return jax.tree.map(lambda sharding: sharding.spec, parameter_sharding(mesh, params))
