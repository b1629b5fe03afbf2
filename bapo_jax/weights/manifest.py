"""Reads a published policy: a manifest, and tensors under their Hugging Face names.

    policy/000123/weights/         an Orbax checkpoint: a folder per tensor, with a file for each of its parts
    policy/000123/manifest.json    written last: it marks the directory as complete

If training changes only an adapter, PEFT's two files (models/adapters.py) take the place of weights/.

A tensor's parts are blocks of equal shape: the shards on the trainer's devices. The file of part (i, j) is
`TENSOR/i.j`, with its bytes in C order (an uncompressed zarr array). The server's process imports this
module, and JAX may be absent there, so it needs only numpy and ml_dtypes.
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
THREADS = 4  # for checksums: reading and crc32 both release the GIL
_DTYPES = ('float32', 'bfloat16')  # the choices of rollout.dtype
_MOST_MANIFEST = 2**28  # most bytes; a thousand tensors of a thousand parts each take a tenth of that
_NAME = r'[A-Za-z0-9_][A-Za-z0-9_.-]*'  # name of a tensor, and so of its folder, or of a config field
OTHER_TRAINER = 'Another trainer has loaded its own policy there; give each trainer its own servers'
NAME = re.compile(r'\d+-[0-9a-f]{8}')  # name of a policy
_BLOCK = 2**20  # bytes that each thread of a check holds in memory at once


class RefusedPolicy(ValueError):
    """A policy is incomplete, damaged or of another model. The message names the file or tensor, and why."""


class PublishedTensor(NamedTuple):
    """One tensor, as described in the manifest."""

    name: str  # its Hugging Face name
    shape: tuple[int, ...]
    dtype: str  # its name in numpy, 'float32' or 'bfloat16'
    part: tuple[int, ...]  # the shape of one part; equal to `shape` if the tensor is one file
    crc32: dict[str, int]  # of each part's bytes in C order, by file name

    @property
    def part_bytes(self) -> int:
        return math.prod(self.part) * np.dtype(self.dtype).itemsize

    def place(self, part: str) -> tuple[slice, ...]:
        """The slices of the tensor that a part covers; `part` is its file name."""
        return tuple(
            slice(int(i) * n, (int(i) + 1) * n) for i, n in zip(part.split('.'), self.part, strict=True)
        )


class Manifest(NamedTuple):
    """A manifest; `tensors` are in loading order: layer by layer, which keeps a server's memory use small."""

    version: int  # the number of training steps behind the policy
    model: dict[str, Any]  # the architecture, as `models.hf.architecture` names it
    tensors: tuple[PublishedTensor, ...]
    files: dict[str, tuple[int, int]] = {}  # of an adapter: (bytes, crc32) by name; then there are no tensors

    @property
    def checksum(self) -> str:
        """CRC-32 of all names and checksums, in hexadecimal; the same for equal weights in equal parts."""
        listed = [(t.name, t.crc32) for t in self.tensors] or sorted(self.files.items())
        return f'{zlib.crc32(json.dumps(listed).encode()):08x}'

    @property
    def name(self) -> str:
        """The policy's name on servers: '123-0a1b2c3d'. Two runs may share versions, but not checksums."""
        return f'{self.version}-{self.checksum}'


def number_of(name: str) -> int:
    """The version in a policy's name."""
    return int(name.partition('-')[0])


