"""Low-rank adapters (LoRA, arXiv 2106.09685): which model has one, how it starts, and its files.

An adapter adds alpha / rank · A B to a matrix W [in, out], with A [in, rank] and B [rank, out]. Its
parameters are rows of the table (parameters.py), and layers.py computes it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from safetensors.numpy import save_file

from bapo_jax.cluster.mesh import fetch
from bapo_jax.models import hf
from bapo_jax.models.configs import overrides, read_config
from bapo_jax.models.decoder import ModelConfig, parameters_of
from bapo_jax.models.layers import Adapter, first_a
from bapo_jax.models.parameters import ADAPTER, ADAPTER_PARAMETERS
from bapo_jax.models.tensor_files import at


def adapter_of(model: Mapping[str, Any]) -> Adapter | None:
    """Returns the adapter that a run's config (section `model`) trains; None if it trains whole matrices."""
    of = model.get('adapter', {})
    return Adapter(of['rank'], of['alpha'], of['targets']) if of.get('rank') else None


def model_of(model: Mapping[str, Any]) -> ModelConfig:
    """Returns the decoder that a config (section `model`) trains; raises as `read_config` does."""
    read = read_config(model['path'], model['dtype'], overrides(model))
    return dataclasses.replace(read, adapter=adapter_of(model))


def draw_first(params: dict[str, Any], config: ModelConfig, seed: int) -> None:
    """Puts the adapter of θ_0 into `params`: A at random, keyed by `seed`. B stays 0, so θ_0 is the base."""
    for i, row in enumerate(ADAPTER_PARAMETERS):
        if row.path[-1] == 'a' and getattr(config, row.needs):
            matrix = at(params, row.path[:-1])
            draw = jax.jit(first_a, static_argnums=1, out_shardings=matrix['a'].sharding)
            matrix['a'] = draw(jax.random.fold_in(jax.random.key(seed), i), matrix['a'].shape)


def save_adapter(path: Path, config: ModelConfig, params: dict[str, Any], *, base: str, dtype: str) -> None:
    """Writes the adapter alone as PEFT does, for a `base` that PEFT and vLLM load beside it."""
    names = {p.name.split('.')[-3] for p in parameters_of(config) if p.when == ADAPTER}
    stated = {
        'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'base_model_name_or_path': base, 'bias': 'none',
        'r': config.adapter.rank, 'lora_alpha': config.adapter.alpha, 'lora_dropout': 0.0,
        'target_modules': sorted(names), 'fan_in_fan_out': False, 'inference_mode': True,
    }  # fmt: skip
    tensors = {name: fetch(array) for name, array in hf.adapter_in_files(config, params, dtype)}
    save_file(tensors, path / 'adapter_model.safetensors', metadata={'format': 'pt'})
    (path / 'adapter_config.json').write_text(json.dumps(stated, indent=2) + '\n', 'utf-8')
