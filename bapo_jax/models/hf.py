"""Reads and writes Hugging Face directories: safetensors (one or more), config.json (configs.py), tokenizer.

A parameter tree is the pure state of `Decoder`: nested dicts of float32 arrays, layers stacked first, [L, in,
out], and then experts, [L, E, in, out]. Hugging Face stores one [out, in] matrix per layer and expert;
parameters.py maps its tensors to parameters.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from bapo_jax.cluster.mesh import fetch, on_device
from bapo_jax.machine.ending import Ending
from bapo_jax.models.configs import (  # noqa: F401  (read as hf.NAME)
    architecture,
    for_all_readers,
    overrides,
    read_config,
    stored_dtype,
    with_stated,
)
from bapo_jax.models.decoder import Decoder, ModelConfig, abstract_params, parameters_of
from bapo_jax.models.parameters import ADAPTER, Parameter
from bapo_jax.models.tensor_files import Tensor, at, open_tensors

Params = dict[str, Any]

TOKENIZER_FILES = (
    'tokenizer.json',
    'tokenizer_config.json',
    'chat_template.jinja',
    'chat_template.json',
    'vocab.json',
    'merges.txt',
    'tokenizer.model',
    'special_tokens_map.json',
    'added_tokens.json',
    'generation_config.json',
    'preprocessor_config.json',
    'video_preprocessor_config.json',
    'processor_config.json',
)

DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}  # of written weights
SHARD_BYTES = 5 * 10**9  # largest weights file, as in transformers


class DamagedWeights(Ending, ValueError):
    """A tensor has a value that is not finite."""


def init_params(config: ModelConfig, seed: int) -> Params:
    """Returns freshly initialised parameters (normal, standard deviation 0.02)."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(seed)), nnx.Param))


def layout(config: ModelConfig) -> list[Tensor]:
    """Lists the model's checkpoint tensors in table order: embedding, layer by layer, norm, head, vision."""
    in_files = [p for p in parameters_of(config) if p.in_files]
    return [
        Tensor(p.name.format(*number), p.path, index, p.transposed)
        for rows, number, index in _in_order(config, in_files)
        for p in rows
    ]


def _in_order(
    config: ModelConfig, rows: Iterable[Parameter], number: tuple[int, ...] = (), index: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[Parameter, ...], tuple[int, ...], tuple[int, ...]]]:
    """Yields (rows, number, index) in the order of files: a layer's together, and in it an expert's.

    The number of a layer is that in names, and its index the place in its stack; they differ in a hybrid
    model. All `rows` are numbered by at least the `number` given.
    """
    depth, shapes = len(number), abstract_params(config)[1]
    for deeper, group in itertools.groupby(rows, key=lambda row: row.indices > depth):
        group = tuple(group)
        if not deeper:
            yield group, number, index
            continue
        of_decoder = depth == 0 and group[0].path[0] == 'layers'
        for i in range(config.num_layers if of_decoder else at(shapes, group[0].path).shape[depth]):
            stack, place = config.stack_of(i) if of_decoder else (None, i)
            there = tuple(row for row in group if stack in (None, row.path[0]))
            yield from _in_order(config, there, (*number, i), (*index, place))


def check_weights(path: str | Path, config: ModelConfig) -> None:
    """Raises as `load_params` does, without reading weights; a run calls it before slower work."""
    open_tensors(Path(path), config, layout(config), abstract_params(config)[1])


