"""Tiny random Qwen2.5-VL models, and prompts with images for them."""

import functools

import jax
import numpy as np
import pytest
from tiny import Policy

from bapo_jax.models import hf

IMAGE, START, END = 5, 7, 8  # tokens
TEXT = {
    'vocab_size': 96, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2, 'num_attention_heads': 2,
    'num_key_value_heads': 1, 'max_position_embeddings': 512, 'rms_norm_eps': 1e-6,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': 10_000.0, 'mrope_section': [2, 3, 3]},
}  # fmt: skip
VISION = {
    'depth': 3, 'hidden_size': 32, 'intermediate_size': 20, 'num_heads': 2, 'out_hidden_size': 32, 'patch_size': 4,
    'window_size': 16, 'fullatt_block_indexes': [1],
}  # fmt: skip
SHAPES = {  # whether tied; what differs in the decoder and in the tower
    'tied, windows of 4 × 4 patches': (True, {}, {}),
    'untied, wide heads, windows of 2 × 2': (
        False,
        {'hidden_size': 64, 'num_key_value_heads': 2, 'rope_parameters': {**TEXT['rope_parameters'], 'mrope_section': [4, 6, 6]}},
        {'hidden_size': 64, 'out_hidden_size': 64, 'window_size': 8, 'depth': 4, 'fullatt_block_indexes': [0, 3]},
    ),
    'untied, windows of 8 × 8 that are no multiple of 2 patches': (False, {}, {'window_size': 36, 'fullatt_block_indexes': [2]}),
}
# Patches of the images of three prompts: partial windows on each side, less than a window, one that is several windows.
GRIDS = [[(1, 6, 10), (1, 2, 2)], [(1, 12, 6)], [(1, 8, 8), (1, 4, 14), (1, 18, 2)]]


@pytest.fixture(scope='session')
def make_vl(tmp_path_factory):
    """A function of a key of SHAPES: that model as transformers writes it and as this package reads it."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    @functools.cache
    def make(shape: str = next(iter(SHAPES))) -> Policy:
        tied, text, vision = SHAPES[shape]
        torch.manual_seed(0)
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(
            text_config=TEXT | text, vision_config=VISION | vision, image_token_id=IMAGE, video_token_id=6,
            vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=tied,
        ))  # fmt: skip
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
            for name, parameter in model.named_parameters():
                if 'norm' in name or 'ln_q' in name:
                    parameter.add_(1.0)
        path = tmp_path_factory.mktemp('vl') / 'model'
        model.save_pretrained(path)
        config = hf.read_config(path)
        return Policy(path, config, hf.abstract_params(config)[0], jax.tree.map(np.array, hf.load_params(path, config)))

    return make


@functools.cache
def torch_model(path):
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(path).eval()


def pixels_of(grids, seed=0):
    """Random patches, [patches, 96]."""
    return np.random.default_rng(seed).standard_normal((sum(h * w for _, h, w in grids), 3 * 2 * 4 * 4)).astype(np.float32)


def prompt_of(grids, seed=0):
    """Tokens of a prompt with those images, text between them and behind them."""
    rng, tokens = np.random.default_rng(seed), [20, 21]
    for _, h, w in grids:
        tokens += [START, *[IMAGE] * (h * w // 4), END, *rng.integers(15, 96, rng.integers(0, 4))]
    return np.array([*tokens, *rng.integers(15, 96, 3)])


def torch_inputs(tokens, grids, pixels):
    import torch

    return {
        'input_ids': torch.tensor(tokens)[None], 'mm_token_type_ids': torch.tensor(tokens == IMAGE).int()[None],
        'image_grid_thw': torch.tensor(grids), 'pixel_values': torch.tensor(pixels),
    }  # fmt: skip
