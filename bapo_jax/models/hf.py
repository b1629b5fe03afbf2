"""Reads and writes Hugging Face directories: safetensors (one file or sharded), config.json (configs.py) and tokenizer files.

A parameter tree is the pure state of `Decoder`: nested dicts of float32 arrays, layers stacked on the first axis. Hugging Face keeps
one [out, in] matrix per layer; the tree keeps [L, in, out]. parameters.py says which tensor is which parameter.
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bapo_jax.models.configs import (  # noqa: F401
    architecture, for_all_readers, overrides, read_config, stored_dtype, with_stated,
)
from bapo_jax.models.parameters import EMBEDDING, HEAD, Parameter
from bapo_jax.models.decoder import Decoder, ModelConfig, abstract_params, parameters_of
from bapo_jax.parallel import fetch, on_device

Params = dict[str, Any]

TOKENIZER_FILES = ('tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja', 'chat_template.json', 'vocab.json',
                   'merges.txt', 'tokenizer.model', 'special_tokens_map.json', 'added_tokens.json', 'generation_config.json',
                   'preprocessor_config.json', 'video_preprocessor_config.json', 'processor_config.json')

DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}  # of written weights
SHARD_BYTES = 5 * 10**9  # the largest file of weights, as in transformers
_READABLE = ('F32', 'BF16', 'F16')  # dtypes of read weights, as safetensors names them; float32 holds their values exactly


class Tensor(NamedTuple):
    """One tensor of a checkpoint, and its place in the parameter tree."""

    name: str  # Hugging Face's
    path: tuple[str, ...]
    layer: int | None  # index on the first axis of the parameter at `path`; None where the parameter is not per layer
    transposed: bool


class DamagedWeights(ValueError):
    """A tensor has a value that is not finite."""


def init_params(config: ModelConfig, seed: int) -> Params:
    """Freshly initialised parameters (normal, 0.02)."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(seed)), nnx.Param))


def layout(config: ModelConfig) -> list[Tensor]:
    """Every tensor of the model in a checkpoint, in the parameter table's order: embedding, layer after layer, norm, head, vision."""
    tensors = []
    in_files = (p for p in parameters_of(config) if p.name)
    for per_layer, group in itertools.groupby(in_files, key=lambda parameter: parameter.per_layer):
        group = list(group)
        for layer in range(_stacked(group[0], config)) if per_layer else (None,):
            tensors += [Tensor(p.name.format(layer), p.path, layer, p.transposed) for p in group]
    return tensors


def _stacked(parameter: Parameter, config: ModelConfig) -> int:
    """How many layers, or blocks of the vision tower, are stacked in a parameter."""
    return config.vision.depth if parameter.needs == 'vision' else config.num_layers


def check_weights(path: str | Path, config: ModelConfig) -> None:
    """Raises as `load_params` does, without reading weights; a run calls it before slower work."""
    _open_tensors(Path(path), config, abstract_params(config)[1])


def load_params(path: str | Path, config: ModelConfig, sharding: Any = None) -> Params:
    """Reads the weights of a Hugging Face directory onto the devices as float32, tensor by tensor.

    `sharding` is a tree of NamedShardings, as `parallel.parameter_sharding` gives; without it everything goes to the first device.
    Each device's part of a tensor is read on its own, and layers are stacked on the devices. So the host holds at most one tensor
    in float32, and one part of it in the file's dtype. A parameter that no file has, a critic's value head, is 0.

    Raises FileNotFoundError for missing files, and ValueError for a truncated file, a missing tensor, or a wrong shape or dtype,
    before anything is allocated; and DamagedWeights (a ValueError) for a value that is not finite.
    """
    shapes = abstract_params(config)[1]
    handles = _open_tensors(Path(path), config, shapes)
    one_device = NamedSharding(Mesh(jax.devices()[:1], 'x'), PartitionSpec())
    params: Params = {}
    for tensor in layout(config):
        handle, where = handles[tensor.name], _get(sharding, tensor.path) if sharding else one_device
        of_tensor = where if tensor.layer is None else NamedSharding(where.mesh, PartitionSpec(*where.spec[1:]))
        array = _place(handle, tensor.transposed, of_tensor)
        if not _all_finite(array):
            raise DamagedWeights(f'{path}: tensor {tensor.name} has a value that is not finite; restore the files of the weights')
        if tensor.layer is not None:
            shape = _get(shapes, tensor.path).shape
            stacked = jnp.zeros(shape, jnp.float32, device=where) if tensor.layer == 0 else _get(params, tensor.path)
            array = _set_layer(stacked, array, tensor.layer, sharding=where)
        # Without this wait the host runs ahead, and holds every tensor that no device has taken yet.
        _set(params, tensor.path, jax.block_until_ready(array))
    for parameter in parameters_of(config):
        if not parameter.name:
            where = _get(sharding, parameter.path) if sharding else one_device
            _set(params, parameter.path, jnp.zeros(_get(shapes, parameter.path).shape, jnp.float32, device=where))
    return params


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def _place(handle: Any, transposed: bool, sharding: NamedSharding) -> jax.Array:
    """One tensor as float32 in the tree's orientation; each device's part is read on its own."""
    parts: dict[tuple, np.ndarray] = {}  # devices with the same part share one copy

    def part(index: tuple[slice, ...]) -> np.ndarray:
        key = tuple((s.start, s.stop) for s in index)
        if key not in parts:
            read = handle[index[::-1]].T if transposed else handle[index]
            parts[key] = np.ascontiguousarray(read, np.float32)
        return parts[key]

    shape = tuple(handle.get_shape())
    return jax.make_array_from_callback(shape[::-1] if transposed else shape, sharding, part)


