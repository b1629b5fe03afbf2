"""Hugging Face directories in and out: config.json, safetensors (one file or sharded), tokenizer files carried along.

A parameter tree here is the pure state of `Qwen`: nested dicts of float32 arrays, layers stacked on the first axis.
Hugging Face keeps one [out, in] matrix per layer; the tree keeps [L, in, out].
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bapo_jax.models.qwen import ModelConfig, Qwen

Params = dict[str, Any]

MODEL_TYPES = ('qwen2', 'qwen3')
TOKENIZER_FILES = ('tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja', 'vocab.json', 'merges.txt',
                   'special_tokens_map.json', 'added_tokens.json', 'generation_config.json')

# (path in the tree, Hugging Face name, transposed?) for what exists once, and for what exists in every layer.
_TOP = ((('embedding', 'embedding'), 'model.embed_tokens.weight', False), (('norm', 'scale'), 'model.norm.weight', False))
_HEAD = (('head', 'kernel'), 'lm_head.weight', True)
_LAYER = (
    (('attention_norm', 'scale'), 'input_layernorm.weight', False),
    (('mlp_norm', 'scale'), 'post_attention_layernorm.weight', False),
    *(((name, 'kernel'), f'self_attn.{name}_proj.weight', True) for name in 'qkvo'),
    *(((name, 'kernel'), f'mlp.{name}_proj.weight', True) for name in ('gate', 'up', 'down')),
)
_QKV_BIAS = tuple(((name, 'bias'), f'self_attn.{name}_proj.bias', False) for name in 'qkv')
_QK_NORM = tuple(((f'{name}_norm', 'scale'), f'self_attn.{name}_norm.weight', False) for name in 'qk')


def read_config(path: str | Path, dtype: str = 'float32') -> ModelConfig:
    """The decoder's shape from `path/config.json`.

    Raises FileNotFoundError where the directory or file is missing, ValueError, naming the field, where it asks for what `Qwen`
    leaves out.
    """
    file = Path(path) / 'config.json'
    if not file.is_file():
        raise FileNotFoundError(f'model.path={str(path)!r}: no config.json there; give a Hugging Face model directory')
    try:
        c = json.loads(file.read_text('utf-8'))
    except ValueError as e:
        raise ValueError(f'{file}: not valid JSON ({e}); fetch the model directory again') from e
    if c.get('model_type') not in MODEL_TYPES:
        raise ValueError(f'{file}: model_type={c.get("model_type")!r} is not supported; supported: {", ".join(MODEL_TYPES)}')
    unsupported = _unsupported(c)
    if unsupported:
        raise ValueError(f'{file}: {"; ".join(unsupported)}')
    rope = c.get('rope_parameters') or c.get('rope_scaling') or {}  # transformers 5 and before
    try:
        # Qwen3's head size is a field of its own; Qwen2's follows from the width where it is not given.
        head_dim = c['head_dim'] if c['model_type'] == 'qwen3' else c.get('head_dim')
        return ModelConfig(
            model_type=c['model_type'],
            vocab_size=c['vocab_size'],
            hidden_size=c['hidden_size'],
            intermediate_size=c['intermediate_size'],
            num_layers=c['num_hidden_layers'],
            num_heads=c['num_attention_heads'],
            num_kv_heads=c.get('num_key_value_heads') or c['num_attention_heads'],
            head_dim=head_dim or c['hidden_size'] // c['num_attention_heads'],
            rope_theta=float(c.get('rope_theta') or rope.get('rope_theta', 10_000.0)),
            rms_norm_eps=float(c.get('rms_norm_eps', 1e-6)),
            tie_embeddings=bool(c.get('tie_word_embeddings', False)),
            dtype=dtype,
        )
    except KeyError as e:
        raise ValueError(f'{file}: the field {e.args[0]!r} is missing') from e


def _unsupported(c: dict[str, Any]) -> list[str]:
    """What a config.json asks for that `Qwen` leaves out, each with the values that are supported."""
    rope_types = {
        field: rope.get('rope_type', rope.get('type', 'default'))
        for field in ('rope_parameters', 'rope_scaling')
        if (rope := c.get(field))
    }
    supported = (
        ('hidden_act', c.get('hidden_act', 'silu') == 'silu', "'silu'"),
        ('use_sliding_window', not c.get('use_sliding_window'), 'False'),
        ('layer_types', set(c.get('layer_types') or ()) <= {'full_attention'}, "'full_attention' in every layer"),
        ('attention_bias', c['model_type'] == 'qwen2' or not c.get('attention_bias'), 'False'),  # Qwen2 does not read it
        *((field, rope_type == 'default', "rope_type 'default'") for field, rope_type in rope_types.items()),
        ('quantization_config', not c.get('quantization_config'), 'weights that are not quantised'),
    )
    return [f'{field}={c[field]!r} is not supported; supported: {values}' for field, fine, values in supported if not fine]


def abstract_params(config: ModelConfig) -> tuple[nnx.GraphDef, Params]:
    """The model's graph and the shapes of its parameters, nothing allocated."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Qwen(config, rngs=nnx.Rngs(0))), nnx.Param)[:2]
    return graph, nnx.to_pure_dict(state)


