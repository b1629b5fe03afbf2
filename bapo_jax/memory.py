"""Bytes on a device during an optimizer step, by formula: for GPUs where their compiler is not installed. docs/memory.md has it in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax.traverse_util import flatten_dict

from bapo_jax.learner.head import Tile
from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig, parameters_of
from bapo_jax.models.patches import Grid
from bapo_jax.seen import tower_rows


def gpu_memory(
    model: ModelConfig, learner: Any, mesh: dict[str, int], params: int, gather_once: bool = False, grids: Sequence[Grid] = ()
) -> dict[str, int]:
    """Bytes on one GPU during an optimizer step; `params` is the size of a float32 copy of its part of the parameters.

    Symbols: r rows of T tokens a device; b bytes a number in compute; D, F, N, K, H, V, L as in models/decoder.py; n = mesh.tensor.

        state         (8 + m) / 4 params                          θ and two moments, the first in m bytes a number, exact
        gradients     2 params                                    their sum, and the micro-batch's own
        gathered once 3 params · mesh.fsdp                        in their place, with mesh.gather_once: whole, and the weights too
        residuals     L r T D b                                   the stream between layers (remat: full, offload); in place of D,
                                                                  attention_and_mlp_inputs: 2 D + N H / n, matrix_products:
                                                                  2 D + (2 N H + 2 K H + 2 F) / n; none: 1.25 L `layer`
        layer         r T b (4 D + (4 N + 4 K) H / n + 3 F / n)   one layer's activations; their gradients take their place
        logits        3 · 4 C U                                   logits, probabilities and gradient of a tile in float32: at most
                                                                  2,048 tokens and 16,384 words (learner/head.py)
        weights       (4 + b) U D + [(2 b + 4) W / n + 4 V D / n]  a block of the head, and its gradient; [if fsdp > 1: two layers'
                                                                  gathered matrices W, the gradient of one and that of the
                                                                  embedding]

    C = min(r T, 2,048), U = min(V / n, 16,384). W comes from the parameter table (`matrix_sizes`). `layer` and `logits` are live at
    different times, so the larger one counts. Fragmentation adds a twentieth of all activations. Images, of these `grids`, add what
    `tower_memory` says, of which a block is live when no layer is.
    """
    b = hf.DTYPES[model.dtype].itemsize
    n, (D, F, V, L) = mesh['tensor'], (model.hidden_size, model.intermediate_size, model.vocab_size, model.num_layers)
    layer = matrix_sizes(model)[2]
    heads, key_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    tokens = learner.micro_batch_rows // (mesh['data'] * mesh['fsdp']) * learner.row_tokens
    kept_by_a_layer = tokens * b * (4 * D + (4 * heads + 4 * key_heads) // n + 3 * F // n)
    kept = {
        'none': kept_by_a_layer * 5 // 4,
        'matrix_products': tokens * b * (2 * D + (2 * heads + 2 * key_heads + 2 * F) // n),
        'attention_and_mlp_inputs': tokens * b * (2 * D + heads // n),
    }
    residuals = L * kept.get(learner.remat, tokens * D * b)
    logits = 3 * 4 * min(tokens, Tile().tokens) * min(V // n, Tile().words)
    weights = (4 + b) * D * min(V // n, Tile().words)
    if mesh['fsdp'] > 1 and not gather_once:
        weights += (2 * b + 4) * layer // n + 4 * V * D // n
    tower, block = tower_memory(model, learner.remat, mesh['data'] * mesh['fsdp'], grids) if grids else ({}, 0)
    at_work = {
        "one layer's recomputation": kept_by_a_layer, 'a tile of logits': logits, "one vision block's recomputation": block,
    }  # fmt: skip
    largest = max(at_work, key=at_work.get)
    activations = {'residual stream': residuals, **tower, largest: at_work[largest], 'weights gathered or cast': weights}
    return {
        'θ and the moments': state_bytes(params, learner),
        **({'gradients and weights, whole': 3 * params * mesh['fsdp']} if gather_once else {'gradients': 2 * params}),
        **activations,
        'fragmentation': sum(activations.values()) // 20,
    }


def tower_memory(model: ModelConfig, remat: str, devices: int, grids: Sequence[Grid]) -> tuple[dict[str, int], int]:
    """Bytes on a GPU for the images of a mini-batch: what lives as long as the optimizer step, and what a block of the tower needs.

    Symbols: v rows of P slots a device, C numbers of a patch, I features in all, D' the decoder's width; D, F, N, L of the tower.

        images        (4 + b) v P C                       pixels, and the same in compute
        features      2 · 4 I D'                          float32 on every device, and their gradient
        residuals     L v P D b                           (remat: full, offload); in place of D, attention_and_mlp_inputs: 3 D,
                                                          matrix_products: 6 D + 2 F; none: L / 2 block
        block         2 v P b (8 D + 3 F) + 3 · 4 v N Q P  one block's activations, and the scores of Q = min(P, 512) slots
    """
    c, b = model.vision, hf.DTYPES[model.dtype].itemsize
    V, P = tower_rows(grids, c, devices)
    slots, D, F = V // devices * P, c.hidden_size, c.intermediate_size
    block = 2 * slots * b * (8 * D + 3 * F) + 3 * 4 * V // devices * c.num_heads * min(P, 512) * P
    kept = {
        'none': block // 2, 'matrix_products': slots * b * (6 * D + 2 * F), 'attention_and_mlp_inputs': slots * b * 3 * D,
    }  # fmt: skip
    return {
        'images and their features': (4 + b) * slots * c.patch_numbers + 8 * V * P // c.spatial_merge_size**2 * model.hidden_size,
        "the tower's residual stream": c.depth * kept.get(remat, slots * D * b),
    }, block


def state_bytes(params: int, learner: Any) -> int:
    """Bytes of parameters and their two moments; `params` is the size of a float32 copy of the parameters."""
    return (8 + hf.DTYPES[learner.first_moment_dtype].itemsize) * params // 4


def matrix_sizes(model: ModelConfig) -> tuple[int, int, int]:
    """Numbers in the embedding, in the head (where tied, the embedding again), and in the matrices of one decoder layer."""
    shapes, table = flatten_dict(hf.abstract_params(model)[1]), parameters_of(model)
    over_vocabulary = [shapes[p.path].size for p in table if 'vocab' in p.axes]
    stacked = sum(shapes[p.path].size for p in table if p.path[0] == 'layers' and len(p.axes) == 3)  # biases and scales are small
    return over_vocabulary[0], over_vocabulary[-1], stacked // model.num_layers
