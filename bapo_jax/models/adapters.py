"""Low-rank adapters (LoRA, arXiv 2106.09685): which model has one, how it starts, and its files, PEFT's.

An adapter adds alpha / rank · A B to a matrix W [in, out], with A [in, rank] and B [rank, out]. Its
parameters are rows of the table (parameters.py), and layers.py computes it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bapo_jax.cluster.mesh import fetch
from bapo_jax.machine import hub
from bapo_jax.models import hf
from bapo_jax.models.configs import overrides, read_config
from bapo_jax.models.decoder import ModelConfig, parameters_of
from bapo_jax.models.layers import Adapter, first_a
from bapo_jax.models.parameters import ADAPTER, ADAPTER_PARAMETERS, PARAMETERS, Parameter
from bapo_jax.models.tensor_files import at

SETTINGS, MATRICES = 'adapter_config.json', 'adapter_model.safetensors'  # the files of an adapter
# Fields of PEFT that change what an adapter computes, and their values in a plain one; None is plain, too.
_PLAIN = {
    'bias': 'none', 'use_dora': False, 'use_rslora': False, 'lora_bias': False, 'fan_in_fan_out': False,
    'rank_pattern': {}, 'alpha_pattern': {}, 'modules_to_save': [], 'layers_to_transform': [],
    'layer_replication': [], 'trainable_token_indices': [], 'target_parameters': [], 'exclude_modules': [],
    'use_qalora': False, 'use_bdlora': None, 'alora_invocation_tokens': None, 'arrow_config': None,
    'kasa_config': None, 'velora_config': None, 'monteclora_config': None,
}  # fmt: skip


_CHANGE_THE_BASE = ('pissa', 'olora', 'corda', 'loftq')  # ways to start that subtract A B from W


def _names(*targets: str) -> frozenset[str]:
    return frozenset(p.name.split('.')[-2] for p in PARAMETERS if p.adapter in targets)


# The layers of each choice of model.adapter.targets, by PEFT's names; the fewest come first.
_NAMES = {'mlp': _names('mlp'), 'attention': _names('attention'), 'all': _names('mlp', 'attention')}


def adapter_of(model: Mapping[str, Any]) -> Adapter | None:
    """Returns the adapter that a run's config (section `model`) trains; None if it trains whole matrices."""
    of = model.get('adapter', {})
    return Adapter(of['rank'], of['alpha'], of['targets']) if of.get('rank') else None


def check_adapter(model: Mapping[str, Any]) -> None:
    """Raises ValueError if model.adapter.start (section `model`) is no adapter of the config's settings.

    It reads the matrices, too: a host should say what is wrong with them before the others wait for it.
    """
    of = model['adapter']
    if not of['start']:
        return
    start = Path(of['start'])
    if not (start / SETTINGS).is_file():
        raise ValueError(
            f'model.adapter.start={of["start"]!r} has no {SETTINGS}; give a directory that PEFT or '
            '`bapo-export --adapter` wrote; to continue a run without a reference policy, it may be left out'
        )
    there, _ = read_adapter(start)
    if there != adapter_of(model):
        fields = ', '.join(f'model.adapter.{name}={value}' for name, value in there._asdict().items())
        raise ValueError(f'model.adapter.start={of["start"]!r} has other settings; set {fields}')
    _matrices(start, model_of(model))


def model_of(model: Mapping[str, Any]) -> ModelConfig:
    """Returns the decoder that a config (section `model`) trains; raises as `read_config`, `adapted` do."""
    return adapted(read_config(model['path'], model['dtype'], overrides(model)), adapter_of(model))


def adapted(model: ModelConfig, adapter: Adapter | None) -> ModelConfig:
    """Returns the model with the adapter.

    Raises ValueError if it would change experts or linear attention, which have none.
    """
    if model.delta and adapter:
        raise ValueError(
            f'model.adapter.rank={adapter.rank}: {model.model_type} has no adapters, since its linear '
            'attention supports none; set model.adapter.rank=0'
        )
    if model.routing and adapter and adapter.targets != 'attention':
        raise ValueError(
            f'model.adapter.targets={adapter.targets!r}: the experts of {model.model_type} have no adapter; '
            "set model.adapter.targets='attention'"
        )
    return dataclasses.replace(model, adapter=adapter)


def draw_first(params: dict[str, Any], config: ModelConfig, seed: int) -> None:
    """Puts the adapter of θ_0 into `params`: A at random, keyed by `seed`. B stays 0, so θ_0 is the base."""
    for i, row in enumerate(ADAPTER_PARAMETERS):
        if row.path[-1] == 'a' and getattr(config, row.needs):
            matrix = at(params, row.path[:-1])
            draw = jax.jit(first_a, static_argnums=1, out_shardings=matrix['a'].sharding)
            matrix['a'] = draw(jax.random.fold_in(jax.random.key(seed), i), matrix['a'].shape)


def travels_alone(config: ModelConfig) -> bool:
    """Returns whether servers get the adapter alone; vLLM reads none of a model with images by our names."""
    return config.adapter is not None and config.vision is None


