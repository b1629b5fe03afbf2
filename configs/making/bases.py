"""The bases that sft.py trains: the files of each model, and the batches of worked solutions that it is
shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.models.configs import read_config
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.models.vision.patches import Pixels, features_at, in_slots, lay_out_images, rope_positions
from bapo_jax.tasks.countdown import task as countdown
from bapo_jax.tasks.countdown.solutions import calling_solution, searched_solution, worked_solution
from bapo_jax.tasks.diagrams import task as diagrams
from bapo_jax.tasks.diagrams.pictures import SIDE
from bapo_jax.tasks.sight import Sight

ROW_TOKENS = 64  # prompt and solution; the few problems that need more are skipped
SEARCH_TOKENS = 16 + 160  # the same of a search
PATCH, MERGE = 8, 2  # pixels a patch's side; patches a feature's side: 36 features a figure
MARK = '<|image_pad|>'
CALL = ['<calc>', '</calc>']


class Batch(NamedTuple):
    """Rows of a prompt, a worked solution and an end token; the targets are the tokens after the prompt."""

    tokens_BxT: np.ndarray
    is_target_BxT: np.ndarray
    # Of a policy that sees, as in Sequences:
    rope_BxTx3: np.ndarray | None = None
    feature_BxT: np.ndarray | None = None
    pixels: Pixels | None = None  # of all pictures


def countdown_files(
    output: Path, width: int, layers: int, calling: bool = False, experts: int = 0
) -> Any:
    """Writes config.json and the tokenizer. Returns the tokenizer.

    In a base that is `calling` the calculator, the end of a call ends the policy's turn. With `experts`, each
    layer has so many in place of its MLP, a quarter as wide, and a token chooses two.
    """
    tokenizer = character_tokenizer()
    if calling:
        tokenizer.add_tokens(CALL)
        ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(CALL[1])]
        _write_json(output / 'generation_config.json', {'eos_token_id': ends})
    tokenizer.save_pretrained(output)
    family = {'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2'}
    if experts:
        family = {
            'architectures': ['Qwen3MoeForCausalLM'], 'model_type': 'qwen3_moe', 'head_dim': 32,
            'moe_intermediate_size': 3 * width // 4, 'num_experts': experts, 'num_experts_per_tok': 2,
            'norm_topk_prob': True,
        }  # fmt: skip
    _write_json(output / 'config.json', {**family, **_decoder(width, layers, tokenizer)})
    return tokenizer


def diagrams_files(output: Path, width: int, layers: int) -> Any:
    """Writes config.json, the tokenizer and the settings of the image processor. Returns the tokenizer."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(['<|vision_start|>', MARK, '<|vision_end|>', '<|video_pad|>'], special_tokens=True)
    tokenizer.save_pretrained(output)
    start, mark, end, video = tokenizer.convert_tokens_to_ids(
        ['<|vision_start|>', MARK, '<|vision_end|>', '<|video_pad|>']
    )
    config = {
        'architectures': ['Qwen2_5_VLForConditionalGeneration'],
        'model_type': 'qwen2_5_vl',
        **_decoder(width, layers, tokenizer),
        # Of a head's 16 frequencies the columns have the lowest: at 10,000 they tell six columns apart by
        # 0.02 radians.
        'rope_theta': 10.0,
        'rope_scaling': {'type': 'mrope', 'mrope_section': [4, 6, 6]},  # time, row, column
        'vision_start_token_id': start,
        'image_token_id': mark,
        'vision_end_token_id': end,
        'video_token_id': video,
        'vision_config': {
            'depth': 3,
            'hidden_act': 'silu',
            'hidden_size': 64,
            'intermediate_size': 192,
            'num_heads': 2,
            'in_chans': 3,
            'out_hidden_size': width,
            'patch_size': PATCH,
            'spatial_patch_size': PATCH,
            'spatial_merge_size': MERGE,
            'temporal_patch_size': 2,
            'window_size': SIDE,
            'fullatt_block_indexes': [0, 1, 2],
            'tokens_per_second': 2,
        },
    }
    _write_json(output / 'config.json', config)
    processor = {
        'image_processor_type': 'Qwen2VLImageProcessor',
        'processor_class': 'Qwen2_5_VLProcessor',
        'patch_size': PATCH,
        'merge_size': MERGE,
        'temporal_patch_size': 2,
        'size': {'shortest_edge': SIDE**2, 'longest_edge': SIDE**2},
        'image_mean': [1.0, 1.0, 1.0],  # white is 0
        'image_std': [0.3, 0.3, 0.3],
    }
    _write_json(output / 'preprocessor_config.json', processor)
    return tokenizer


