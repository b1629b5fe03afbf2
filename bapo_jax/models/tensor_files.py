"""Opens the safetensors files of a Hugging Face directory, and checks them against the model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.parameters import EMBEDDING, HEAD

_READABLE = ('F32', 'BF16', 'F16')  # readable dtypes, named as in safetensors; float32 is exact for all


class Tensor(NamedTuple):
    """One tensor of a checkpoint, and its place in the parameter tree."""

    name: str  # Hugging Face's
    path: tuple[str, ...]
    index: tuple[int, ...]  # on the leading axes of the parameter at `path`: (), (layer,) or (layer, expert)
    transposed: bool


def at(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Returns the entry of a nested dict at a path."""
    for key in path:
        tree = tree[key]
    return tree


def open_tensors(
    path: Path, config: ModelConfig, tensors: Sequence[Tensor], shapes: Mapping[str, Any]
) -> dict[str, Any]:
    """Checks presence, shape and dtype of the tensors; returns handles to read slices.

    `shapes` is the tree of the parameters' shapes. Raises ValueError or FileNotFoundError, naming the file.

    Reads no weights, except a head that is stored beside the embedding it is tied to.
    """
    index_file, single = path / 'model.safetensors.index.json', path / 'model.safetensors'
    if single.is_file():  # takes precedence, as in transformers: an index of an older export may remain
        file_of = {t.name: single for t in tensors}
    elif index_file.is_file():
        file_of = _read_index(index_file)
        absent = [t.name for t in tensors if t.name not in file_of]
        if absent:
            raise ValueError(
                f'{index_file}: no tensor {absent[0]!r}, which config.json implies; fetch the model '
                'directory again'
            )
    else:
        raise FileNotFoundError(
            f'model.path={str(path)!r}: no model.safetensors and no model.safetensors.index.json there; '
            'fetch or convert them'
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
                f'{file}: cannot read tensor {tensor.name!r} ({e}); the file is truncated or of another '
                'model: fetch it again'
            ) from e
        want = at(shapes, tensor.path).shape[len(tensor.index) :]
        want = want[::-1] if tensor.transposed else want
        if tuple(handle.get_shape()) != want:
            raise ValueError(
                f'{file}: {tensor.name} has shape {tuple(handle.get_shape())}, but config.json implies '
                f'{want}; they belong to different models: fetch the model directory again'
            )
        if handle.get_dtype() not in _READABLE:
            raise ValueError(
                f'{file}: {tensor.name} is stored as {handle.get_dtype()}; supported: {", ".join(_READABLE)}'
            )
        handles[tensor.name] = handle

    held: dict[str, Path] = {}
    for file, content in opened.items():
        for name in content.keys():
            if held.setdefault(name, file) != file:
                other = held[name].name
                raise ValueError(
                    f'{file}: {name} is also in {other}, and it is not clear which one to use; fetch both '
                    'files again'
                )
    known = {*handles, HEAD.name}
    if more := sorted(name for name in {*held, *file_of} - known if not name.endswith('rotary_emb.inv_freq')):
        if more[0].startswith('mtp.'):
            raise ValueError(
                f'{held.get(more[0]) or file_of[more[0]]}: {more[0]} is of multi-token prediction, which is '
                "not supported. Write the model without it, and its tokenizer beside it: transformers' "
                'AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(TEXT, '
                'save_original_format=False); then set model.path=TEXT'
            )
        raise ValueError(
            f'{held.get(more[0]) or file_of[more[0]]}: {len(more)} tensors do not belong to the model that '
            f'config.json describes, the first is {more[0]!r}; fetch the model directory again'
        )
    if config.tie_embeddings and HEAD.name in held:
        head = opened[held[HEAD.name]].get_slice(HEAD.name)
        if not _equal(head, handles[EMBEDDING.name]):
            raise ValueError(
                f'{held[HEAD.name]}: {HEAD.name} differs from {EMBEDDING.name}, but config.json ties them; '
                'set tie_word_embeddings to false there, or fetch the model directory again'
            )
    return handles


def stored_values(path: Path) -> int:
    """Returns how many values the safetensors files of a directory hold, by their headers.

    Returns 0 if there is no such file, or if one cannot be read, which `open_tensors` explains.
    """
    try:
        opened = [safe_open(file, framework='numpy') for file in path.glob('*.safetensors')]
    except (SafetensorError, OSError):
        return 0
    return sum(math.prod(file.get_slice(name).get_shape()) for file in opened for name in file.keys())


def _equal(a: Any, b: Any, rows: int = 4096) -> bool:
    """Returns whether two stored matrices hold the same values; reads some rows at a time."""
    (n, _), other = a.get_shape(), b.get_shape()
    parts = [slice(i, min(i + rows, n)) for i in range(0, n, rows)]
    return a.get_shape() == other and all(
        np.array_equal(a[p].astype(np.float32), b[p].astype(np.float32)) for p in parts
    )


def _read_index(index_file: Path) -> dict[str, Path]:
    """Maps tensor names of a sharded checkpoint to files. Raises like `load_params` if a file is missing."""
    try:
        weight_map = dict(json.loads(index_file.read_text('utf-8'))['weight_map'])
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise ValueError(
            f'{index_file}: not a safetensors index ({e!r}); fetch the model directory again'
        ) from e
    path = index_file.parent
    for name, file in weight_map.items():
        # Only the name is checked, not the target of a link: the hub's cache consists of links.
        if not isinstance(file, str) or file != Path(file).name or file in ('', '..'):
            raise ValueError(
                f'{index_file}: {name} must be in a file beside the index, not {str(file)[:100]!r}; fetch '
                'them again'
            )
    missing = sorted({file for file in weight_map.values() if not (path / file).is_file()})
    if missing:
        raise FileNotFoundError(
            f'model.path={str(path)!r}: the index names missing files {missing}; fetch them again'
        )
    return {name: path / file for name, file in weight_map.items()}
