"""A published policy, as whoever serves it reads it: a manifest, and tensors under their Hugging Face names.

    policy/000123/weights/         an Orbax checkpoint, one zarr array a tensor
    policy/000123/manifest.json    written last: its presence says that the directory is complete

This module loads in the server's process, where JAX may be absent: it needs numpy and tensorstore alone.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import tensorstore

WEIGHTS, MANIFEST = 'weights', 'manifest.json'
FORMAT = 1
_THREADS = 4  # tensorstore reads and crc32 both release the interpreter's lock


class RefusedPolicy(ValueError):
    """A published policy that must not be served: incomplete, damaged, or of another model. Says which file or tensor, and why."""


class Tensor(NamedTuple):
    """What the manifest promises of one tensor."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]
    dtype: str  # numpy's name, 'float32' or 'bfloat16'
    crc32: int  # of its bytes in C order


class Manifest(NamedTuple):
    """`tensors` are in the order to load them: layer by layer, which keeps a server's temporary memory small."""

    version: int  # training steps the policy has had
    model: dict[str, Any]  # the architecture's sizes, by their names in config.json
    tensors: tuple[Tensor, ...]

    @property
    def fingerprint(self) -> str:
        """Equal for equal weights: a checksum of names and checksums."""
        return f'{zlib.crc32(json.dumps([(t.name, t.crc32) for t in self.tensors]).encode()):08x}'


def crc32(array: np.ndarray) -> int:
    """Of an array's bytes in C order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def read_manifest(directory: str | Path) -> Manifest:
    """Raises RefusedPolicy where there is none (the directory is incomplete or missing) or it is damaged."""
    path = Path(directory) / MANIFEST
    try:
        fields = json.loads(path.read_text('utf-8'))
    except FileNotFoundError:
        raise RefusedPolicy(f'{path} is missing: no policy was published there, or it is not complete') from None
    except (ValueError, OSError) as e:
        raise RefusedPolicy(f'{path} cannot be read ({e}); publish the policy again') from e
    if not isinstance(fields, dict) or fields.get('format') != FORMAT:
        raise RefusedPolicy(f'{path} is not a manifest of format {FORMAT}; trainer and server must be of one version of bapo_jax')
    try:
        tensors = tuple(Tensor(name, tuple(t['shape']), t['dtype'], t['crc32']) for name, t in fields['tensors'].items())
        return Manifest(fields['version'], fields['model'], tensors)
    except (KeyError, TypeError) as e:
        raise RefusedPolicy(f'{path} lacks {e}; publish the policy again') from e


def check_model(manifest: Manifest, config: Any) -> None:
    """Compares the architecture with a server's model, given as its Hugging Face config object. Raises RefusedPolicy."""
    differing = [
        f'{field} {value!r} (the server has {_served(config, field)!r})'
        for field, value in manifest.model.items()
        if _served(config, field) != value
    ]
    if differing:
        raise RefusedPolicy(f'policy {manifest.version} is of another model: {", ".join(differing)}')


def _served(config: Any, field: str) -> Any:
    value = getattr(config, field, None)
    if field == 'head_dim' and value is None:  # Qwen2's need not name it
        return config.hidden_size // config.num_attention_heads
    return value


def read_tensors(directory: str | Path, manifest: Manifest) -> list[tuple[str, np.ndarray]]:
    """Every tensor, checked against the manifest, in its order.

    All of them are read and checked before the first is returned, so that nothing half-read is ever served. Raises RefusedPolicy.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda tensor: (tensor.name, _read_tensor(Path(directory), tensor)), manifest.tensors))


def _read_tensor(directory: Path, tensor: Tensor) -> np.ndarray:
    base = (directory / WEIGHTS).absolute()
    spec = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{base}/{tensor.name}/'}}
    try:
        array = tensorstore.open(spec, open=True, read=True).result().read().result()
    except (ValueError, OSError) as e:
        raise RefusedPolicy(f'{base}: tensor {tensor.name} cannot be read ({" ".join(str(e).split())[:300]})') from e
    if array.shape != tensor.shape or array.dtype.name != tensor.dtype:
        raise RefusedPolicy(
            f'{base}: {tensor.name} is {array.dtype.name} {array.shape}, the manifest says {tensor.dtype} {tensor.shape}'
        )
    if crc32(array) != tensor.crc32:
        raise RefusedPolicy(f'{base}: the checksum of {tensor.name} is not the one in the manifest; the file is damaged')
    return array


def published_versions(directory: str | Path) -> Iterator[tuple[int, Path]]:
    """(version, path) of the complete policies in a run's `policy/` directory, oldest first."""
    for path in sorted(Path(directory).glob('[0-9]*')):
        if (path / MANIFEST).is_file():
            yield int(path.name), path
