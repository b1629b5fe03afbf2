"""Speed of the policy's update: tokens per second, and model FLOPs utilisation (MFU)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from bapo_jax.learner.packing import Part
from bapo_jax.models.decoder import ModelConfig, abstract_params, parameters_of
from bapo_jax.models.parameters import ADAPTER

# Dense bfloat16 peak in TFLOP/s by JAX's device_kind: the makers' published figures, without sparsity.
TERAFLOPS = {
    'NVIDIA A100-SXM4-40GB': 312,
    'NVIDIA A100-SXM4-80GB': 312,
    'NVIDIA A100-PCIE-40GB': 312,
    'NVIDIA A100 80GB PCIe': 312,
    'NVIDIA L40S': 362,
    'NVIDIA GeForce RTX 4090': 165,
    'NVIDIA H100 80GB HBM3': 989,
    'NVIDIA H100 PCIe': 756,
    'NVIDIA H200': 989,
    'NVIDIA B200': 2250,
    'TPU v4': 275,
    'TPU v5 lite': 197,
    'TPU v5': 459,
    'TPU v6 lite': 918,
}


def update_speed(
    parts: Sequence[Part], model: ModelConfig, devices: np.ndarray, seconds: float
) -> dict[str, float]:
    """Returns speed metrics of an update on `devices` that took `seconds` for the mini-batches of all passes.

    Tokens are counted as they lie in rows: a prompt counts once for each row that holds it, or once per
    response if prompts are not shared. perf/mfu/actor is left out if the peak is unknown.
    """
    tokens = sum(int(np.count_nonzero(part.layout.segment[: part.layout.filled])) for part in parts)
    if not tokens:
        return {}
    speed = {'perf/throughput/update': tokens / seconds}
    if peak := peak_flops(devices.flat[0], model.dtype):
        responses = sum(len(r.tokens) for part in parts for g in part.batch.groups for r in g.responses)
        pairs = tokens + sum(
            part.layout.position[: part.layout.filled].sum(dtype=np.float64) for part in parts
        )
        speed['perf/mfu/actor'] = model_flops(model, tokens, responses, pairs) / (
            seconds * devices.size * peak
        )
    return speed


def model_flops(model: ModelConfig, tokens: int, responses: int, pairs: float) -> float:
    """Returns the decoder's FLOPs, forward and backward, without recomputation or masked attention pairs.

    A vision tower's FLOPs are left out. Of `tokens`, only `responses` need the head. `pairs` counts pairs of
    a token and a token that it attends to, including itself. A multiply-add is two operations, and its
    gradient four:

        6 L (2 D N H + 2 D K H + 3 D F + D E) tokens + 6 V D responses + 12 L N H pairs

    With E experts, F is the width of those that a token chooses, together; without any, E = 0.

    A layer with linear attention (its C, N, H and W are those of models/delta.py) has D (C + 2 N W + 2 N)
    in place of attention's products, and 3 N W H for its state: two reads and a correction. Queries of a
    hybrid model's other layers have gates, D N H more; only these layers have pairs.

    With an adapter of P parameters, weights have no gradient, so the first two terms have 4 in place of 6,
    and 6 P tokens are added.
    """
    D, L, heads = model.hidden_size, model.num_layers, model.num_heads * model.head_dim
    full = L // model.period
    layers = full * 2 * D * (heads + model.num_kv_heads * model.head_dim) + L * 3 * D * model.chosen_width
    if model.routing:
        layers += L * D * model.routing.experts
    if d := model.delta:
        values = d.value_heads * d.value_dim
        of_delta = D * (d.channels + 2 * values + 2 * d.value_heads) + 3 * values * d.key_dim
        layers += full * D * heads + (L - full) * of_delta
    of_weights = (4.0 if model.adapter else 6.0) * (layers * tokens + model.vocab_size * D * responses)
    shapes = flatten_dict(abstract_params(model)[1])
    adapter = sum(shapes[p.path].size for p in parameters_of(model) if p.when == ADAPTER)
    return of_weights + 6.0 * adapter * tokens + 12.0 * full * heads * pairs


def peak_flops(device: jax.Device, dtype: str) -> float | None:
    """Returns the peak FLOP/s of matrix products in `dtype`; None if it is unknown.

    For float32, JAX lets GPUs multiply in TF32, at half the rate of bfloat16, and TPUs in bfloat16.
    """
    teraflops = TERAFLOPS.get(device.device_kind)
    return teraflops and 1e12 * teraflops / (2 if dtype == 'float32' and device.platform == 'gpu' else 1)
