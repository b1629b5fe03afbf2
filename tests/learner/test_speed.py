"""The update's tokens and arithmetic by hand, and the peaks that they are compared with."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from test_packing import make_group

from bapo_jax.dry_run.memory import matrix_sizes
from bapo_jax.dry_run.targets import CARDS, TPU_GIB
from bapo_jax.groups import make_batch
from bapo_jax.learner.packing import cut
from bapo_jax.learner.speed import TERAFLOPS, model_flops, peak_flops, update_speed
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.layers import Adapter
from bapo_jax.models.rotary import Rotation

MODEL = ModelConfig('qwen3', 512, 64, 128, 2, 4, 2, 24, Rotation(1e4), 1e-6, True, dtype='bfloat16')
CPU, H100 = SimpleNamespace(device_kind='cpu', platform='cpu'), SimpleNamespace(device_kind='NVIDIA H100 80GB HBM3', platform='gpu')


def parts(shared=0):
    """Two prompts of 3 and 2 tokens, responses of 4 and 1, and of 2 and 2: each pass has two mini-batches."""
    groups = [make_group(0, 3, [4, 1], 1), make_group(1, 2, [2, 2], 1)]
    config = SimpleNamespace(
        mini_batch_groups=1, mini_batches='released', row_tokens=20, micro_batch_rows=2, slot_tokens=5 if shared else 0
    )
    return cut(make_batch(groups, ['x1', 'x1']), np.arange(2), config, shared=shared)


@pytest.mark.parametrize(
    'shared, tokens, pairs',
    [
        (0, 7 + 4 + 4 + 4, 28 + 10 + 10 + 10),  # n tokens of a sequence see n (n + 1) / 2
        (5, 3 + 4 + 1 + 2 + 2 + 2, (6 + 22 + 4) + (3 + 7 + 7)),  # a prompt once: 3 + 4 tokens see 6, then 4 + 5 + 6 + 7
    ],
)
def test_tokens_and_utilisation_by_hand(shared, tokens, pairs):
    peak = 989e12
    flops = 6 * (2 * (2 * 64 * 96 + 2 * 64 * 48 + 3 * 64 * 128) * tokens + 512 * 64 * 9) + 12 * 2 * 96 * pairs
    assert update_speed(parts(shared) * 2, MODEL, np.array([CPU] * 4), 0.5) == {'perf/throughput/update': 2 * tokens / 0.5}
    assert update_speed(parts(shared) * 2, MODEL, np.array([[H100] * 2] * 2), 0.5) == pytest.approx(
        {'perf/throughput/update': 4 * tokens, 'perf/mfu/actor': 2 * flops / (0.5 * 4 * peak)}, rel=1e-12
    )  # fmt: skip


def test_an_update_without_tokens_has_no_speed():
    assert update_speed([], MODEL, np.array([H100]), 0.5) == {}


def test_matrices_are_those_of_the_parameter_table():
    _, head, layer = matrix_sizes(MODEL)
    assert model_flops(MODEL, 1, 0, 0) == 6 * MODEL.num_layers * layer and model_flops(MODEL, 0, 1, 0) == 6 * head
    adapted = dataclasses.replace(MODEL, adapter=Adapter(3, 6.0, 'mlp'))  # gate, up and down have 64 + 128 rows of 3 each
    assert model_flops(adapted, 1, 0, 0) == 2 * (4 * layer + 6 * 3 * 3 * (64 + 128)) and model_flops(adapted, 0, 1, 0) == 4 * head


def test_every_device_that_a_dry_run_knows_has_a_peak():
    assert TPU_GIB.keys() | {card.kind for card in CARDS.values()} <= TERAFLOPS.keys()


def test_float32_is_half_as_fast_on_a_gpu_and_a_cpu_has_no_peak():
    tpu = SimpleNamespace(device_kind='TPU v5 lite', platform='tpu')
    assert peak_flops(H100, 'bfloat16') == 2 * peak_flops(H100, 'float32') == 989e12
    assert peak_flops(tpu, 'float32') == peak_flops(tpu, 'bfloat16') == 197e12
    assert peak_flops(CPU, 'float32') is None