def crc32(array: np.ndarray) -> int:
    """CRC-32 of an array's bytes in C order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def read_manifest(directory: str | Path) -> Manifest:
    """Reads a manifest. Raises RefusedPolicy if it is damaged, or missing as in an incomplete directory."""
    path = Path(directory) / MANIFEST
    try:
        if (size := path.stat().st_size) > _MOST_MANIFEST:
            raise ValueError(f'it has {size} bytes, more than any manifest')
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RefusedPolicy(
            f'{path} is missing, so no complete policy is there; check the path, and that trainer and '
            'servers mount the same directory'
        ) from None
    except (ValueError, RecursionError, OSError) as e:
        raise RefusedPolicy(
            f'{path} cannot be read ({e}); continue the run, which writes the policy again'
        ) from e
    if not isinstance(fields, dict) or fields.get('format') != FORMAT:
        raise RefusedPolicy(
            f'{path} is not a manifest of format {FORMAT}; install the same bapo_jax for trainer and server'
        )

    def need(condition: bool, what: str) -> None:
        if not condition:
            raise RefusedPolicy(f'{path}: {what[:500]}; continue the run, which writes the policy again')

    for name, kind in (('version', int), ('model', dict), ('tensors', dict)):
        need(type(fields.get(name)) is kind, f'{name} is missing or not of type {kind.__name__}')
    need(
        all(re.fullmatch(_NAME, field) for field in fields['model']), 'model has a field with an invalid name'
    )
    need(
        type(fields['model'].get('tie_word_embeddings')) is bool,
        'model.tie_word_embeddings is missing or not of type bool',
    )
    files = fields.get('files', {})
    need(isinstance(files, dict), 'files is not a dict')
    for name, entry in files.items():
        need(re.fullmatch(_NAME, name) is not None, f'{name!a} is not a valid file name')
        need(_are_counts(entry) and len(entry) == 2, f'{name} has no size and checksum')
    need(not (files and fields['tensors']), 'it lists both tensors and files')
    tensors = tuple(_described(name, t, need) for name, t in fields['tensors'].items())
    return Manifest(
        fields['version'], fields['model'], tensors, {name: tuple(entry) for name, entry in files.items()}
    )


def _described(name: str, fields: Any, need: Callable[[bool, str], None]) -> PublishedTensor:
    """One tensor of a manifest; `need` raises RefusedPolicy if its condition is false.

    Takes no more memory than the manifest does.
    """
    need(re.fullmatch(_NAME, name) is not None, f'{name!a} is not a valid tensor name')
    need(isinstance(fields, dict), f'{name} is not a dict')
    shape, part, dtype, crcs = (fields.get(field) for field in ('shape', 'part', 'dtype', 'crc32'))
    need(_are_counts(shape), f'{name} has the invalid shape {shape!a}')
    need(_are_counts(part), f'{name} has parts of the invalid shape {part!a}')
    need(dtype in _DTYPES, f'{name} has dtype {dtype!a} instead of {" or ".join(_DTYPES)}')
    need(isinstance(crcs, dict) and _are_counts(list(crcs.values())), f'{name} has no valid checksums')
    divides = len(part) == len(shape) and all(
        n and size % n == 0 for size, n in zip(shape, part, strict=True)
    )
    counts = [size // n for size, n in zip(shape, part, strict=True)] if divides else []
    # The count is checked before the names are built, since a manifest may claim any number.
    as_many = divides and math.prod(counts) == len(crcs)
    whole = as_many and crcs.keys() == {'.'.join(map(str, place)) for place in np.ndindex(*counts)}
    need(
        whole,
        f'{name} has shape {tuple(shape)}, but its parts {", ".join(list(crcs)[:9])!a} of {tuple(part)} do '
        'not fill it',
    )
    return PublishedTensor(name, tuple(shape), dtype, tuple(part), dict(sorted(crcs.items())))


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)


def check_architecture(manifest: Manifest, config: Any) -> None:
    """Raises RefusedPolicy if the architecture differs from `config`, a server's Hugging Face config."""
    differing = [
        f'{field} {value!a} (the server has {_served(config, field)!r})'
        for field, value in manifest.model.items()
        if _served(config, field) != value
    ]
    if differing:
        raise RefusedPolicy(
            f'policy {manifest.version} is of another model: {", ".join(differing)}; serve the model '
            'directory that the run trains'
        )


