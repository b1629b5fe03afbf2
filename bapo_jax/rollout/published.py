"""Reads a published policy: a manifest, and tensors under their Hugging Face names.

    policy/000123/weights/         an Orbax checkpoint, one zarr array a tensor
    policy/000123/manifest.json    written last: it marks the directory as complete

This module loads in the server's process, where JAX may be absent. It needs only numpy, ml_dtypes and tensorstore.
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
    """A published policy is incomplete, damaged or of another model. The message names the file or tensor, and the reason."""


class PublishedTensor(NamedTuple):
    """One tensor, as the manifest describes it."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]
    dtype: str  # numpy's name, 'float32' or 'bfloat16'
    crc32: int  # of its bytes in C order


class Manifest(NamedTuple):
    """`tensors` are in loading order: layer by layer, which keeps a server's temporary memory small."""

    version: int  # training steps that the policy has had
    model: dict[str, Any]  # the architecture, as `models.hf.architecture` names it
    tensors: tuple[PublishedTensor, ...]

    @property
    def checksum(self) -> str:
        """CRC-32 of all tensors' names and checksums, in hexadecimal; equal for equal weights."""
        return f'{zlib.crc32(json.dumps([(t.name, t.crc32) for t in self.tensors]).encode()):08x}'


def crc32(array: np.ndarray) -> int:
    """CRC-32 of an array's bytes in C order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def read_manifest(directory: str | Path) -> Manifest:
    """Raises RefusedPolicy where the manifest is damaged or missing; it is missing from an incomplete directory."""
    path = Path(directory) / MANIFEST
    try:
        fields = json.loads(path.read_text('utf-8'))
    except FileNotFoundError:
        raise RefusedPolicy(f'{path} is missing: no policy was published there, or the publication is not complete') from None
    except (ValueError, OSError) as e:
        raise RefusedPolicy(f'{path} cannot be read ({e}); publish the policy again') from e
    if not isinstance(fields, dict) or fields.get('format') != FORMAT:
        raise RefusedPolicy(f'{path} is not a manifest of format {FORMAT}; trainer and server must be of one version of bapo_jax')
    try:
        tensors = tuple(PublishedTensor(name, tuple(t['shape']), t['dtype'], t['crc32']) for name, t in fields['tensors'].items())
        return Manifest(fields['version'], fields['model'], tensors)
    except (KeyError, TypeError) as e:
        raise RefusedPolicy(f'{path} lacks {e}; publish the policy again') from e


def check_model(manifest: Manifest, config: Any) -> None:
    """Compares the manifest's architecture with a server's model, a Hugging Face config object. Raises RefusedPolicy."""
    differing = [
        f'{field} {value!r} (the server has {_served(config, field)!r})'
        for field, value in manifest.model.items()
        if _served(config, field) != value
    ]
    if differing:
        raise RefusedPolicy(f'policy {manifest.version} is of another model: {", ".join(differing)}')


def _served(config: Any, field: str) -> Any:
    value = getattr(config, field, None)
    if field == 'head_dim' and value is None:  # optional in Qwen2's config
        return config.hidden_size // config.num_attention_heads
    return value


def read_tensors(directory: str | Path, manifest: Manifest) -> list[tuple[str, np.ndarray]]:
    """Returns (name, array) of every tensor in the manifest's order.

    All tensors are read and checked before the first is returned, so that no partial policy is served. Raises RefusedPolicy.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda tensor: (tensor.name, _read_tensor(Path(directory), tensor)), manifest.tensors))


def _read_tensor(directory: Path, tensor: PublishedTensor) -> np.ndarray:
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
    """Yields (version, path) of the complete policies in a run's `policy/` directory, oldest first."""
    for path in sorted(Path(directory).glob('[0-9]*')):
        if (path / MANIFEST).is_file():
            yield int(path.name), path
