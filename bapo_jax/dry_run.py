"""What a run needs, measured without running it: `--dry_run` of bapo_jax.train.

    python -m bapo_jax.train --dry_run --config=configs/math.py                        # the devices present
    python -m bapo_jax.train --dry_run --config=configs/math.py --topology=v5e:2x4     # a TPU slice, with its real compiler
    python -m bapo_jax.train --dry_run --config=configs/math.py --topology=8x80GB      # eight GPUs of that memory

A dry run resolves the config, reads data and tokenizer, makes the mesh, and compiles the sharded optimizer step from shapes. It
allocates and starts nothing and writes no more than the hub's cache; of model.path it needs only configs and tokenizer. libtpu
compiles for a TPU slice and needs no TPU; memory is that compiler's plan. Without a GPU nothing can be compiled for one: memory is
then the exact state, and the activation model of `gpu_memory`.

GB are 10^9 bytes, as on the cards' labels. Memory is the trainer's; a vLLM server on the same devices needs more.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from bapo_jax import parallel
from bapo_jax.learner.head import Tile
from bapo_jax.learner.learner import Learner, choose_kernel
from bapo_jax.learner.objective import REFERENCE, objective_of
from bapo_jax.learner.packing import most_groups
from bapo_jax.models import hf
from bapo_jax.models.patches import Grid
from bapo_jax.models.decoder import ModelConfig, parameters_of
from bapo_jax.inputs import read_inputs
from bapo_jax.rollout.engines import cache_limits, slots_in_words
from bapo_jax.rollout.room import memory_of
from bapo_jax.run.checkpoint import copied_gb
from bapo_jax.run.sinks import check_sinks
from bapo_jax.seen import largest_images, tower_rows

GB = 10**9
PROCESS = 700 * 10**6  # bytes of a trainer on a CPU before it has a policy, and of what it compiles (docs/memory.md)
CRITIC, EARLIER = 'the critic and its moments', 'rollout policies before α'  # rows of the table
GPUS = re.compile(r'(\d+)x(\d+)GB')
# Usable HBM of a device, GiB, by JAX's device_kind: the limit in the compiler's error for a far too large program.
TPU_GIB = {'TPU v4': 30.75, 'TPU v5 lite': 15.75, 'TPU v5': 95.74, 'TPU v6 lite': 31.25}


class Target(NamedTuple):
    """The devices that would train."""

    name: str  # shown to the user: '8 TPU v5 lite'
    platform: str  # 'cpu', 'gpu', 'tpu'
    mesh: Mesh | AbstractMesh  # abstract where no compiler for the devices exists
    device_bytes: int | None  # of memory a device; None: unknown


class Result(NamedTuple):
    target: Target
    kernel: str
    parameters: int
    memory: dict[str, int]  # bytes a device, by use
    compile_s: float | None  # None: nothing was compiled
    refused: str  # the compiler's message where the step does not fit; else ''

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool | None:
        """None where the device's memory is unknown."""
        if self.refused:
            return False
        return None if self.target.device_bytes is None else self.total <= self.target.device_bytes


def dry_run(config: ConfigDict, topology: str) -> Result:
    """Prints what a run needs. Raises ValueError or FileNotFoundError, naming the field, where the run could not start."""
    read = read_inputs(config, weights=False)
    c = read.config
    check_sinks(c.log.sinks)
    result = measure(c, read.model, topology, largest_images(read.prompts, read.sight, most_groups(c.learner)))
    mesh, sequences = result.target.mesh, c.learner.batch_groups * c.rollout.group_size
    longest = c.rollout.max_prompt_tokens + c.rollout.max_response_tokens
    print(f'model      {read.model.model_type}, {read.model.num_layers} layers, {result.parameters:,} parameters')
    first = read.prompts[0]
    print(f'data       {len(read.prompts):,} prompts, {read.steps} steps')
    print(f'prompt     {len(first.tokens)} tokens, the first: {_cut(read.tokenizer.decode(first.tokens))}')
    print(
        f'step       up to {sequences:,} sequences = {sequences * longest:,} tokens, '
        f'{c.learner.micro_batch_rows} rows of {c.learner.row_tokens:,} tokens at once'
    )
    sizes = ' × '.join(f'{axis} {n}' for axis, n in mesh.shape.items())
    print(f'mesh       {sizes} on {result.target.name}; attention {result.kernel}')
    if result.compile_s is None:
        print('compile    nothing: only a GPU can compile for a GPU; activations are estimated as in docs/memory.md')
    else:
        print(f'compile    {result.compile_s:.1f} s')
    print('memory of a device, GB')
    for what, n in result.memory.items():
        print(f'  {n / GB:7.2f}  {what}')
    if not result.refused:
        print(f'  {result.total / GB:7.2f}  in all')
    print(verdict(result))
    if c.rollout.engine == 'jax':
        limits = cache_limits(c, mesh.size, result.target.platform, result.target.device_bytes)
        if said := slots_in_words(c, read.model, limits, mesh.size):
            print(said)
    more = _bytes_of_a_copy(read.model, mesh) * (3 * mesh.shape['fsdp'] - 2)  # three whole copies in place of two parts
    if mesh.shape['fsdp'] > 1 and not c.mesh.gather_once and result.fits and result.total + more <= result.target.device_bytes:
        print(f'mesh.gather_once=True should fit too, with {more / GB:.1f} GB more: the mesh is crossed once a mini-batch')
    return result