def _served(config: Any, field: str) -> Any:
    """A field of a config object; a dotted name is a field of a nested config."""
    value = functools.reduce(lambda part, name: getattr(part, name, None), field.split('.'), config)
    if field == 'head_dim' and value is None:  # optional in Qwen2's config
        return config.hidden_size // config.num_attention_heads
    return value


def check_bytes(directory: str | Path, manifest: Manifest, worker: int = 0, workers: int = 1) -> None:
    """Raises RefusedPolicy if a file is missing, or its bytes do not match the manifest's checksums.

    Holds a few MiB in memory at a time. The parts are divided among `workers`; each checks its own.
    """
    parts = [(tensor, part) for tensor in manifest.tensors for part in tensor.crc32]
    mine = sorted(parts, key=lambda part: part[0].part_bytes, reverse=True)[worker::workers]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda part: _check_part(directory, *part), mine):
            pass
    for name, (size, crc) in manifest.files.items():  # vLLM lets every worker read an adapter whole
        _check_file(Path(directory).absolute() / name, size, crc, name, '')


def _check_part(directory: str | Path, tensor: PublishedTensor, part: str) -> None:
    said = f' ({tensor.part} of {tensor.name} in {tensor.dtype})'
    _check_file(_file(directory, tensor, part), tensor.part_bytes, tensor.crc32[part], tensor.name, said)


def _check_file(file: Path, size: int, crc: int, what: str, said: str) -> None:
    """Raises RefusedPolicy unless a file that holds `what` has that size and checksum."""
    read = 0
    try:
        with file.open('rb', buffering=0) as f:
            found = os.fstat(f.fileno()).st_size
            if found != size:
                raise RefusedPolicy(
                    f'{file} has {found} bytes, but the manifest says {size}{said}; continue the run, which '
                    'writes the policy again'
                )
            block = memoryview(bytearray(min(_BLOCK, size)))
            while n := f.readinto(block):
                read = zlib.crc32(block[:n], read)
    except OSError as e:
        raise RefusedPolicy(
            f'{file} cannot be read ({e.strerror}), so {what} is incomplete; continue the run, which '
            'writes the policy again'
        ) from e
    if read != crc:
        raise RefusedPolicy(
            f'{file} is damaged: the checksum of {what} differs; continue the run, which writes the policy '
            'again'
        )


def read_tensors(directory: str | Path, manifest: Manifest) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of every tensor in the manifest's order; call `check_bytes` first.

    A tensor with one part is its memory-mapped file, of which only the bytes that are used are read. Writing
    to the array never changes the file. Raises RefusedPolicy if a file is gone or has another size.
    """
    for tensor in manifest.tensors:
        if tensor.part == tensor.shape:
            [part] = tensor.crc32
            yield tensor.name, _map(directory, tensor, part)
        else:
            # All parts exist before memory is allocated.
            parts = {part: _map(directory, tensor, part) for part in tensor.crc32}
            array = np.empty(tensor.shape, tensor.dtype)
            for part, mapped in parts.items():
                array[tensor.place(part)] = mapped
            yield tensor.name, array


def _map(directory: str | Path, tensor: PublishedTensor, part: str) -> np.ndarray:
    file = _file(directory, tensor, part)
    try:
        return np.memmap(file, tensor.dtype, 'c', shape=tensor.part)
    except (OSError, ValueError) as e:
        raise RefusedPolicy(
            f'{file} cannot be read ({e}), but it was there when it was checked; continue the run, which '
            'writes the policy again'
        ) from e


def _file(directory: str | Path, tensor: PublishedTensor, part: str) -> Path:
    return Path(directory).absolute() / WEIGHTS / tensor.name / part


def published_versions(directory: str | Path) -> Iterator[tuple[int, Path]]:
    """Yields (version, path) of each complete policy in a run's `policy/` directory, oldest first."""
    for path in sorted(Path(directory).glob('[0-9]*')):
        if (path / MANIFEST).is_file():
            yield int(path.name), path
