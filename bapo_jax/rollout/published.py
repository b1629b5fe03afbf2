"""Reads a published policy: a manifest, and tensors under their Hugging Face names.

    policy/000123/weights/         an Orbax checkpoint: for each tensor a folder, with a file for each part of it
    policy/000123/manifest.json    written last: it marks the directory as complete

A tensor's parts are blocks of one shape, as the trainer's devices held them. The file of part (i, j) is `TENSOR/i.j`: its bytes in
C order (an uncompressed zarr array). This module loads in the server's process, where JAX may be absent. It needs only numpy and
ml_dtypes.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

WEIGHTS, MANIFEST = 'weights', 'manifest.json'
FORMAT = 2
THREADS = 4  # for checksums: reading and crc32 both release the interpreter's lock
_DTYPES = ('float32', 'bfloat16')  # what rollout.dtype may be
_MOST_MANIFEST = 2**28  # bytes; a thousand tensors in a thousand parts each take a tenth of that
_NAME = r'[A-Za-z0-9_][A-Za-z0-9_.-]*'  # of a tensor, and so of its folder, or of a config's field
OTHER_TRAINER = 'Another trainer has loaded its own policy there: give each trainer servers of its own'
NAME = re.compile(r'\d+-[0-9a-f]{8}')  # of a policy
_BLOCK = 2**20  # bytes that a check has in memory at once, for each thread


class RefusedPolicy(ValueError):
    """A published policy is incomplete, damaged or of another model. The message names the file or tensor, and the reason."""


class PublishedTensor(NamedTuple):
    """One tensor, as the manifest describes it."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]
    dtype: str  # numpy's name, 'float32' or 'bfloat16'
    part: tuple[int, ...]  # the shape of one part; equal to `shape` where the tensor is one file
    crc32: dict[str, int]  # of each part's bytes in C order, by the name of its file

    @property
    def part_bytes(self) -> int:
        return math.prod(self.part) * np.dtype(self.dtype).itemsize

    def place(self, part: str) -> tuple[slice, ...]:
        """Where in the tensor a part lies; `part` names its file."""
        return tuple(slice(int(i) * n, (int(i) + 1) * n) for i, n in zip(part.split('.'), self.part, strict=True))


class Manifest(NamedTuple):
    """`tensors` are in loading order: layer by layer, which keeps a server's temporary memory small."""

    version: int  # training steps that the policy has had
    model: dict[str, Any]  # the architecture, as `models.hf.architecture` names it
    tensors: tuple[PublishedTensor, ...]

    @property
    def checksum(self) -> str:
        """CRC-32 of all tensors' names and checksums, in hexadecimal; equal for equal weights in equal parts."""
        return f'{zlib.crc32(json.dumps([(t.name, t.crc32) for t in self.tensors]).encode()):08x}'

    @property
    def name(self) -> str:
        """By which servers know the policy: '123-0a1b2c3d'. Two runs have policies of one version, and not of one checksum."""
        return f'{self.version}-{self.checksum}'


def number_of(name: str) -> int:
    """The version in a policy's name."""
    return int(name.partition('-')[0])


