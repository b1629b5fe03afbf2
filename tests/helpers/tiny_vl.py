"""Tiny random Qwen2.5-VL models, prompts with images for them, and one whole model directory that reads real problems."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import Policy

from bapo_jax.models import hf
from bapo_jax.models.attention import xla
from bapo_jax.models.decoder import ImageFeatures
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.models.vision.patches import features_at, in_slots, lay_out_images, rope_positions

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
    @functools.cache
    def make(shape: str = next(iter(SHAPES))) -> Policy:
        tied, text, vision = SHAPES[shape]
        tokens = {'image_token_id': IMAGE, 'video_token_id': 6, 'vision_start_token_id': START, 'vision_end_token_id': END}
        path = tmp_path_factory.mktemp('vl') / 'model'
        write_model(path, text_config=TEXT | text, vision_config=VISION | vision, tie_word_embeddings=tied, **tokens)
        config = hf.read_config(path)
        return Policy(path, config, hf.abstract_params(config)[0], jax.tree.map(np.array, hf.load_params(path, config)))

    return make


def write_model(path, **config):
    """A random model in a new directory, no parameter at its initial value."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3))
        for name, parameter in model.named_parameters():
            if 'norm' in name or 'ln_q' in name:
                parameter.add_(1.0)
    model.save_pretrained(path)


# Qwen's chat format. A problem's text already has its places for images.
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
SPECIAL = ('<|im_start|>', '<|im_end|>', '<|vision_start|>', '<|vision_end|>', '<|image_pad|>', '<|video_pad|>')


@pytest.fixture(scope='session')
def vl_directory(tmp_path_factory):
    """A whole Hugging Face directory: 0.3M parameters, a tokenizer of bytes, images of 4 to 16 features of 28 × 28 pixels.

    Real geometry problems fit into 768 tokens. Heads are as wide as vLLM's attention on CPU wants them.
    """
    path = tmp_path_factory.mktemp('vl_directory') / 'model'
    tokenizer = character_tokenizer(chat_template=CHAT)
    tokenizer.add_special_tokens({'eos_token': '<|im_end|>', 'additional_special_tokens': list(SPECIAL)})
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    wide = {'hidden_size': 64, 'intermediate_size': 96, 'num_key_value_heads': 2, 'max_position_embeddings': 1024}
    text = TEXT | wide | {'vocab_size': -(-len(tokenizer) // 16) * 16, 'bos_token_id': None, 'eos_token_id': None}
    text['rope_parameters'] = TEXT['rope_parameters'] | {'mrope_section': [4, 6, 6]}
    vision = VISION | {'hidden_size': 64, 'out_hidden_size': 64, 'patch_size': 14, 'window_size': 56}
    write_model(
        path, text_config=text, vision_config=vision, tie_word_embeddings=True, eos_token_id=ids['<|im_end|>'],
        image_token_id=ids['<|image_pad|>'], video_token_id=ids['<|video_pad|>'], vision_start_token_id=ids['<|vision_start|>'],
        vision_end_token_id=ids['<|vision_end|>'],
    )  # fmt: skip
    tokenizer.save_pretrained(path)
    images = {  # the fields that the published models state; without mean and std vLLM would leave pixels as they are
        'min_pixels': 4 * 28 * 28, 'max_pixels': 16 * 28 * 28, 'patch_size': 14, 'temporal_patch_size': 2, 'merge_size': 2,
        'image_mean': [0.48145466, 0.4578275, 0.40821073], 'image_std': [0.26862954, 0.26130258, 0.27577711],
        'image_processor_type': 'Qwen2VLImageProcessor', 'processor_class': 'Qwen2_5_VLProcessor',
    }  # fmt: skip
    (path / 'preprocessor_config.json').write_text(json.dumps(images))
    return path


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


def seen_logp(config, params, sight, prompts, responses, temperature=1.0):
    """The trainer's log-probs of each prompt's response, [responses][tokens]. Prompts hold references to their images."""
    graph, starts = hf.abstract_params(config)[0], [len(p.tokens) - 1 for p in prompts]
    logp_BxT = np.asarray(logp_of_rows(graph, params, *seen_rows(config, sight, prompts, responses), temperature))
    return [logp_BxT[b, start : start + len(r)] for b, (start, r) in enumerate(zip(starts, responses, strict=True))]


def seen_rows(config, sight, prompts, responses):
    """A row for each response, its images not shared: what the tower reads, features at tokens, tokens, rotary positions."""
    T = -(-max(len(p.tokens) + len(r) for p, r in zip(prompts, responses, strict=True)) // 64) * 64
    tokens_BxT, position_3xBxT = np.zeros((len(prompts), T), np.int32), np.zeros((3, len(prompts), T), np.int32)
    images = [image for p in prompts for image in p.images]
    layout = lay_out_images([sight.grid(image) for image in images], config.vision)
    for b, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        n, end = len(prompt.tokens), len(prompt.tokens) + len(response)
        grids = [sight.grid(image) for image in prompt.images]
        tokens_BxT[b, :n] = prompt.tokens
        position_3xBxT[:, b, :n], following = rope_positions(prompt.tokens, grids, config.vision)
        position_3xBxT[:, b, n:end] = following + np.arange(end - n)
    at_BxT = features_at(tokens_BxT, layout.feature_I, config.vision.image_token)  # of the prompts alone
    for b, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens_BxT[b, len(prompt.tokens) : len(prompt.tokens) + len(response)] = response
    slots = in_slots(sight.patches(images), layout.order_RxP)
    return (slots, layout.position_RxPx2, layout.image_RxP), at_BxT, tokens_BxT, position_3xBxT


@functools.partial(jax.jit, static_argnames='graph')
def logp_of_rows(graph, params, pixels, at_BxT, tokens_BxT, position_3xBxT, temperature=1.0):
    """[B, T - 1]: of token t + 1."""
    model = nnx.merge(graph, params)
    images, segment_BxT = ImageFeatures(model.vision(*pixels), at_BxT), jnp.ones_like(tokens_BxT)
    hidden = model(tokens_BxT, position_3xBxT, lambda *qkv: xla(*qkv, segment_BxT), images)
    logp_BxTxV = jax.nn.log_softmax(model.logits(hidden)[:, :-1] / temperature)
    return jnp.take_along_axis(logp_BxTxV, tokens_BxT[:, 1:, None], axis=2)[..., 0]