@functools.partial(jax.jit, donate_argnames='stacked', static_argnames='sharding')
def _set_layer(stacked: jax.Array, layer: jax.Array, i: int, *, sharding: NamedSharding) -> jax.Array:
    """stacked[i] = layer, in place."""
    return jax.lax.with_sharding_constraint(jax.lax.dynamic_update_index_in_dim(stacked, layer, i, 0), sharding)


def _open_tensors(path: Path, config: ModelConfig, shapes: Params) -> dict[str, Any]:
    """Returns a handle for each tensor of `layout(config)`, from which slices can be read. Checks presence, shape and dtype.

    Reads no weights, but a head beside the embedding that it is tied to.
    """
    index_file, single, tensors = path / 'model.safetensors.index.json', path / 'model.safetensors', layout(config)
    if single.is_file():  # goes before an index, as in transformers: one of an older export may lie there still
        file_of = {t.name: single for t in tensors}
    elif index_file.is_file():
        file_of = _read_index(index_file)
        absent = [t.name for t in tensors if t.name not in file_of]
        if absent:
            raise ValueError(f'{index_file}: no tensor {absent[0]!r}, which config.json implies; fetch the model directory again')
    else:
        raise FileNotFoundError(
            f'model.path={str(path)!r}: no model.safetensors and no model.safetensors.index.json there; fetch or convert them'
        )

    opened: dict[Path, Any] = {}
    handles = {}
    for tensor in tensors:
        file = file_of[tensor.name]
        try:
            if file not in opened:
                opened[file] = safe_open(file, framework='numpy')
            handle = opened[file].get_slice(tensor.name)
        except SafetensorError as e:
            raise ValueError(
                f'{file}: cannot read tensor {tensor.name!r} ({e}); the file is truncated or of another model'
            ) from e
        want = _get(shapes, tensor.path).shape[0 if tensor.layer is None else 1 :]
        want = want[::-1] if tensor.transposed else want
        if tuple(handle.get_shape()) != want:
            raise ValueError(
                f'{file}: {tensor.name} has shape {tuple(handle.get_shape())} here, config.json implies {want}; '
                'weights and config.json are of different models'
            )
        if handle.get_dtype() not in _READABLE:
            raise ValueError(f'{file}: {tensor.name} is stored as {handle.get_dtype()}; supported: {", ".join(_READABLE)}')
        handles[tensor.name] = handle

    held: dict[str, Path] = {}
    for file, content in opened.items():
        for name in content.keys():
            if held.setdefault(name, file) != file:
                other = held[name].name
                raise ValueError(f'{file}: {name} is in {other} too, and readers differ in which counts; fetch them again')
    known = {*handles, HEAD.name}
    if more := sorted(name for name in {*held, *file_of} - known if not name.endswith('rotary_emb.inv_freq')):
        raise ValueError(
            f'{held.get(more[0]) or file_of[more[0]]}: {len(more)} tensors are not of the model that config.json describes, the first '
            f'is {more[0]!r}; the two are of different models: fetch the model directory again'
        )
    if config.tie_embeddings and HEAD.name in held:
        head = opened[held[HEAD.name]].get_slice(HEAD.name)
        if not _equal(head, handles[EMBEDDING.name]):
            raise ValueError(
                f'{held[HEAD.name]}: {HEAD.name} differs from {EMBEDDING.name}, and config.json ties them; state '
                'tie_word_embeddings=false there, or fetch the model directory again'
            )
    return handles


def _equal(a: Any, b: Any, rows: int = 4096) -> bool:
    """Whether two stored matrices hold the same values; reads some rows at a time."""
    (n, _), other = a.get_shape(), b.get_shape()
    parts = [slice(i, min(i + rows, n)) for i in range(0, n, rows)]
    return a.get_shape() == other and all(np.array_equal(a[p].astype(np.float32), b[p].astype(np.float32)) for p in parts)


def _read_index(index_file: Path) -> dict[str, Path]:
    """Tensor name -> file, of a sharded checkpoint. Raises as `load_params` does where a file is missing."""
    try:
        weight_map = dict(json.loads(index_file.read_text('utf-8'))['weight_map'])
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(f'{index_file}: not an index of safetensors ({e!r}); fetch the model directory again') from e
    path = index_file.parent
    for name, file in weight_map.items():
        # A link is no such name: the hub's cache is made of links.
        if not isinstance(file, str) or file != Path(file).name or file in ('', '..'):
            raise ValueError(f'{index_file}: {name} is in {str(file)[:100]!r}, which is no name of a file beside the index')
    missing = sorted({file for file in weight_map.values() if not (path / file).is_file()})
    if missing:
        raise FileNotFoundError(f'model.path={str(path)!r}: the index names missing files {missing}; fetch them again')
    return {name: path / file for name, file in weight_map.items()}


