"""What the compiled step moves between devices, counted in its program on eight fake CPU devices, which need a process of their own.

Float32, since XLA on CPU moves bfloat16 as float32.
"""

import dataclasses
import functools
import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest
from eight_devices import eight_devices
from flax.traverse_util import flatten_dict

from bapo_jax.cluster.mesh import make_mesh, row_sharding, with_sharding
from bapo_jax.cluster.split import Split
from bapo_jax.config import default_config
from bapo_jax.learner.head import Tile
from bapo_jax.learner.logprobs import Compute
from bapo_jax.learner.mini_batch import blank_rows
from bapo_jax.learner.objective import numbers_of, objective_of
from bapo_jax.learner.optimizer import clipped_adamw
from bapo_jax.learner.policy import policy_loss
from bapo_jax.learner.update import Program, state_shapes, update
from bapo_jax.models.decoder import ModelConfig, abstract_params, trained_parameters
from bapo_jax.models.layers import Adapter
from bapo_jax.models.parameters import ADAPTER_PARAMETERS, PARAMETERS, parted
from bapo_jax.models.rotary import Rotation
from bapo_jax.models.sharding import parameter_sharding
from benchmarks.compiled.hlo import axes_of, collectives, parse

MODEL = ModelConfig('qwen3', 96, 32, 64, 3, 4, 2, 8, Rotation(1e4), 1e-6, False)
ROWS, TOKENS = 8, 64
CASES = {  # mesh sizes, remat, tile of the head
    'data and fsdp': ((2, 4, 1), 'full', (2048, 16384)),
    'many tiles': ((2, 4, 1), 'full', (16, 24)),
    'nothing recomputed': ((2, 4, 1), 'none', (2048, 16384)),
    'tensor': ((1, 4, 2), 'full', (2048, 16384)),
}
GATHERED_ONCE = 'gathered once'  # mesh.gather_once
ADAPTED, ADAPTER = 'an adapter', Adapter(4, 8.0, 'all')


def moved(sizes, remat, tile, gather_once=False, adapter=None) -> list:
    """[kind, dtype, axes, in the loop over micro-batches, bytes a device receives]; equal ones summed."""
    model = dataclasses.replace(MODEL, adapter=adapter)
    learner, mesh, (graph, shapes) = default_config().learner, make_mesh(*sizes), abstract_params(model)
    compute = Compute(remat=remat, split=Split(1 if gather_once else mesh.shape['fsdp'], mesh.shape['tensor']), tile=Tile(*tile))
    optimizer, objective = clipped_adamw(1e-4, learner), objective_of(learner)
    program = Program(graph, policy_loss(objective, compute), optimizer, mesh, compute)
    trained, frozen = parted(with_sharding(shapes, parameter_sharding(mesh, shapes)), trained_parameters(model, False))
    state = state_shapes(optimizer, trained, mesh)
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=row_sharding(mesh, 1)),
        blank_rows((2, ROWS, TOKENS), roles=objective.roles),
    )
    step = jax.jit(functools.partial(update, program=program), donate_argnums=0)
    text = step.lower(state, rows, 2, numbers_of(learner, np.float32(1.0), 1), frozen=frozen).compile().as_text()
    sums = {}
    for c in collectives(parse(text)._replace(inner_trips=1)):
        key = (c.kind, c.dtype, axes_of(c.groups, dict(mesh.shape)), c.in_loop)
        sums[key] = sums.get(key, 0) + c.bytes * c.executions
    return [[*key, total] for key, total in sums.items()]


if __name__ == '__main__':
    assert jax.device_count() == 8
    plain = CASES['data and fsdp']
    others = {GATHERED_ONCE: moved(*plain, True), ADAPTED: moved(*plain, adapter=ADAPTER)}
    print(json.dumps({name: moved(*case) for name, case in CASES.items()} | others))
    sys.exit()


