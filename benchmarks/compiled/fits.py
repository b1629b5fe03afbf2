"""Which settings fit which devices, for the paper's responses, of mathematics and of visual geometry: the
table of docs/reference/memory.md.

    make tpu-compiler gpu-compiler
    # all rows; or those of some devices: … fits.py H100
    PYTHONPATH=.:.tpu-compiler:.gpu-compiler python -m benchmarks.compiled.fits
    # the dry run's own choice on H100s: docs/reference/performance.md
    PYTHONPATH=.:.gpu-compiler python -m benchmarks.compiled.fits advice

Needs neither weights nor accelerators, and takes a minute a row. Each model's config.json is written from the
numbers below. TPU slices and GPUs go by their own compilers; beside a GPU's stands the formula of
bapo_jax/dry_run/memory.py. The images of visual geometry are as large as its config allows, all of them.
"""

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
from ml_collections import ConfigDict

from bapo_jax import config as config_lib
from bapo_jax.cluster.devices import POOL
from bapo_jax.dry_run.advice import tokens_of_a_step
from bapo_jax.dry_run.command import chosen, measure
from bapo_jax.dry_run.targets import CARDS, GB
from bapo_jax.learner.packing import most_groups
from bapo_jax.learner.speed import model_flops
from bapo_jax.models.adapters import model_of
from bapo_jax.models.decoder import ModelConfig
from benchmarks.compiled.absent import cards, require_compiler
from configs import geometry, math