def _decoder(width: int, layers: int, tokenizer: Any) -> dict[str, Any]:
    return {
        'hidden_act': 'silu',
        'hidden_size': width,
        'intermediate_size': 3 * width,
        'num_hidden_layers': layers,
        'num_attention_heads': width // 32,
        'num_key_value_heads': max(1, width // 64),
        'max_position_embeddings': 4096,
        'rope_theta': 10000.0,
        'rms_norm_eps': 1e-6,
        'tie_word_embeddings': True,
        'torch_dtype': 'float32',
        'vocab_size': len(tokenizer),
        'bos_token_id': tokenizer.eos_token_id,
        'eos_token_id': tokenizer.eos_token_id,
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + '\n', 'utf-8')


def countdown_batches(
    tokenizer: Any, problems: int, batch: int, seed: int, aimless: float = 0.0, searching: bool = False,
    calling: bool = False,
) -> Iterator[Batch]:  # fmt: skip
    """Yields batches of [batch, ROW_TOKENS] without end; where solutions are searches, [batch,
    SEARCH_TOKENS]. Where they are `calling`, they call the calculator.
    """
    steps = calling_solution if calling else worked_solution
    room = SEARCH_TOKENS if searching else ROW_TOKENS
    truths = countdown.training_problems('generated', limit=problems, seed=seed)
    prompts = [tokenizer.encode(countdown.prompt_text(t, 'compact', tokenizer)) for t in truths]
    rng = np.random.default_rng(seed)
    while True:
        tokens, is_target = np.zeros((batch, room), np.int32), np.zeros((batch, room), bool)
        for row in range(batch):
            end = room + 1
            while end > room:  # draw another problem: some have long solutions only
                i = rng.integers(len(truths))
                aim = not aimless or rng.random() >= aimless
                text = searched_solution(truths[i], rng) if searching else steps(truths[i], rng, aim)
                solution = [*tokenizer.encode(text), tokenizer.eos_token_id]
                start, end = len(prompts[i]), len(prompts[i]) + len(solution)
            tokens[row, :end] = [*prompts[i], *solution]
            is_target[row, start:end] = True
        yield Batch(tokens, is_target)


def diagrams_batches(
    output: Path, tokenizer: Any, problems: int, batch: int, seed: int, aimless: float = 0.0
) -> Iterator[Batch]:
    """Yields batches of [batch, ROW_TOKENS] with their pictures, without end; `output` holds what
    `diagrams_files` wrote.

    A share `aimless` of the solutions are those of other pictures.
    """
    truths = diagrams.training_problems('generated', limit=problems, seed=seed)
    vision, mark = read_config(output).vision, tokenizer.convert_tokens_to_ids(MARK)
    sight, rng = Sight(output, mark), np.random.default_rng(seed)
    one = truths[0]  # all prompts are alike
    grid = sight.grid(one['images'][0])
    prompt = sight.expanded(
        np.array(tokenizer.encode(diagrams.prompt_text(one, 'compact', tokenizer)), np.int32), one['images']
    )
    layout = lay_out_images([grid] * batch, vision)
    positions, following = rope_positions(prompt, [grid], vision)
    behind = np.broadcast_to(
        following + np.arange(ROW_TOKENS - len(prompt), dtype=np.int32), (3, ROW_TOKENS - len(prompt))
    )
    rope_BxTx3 = np.broadcast_to(np.concatenate([positions, behind], axis=1).T, (batch, ROW_TOKENS, 3))
    while True:
        tokens, is_target = np.zeros((batch, ROW_TOKENS), np.int32), np.zeros((batch, ROW_TOKENS), bool)
        rows = [truths[i] for i in rng.integers(len(truths), size=batch)]
        for row, truth in enumerate(rows):
            aim = not aimless or rng.random() >= aimless
            solved = truth if aim else truths[rng.integers(len(truths))]
            solution = [*tokenizer.encode(diagrams.worked_diagram(solved)), tokenizer.eos_token_id]
            start, end = len(prompt), len(prompt) + len(solution)
            tokens[row, :end] = [*prompt, *solution]
            is_target[row, start:end] = True
        patches = in_slots(sight.patches([truth['images'][0] for truth in rows]), layout.order_RxP)
        pixels = Pixels(patches, layout.position_RxPx2, layout.image_RxP)
        yield Batch(tokens, is_target, rope_BxTx3, features_at(tokens, layout.feature_I, mark), pixels)