@pytest.fixture(scope='module')
def counted():
    done = subprocess.run([sys.executable, __file__], env=eight_devices(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: {tuple(row[:4]): row[4] for row in rows} for name, rows in json.loads(done.stdout.splitlines()[-1]).items()}


def split_bytes(tensor=1, embedding=False) -> int:
    """Of the float32 matrices that 'fsdp' splits and a device computes with; the embedding's rows are looked up where they are."""
    shapes = flatten_dict(abstract_params(MODEL)[1])
    of_table = {p.path: p.axes for p in PARAMETERS if p.path in shapes and 'embed' in p.axes}
    return sum(4 * math.prod(shapes[path].shape) // tensor for path in of_table if embedding or path[0] != 'embedding')


def of(counts, kind, dtype='f32', axes=None, in_loop=True) -> int:
    return sum(n for key, n in counts.items() if key[:2] == (kind, dtype) and key[3] == in_loop and axes in (None, key[2]))


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_weights_are_gathered_twice_a_micro_batch_and_their_gradient_is_scattered_once(name, counted):
    _, fsdp, tensor = CASES[name][0]
    whole = split_bytes(tensor)
    # Less than twice where XLA gathers the head before the loop, once for all micro-batches.
    assert whole * (fsdp - 1) // fsdp < of(counted[name], 'all-gather') <= 2 * whole * (fsdp - 1) // fsdp
    assert of(counted[name], 'reduce-scatter') == whole * (fsdp - 1) // fsdp
    assert of(counted[name], 'collective-permute') == 0
    if tensor == 1:
        assert of(counted[name], 'all-reduce') == 0


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_no_rows_are_gathered(name, counted):
    """Of the activations, the embedding of a device's own rows moves, there and back; tokens are gathered to look them up."""
    data, fsdp, tensor = CASES[name][0]
    own = ROWS // (data * fsdp) * TOKENS
    assert of(counted[name], 'all-to-all') == 2 * 4 * own * MODEL.hidden_size * (fsdp - 1) // fsdp
    assert of(counted[name], 'all-gather', 's32') == 4 * own * (fsdp - 1)


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_over_data_gradients_are_reduced_once_a_mini_batch_and_in_float32(name, counted):
    (data, fsdp, _), counts = CASES[name][0], counted[name]
    assert not any('data' in axes for _, _, axes, in_loop in counts if in_loop)
    assert {dtype for kind, dtype, _, _ in counts if 'reduce' in kind} <= {'f32'}
    if data > 1:
        parts = split_bytes(embedding=True) // fsdp
        assert of(counts, 'all-reduce', axes='data', in_loop=False) == 2 * parts * (data - 1) // data


@pytest.mark.slow
def test_nothing_grows_with_the_tiles_of_the_head(counted):
    assert counted['many tiles'] == counted['data and fsdp']


@pytest.mark.slow
def test_gathered_once_nothing_crosses_the_mesh_in_a_micro_batch(counted):
    """The whole of every parameter that 'fsdp' splits is gathered, and its gradient scattered, once a mini-batch."""
    (data, fsdp, _), counts = CASES['data and fsdp'][0], counted[GATHERED_ONCE]
    assert not any(in_loop for _, _, _, in_loop in counts)
    whole = split_bytes(embedding=True)
    assert of(counts, 'all-gather', axes='fsdp', in_loop=False) == whole * (fsdp - 1) // fsdp
    assert of(counts, 'reduce-scatter', axes='fsdp', in_loop=False) == whole * (fsdp - 1) // fsdp
    assert of(counts, 'all-reduce', axes='data', in_loop=False) == 2 * whole // fsdp * (data - 1) // data


@pytest.mark.slow
def test_with_an_adapter_all_weights_are_gathered_and_its_gradient_alone_is_summed(counted):
    (data, fsdp, _), counts = CASES['data and fsdp'][0], counted[ADAPTED]
    shapes = flatten_dict(abstract_params(dataclasses.replace(MODEL, adapter=ADAPTER))[1])
    rows = {p.path: 4 * math.prod(shapes[p.path].shape) for p in ADAPTER_PARAMETERS if p.path in shapes}
    split = sum(rows[p.path] for p in ADAPTER_PARAMETERS if p.path in rows and 'embed' in p.axes)
    assert 0 < split < split_bytes() < of(counts, 'all-gather') * fsdp // (fsdp - 1)
    assert of(counts, 'reduce-scatter') == split * (fsdp - 1) // fsdp
    parts, copies = split // fsdp, sum(rows.values()) - split
    assert of(counts, 'all-reduce', axes='data', in_loop=False) == 2 * parts * (data - 1) // data
    # Over all devices: matrices that 'fsdp' does not split, and the sums of the metrics.
    everywhere = of(counts, 'all-reduce', axes='data × fsdp', in_loop=False) - 2 * copies * (data * fsdp - 1) // (data * fsdp)
    assert 0 <= everywhere < 1_000