_VL = {
    'model_type': 'qwen2_5_vl', 'rope_theta': 1_000_000, 'rms_norm_eps': 1e-6, 'image_token_id': 151_655,
    'rope_scaling': {'type': 'mrope', 'mrope_section': [16, 24, 24]},
}  # fmt: skip
_TOWER = {
    'depth': 32,
    'hidden_size': 1280,
    'intermediate_size': 3420,
    'num_heads': 16,
    'in_chans': 3,
    'patch_size': 14,
    'spatial_merge_size': 2,
    'temporal_patch_size': 2,
    'window_size': 112,
    'fullatt_block_indexes': [7, 15, 23, 31],
}
MODELS = {
    '1.5B': {  # DeepSeek-R1-Distill-Qwen-1.5B
        'model_type': 'qwen2',
        'vocab_size': 151936,
        'hidden_size': 1536,
        'intermediate_size': 8960,
        'num_hidden_layers': 28,
        'num_attention_heads': 12,
        'num_key_value_heads': 2,
        'rope_theta': 10_000,
        'rms_norm_eps': 1e-6,
        'tie_word_embeddings': False,
    },
    '8B': {  # Qwen3-8B
        'model_type': 'qwen3',
        'vocab_size': 151936,
        'hidden_size': 4096,
        'intermediate_size': 12288,
        'num_hidden_layers': 36,
        'num_attention_heads': 32,
        'num_key_value_heads': 8,
        'head_dim': 128,
        'rope_theta': 1_000_000,
        'rms_norm_eps': 1e-6,
        'tie_word_embeddings': False,
    },
    '30B-A3B': {  # Qwen3-30B-A3B
        'model_type': 'qwen3_moe',
        'vocab_size': 151936,
        'hidden_size': 2048,
        'intermediate_size': 6144,
        'moe_intermediate_size': 768,
        'num_experts': 128,
        'num_experts_per_tok': 8,
        'norm_topk_prob': True,
        'num_hidden_layers': 48,
        'num_attention_heads': 32,
        'num_key_value_heads': 4,
        'head_dim': 128,
        'rope_theta': 1_000_000,
        'rms_norm_eps': 1e-6,
        'tie_word_embeddings': False,
    },
    'Qwen3.5-4B': {  # its text part
        'model_type': 'qwen3_5_text',
        'vocab_size': 248320,
        'hidden_size': 2560,
        'intermediate_size': 9216,
        'num_hidden_layers': 32,
        'full_attention_interval': 4,
        'num_attention_heads': 16,
        'num_key_value_heads': 4,
        'head_dim': 256,
        'linear_num_key_heads': 16,
        'linear_num_value_heads': 32,
        'linear_key_head_dim': 128,
        'linear_value_head_dim': 128,
        'linear_conv_kernel_dim': 4,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 10_000_000, 'partial_rotary_factor': 0.25},
        'rms_norm_eps': 1e-6,
        'tie_word_embeddings': True,
    },
    'VL-3B': _VL
    | {  # Qwen2.5-VL-3B-Instruct
        'vocab_size': 151936,
        'hidden_size': 2048,
        'intermediate_size': 11008,
        'num_hidden_layers': 36,
        'num_attention_heads': 16,
        'num_key_value_heads': 2,
        'tie_word_embeddings': True,
        'vision_config': _TOWER | {'out_hidden_size': 2048},
    },
    'VL-7B': _VL
    | {  # Qwen2.5-VL-7B-Instruct
        'vocab_size': 152064,
        'hidden_size': 3584,
        'intermediate_size': 18944,
        'num_hidden_layers': 28,
        'num_attention_heads': 28,
        'num_key_value_heads': 4,
        'tie_word_embeddings': False,
        'vision_config': _TOWER | {'out_hidden_size': 3584},
    },
}
LARGEST = (1, 48, 64)  # patches: 768 features, the most of model.pixels in configs/geometry.py
OTHER = {  # fields that a setting may have beside, by their names in the table
    'LoRA': {'model.adapter.rank': 16, 'model.adapter.alpha': 32.0},
    'LoRA of attention': {
        'model.adapter.rank': 16,
        'model.adapter.alpha': 32.0,
        'model.adapter.targets': 'attention',
    },
    'moments on the host': {'learner.adam.on_host': True},
    'rows of 32k': {'rollout.max_response_tokens': 30_720},
}
# model, devices, (data, fsdp, tensor), micro_batch_rows, remat, and a name of OTHER. Some do not fit, to show where
# the edge is.
SETTINGS = (
    ('1.5B', '1xA100-40GB', (1, 1, 1), 1, 'full'),
    ('1.5B', '1xH100', (1, 1, 1), 8, 'full'),
    ('1.5B', '1xH100', (1, 1, 1), 2, 'matrix_products'),
    ('1.5B', '4xH100', (1, 4, 1), 4, 'none'),
    ('1.5B', '2x8xH100', (2, 8, 1), 16, 'none'),
    ('8B', '1xH100', (1, 1, 1), 1, 'full'),
    ('8B', '4xH100', (1, 4, 1), 4, 'full'),
    ('8B', '4xH100', (1, 4, 1), 8, 'full'),
    ('8B', '8xH100', (1, 8, 1), 32, 'full'),
    ('8B', '2x8xH100', (2, 8, 1), 16, 'matrix_products'),
    ('8B', '2x8xH100', (1, 16, 1), 16, 'full'),
    ('1.5B', 'v5e:2x4', (1, 8, 1), 8, 'full'),
    ('8B', 'v5e:4x4', (1, 16, 1), 16, 'full'),
    ('8B', 'v5e:4x8', (1, 32, 1), 32, 'full'),
    ('8B', 'v6e:2x4', (1, 8, 1), 8, 'full'),
    ('8B', 'v5p:2x2x2', (1, 8, 1), 16, 'full'),
    ('VL-3B', '8xH100', (1, 8, 1), 32, 'full'),
    ('VL-7B', '8xH100', (1, 8, 1), 32, 'full'),
    ('VL-3B', 'v5e:4x4', (1, 16, 1), 16, 'full'),
    ('VL-7B', 'v6e:2x4', (1, 8, 1), 8, 'full'),
    ('1.5B', '1xA100-40GB', (1, 1, 1), 1, 'full', 'moments on the host'),
    ('1.5B', '1xA100-40GB', (1, 1, 1), 1, 'full', 'LoRA'),
    ('8B', '1xH100', (1, 1, 1), 1, 'full', 'LoRA'),
    ('8B', '8xH100', (1, 8, 1), 32, 'full', 'LoRA'),
    ('8B', 'v5e:4x8', (1, 32, 1), 32, 'full', 'LoRA'),
    ('30B-A3B', '1xH200', (1, 1, 1), 1, 'full', 'LoRA of attention'),
    ('30B-A3B', '8xH100', (1, 8, 1), 8, 'full', 'LoRA of attention'),
    ('30B-A3B', '8xH200', (1, 8, 1), 8, 'full'),
    ('30B-A3B', '4x8xH100', (1, 32, 1), 32, 'full'),
    ('30B-A3B', 'v5p:2x4x4', (1, 32, 1), 32, 'full'),
    ('30B-A3B', 'v5p:1x1x1', (1, 1, 1), 1, 'full', 'LoRA of attention'),
    ('30B-A3B', 'v5p:2x4x4', (1, 32, 1), 32, 'full', 'LoRA of attention'),
    ('30B-A3B', 'v5p:2x2x2', (1, 8, 1), 8, 'full'),
    ('Qwen3.5-4B', '1xH100', (1, 1, 1), 1, 'full'),
    ('Qwen3.5-4B', '8xH100', (1, 8, 1), 8, 'full'),
    ('Qwen3.5-4B', '8xH100', (1, 8, 1), 8, 'matrix_products'),
    ('1.5B', '1xH100', (1, 1, 1), 1, 'full', 'rows of 32k'),
    ('1.5B', '2xH100', (1, 2, 1), 1, 'full', 'rows of 32k'),
    ('1.5B', '4xH100', (1, 4, 1), 1, 'full', 'rows of 32k'),
    ('8B', '8xH100', (1, 8, 1), 8, 'full', 'rows of 32k'),
    ('8B', '8xH100', (1, 8, 1), 1, 'full', 'rows of 32k'),
    ('8B', 'v5p:2x2x2', (1, 8, 1), 1, 'full', 'rows of 32k'),
)


# model, a name of OTHER, and the clusters for which the dry run is asked
ADVISED = (
    ('1.5B', ('1xH100', '8xH100')),
    ('8B', ('2xH100', '4xH100', '8xH100', '2x8xH100')),
    ('8B', 'LoRA', ('1xH100', '8xH100', '4x8xH100')),
    ('30B-A3B', 'LoRA of attention', ('1xH200', '8xH100', '4x8xH100')),
    ('30B-A3B', ('8xH200', '4x8xH100')),
)