def _cut(text: str) -> str:
    """A prompt on one line, its ends alone where it is long: the question is at one of them, the instruction at the other."""
    return repr(text if len(text) <= 800 else f'{text[:400]} … {text[-400:]}')


def verdict(result: Result) -> str:
    """One line: whether the run fits, and why not."""
    size = result.target.device_bytes
    if result.refused:
        return f'does NOT fit: {result.refused}'
    if result.fits is None:
        return f'whether the run fits is unknown: {result.target.name} report no memory size'
    return f'{"fits" if result.fits else "does NOT fit"}: {result.total / GB:.1f} of {size / GB:.1f} GB'


def measure(config: ConfigDict, model: ModelConfig, topology: str, grids: Sequence[Grid] = ()) -> Result:
    """Measures a resolved config; `grids` are those of the images of its largest mini-batch. Raises as `dry_run` does."""
    target = find_target(topology, config.mesh)
    kernel = choose_kernel(config, model, target.mesh, target.platform)
    a_copy = _bytes_of_a_copy(model, target.mesh)
    frozen = 0 if config.mesh.frozen_on_host else _bytes_of_a_copy(model, target.mesh, model.dtype)
    memory = {'α, the rollout policy': frozen}
    if REFERENCE in objective_of(config.learner).roles:
        memory['θ_0, the reference policy'] = frozen
    if config.rollout.mixture:
        memory[EARLIER] = config.rollout.mixture_policies * frozen
    if config.learner.advantage == 'gae':
        # Its gradients and activations take the place of the policy's, which are larger and are counted below.
        critic = dataclasses.replace(model, value_head=True)
        memory[CRITIC] = state_bytes(_bytes_of_a_copy(critic, target.mesh), config.learner)
    compile_s, refused, kept = None, '', set(memory)
    if isinstance(target.mesh, AbstractMesh):
        memory |= gpu_memory(model, config.learner, dict(target.mesh.shape), a_copy, config.mesh.gather_once, grids)
    else:
        started = time.perf_counter()
        learner = Learner(config, model, target.mesh, kernel)
        try:
            step = learner.compile_update(grids).memory_analysis()
        except jax.errors.JaxRuntimeError as e:
            if 'RESOURCE_EXHAUSTED' not in str(e):
                raise
            refused = re.sub(r'\s+', ' ', str(e))[:300]
            memory['θ and the moments'] = state_bytes(a_copy, config.learner)
        else:
            memory['θ, the moments and the mini-batch'] = step.argument_size_in_bytes
            memory['gradients and activations'] = _beside_arguments(step, target.platform)
        compile_s = time.perf_counter() - started
    parameters = sum(x.size for x in jax.tree.leaves(hf.abstract_params(model)[1]))
    if config.rollout.engine == 'jax':
        r, e = config.rollout, config.evaluate
        limits = cache_limits(config, target.mesh.size, target.platform, target.device_bytes)
        engine = max(
            memory_of(model, 4 * parameters, limits, group_size=size, response_tokens=tokens)
            for size, tokens in ((r.group_size, r.max_response_tokens), (e.samples, e.max_response_tokens))
        )
        # A CPU's allocator keeps the engine's many small arrays, so nothing of them is there for the update.
        at_once = r.overlap or target.platform == 'cpu'
        what = 'the in-process engine' if at_once else 'the in-process engine, beyond what the update needs before and after it'
        of_update = sum(n for what, n in memory.items() if what not in kept and not what.startswith('θ'))
        memory[what] = engine if at_once else max(0, engine - of_update)
    if target.platform == 'cpu':
        # The arrays that are being written are not reused, so training goes on in others; a part of them is copied first.
        saved, copied = frozen + state_bytes(a_copy, config.learner), GB * copied_gb(hf.abstract_params(model)[1])
        saved += sum(memory.get(what, 0) for what in (CRITIC, EARLIER))
        memory['a checkpoint that is written meanwhile'] = (saved + min(saved, copied)) // target.mesh.shape['data']
        memory['the process: libraries, compiled programs'] = PROCESS // target.mesh.size
    return Result(target, kernel, parameters, memory, compile_s, refused)


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
                                                                  2 D + (2 N H + 2 K H + 2 F) / n; none: L / 2 `layer`
        layer         2 r T b (4 D + (4 N + 4 K) H / n + 3 F / n)  one layer's saved activations, and their gradients
        logits        3 · 4 C U                                   logits, probabilities and gradient of a tile in float32: at most
                                                                  2,048 tokens and 16,384 words (learner/head.py)
        weights       (4 + b) U D + [(2 b + 4) W / n]             a block of the head, and its gradient; [where fsdp > 1: two
                                                                  layers' gathered matrices W, and the gradient of one]

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
        'none': kept_by_a_layer,
        'matrix_products': tokens * b * (2 * D + (2 * heads + 2 * key_heads + 2 * F) // n),
        'attention_and_mlp_inputs': tokens * b * (2 * D + heads // n),
    }
    residuals = L * kept.get(learner.remat, tokens * D * b)
    logits = 3 * 4 * min(tokens, Tile().tokens) * min(V // n, Tile().words)
    weights = (4 + b) * D * min(V // n, Tile().words)
    if mesh['fsdp'] > 1 and not gather_once:
        weights += (2 * b + 4) * layer // n
    tower, block = tower_memory(model, learner.remat, mesh['data'] * mesh['fsdp'], grids) if grids else ({}, 0)
    at_work = {
        "one layer's recomputation": 2 * kept_by_a_layer, 'a tile of logits': logits, "one vision block's recomputation": block,
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


def _bytes_of_a_copy(model: ModelConfig, mesh: Mesh | AbstractMesh, dtype: str = 'float32') -> int:
    """Bytes a device of one copy of the parameters; the scales of norms are float32 always."""
    _, shapes = hf.abstract_params(model)
    shapes, sharding = flatten_dict(shapes), flatten_dict(parallel.parameter_sharding(mesh, shapes))
    return sum(
        math.prod(sharding[path].shard_shape(x.shape)) * (4 if path[-1] == 'scale' else hf.DTYPES[dtype].itemsize)
        for path, x in shapes.items()
    )


def _beside_arguments(step: Any, platform: str) -> int:
    """Bytes that the compiled step needs beside its arguments; its results reuse the arguments' buffers."""
    if platform == 'tpu':
        # The compiler compares peak memory with the chip's. The sum of temporaries can be larger: steps compile whose arguments
        # and temporaries together exceed the chip (docs/memory.md).
        return step.peak_memory_in_bytes - step.argument_size_in_bytes
    return step.temp_size_in_bytes + step.output_size_in_bytes - step.alias_size_in_bytes + step.generated_code_size_in_bytes


def find_target(topology: str, mesh: ConfigDict) -> Target:
    """`topology` is '' for the devices present, '8x80GB' for GPUs, or a TPU slice such as 'v5e:2x4'. Raises ValueError."""
    gpus = GPUS.fullmatch(topology)
    if gpus:
        count, gigabytes = map(int, gpus.groups())
        sizes = parallel.mesh_sizes(mesh.data, mesh.fsdp, mesh.tensor, count)
        return Target(f'{count} GPUs of {gigabytes} GB', 'gpu', AbstractMesh(sizes, parallel.MESH_AXES), gigabytes * GB)
    devices = tpu_devices(topology) if topology else jax.devices()
    platform, kind = devices[0].platform, devices[0].device_kind
    on_devices = parallel.make_mesh(mesh.data, mesh.fsdp, mesh.tensor, devices)
    if topology:
        device_bytes = int(TPU_GIB[kind] * 2**30) if kind in TPU_GIB else None
    else:
        device_bytes = parallel.device_memory(devices)
    return Target(f'{len(devices)} {kind}', platform, on_devices, device_bytes)


def tpu_devices(topology: str) -> list[jax.Device]:
    """The devices of an absent TPU slice. Raises ValueError where the TPU compiler is missing or does not know the slice."""
    if not re.fullmatch(r'[a-z0-9]+:\d+(x\d+)+', topology):
        raise ValueError(
            f"--topology={topology!r}: give a TPU slice such as 'v5e:2x4', GPUs such as '8x80GB', or nothing for the devices here"
        )
    if importlib.util.find_spec('libtpu') is None:
        raise ValueError(
            f"--topology={topology!r}: the TPU compiler is missing; run `make tpu-compiler` and set PYTHONPATH=.tpu-compiler, or "
            "pip install 'bapo_jax[tpu-compiler]'. No TPU is needed"
        )
    from jax.experimental import topologies  # imported here, since only a dry run for an absent slice needs it

    # libtpu touches no chip here: it need not ask the network for its place in a slice, and other processes may compile too.
    os.environ |= {'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}
    # As libtpu describes it, a v4 chip is two devices; a chip that is there is one.
    chip = {'chip_config_name': 'megacore'} if topology.startswith('v4:') else {}
    if set(topology.split(':')[1].split('x')) == {'1'}:
        chip['chips_per_host_bounds'] = (1, 1, 1)  # it takes hosts of four chips for granted
    try:
        return list(topologies.get_topology_desc(platform='tpu', topology_name=topology, **chip).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError) as e:
        raise ValueError(f'--topology={topology!r}: {e}') from e
