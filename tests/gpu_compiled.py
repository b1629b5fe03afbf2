"""Kernels, the learner's step and the engine's, through XLA's own compiler for GPUs, of which none is needed: `make gpu-kernels`.

Some four minutes; tests/test_gpu_compiled.py has a sample.
"""

import os
import subprocess
import sys

from small_run import ROOT

from bapo_jax.models import kernels

COMPILER = ROOT / '.gpu-compiler'
# Sizes of heads: those that have tiles of their own, on the card with the least shared memory that takes them, and on newer ones.
EVERY = {
    'triton': {
        'A100-80GB': (128, 256), 'L40S': (128,), 'RTX4090': (64,), 'H100': (64, 128, 256), 'H200': (128,), 'B200': (64, 128, 256),
    },
    'cudnn': {'H100': (64, 128, 256), 'B200': (64, 128, 256)},
    'xla': {'A100-80GB': (128,), 'H100': (128,), 'B200': (128,)},
}  # fmt: skip
KERNELS = """
import re, types
import jax, jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import PartitionSpec
from bapo_jax.cluster.devices import capability
from bapo_jax.cluster.mesh import per_device
from bapo_jax.config import default_config
from bapo_jax.models import kernels
from bapo_jax.rollout.inprocess import gpu_decoding
from bapo_jax.dry_run.targets import find_target

# JAX asks the card and its library what they can do, and here is neither. What XLA then makes ends at a call of cuDNN, whose own
# program a card's library makes.
fused.check_cudnn_version = lambda: 92800
fused.check_compute_capability = lambda least: True
fused.is_cuda_compute_capability_equal = lambda capability: False
TARGET = re.compile('custom_call_target="(?:__gpu[$]xla[.]gpu[.])?([^"]*)"')

for kernel, cards in {every}.items():
    for card, sizes in cards.items():
        mesh = find_target('1x' + card, default_config()).mesh
        for H in sizes:
            model = types.SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=H, dtype='bfloat16')
            named = kernels.kernel_for(kernel, 'gpu', model, row_tokens=256, tensor=1, capability=capability(mesh))
            none = PartitionSpec()
            attend = per_device(kernels.packed(named), mesh, (none,) * 4, none)
            loss = lambda q, k, v, segment: attend(q, k, v, segment).astype(jnp.float32).sum()
            sharding = jax.sharding.NamedSharding(mesh, none)
            shapes = ((1, 256, 4, H), (1, 2, 256, H), (1, 2, 256, H))
            arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
            segment = jax.ShapeDtypeStruct((1, 256), jnp.int32, sharding=sharding)
            text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays, segment).compile().as_text()
            if named == 'triton':  # beside it the in-process engine's
                shapes = ((4, 1, 6, H), (4, 2, 1, H), (4, 2, 1, H), (4, 2, 256, H), (4, 2, 256, H))
                arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
                position = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=sharding)
                text += jax.jit(gpu_decoding.attend).lower(*arrays, position, None).compile().as_text()
            calls = sorted(name for name in TARGET.findall(text) if name == 'triton' or name.startswith('__cudnn'))
            print(kernel, card, H, *calls)
"""
# Heads at the table's edge for cards of little shared memory and of much: whether the kernel compiles, forward and backward.
EDGES = """
import types
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from bapo_jax.cluster.devices import capability
from bapo_jax.cluster.mesh import per_device
from bapo_jax.config import default_config
from bapo_jax.models import attention, kernels
from bapo_jax.dry_run.targets import find_target

for card, dtype, H in (('L40S', 'float32', 128), ('L40S', 'bfloat16', 136), ('A100-80GB', 'bfloat16', 256), ('A100-80GB', 'float32', 136)):
    mesh, none = find_target('1x' + card, default_config()).mesh, PartitionSpec()
    refused = kernels.unfit('triton', types.SimpleNamespace(head_dim=H, dtype=dtype), capability(mesh))
    attend = per_device(attention.triton, mesh, (none,) * 4, none)
    shapes = {(1, 256, 4, H): dtype, (1, 2, 256, H): dtype, (1, 256): 'int32'}
    q, k, segment = (jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, none)) for s, d in shapes.items())
    gradients = jax.grad(lambda q, k, v, segment: attend(q, k, v, segment).astype(jnp.float32).sum(), (0, 1, 2))
    try:
        jax.jit(gradients).lower(q, k, k, segment).compile()
        compiles = True
    except (ValueError, jax.errors.JaxRuntimeError) as e:
        assert 'Shared memory size limit' in str(e) or 'the kernel takes 512' in str(e), e
        compiles = False
    print(card, dtype, H, compiles, not refused)
"""
CALLS = {'triton': 'triton triton triton triton', 'cudnn': '__cudnn$fmhaSoftmax __cudnn$fmhaSoftmaxBackward'}
ENGINE = """
import dataclasses
from bapo_jax.config import default_config
from bapo_jax.dry_run.targets import find_target
from benchmarks.compiled.engine_kernels import MODELS, counted, sample_program

mesh = find_target('1xH100', default_config()).mesh
for layers in (1, 3):
    model = dataclasses.replace(MODELS['0.5B'], num_layers=layers)
    count = counted(sample_program(model, mesh).compile().as_text(), model.vocab_size)
    print(count.launched['kernels'], count.loops, count.scores, count.launched.total())
"""
STEP = """
from in_dry_runs import MODEL, config
from bapo_jax.dry_run import command as dry_run

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


def check_kernels(every):
    """The forward pass and the backward pass compile, for each kernel, card and size of head, to the kernel's own calls; with `triton` the engine's too."""
    sizes = [(kernel, card, H) for kernel, cards in every.items() for card in cards for H in cards[card]]
    lines = output(KERNELS.replace('{every}', repr(every)))
    assert lines == [f'{kernel} {card} {H} {CALLS.get(kernel, "")}'.strip() for kernel, card, H in sizes]


def test_every_kernel_compiles_for_every_card():
    assert set(EVERY) == {name for name, row in kernels.KERNELS.items() if row.platform in ('', 'gpu')}
    check_kernels(EVERY)


def test_what_the_table_refuses_does_not_compile_and_what_it_takes_does():
    found = [line.rsplit(maxsplit=2) for line in output(EDGES)]
    assert [(case, compiles) for case, compiles, _ in found] == [(case, takes) for case, _, takes in found]
    assert [takes for *_, takes in found] == ['True', 'False'] * 2


def test_the_step_compiles_for_four_cards_and_its_memory_is_the_compilers():
    assert output(STEP) == ['4 H100 triton True True None']


def test_a_token_is_few_kernels_and_no_loop():
    """At the sizes of Qwen2.5-0.5B: 10 a layer and 20 more, one of a layer is attention; scores are written once and read once."""
    one, three = ([int(n) for n in line.split()] for line in output(ENGINE))
    assert (one[:3], three[:3]) == ([1, 0, 2], [3, 0, 2])
    assert one[3] <= 30 and three[3] - one[3] <= 2 * 10
