"""Loading keeps at most two tensors on the host beyond the parameters themselves, on eight fake CPU devices, for a model of 193 MB.

The eight devices need a process of their own, which runs this file as a script. Their memory is the host's, so two things are
measured. What numpy and safetensors allocate, by tracemalloc, exactly: the host's staging, and besides it only the embedding, which
a CPU device may take over without a copy. And all of the process's own memory (RssAnon, sampled; the mapped files are not in it):
the parts of all devices, replicas included, two tensors, and 64 MiB for what XLA compiles. One stacked tensor is 101 MB.
Pages that malloc keeps for reuse are nobody's tensors: it has one arena here and gives large blocks back when they are freed.
"""

import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.models import hf
from bapo_jax.models.sharding import parameter_sharding

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
MESHES = ((2, 2, 2), (1, 8, 1))
CONFIG = {
    'model_type': 'qwen3', 'vocab_size': 2048, 'hidden_size': 512, 'intermediate_size': 1536, 'num_hidden_layers': 32,
    'num_attention_heads': 8, 'num_key_value_heads': 2, 'head_dim': 64, 'tie_word_embeddings': True,
}  # fmt: skip
LARGEST = 4 * CONFIG['vocab_size'] * CONFIG['hidden_size']  # bytes of the largest tensor (the embedding) in float32
SLACK = 64 * 2**20
ALLOCATOR = {'MALLOC_ARENA_MAX': '1', 'MALLOC_MMAP_THRESHOLD_': '65536'}  # glibc's own settings


def write_checkpoint(directory: Path) -> None:
    """Random finite bfloat16 in two files and an index."""
    (directory / 'config.json').write_text(json.dumps(CONFIG))
    config = hf.read_config(directory)
    shapes, rng = hf.abstract_params(config)[1], np.random.default_rng(0)
    shards = ({}, {})
    for i, tensor in enumerate(hf.layout(config)):
        shape = shapes[tensor.path[0]]
        for key in tensor.path[1:]:
            shape = shape[key]
        shape = shape.shape[len(tensor.index) :]
        bits = rng.integers(0, 2**16, shape[::-1] if tensor.transposed else shape, np.uint16) & 0xFF7F  # no infinity, no NaN
        shards[i % 2][tensor.name] = bits.view(ml_dtypes.bfloat16)
    for i, shard in enumerate(shards):
        save_file(shard, directory / f'{i}.safetensors')
    weight_map = {name: f'{i}.safetensors' for i, shard in enumerate(shards) for name in shard}
    (directory / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))


def anonymous_memory() -> int:
    for line in Path('/proc/self/status').read_text().splitlines():
        if line.startswith('RssAnon'):
            return int(line.split()[1]) * 1024
    raise RuntimeError('no RssAnon in /proc/self/status')


def load_and_measure(directory: Path, sizes: tuple[int, int, int]) -> dict[str, int]:
    """Bytes: host staging (peak), process memory (peak above the start), device parts; and tensors that are not the file's."""
    config = hf.read_config(directory)
    sharding = parameter_sharding(make_mesh(*sizes), hf.abstract_params(config)[1])
    samples, done, before = [], threading.Event(), anonymous_memory()

    def sample():
        while not done.is_set():
            samples.append(anonymous_memory())
            time.sleep(0.001)

    sampler = threading.Thread(target=sample)
    sampler.start()
    tracemalloc.start()
    params = hf.load_params(directory, config, sharding)
    staging = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    done.set()
    sampler.join()

    weight_map, wrong = json.loads((directory / 'model.safetensors.index.json').read_text())['weight_map'], 0
    for name, array in hf.to_hf(config, params):
        with safe_open(directory / weight_map[name], 'numpy') as f:
            wrong += not np.array_equal(array, f.get_tensor(name).astype(np.float32))
    wrong += sum(leaf.sharding != s for leaf, s in zip(jax.tree.leaves(params), jax.tree.leaves(sharding), strict=True))
    kept = sum(part.data.nbytes for leaf in jax.tree.leaves(params) for part in leaf.addressable_shards)
    return {'staging': staging, 'process': max(samples) - before, 'kept': kept, 'wrong': wrong}


if __name__ == '__main__':
    assert jax.device_count() == 8
    mesh_sizes = tuple(int(n) for n in sys.argv[2].split(','))
    print(json.dumps(load_and_measure(Path(sys.argv[1]), mesh_sizes)))
    sys.exit()


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp('large')
    write_checkpoint(directory)
    yield directory
    for file in directory.glob('*.safetensors'):
        file.unlink()


@pytest.mark.parametrize('sizes', MESHES)
def test_the_host_holds_two_tensors_beyond_what_it_keeps(sizes, checkpoint):
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8', **ALLOCATOR}
    command = [sys.executable, __file__, checkpoint, ','.join(map(str, sizes))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    measured = json.loads(done.stdout)
    print(sizes, measured)
    assert measured['wrong'] == 0
    assert measured['kept'] > 380e6
    assert measured['staging'] <= 2 * LARGEST + LARGEST  # the embedding itself may be among them
    assert measured['process'] <= measured['kept'] + 2 * LARGEST + SLACK