def load_params(path: str | Path, config: ModelConfig, sharding: Any = None, like: Any = None) -> Params:
    """Reads the weights of a Hugging Face directory onto the devices, tensor by tensor.

    They are float32, or have the dtypes of the tree `like`.

    `sharding` is a tree of NamedShardings, as from `parameter_sharding`; by default all goes to the first
    device. Each device's shard of a tensor is read separately, and layers are stacked on the devices. So the
    host holds at most one tensor in float32 and one shard of it in the file's dtype. A parameter without a
    tensor (a critic's value head, an adapter) is 0.

    Raises DamagedWeights (a ValueError) if a value is not finite. Before allocating, raises FileNotFoundError
    if a file is missing, and ValueError if one is truncated or a tensor is missing or has a wrong shape or
    dtype.
    """
    shapes = like or abstract_params(config)[1]
    handles = open_tensors(Path(path), config, layout(config), shapes)
    one_device = NamedSharding(Mesh(jax.devices()[:1], 'x'), PartitionSpec())
    params: Params = {}
    for tensor in layout(config):
        handle, where = handles[tensor.name], at(sharding, tensor.path) if sharding else one_device
        of_tensor = NamedSharding(where.mesh, PartitionSpec(*where.spec[len(tensor.index) :]))
        shape, dtype = at(shapes, tensor.path).shape, at(shapes, tensor.path).dtype
        array = _place(handle, tensor.transposed, of_tensor, dtype)
        if not _all_finite(array):
            raise DamagedWeights(
                f'{path}: tensor {tensor.name} has a value that is not finite; restore the weight files'
            )
        if tensor.index:
            first = not any(tensor.index)
            stacked = jnp.zeros(shape, dtype, device=where) if first else at(params, tensor.path)
            array = _set_part(stacked, array, tensor.index, sharding=where)
        # Without this wait the host would run ahead and hold every tensor that no device has taken yet.
        _set(params, tensor.path, jax.block_until_ready(array))
    for parameter in parameters_of(config):
        if not parameter.in_files:
            where = at(sharding, parameter.path) if sharding else one_device
            _set(
                params,
                parameter.path,
                jnp.zeros(at(shapes, parameter.path).shape, jnp.float32, device=where),
            )
    return params


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def _place(handle: Any, transposed: bool, sharding: NamedSharding, dtype: Any) -> jax.Array:
    """Returns one tensor in the tree's orientation; each device's shard is read separately."""
    parts: dict[tuple, np.ndarray] = {}  # devices with the same shard share one copy

    def part(index: tuple[slice, ...]) -> np.ndarray:
        key = tuple((s.start, s.stop) for s in index)
        if key not in parts:
            read = handle[index[::-1]].T if transposed else handle[index]
            parts[key] = np.ascontiguousarray(read, dtype)
        return parts[key]

    shape = tuple(handle.get_shape())
    return jax.make_array_from_callback(shape[::-1] if transposed else shape, sharding, part)


@functools.partial(jax.jit, donate_argnames='stacked', static_argnames='sharding')
def _set_part(
    stacked: jax.Array, part: jax.Array, index: tuple[int, ...], *, sharding: NamedSharding
) -> jax.Array:
    """Sets stacked[index] = part in place."""
    whole = part.reshape(*[1] * len(index), *part.shape)
    return jax.lax.with_sharding_constraint(
        jax.lax.dynamic_update_slice(stacked, whole, (*index, *[0] * part.ndim)), sharding
    )