def prepared(
    name: str, mesh: tuple[int, int, int], rows: int, remat: str, changes: dict[str, Any] = {}
) -> tuple[ConfigDict, ModelConfig]:
    """The config of the model's task, resolved, and the model."""
    c = (geometry if 'vision_config' in MODELS[name] else math).get_config()
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = mesh
    c.learner.micro_batch_rows, c.learner.remat = rows, remat
    c.update_from_flattened_dict(changes)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / 'config.json').write_text(json.dumps(MODELS[name]))
        c.model.path = directory
        return config_lib.resolve(c), model_of(c.model.to_dict())


def rows_of(wanted: str) -> None:
    print(
        '| model | devices | data × fsdp × tensor | micro_batch_rows | remat | GB a device | formula | of | '
        'fits |'
    )
    print('|' + '---|' * 9)
    for name, devices, mesh, rows, remat, *other in SETTINGS:
        if wanted not in (devices, name) and wanted not in devices:
            continue
        c, model = prepared(name, mesh, rows, remat, *(OTHER[what] for what in other))
        images = [LARGEST] * most_groups(c.learner) if model.vision else []
        result = measure(c, model, devices, images)
        formula = (
            f'{measure(c, model, devices, images, compiles=False).total / GB:.1f}'
            if result.target.card
            else ''
        )
        jax.clear_caches()
        size = result.target.device_bytes
        used = f'over: {result.refused}' if result.refused else f'{result.total / GB:.1f}'
        cells = (
            ', '.join([name, *other]),
            devices,
            ' × '.join(map(str, mesh)),
            rows,
            remat,
            used,
            formula,
            f'{size / GB:.1f}',
            'yes' if result.fits else 'no',
        )
        print(f'| {" | ".join(map(str, cells))} |', flush=True)


def advice() -> None:
    print(
        '| model | cards | data × fsdp × tensor | micro_batch_rows | remat | GB a card | of | modelled s a '
        'step | tokens/s | utilisation |'
    )
    print('|' + '---|' * 10)
    for name, *other, clusters in ADVISED:
        for devices in clusters:
            c, model = prepared(name, (1, -1, 1), 32, 'full', *(OTHER[what] for what in other))
            result = measure(c, model, devices, compiles=False)
            found, best = chosen(result.target, c, model, devices)
            jax.clear_caches()
            if best:
                size, rate = result.target.device_bytes / GB, tokens_of_a_step(c) / best.seconds
                cells = (
                    ', '.join([name, *other]),
                    devices,
                    f'{best.data} × {best.fsdp} × {best.tensor}',
                    best.rows,
                    best.remat,
                    f'{best.bytes / GB:.1f}',
                    f'{size:.1f}',
                    f'{best.seconds:.0f}',
                    f'{rate:,.0f}',
                    f'{utilisation(c, model, devices, best.seconds):.0%}',
                )
            else:
                cells = ', '.join([name, *other]), devices, 'none', *[''] * 7
            print(f'| {" | ".join(map(str, cells))} |', flush=True)


def utilisation(config: ConfigDict, model: ModelConfig, devices: str, seconds: float) -> float:
    """The share of the cards' bfloat16 peak that a step of so many seconds needs, nothing recomputed."""
    hosts, of_host = cards(devices)
    card, T = (
        CARDS[devices.split('x')[-1]],
        config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
    )
    needed = tokens_of_a_step(config) // T * model_flops(model, T, T, T * T / 2)
    return needed / (seconds * hosts * of_host * card.teraflops * 1e12)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument(
        'wanted',
        nargs='?',
        default='',
        metavar='DEVICES',
        help='rows of these alone: H100, v5e, …; of a model: 30B-A3B; or advice',
    )
    wanted = parser.parse_args(argv).wanted
    os.environ.setdefault(POOL, '.93')
    devices = (
        [row[1] for row in SETTINGS if wanted in (row[0], row[1]) or wanted in row[1]]
        if wanted != 'advice'
        else ['1xH100']
    )
    if not devices:
        parser.error(
            f'no row of {wanted!r}; there are {", ".join(dict.fromkeys(row[1] for row in SETTINGS))}, and '
            'advice'
        )
    for platform_ in sorted({'tpu' if ':' in name else 'gpu' for name in devices}):
        require_compiler(platform_)
    installed = ', '.join(
        f'{name} {version(name)}' for name in ('jax', 'libtpu', 'jax-cuda13-pjrt') if find_spec(MODULES[name])
    )
    print(f'{datetime.date.today()}, {installed}, {os.cpu_count()} cores ({platform.machine()})\n')
    advice() if wanted == 'advice' else rows_of(wanted)


MODULES = {'jax': 'jax', 'libtpu': 'libtpu', 'jax-cuda13-pjrt': 'jax_cuda13_plugin'}

if __name__ == '__main__':
    main(sys.argv[1:])
