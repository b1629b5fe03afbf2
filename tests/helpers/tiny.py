"""The tiny random models that many tests share: their Hugging Face configs, and one as this package reads it."""

from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from bapo_jax.models.decoder import ModelConfig

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


class Policy(NamedTuple):
    path: Path
    config: ModelConfig
    graph: nnx.GraphDef
    params: Any  # numpy