def _part(stacked: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
    """Returns stacked[index]."""
    shape = stacked.shape[len(index) :]
    part = jax.lax.dynamic_slice(stacked, (*index, *[0] * len(shape)), (*[1] * len(index), *shape))
    return part.reshape(shape)


def to_hf(config: ModelConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (Hugging Face name, float32 array [out, in]) in `layout` order; the host holds one at a time."""
    for name, array in as_in_files(config, params, 'float32'):
        yield name, fetch(array)


def as_in_files(config: ModelConfig, params: Params, dtype: str) -> Iterator[tuple[str, jax.Array]]:
    """Yields (Hugging Face name, array [out, in] in `dtype`) in `layout` order, computed on the devices.

    An adapter is merged into the matrices that it changes. An array is split like its parameter, so nothing
    but an adapter is gathered; devices with the same rows of a matrix divide them. One compiled program
    handles all layers, one at a time, and another all experts. Parameters in host memory are moved to devices
    first.
    """
    params = on_device(jax.tree.map(jnp.asarray, params))
    rows = [p for p in parameters_of(config) if p.in_files]
    yield from _in_files(config, params, dtype, rows, config.adapter and config.adapter.scale)


def adapter_in_files(config: ModelConfig, params: Params, dtype: str) -> Iterator[tuple[str, jax.Array]]:
    """Yields (PEFT's name, array [out, in] in `dtype`) of the adapter alone, as `as_in_files` does."""
    params = on_device(jax.tree.map(jnp.asarray, params))
    rows = [p for p in parameters_of(config) if p.when == ADAPTER]
    yield from _in_files(config, params, dtype, rows, None)


def _in_files(
    config: ModelConfig, params: Params, dtype: str, rows: Iterable[Parameter], scale: float | None
) -> Iterator[tuple[str, jax.Array]]:
    for group, number, index in _in_order(config, rows):
        shardings = tuple(_sharding_in_files(p, at(params, p.path)) for p in group)
        arrays = _as_in_files(params, index, parameters=group, dtype=dtype, shardings=shardings, scale=scale)
        yield from zip((p.name.format(*number) for p in group), arrays, strict=True)


def _sharding_in_files(parameter: Parameter, array: jax.Array) -> NamedSharding | None:
    """Returns how a tensor of `parameter` is split; None without a mesh."""
    if not isinstance(array.sharding, NamedSharding):
        return None
    mesh, first = array.sharding.mesh, parameter.indices
    shape, axes = array.shape[first:], [*array.sharding.spec, *[None] * array.ndim][first : array.ndim]
    if parameter.transposed:
        shape, axes = shape[::-1], axes[::-1]
    copies = [axis for axis in mesh.axis_names if axis not in axes]
    rows = tuple(filter(None, (axes[0], *copies)))  # divides the rows of a shard among its copies
    if len(shape) == 2 and shape[0] % math.prod(mesh.shape[axis] for axis in rows) == 0:
        axes[0] = rows
    return NamedSharding(mesh, PartitionSpec(*axes))


@functools.partial(jax.jit, static_argnames=('parameters', 'dtype', 'shardings', 'scale'))
def _as_in_files(
    params: Params,
    index: tuple[jax.Array, ...],
    *,
    parameters: tuple[Parameter, ...],
    dtype: str,
    shardings: tuple[NamedSharding | None, ...],
    scale: float | None = None,
) -> list[jax.Array]:
    """Returns the tensors of `parameters` as in files; `index` is that of the layer, and of the expert.

    With the `scale` of an adapter, matrices that have one are W + scale · A B.
    """
    arrays = []
    for parameter, sharding in zip(parameters, shardings, strict=True):
        beside = at(params, parameter.path[:-1])
        array = beside[parameter.path[-1]]
        merged = scale is not None and parameter.path[-1] == 'kernel' and 'a' in beside
        if merged:
            array = array.astype(jnp.float32)
        array = _part(array, index)
        if merged:
            a, b = (_part(beside[x], index) for x in ('a', 'b'))
            array += scale * jnp.matmul(a, b, precision='highest', preferred_element_type=jnp.float32)
        array = (array.T if parameter.transposed else array).astype(dtype)
        arrays.append(jax.lax.with_sharding_constraint(array, sharding) if sharding else array)
    return arrays


def save(
    path: str | Path, tensors: Iterable[tuple[str, np.ndarray]], *, like: str | Path, dtype: str = 'float32',
    shard_bytes: int = SHARD_BYTES, stated: Mapping[str, Any] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Writes a Hugging Face directory that transformers and vLLM load.

    `tensors` are as from `to_hf`; config and tokenizer files are copied from `like`. Weights files have at
    most `shard_bytes`; a larger tensor gets its own file. Files get their final names once all are written,
    and the permissions of any new file (umask).
    config.json states `dtype` and `stated` (`overrides`). Raises FileExistsError if `path` holds weights.
    """
    path, like = Path(path), Path(like)
    for name in ('model.safetensors', 'model.safetensors.index.json'):
        if (path / name).exists():
            raise FileExistsError(f'{path} already holds {name}; give an empty output directory')
    path.mkdir(parents=True, exist_ok=True)
    for name in ('config.json', *TOKENIZER_FILES):
        if (like / name).is_file() and like != path:
            shutil.copyfile(like / name, path / name)
    file = path / 'config.json'
    config = json.loads(file.read_text('utf-8'))
    written = for_all_readers(with_stated(config, stated), dtype, file)
    if written != config:
        file.write_text(json.dumps(written, indent=2) + '\n', 'utf-8')

    shards: list[list[str]] = []
    sizes = 0
    for shard in _shards(tensors, DTYPES[dtype], shard_bytes):
        partial = path / f'{len(shards)}.partial'
        save_file(shard, partial, metadata={'format': 'pt'})
        shutil.copymode(file, partial)  # safetensors makes files that only their owner can read
        shards.append(list(shard))
        sizes += sum(array.nbytes for array in shard.values())
    files = [f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors' for i in range(len(shards))]
    if len(shards) == 1:
        files = ['model.safetensors']
    for i, file in enumerate(files):
        (path / f'{i}.partial').rename(path / file)
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {'metadata': {'total_size': sizes}, 'weight_map': weight_map}
        (path / 'model.safetensors.index.json').write_text(json.dumps(index, indent=2) + '\n', 'utf-8')


def _shards(
    tensors: Iterable[tuple[str, np.ndarray]], dtype: np.dtype, limit: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields one dict of tensors per file. Clears each before the next, so only one shard is in memory."""
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, array in tensors:
        array = np.ascontiguousarray(array, dtype)
        if shard and size + array.nbytes > limit:
            yield shard
            shard.clear()
            size = 0
        shard[name] = array
        size += array.nbytes
    yield shard


def _set(tree: Params, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
