"""Bytes on a GPU during an optimizer step, by formula, for when the GPU compiler is not installed.

docs/reference/memory.md has the formula in words.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, Mesh

from bapo_jax.cluster.grouped import tiles_for
from bapo_jax.cluster.long_rows import copies_of_key_heads
from bapo_jax.learner.head import Tile
from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig, parameters_of
from bapo_jax.models.delta import CHUNK
from bapo_jax.models.parameters import FLOAT32
from bapo_jax.models.sharding import parameter_sharding
from bapo_jax.models.vision.layout import tower_rows
from bapo_jax.models.vision.patches import Grid


def gpu_memory(
    model: ModelConfig,
    learner: Any,
    mesh: dict[str, int],
    params: int,
    never_trained: int = 0,
    gather_once: bool = False,
    grids: Sequence[Grid] = (),
) -> dict[str, int]:
    """Bytes on one GPU during an optimizer step, by use.

    `params` is the size of a float32 copy of the GPU's shard of the parameters, if all are trained; else of
    those that are, and `never_trained` that of the rest, as they are kept. Symbols: r rows of T tokens per
    device; b bytes per number in compute; D, F, N, K, H, V, L as in models/decoder.py; n = mesh.tensor.

        state           (8 + m) / 4 params
            θ and two moments, exact; the first moment has m bytes per number. On one card with
            learner.adam.on_host only θ: the moments come tensor by tensor, when the activations are gone.
            With several cards XLA's plan is no smaller
        gradients       2 params
            their sum, and those of the micro-batch
        gathered once   (3 params + never_trained) · mesh.fsdp
            replaces gradients with mesh.gather_once, if fsdp > 1: unsharded gradients and weights
        residuals       L r T D b
            the residual stream between layers (remat: full, offload). Instead of D, attention_and_mlp_inputs
            has 2 D + N H / n, matrix_products 2 D + (2 N H + 2 K H + 2 F) / n; none: 1.25 L `layer`
        layer           r T b (4 D + (4 N + 4 K) H / n + 3 F / n)
            activations of one layer; their gradients reuse the space. With experts, F is the width of the S
            that a token chooses, together, and its copies add 3 S D. `delta_numbers` has what replaces
            N and K in layers with linear attention; the larger layer counts
        logits          3 · 4 C U
            logits, probabilities and gradient of a tile in float32: at most 2,048 tokens and 16,384 words
            (learner/head.py)
        weights         (4 + b) U D + [(2 b + 4) W / n + 4 V D / n]
            a block of the head and its gradient; [if fsdp > 1: the gathered matrices W of two layers, the
            gradient of one, and that of the embedding]. With an adapter [2 b W / n, with experts twice that],
            and with fsdp = 1 a copy of the head. With experts also 2 b · 3 D F / n numbers for each tile
            (cluster/grouped.py): its copies of an expert's matrices, forward and backward

    If the tokens of rows are split, r is a fraction, and K counts the copies of key heads that devices
    exchange. C = min(r T, 2,048), U = min(V / n, 16,384). W comes from the parameter table (`matrix_sizes`).
    `layer` and `logits` are live at different times, so only the larger counts. Fragmentation adds a
    twentieth of all activations. Images with these `grids` add `tower_memory`; its block is live when no
    layer is.
    """
    b = hf.DTYPES[model.dtype].itemsize
    n, (D, F, V, L) = (
        mesh['tensor'],
        (model.hidden_size, model.chosen_width, model.vocab_size, model.num_layers),
    )
    copies = 3 * model.routing.chosen if model.routing else 0
    layer = matrix_sizes(model)[2]
    heads, key_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    row_devices = mesh['data'] * mesh['fsdp']
    tokens = learner.micro_batch_rows * learner.row_tokens // row_devices
    if learner.micro_batch_rows < row_devices:
        key_heads *= copies_of_key_heads(model.num_heads // n, model.num_kv_heads // n, mesh['fsdp'])
    gates = heads if model.hybrid else 0
    kinds = [
        (L // model.period, 4 * heads + 4 * key_heads + 2 * gates, 2 * heads + 2 * key_heads + gates, heads)
    ]
    if model.hybrid:
        kinds.append((L - L // model.period, *delta_numbers(model)))
    kept_by_a_layer = residuals = 0
    for layers, in_work, of_products, attended in kinds:
        of_kind = tokens * b * ((4 + copies) * D + in_work // n + 3 * F // n)
        kept = {
            'none': of_kind * 5 // 4,
            'matrix_products': tokens * b * (2 * D + (of_products + 2 * F) // n),
            'attention_and_mlp_inputs': tokens * b * (2 * D + attended // n),
        }
        residuals += layers * kept.get(learner.remat, tokens * D * b)
        kept_by_a_layer = max(kept_by_a_layer, of_kind)
    logits = 3 * 4 * min(tokens, Tile().tokens) * min(V // n, Tile().words)
    weights = (4 + b) * D * min(V // n, Tile().words)
    if model.routing:
        tiles, _ = tiles_for(max(1, tokens) * model.routing.chosen, model.routing.experts)
        weights += 2 * b * tiles * 3 * D * model.intermediate_size // n
    gather_once = gather_once and mesh['fsdp'] > 1
    if model.adapter and mesh['fsdp'] == 1:
        weights += b * V * D // n
    elif model.adapter and not gather_once:
        weights += (4 if model.routing else 2) * b * layer // n
    elif mesh['fsdp'] > 1 and not gather_once:
        weights += (2 * b + 4) * layer // n + 4 * V * D // n
    tower, block = tower_memory(model, learner.remat, row_devices, grids) if grids else ({}, 0)
    at_work = {
        "one layer's recomputation": kept_by_a_layer,
        'a tile of logits': logits,
        "one vision block's recomputation": block,
    }
    largest = max(at_work, key=at_work.get)
    activations = {
        'residual stream': residuals,
        **tower,
        largest: at_work[largest],
        'weights gathered or cast': weights,
    }
    return {
        'θ and the moments': state_bytes(params, learner, math.prod(mesh.values())),
        **(
            {'gradients and weights, whole': (3 * params + never_trained) * mesh['fsdp']}
            if gather_once
            else {'gradients': 2 * params}
        ),
        **activations,
        'fragmentation': sum(activations.values()) // 20,
    }


def delta_numbers(model: ModelConfig) -> tuple[int, int, int]:
    """Numbers of a token in linear attention: all at work, of matrix products, and of the result.

    Of N heads in chunks of Q tokens, float32 ones count 4 / b times, and again for their gradients: 3 N Q of
    decays and products, N (5 H + 3 W) of a chunk's inputs and corrections, and N H W / Q of the states
    between chunks.
    """
    d, b = model.delta, hf.DTYPES[model.dtype].itemsize
    N, H, W = d.value_heads, d.key_dim, d.value_dim
    products = d.channels + N * W
    in_float32 = N * (3 * CHUNK + 5 * H + 3 * W + H * W // CHUNK)
    return products + N * W + 2 * in_float32 * 4 // b, products + N * W, N * W


def tower_memory(
    model: ModelConfig, remat: str, devices: int, grids: Sequence[Grid]
) -> tuple[dict[str, int], int]:
    """Bytes on a GPU for the images of a mini-batch: what lasts for the optimizer step, and one tower block.

    Symbols: v rows of P slots per device, C numbers per patch, I features in all, D' the decoder's width;
    D, F, N, L are the tower's.

        images      (4 + b) v P C
            pixels in float32 and in the compute dtype
        features    2 · 4 I D'
            float32 on every device, with their gradient
        residuals   L v P D b
            (remat: full, offload); instead of D, attention_and_mlp_inputs has 3 D, matrix_products 6 D + 2 F;
            none: L / 2 block
        block       2 v P b (8 D + 3 F) + 3 · 4 v N Q P
            activations of one block, and the scores of Q = min(P, 512) slots
    """
    c, b = model.vision, hf.DTYPES[model.dtype].itemsize
    V, P = tower_rows(grids, c, devices)
    slots, D, F = V // devices * P, c.hidden_size, c.intermediate_size
    block = 2 * slots * b * (8 * D + 3 * F) + 3 * 4 * V // devices * c.num_heads * min(P, 512) * P
    kept = {
        'none': block // 2,
        'matrix_products': slots * b * (6 * D + 2 * F),
        'attention_and_mlp_inputs': slots * b * 3 * D,
    }
    return {
        'images and their features': (4 + b) * slots * c.patch_numbers
        + 8 * V * P // c.spatial_merge_size**2 * model.hidden_size,
        "the tower's residual stream": c.depth * kept.get(remat, slots * D * b),
    }, block


def state_bytes(params: int, learner: Any, devices: int, platform: str = 'gpu') -> int:
    """Bytes on a device of the parameters and, unless the host keeps them, of their two moments.

    `params` is the size of a float32 copy.
    """
    if learner.adam.on_host and platform == 'gpu' and devices == 1:
        return params
    return (8 + hf.DTYPES[learner.adam.first_moment_dtype].itemsize) * params // 4


def bytes_of_a_copy(
    model: ModelConfig, mesh: Mesh | AbstractMesh, dtype: str = 'float32', of: Any = None
) -> int:
    """Bytes per device of one copy of the parameters, or of those in the tree `of`.

    Those named in FLOAT32 always are.
    """
    _, shapes = hf.abstract_params(model)
    sharding = flatten_dict(parameter_sharding(mesh, shapes))
    shapes = flatten_dict(shapes)
    return sum(
        math.prod(sharding[path].shard_shape(shapes[path].shape))
        * (4 if path[-1] in FLOAT32 else hf.DTYPES[dtype].itemsize)
        for path in (shapes if of is None else flatten_dict(of))
    )


def matrix_sizes(model: ModelConfig) -> tuple[int, int, int]:
    """Numbers in the embedding, in the head (if tied, the embedding again), and in one layer's matrices.

    The latter is the mean over both kinds of a hybrid model's layers.
    Those of all experts count; `numbers_idle` says how many a token does not pass.
    """
    shapes, table = flatten_dict(hf.abstract_params(model)[1]), parameters_of(model)
    over_vocabulary = [shapes[p.path].size for p in table if 'vocab' in p.axes]
    # Biases and scales are small and not counted.
    of_layers = (p for p in table if p.path[0] in ('layers', 'delta_layers'))
    matrices = (p for p in of_layers if len(p.axes) - p.indices == 2)
    stacked = sum(shapes[p.path].size for p in matrices)
    return over_vocabulary[0], over_vocabulary[-1], stacked // model.num_layers


def numbers_idle(model: ModelConfig) -> int:
    """Numbers in the matrices of the experts of a layer that a token does not choose; 0 without experts."""
    r = model.routing
    return 3 * model.hidden_size * model.intermediate_size * (r.experts - r.chosen) if r else 0


def numbers_adapted(model: ModelConfig) -> int:
    """Numbers in the matrices of a layer's adapter; 0 without one."""
    return matrix_sizes(model)[2] - matrix_sizes(dataclasses.replace(model, adapter=None))[2]
