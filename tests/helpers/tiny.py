"""The tiny random models that many tests share: their Hugging Face configs, and one as this package reads it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig
from configs.making.bases import countdown_files

STOP_TOKENS = tuple(range(3, 15))  # many, so that responses differ in length
TINY = {
    'model_type': 'qwen2', 'vocab_size': 96, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2,
    'num_attention_heads': 4, 'num_key_value_heads': 2, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 10_000.0},
    'tie_word_embeddings': True, 'eos_token_id': 3,
}  # fmt: skip
QWEN3 = {'model_type': 'qwen3', 'head_dim': 16}  # heads wider than the model, as Qwen3-4B's
QWEN3_MOE = {
    'model_type': 'qwen3_moe', 'head_dim': 16, 'moe_intermediate_size': 24, 'num_experts': 6, 'num_experts_per_tok': 2,
    'norm_topk_prob': True,
}  # fmt: skip
# Four layers, two of them with linear attention; two value heads share a key head, and half of a head is turned.
QWEN3_5 = {
    'model_type': 'qwen3_5_text', 'num_hidden_layers': 4, 'full_attention_interval': 2, 'head_dim': 16, 'linear_num_key_heads': 2,
    'linear_num_value_heads': 4, 'linear_key_head_dim': 16, 'linear_value_head_dim': 16, 'linear_conv_kernel_dim': 4,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': 10_000.0, 'partial_rotary_factor': 0.5},
}  # fmt: skip


class Policy(NamedTuple):
    path: Path
    config: ModelConfig
    graph: nnx.GraphDef
    params: Any  # numpy


def hybrid_files(path: Path) -> Path:
    """A directory with Countdown's tokenizer and a random hybrid policy, which remembers some tokens; returns `path`."""
    countdown_files(path, width=32, layers=4)
    config = json.loads((path / 'config.json').read_text()) | QWEN3_5
    (path / 'config.json').write_text(json.dumps(config | {'architectures': ['Qwen3_5ForCausalLM']}))
    model = hf.read_config(path)
    params = hf.init_params(model, 0)
    params['delta_layers']['delta']['dt_bias'] -= 4
    hf.save(path, hf.to_hf(model, params), like=path)
    return path


def expert_files(path: Path, **stated) -> Path:
    """A directory with Countdown's tokenizer and a random policy of experts; returns `path`.

    Its routers' weights are large, so that rounding changes no token's experts.
    """
    countdown_files(path, width=32, layers=stated.get('num_hidden_layers', 1))
    config = json.loads((path / 'config.json').read_text()) | QWEN3_MOE | stated
    (path / 'config.json').write_text(json.dumps(config | {'architectures': ['Qwen3MoeForCausalLM']}))
    model = hf.read_config(path)
    params = hf.init_params(model, 0)
    params['layers']['router']['kernel'] *= 20
    hf.save(path, hf.to_hf(model, params), like=path)
    return path
