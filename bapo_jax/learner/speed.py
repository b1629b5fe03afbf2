"""How fast the policy's update is: tokens a second, and the share of the devices' peak that the model's own arithmetic takes."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from bapo_jax.learner.packing import Part
from bapo_jax.models.decoder import ModelConfig

# Dense bfloat16 products, 10^12 operations a second, by JAX's device_kind: the makers' published figures, without sparsity.
TERAFLOPS = {
    'NVIDIA A100-SXM4-40GB': 312, 'NVIDIA A100-SXM4-80GB': 312, 'NVIDIA A100-PCIE-40GB': 312, 'NVIDIA A100 80GB PCIe': 312,
    'NVIDIA L40S': 362, 'NVIDIA GeForce RTX 4090': 165, 'NVIDIA H100 80GB HBM3': 989, 'NVIDIA H100 PCIe': 756, 'NVIDIA H200': 989,
    'NVIDIA B200': 2250, 'TPU v4': 275, 'TPU v5 lite': 197, 'TPU v5': 459, 'TPU v6 lite': 918,
}  # fmt: skip


def update_speed(parts: Sequence[Part], model: ModelConfig, devices: np.ndarray, seconds: float) -> dict[str, float]:
    """Metrics of an update on a mesh's `devices`, of the mini-batches `parts` of all passes, that took so many seconds.

    A token is one that lies in a row: a prompt counts once in each row that holds it, which is once a response where nothing is
    shared. There is no perf/mfu/actor where the peak is unknown.
    """
    tokens = sum(int(np.count_nonzero(part.layout.segment[: part.layout.filled])) for part in parts)
    if not tokens:
        return {}
    speed = {'perf/throughput/update': tokens / seconds}
    if peak := peak_flops(devices.flat[0], model.dtype):
        responses = sum(len(r.tokens) for part in parts for g in part.batch.groups for r in g.responses)
        pairs = tokens + sum(part.layout.position[: part.layout.filled].sum(dtype=np.float64) for part in parts)
        speed['perf/mfu/actor'] = model_flops(model, tokens, responses, pairs) / (seconds * devices.size * peak)
    return speed


def model_flops(model: ModelConfig, tokens: int, responses: int, pairs: float) -> float:
    """Operations of the decoder, forward and backward, nothing recomputed or masked; a vision tower's are left out.

    Of `tokens`, `responses` need the head; `pairs` are those of a token and one that it sees, itself included. A product is two
    operations, and its gradient four:

        6 L (2 D N H + 2 D K H + 3 D F) tokens + 6 V D responses + 12 L N H pairs
    """
    D, L, heads = model.hidden_size, model.num_layers, model.num_heads * model.head_dim
    layer = 2 * D * (heads + model.num_kv_heads * model.head_dim) + 3 * D * model.intermediate_size
    return 6.0 * (L * layer * tokens + model.vocab_size * D * responses) + 12.0 * L * heads * pairs


def peak_flops(device: jax.Device, dtype: str) -> float | None:
    """Operations a second of products in `dtype`; None where they are not known.

    In float32 JAX lets GPUs multiply in TF32, at half the rate of bfloat16, and TPUs in bfloat16.
    """
    teraflops = TERAFLOPS.get(device.device_kind)
    return teraflops and 1e12 * teraflops / (2 if dtype == 'float32' and device.platform == 'gpu' else 1)
