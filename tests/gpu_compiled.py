"""Kernels, the learner's step and the engine's, through XLA's own compiler for GPUs, of which none is needed: `make gpu-kernels`.

Some four minutes; tests/test_gpu_compiled.py has a sample.
"""

import os
import subprocess
import sys

from small_run import ROOT

COMPILER = ROOT / '.gpu-compiler'
# Sizes of heads: those that have tiles of their own, on the card with the least shared memory that takes them, and on newer ones.
EVERY = {'A100-80GB': (128, 256), 'L40S': (128,), 'RTX4090': (64,), 'H100': (64, 128, 256), 'H200': (128,), 'B200': (64, 128, 256)}
KERNELS = """
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from bapo_jax.models import gpu_attention, gpu_decoding
from bapo_jax.config import default_config
from bapo_jax.targets import find_target

def loss(q, k, v, segment):
    return gpu_attention.attention(q, k, v, segment).astype(jnp.float32).sum()

for card, sizes in {sizes}.items():
    device = find_target('1x' + card, default_config()).mesh.devices.flat[0]
    for H in sizes:
        shapes = ((1, 256, 4, H), (1, 2, 256, H), (1, 2, 256, H))
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(device)) for shape in shapes]
        segment = jax.ShapeDtypeStruct((1, 256), jnp.int32, sharding=SingleDeviceSharding(device))
        text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays, segment).compile().as_text()
        shapes = ((4, 1, 6, H), (4, 2, 1, H), (4, 2, 1, H), (4, 2, 256, H), (4, 2, 256, H))
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(device)) for shape in shapes]
        position = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=SingleDeviceSharding(device))
        text += jax.jit(gpu_decoding.attend).lower(*arrays, position, None).compile().as_text()
        print(card, H, text.count('custom_call_target="__gpu$xla.gpu.triton"'))
"""
ENGINE = """
import dataclasses
from bapo_jax.config import default_config
from bapo_jax.targets import find_target
from benchmarks.engine_kernels import MODELS, counted, sample_program

mesh = find_target('1xH100', default_config()).mesh
for layers in (1, 3):
    model = dataclasses.replace(MODELS['0.5B'], num_layers=layers)
    count = counted(sample_program(model, mesh).compile().as_text(), model.vocab_size)
    print(count.launched['kernels'], count.loops, count.scores, count.launched.total())
"""
STEP = """
from test_dry_run import MODEL, config
from bapo_jax import dry_run

compiled, formula = (dry_run.measure(config(4), MODEL, '4xH100', compiles=compiles) for compiles in (True, False))
state = compiled.memory['θ, the moments and the mini-batch']
print(compiled.target.name, compiled.kernel, compiled.fits, state > 12 * compiled.parameters / 4, formula.compile_s)
"""


def output(script):
    """The lines that a process with the compiler prints."""
    assert (COMPILER / 'jax_cuda13_plugin').is_dir(), 'run make gpu-compiler'
    path = {'PYTHONPATH': f'{COMPILER}:{ROOT}:{ROOT}/tests:{ROOT}/tests/helpers', 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'}
    done = subprocess.run([sys.executable, '-c', script], cwd=ROOT, env=os.environ | path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def check_kernels(sizes):
    """The forward pass, the two of the backward pass and the engine's compile, for each card and size of head."""
    assert output(KERNELS.replace('{sizes}', repr(sizes))) == [f'{card} {H} 4' for card in sizes for H in sizes[card]]


def test_every_kernel_compiles_for_every_card():
    check_kernels(EVERY)


def test_the_step_compiles_for_four_cards_and_its_memory_is_the_compilers():
    assert output(STEP) == ['4 H100 triton True True None']


def test_a_token_is_few_kernels_and_no_loop():
    """At the sizes of Qwen2.5-0.5B: 10 a layer and 20 more, one of a layer is attention; scores are written once and read once."""
    one, three = ([int(n) for n in line.split()] for line in output(ENGINE))
    assert (one[:3], three[:3]) == ([1, 0, 2], [3, 0, 2])
    assert one[3] <= 30 and three[3] - one[3] <= 2 * 10