def adapter_tensors(config: ModelConfig, params: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    """Returns the adapter's matrices by PEFT's names, [out, in] in `dtype`; every host must call it."""
    return {name: fetch(array) for name, array in hf.adapter_in_files(config, params, dtype)}


def save_adapter(
    path: Path, config: ModelConfig, tensors: Mapping[str, np.ndarray], base: str, revision: str = ''
) -> None:
    """Writes the `adapter_tensors` as PEFT does, for a `base` that it loads, at a `revision` of the hub."""
    names = {name.split('.')[-3] for name in tensors}
    stated = {
        'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'base_model_name_or_path': base,
        'revision': revision or None, 'r': config.adapter.rank, 'lora_alpha': config.adapter.alpha,
        'lora_dropout': 0.0, 'bias': 'none', 'target_modules': sorted(names), 'fan_in_fan_out': False,
        'inference_mode': True,
    }  # fmt: skip
    save_file(dict(tensors), path / MATRICES, metadata={'format': 'pt'})
    (path / SETTINGS).write_text(json.dumps(stated, indent=2) + '\n', 'utf-8')


def read_adapter(path: Path) -> tuple[Adapter, str]:
    """Returns the settings of the adapter that PEFT wrote to `path`, and the name of its base.

    The targets are the fewest that have all its matrices; those that it lacks are 0, and stay 0 in training.
    The name is owner/name[@revision] for a model of the hub, '' if none is stated. Raises ValueError, naming
    the file, if it does more than to add alpha / r · A B to them.
    """
    stated = _settings(path)
    base, revision = (stated.get(field) for field in ('base_model_name_or_path', 'revision'))
    base = base if isinstance(base, str) else ''
    if isinstance(revision, str) and hub.is_model(base):
        base += f'@{revision}'
    fitting = next(kind for kind, theirs in _NAMES.items() if {*stated['target_modules']} <= theirs)
    return Adapter(stated['r'], float(stated['lora_alpha']), fitting), base


def _settings(path: Path) -> dict[str, Any]:
    """The contents of the adapter's settings; raises as `read_adapter` does."""
    file = path / SETTINGS
    try:
        stated = dict(json.loads(file.read_text('utf-8')))
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(f'{file}: not a JSON object ({str(e)[:200]}); fetch the adapter again') from e
    rank, alpha, names = (stated.get(field) for field in ('r', 'lora_alpha', 'target_modules'))
    other = [field for field, plain in _PLAIN.items() if stated.get(field, plain) not in (plain, None)]
    if str(stated.get('init_lora_weights', True)).lower().startswith(_CHANGE_THE_BASE):
        other.append('init_lora_weights')
    if other or stated.get('peft_type') != 'LORA':
        field = (other or ['peft_type'])[0]
        raise ValueError(f'{file}: {field}={stated.get(field)!r} is not supported; give a plain LoRA adapter')
    if not (_is_positive(rank) and isinstance(rank, int) and _is_positive(alpha)):
        raise ValueError(f'{file}: r={rank!r} and lora_alpha={alpha!r} must be positive; fetch it again')
    if not (isinstance(names, list) and names and {*names} <= _NAMES['all']):
        raise ValueError(
            f'{file}: target_modules={names!r} is not supported; give an adapter of some of '
            f'{", ".join(sorted(_NAMES["all"]))}'
        )
    return stated


def put_adapter(params: dict[str, Any], path: Path, config: ModelConfig) -> None:
    """Puts the adapter that PEFT wrote to `path` into `params`, in place of that of `config`'s rank.

    Raises ValueError, naming the file, if it is damaged, of another rank, or of another model.
    """
    for row, of_layers in _matrices(path, config):
        matrix = at(params, row.path[:-1])
        now = matrix[row.path[-1]]
        if not of_layers:
            matrix[row.path[-1]] = jnp.zeros_like(now)
            continue
        stacked = np.stack([tensor.astype(np.float32).T for tensor in of_layers])
        matrix[row.path[-1]] = jax.make_array_from_callback(now.shape, now.sharding, stacked.__getitem__)


def _matrices(path: Path, config: ModelConfig) -> list[tuple[Parameter, list[np.ndarray]]]:
    """Returns each A and B of `config` with those of all layers in the files; none if no target has it.

    Raises as `put_adapter` does.
    """
    file, modules = path / MATRICES, _settings(path)['target_modules']
    try:
        stored = load_file(file)
    except (SafetensorError, OSError) as e:
        raise ValueError(f'{file} cannot be read ({e}); fetch the adapter again') from e
    matrices = []
    for row in (p for p in parameters_of(config) if p.when == ADAPTER):
        if row.name.split('.')[-3] not in modules:
            matrices.append((row, []))
            continue
        layers, *shape = at(hf.abstract_params(config)[1], row.path).shape
        shape = tuple(shape[::-1])
        named = [stored.pop(row.name.format(layer), None) for layer in range(layers)]
        for layer, tensor in enumerate(named):
            if tensor is None or tensor.shape != shape or not np.isfinite(tensor.astype(np.float32)).all():
                found = 'missing' if tensor is None else f'{tensor.shape}, or not finite'
                raise ValueError(
                    f'{file}: {row.name.format(layer)} is {found}; it must be {shape} of finite numbers: '
                    'fetch the adapter again, or give that of this base'
                )
        matrices.append((row, named))
    if stored:
        raise ValueError(
            f'{file}: {len(stored)} tensors are of no layer of the base that target_modules of {SETTINGS} '
            f'names, the first is {min(stored)!r}; fetch the adapter again, or give that of this base'
        )
    return matrices


def _is_positive(number: Any) -> bool:
    return type(number) in (int, float) and 0 < number < math.inf