def init_params(config: ModelConfig, seed: int) -> Params:
    """Freshly initialised parameters (normal, 0.02)."""
    return nnx.to_pure_dict(nnx.state(Qwen(config, rngs=nnx.Rngs(seed)), nnx.Param))


def _entries(config: ModelConfig) -> Iterator[tuple[tuple[str, ...], list[str], bool]]:
    """(path in the tree, its Hugging Face names, transposed?); a name per layer under 'layers', else one."""
    for path, name, transposed in (*_TOP, *(() if config.tie_embeddings else (_HEAD,))):
        yield path, [name], transposed
    for path, name, transposed in (*_LAYER, *(_QKV_BIAS if config.qkv_bias else ()), *(_QK_NORM if config.qk_norm else ())):
        yield ('layers', *path), [f'model.layers.{i}.{name}' for i in range(config.num_layers)], transposed


def load_params(path: str | Path, config: ModelConfig, put: Callable[[tuple[str, ...], np.ndarray], Any] | None = None) -> Params:
    """Reads the parameters of a Hugging Face directory, one tensor of the tree at a time.

    `put(path, array)` says where each goes (a device, a mesh); by default arrays stay in numpy.
    Raises FileNotFoundError for missing files, ValueError for a truncated file, a missing tensor or a wrong shape.
    """
    path = Path(path)
    index_file, single = path / 'model.safetensors.index.json', path / 'model.safetensors'
    if index_file.is_file():
        shards = {name: path / file for name, file in json.loads(index_file.read_text('utf-8'))['weight_map'].items()}
        missing = sorted({str(f) for f in shards.values() if not f.is_file()})
        if missing:
            raise FileNotFoundError(f'model.path={str(path)!r}: the index names missing files {missing}; fetch them again')
    elif single.is_file():
        shards = None
    else:
        raise FileNotFoundError(f'model.path={str(path)!r}: no model.safetensors and no model.safetensors.index.json there')

    opened: dict[Path, Any] = {}

    def file_of(name: str) -> Path:
        if shards is not None and name not in shards:
            raise ValueError(f'{index_file}: no tensor {name!r}; the checkpoint does not fit its config.json')
        return single if shards is None else shards[name]

    def read(name: str) -> np.ndarray:
        file = file_of(name)
        try:
            if file not in opened:
                opened[file] = safe_open(file, framework='numpy')
            return opened[file].get_tensor(name)
        except SafetensorError as e:
            raise ValueError(f'{file}: cannot read tensor {name!r} ({e}); the file is truncated or of another model') from e

    _, shapes = abstract_params(config)
    params: Params = {}
    for tree_path, names, transposed in _entries(config):
        want = _get(shapes, tree_path).shape[1 if tree_path[0] == 'layers' else 0 :]
        tensors = [read(name).T if transposed else read(name) for name in names]
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.shape != want:
                raise ValueError(f'{file_of(name)}: {name} has shape {_hf_shape(tensor.shape, transposed)} here, config.json implies '
                                 f'{_hf_shape(want, transposed)}; weights and config.json are of different models')  # fmt: skip
        array = np.stack(tensors) if tree_path[0] == 'layers' else tensors[0]
        array = np.ascontiguousarray(array, np.float32)
        _set(params, tree_path, put(tree_path, array) if put else array)
    return params


def save_params(path: str | Path, config: ModelConfig, params: Params, *, like: str | Path) -> None:
    """Writes a Hugging Face directory that transformers and vLLM load: weights in float32, the rest copied from `like`.

    Raises FileExistsError if `path` already holds weights.
    """
    path, like = Path(path), Path(like)
    for name in ('model.safetensors', 'model.safetensors.index.json'):
        if (path / name).exists():
            raise FileExistsError(f'{path} already holds {name}; give an empty output directory')
    path.mkdir(parents=True, exist_ok=True)
    for name in ('config.json', *TOKENIZER_FILES):
        if (like / name).is_file() and like != path:
            shutil.copy(like / name, path / name)
    save_file(to_hf(config, params), path / 'model.safetensors', metadata={'format': 'pt'})


def to_hf(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Every tensor under its Hugging Face name, in layer order within each kind."""
    tensors = {}
    for tree_path, names, transposed in _entries(config):
        array = np.asarray(jax.device_get(_get(params, tree_path)), np.float32)
        for name, a in zip(names, array if tree_path[0] == 'layers' else [array], strict=True):
            tensors[name] = np.ascontiguousarray(a.T if transposed else a)
    return tensors


def _hf_shape(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    return shape[::-1] if transposed else shape


def _get(tree: Params, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _set(tree: Params, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