def to_hf(config: ModelConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (Hugging Face name, float32 array [out, in]) in the order of `layout`; the host holds one tensor at a time."""
    for name, array in as_in_files(config, params, 'float32'):
        yield name, fetch(array)


def as_in_files(config: ModelConfig, params: Params, dtype: str) -> Iterator[tuple[str, jax.Array]]:
    """Yields (Hugging Face name, array [out, in] in `dtype`) in the order of `layout`, transposed and cast on the devices.

    An array is split as its parameter is, so nothing is gathered; devices that hold the same rows of a matrix share them out. All
    layers go through one compiled program, a layer at a time. Parameters in host memory go to the devices first.
    """
    params = on_device(jax.tree.map(jnp.asarray, params))
    in_files = (p for p in parameters_of(config) if p.name)
    for per_layer, group in itertools.groupby(in_files, key=lambda parameter: parameter.per_layer):
        group = tuple(group)
        shardings = tuple(_sharding_in_files(p, _get(params, p.path)) for p in group)
        for layer in range(_stacked(group[0], config)) if per_layer else (0,):
            arrays = _as_in_files(params, layer, parameters=group, dtype=dtype, shardings=shardings)
            yield from zip((p.name.format(layer) for p in group), arrays, strict=True)


def _sharding_in_files(parameter: Parameter, array: jax.Array) -> NamedSharding | None:
    """How a tensor of `parameter` is split; None without a mesh."""
    if not isinstance(array.sharding, NamedSharding):
        return None
    mesh, first = array.sharding.mesh, int(parameter.per_layer)
    shape, axes = array.shape[first:], [*array.sharding.spec, *[None] * array.ndim][first : array.ndim]
    if parameter.transposed:
        shape, axes = shape[::-1], axes[::-1]
    copies = [axis for axis in mesh.axis_names if axis not in axes]
    rows = tuple(filter(None, (axes[0], *copies)))  # the rows of a device's part, cut among the devices that hold the same part
    if len(shape) == 2 and shape[0] % math.prod(mesh.shape[axis] for axis in rows) == 0:
        axes[0] = rows
    return NamedSharding(mesh, PartitionSpec(*axes))


@functools.partial(jax.jit, static_argnames=('parameters', 'dtype', 'shardings'))
def _as_in_files(
    params: Params, layer: jax.Array, *, parameters: tuple[Parameter, ...], dtype: str, shardings: tuple[NamedSharding | None, ...]
) -> list[jax.Array]:
    """The tensors of `parameters` as in files; `layer` counts where they are per layer."""
    arrays = []
    for parameter, sharding in zip(parameters, shardings, strict=True):
        array = _get(params, parameter.path)
        if parameter.per_layer:
            array = jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
        array = (array.T if parameter.transposed else array).astype(dtype)
        arrays.append(jax.lax.with_sharding_constraint(array, sharding) if sharding else array)
    return arrays


def save(
    path: str | Path, tensors: Iterable[tuple[str, np.ndarray]], *, like: str | Path, dtype: str = 'float32',
    shard_bytes: int = SHARD_BYTES, stated: Mapping[str, Any] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Writes a Hugging Face directory that transformers and vLLM load.

    `tensors` are as `to_hf` yields them; config and tokenizer files are copied from `like`. Weights go into files of at most
    `shard_bytes`, a larger tensor into a file of its own. Files get their final names when all are written. config.json states
    `dtype`, and what is `stated` (`overrides`). Raises FileExistsError if `path` already holds weights.
    """
    path, like = Path(path), Path(like)
    for name in ('model.safetensors', 'model.safetensors.index.json'):
        if (path / name).exists():
            raise FileExistsError(f'{path} already holds {name}; give an empty output directory')
    path.mkdir(parents=True, exist_ok=True)
    for name in ('config.json', *TOKENIZER_FILES):
        if (like / name).is_file() and like != path:
            shutil.copy(like / name, path / name)
    file = path / 'config.json'
    config = json.loads(file.read_text('utf-8'))
    written = for_all_readers(with_stated(config, stated), dtype, file)
    if written != config:
        file.write_text(json.dumps(written, indent=2) + '\n', 'utf-8')

    shards: list[list[str]] = []
    sizes = 0
    for shard in _shards(tensors, DTYPES[dtype], shard_bytes):
        save_file(shard, path / f'{len(shards)}.partial', metadata={'format': 'pt'})
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


def _shards(tensors: Iterable[tuple[str, np.ndarray]], dtype: np.dtype, limit: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields one dict of tensors a file. It empties a dict before the next one, so that only one shard is in memory."""
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


def _get(tree: Params, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _set(tree: Params, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