def crc32(array: np.ndarray) -> int:
    """CRC-32 of an array's bytes in C order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def read_manifest(directory: str | Path) -> Manifest:
    """Raises RefusedPolicy where the manifest is damaged or missing; it is missing from an incomplete directory."""
    path = Path(directory) / MANIFEST
    try:
        if (size := path.stat().st_size) > _MOST_MANIFEST:
            raise ValueError(f'it has {size} bytes, more than any manifest')
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RefusedPolicy(f'{path} is missing: no policy was published there, or the publication is not complete') from None
    except (ValueError, RecursionError, OSError) as e:
        raise RefusedPolicy(f'{path} cannot be read ({e}); publish the policy again') from e
    if not isinstance(fields, dict) or fields.get('format') != FORMAT:
        raise RefusedPolicy(f'{path} is not a manifest of format {FORMAT}; trainer and server must be of one version of bapo_jax')

    def need(condition: bool, what: str) -> None:
        if not condition:
            raise RefusedPolicy(f'{path}: {what[:500]}; publish the policy again')

    for name, kind in (('version', int), ('model', dict), ('tensors', dict)):
        need(type(fields.get(name)) is kind, f'{name} is missing, or no {kind.__name__}')
    need(all(re.fullmatch(_NAME, field) for field in fields['model']), 'model has a field that is none of a config')
    need(type(fields['model'].get('tie_word_embeddings')) is bool, 'model does not say whether the head is tied')
    tensors = tuple(_described(name, t, need) for name, t in fields['tensors'].items())
    return Manifest(fields['version'], fields['model'], tensors)


def _described(name: str, fields: Any, need: Callable[[bool, str], None]) -> PublishedTensor:
    """One tensor of a manifest; `need` raises where its condition fails. Takes no more memory than the manifest has."""
    need(re.fullmatch(_NAME, name) is not None, f'{name!a} is no name of a tensor')
    need(isinstance(fields, dict), f'{name} is no dict')
    shape, part, dtype, crcs = (fields.get(field) for field in ('shape', 'part', 'dtype', 'crc32'))
    need(_are_counts(shape), f'{name} has the shape {shape!a}, which is none')
    need(_are_counts(part), f'{name} has parts of {part!a}, which is no shape')
    need(dtype in _DTYPES, f'{name} is of dtype {dtype!a}, which is none of {", ".join(_DTYPES)}')
    need(isinstance(crcs, dict) and _are_counts(list(crcs.values())), f'{name} has no checksums')
    divides = len(part) == len(shape) and all(n and size % n == 0 for size, n in zip(shape, part, strict=True))
    counts = [size // n for size, n in zip(shape, part, strict=True)] if divides else []
    # How many there are is compared before their names are made: a manifest may claim any number.
    as_many = divides and math.prod(counts) == len(crcs)
    whole = as_many and crcs.keys() == {'.'.join(map(str, place)) for place in np.ndindex(*counts)}
    need(whole, f'{name} is {tuple(shape)}, which the parts {", ".join(list(crcs)[:9])!a} of {tuple(part)} do not make up')
    return PublishedTensor(name, tuple(shape), dtype, tuple(part), dict(sorted(crcs.items())))


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)


def check_model(manifest: Manifest, config: Any) -> None:
    """Compares the manifest's architecture with a server's model, a Hugging Face config object. Raises RefusedPolicy."""
    differing = [
        f'{field} {value!a} (the server has {_served(config, field)!r})'
        for field, value in manifest.model.items()
        if _served(config, field) != value
    ]
    if differing:
        raise RefusedPolicy(f'policy {manifest.version} is of another model: {", ".join(differing)}')


def _served(config: Any, field: str) -> Any:
    """The field of a config object; a name with dots is that of a part's field."""
    value = functools.reduce(lambda part, name: getattr(part, name, None), field.split('.'), config)
    if field == 'head_dim' and value is None:  # optional in Qwen2's config
        return config.hidden_size // config.num_attention_heads
    return value


def check_weights(directory: str | Path, manifest: Manifest, worker: int = 0, workers: int = 1) -> None:
    """Compares every byte with the manifest's checksums, a few MiB in memory at a time. Raises RefusedPolicy.

    `workers` share the parts out: each checks its own.
    """
    parts = [(tensor, part) for tensor in manifest.tensors for part in tensor.crc32]
    mine = sorted(parts, key=lambda part: part[0].part_bytes, reverse=True)[worker::workers]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda part: _check_part(directory, *part), mine):
            pass


def _check_part(directory: str | Path, tensor: PublishedTensor, part: str) -> None:
    file = _file(directory, tensor, part)
    crc = 0
    try:
        with file.open('rb', buffering=0) as f:
            size = os.fstat(f.fileno()).st_size
            if size != tensor.part_bytes:
                raise RefusedPolicy(
                    f'{file} has {size} bytes; the manifest says {tensor.part_bytes}, for {tensor.part} of {tensor.name} in '
                    f'{tensor.dtype}'
                )
            block = memoryview(bytearray(min(_BLOCK, size)))
            while n := f.readinto(block):
                crc = zlib.crc32(block[:n], crc)
    except OSError as e:
        raise RefusedPolicy(f'{file} cannot be read ({e.strerror}): tensor {tensor.name} is not whole') from e
    if crc != tensor.crc32[part]:
        raise RefusedPolicy(f'{file}: the checksum of {tensor.name} is not the one in the manifest; the file is damaged')


def read_tensors(directory: str | Path, manifest: Manifest) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of every tensor in the manifest's order; call `check_weights` first.

    A tensor of one part is its file, mapped into memory: bytes are read when they are used, and those that nobody uses are not.
    Writing to the array changes the file in no case. Raises RefusedPolicy where a file has gone or has another size.
    """
    for tensor in manifest.tensors:
        if tensor.part == tensor.shape:
            [part] = tensor.crc32
            yield tensor.name, _map(directory, tensor, part)
        else:
            parts = {part: _map(directory, tensor, part) for part in tensor.crc32}  # they are there before memory is taken
            array = np.empty(tensor.shape, tensor.dtype)
            for part, mapped in parts.items():
                array[tensor.place(part)] = mapped
            yield tensor.name, array


def _map(directory: str | Path, tensor: PublishedTensor, part: str) -> np.ndarray:
    file = _file(directory, tensor, part)
    try:
        return np.memmap(file, tensor.dtype, 'c', shape=tensor.part)
    except (OSError, ValueError) as e:
        raise RefusedPolicy(f'{file} cannot be read ({e}); it was there when it was checked') from e


def _file(directory: str | Path, tensor: PublishedTensor, part: str) -> Path:
    return Path(directory).absolute() / WEIGHTS / tensor.name / part


def published_versions(directory: str | Path) -> Iterator[tuple[int, Path]]:
    """Yields (version, path) of the complete policies in a run's `policy/` directory, oldest first."""
    for path in sorted(Path(directory).glob('[0-9]*')):
        if (path / MANIFEST).is_file():
            yield int(path.name), path
