"""What a run needs, measured without running it: `--dry_run` of bapo_jax.train.

    python -m bapo_jax.train --dry_run --config=configs/math.py                        # the devices present
    python -m bapo_jax.train --dry_run --config=configs/math.py --topology=v5e:2x4     # a TPU slice, with its real compiler
    python -m bapo_jax.train --dry_run --config=configs/math.py --topology=4xH100      # GPUs, with theirs; 2x8xH200: two hosts
    python -m bapo_jax.train --dry_run --config=configs/math.py --topology=8x80GB      # any eight GPUs of that memory, by formula

A dry run resolves the config, reads data and tokenizer, makes the mesh, and compiles the sharded optimizer step from shapes. It
allocates and starts nothing and writes no more than the hub's cache; of model.path it needs only configs and tokenizer. The compilers
of TPUs and GPUs need no such device (`make tpu-compiler gpu-compiler`); memory is the compiler's plan. Without the compiler of GPUs,
memory is the exact state and a model of activations (memory.py). For GPUs a table of settings follows (advice.py).

GB are 10^9 bytes, as on the cards' labels. Memory is the trainer's. Of a topology's GPUs, those in rollout.gpus are its servers'.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from bapo_jax import parallel
from bapo_jax.advice import SHARE, Setting, as_table, settings, what_helps
from bapo_jax.learner.learner import Learner, check_engine, choose_kernel
from bapo_jax.learner.objective import REFERENCE, objective_of
from bapo_jax.learner.packing import most_groups
from bapo_jax.models import hf
from bapo_jax.models.attention import described
from bapo_jax.models.patches import Grid
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.inputs import read_inputs
from bapo_jax.memory import gpu_memory, state_bytes
from bapo_jax.rollout.engines import cache_limits, check_commands, check_gpus, gpus_of_servers, slots_in_words, starts_servers
from bapo_jax.rollout.room import memory_of
from bapo_jax.run.checkpoint import copied_gb
from bapo_jax.run.sinks import check_sinks
from bapo_jax.seen import largest_images
from bapo_jax.targets import GB, Target, find_target, for_absent_devices

TRIED = 3  # settings that are compiled, some half a minute each, until one fits
PROCESS = 700 * 10**6  # bytes of a trainer on a CPU before it has a policy, and of what it compiles (docs/memory.md)
CRITIC, EARLIER = 'the critic and its moments', 'rollout policies before α'  # rows of the table


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
    if topology:
        for_absent_devices()
    read = read_inputs(config, weights=False)
    c = read.config
    check_sinks(c.log.sinks)
    if starts_servers(c):
        check_commands(c)
    grids = largest_images(read.prompts, read.sight, most_groups(c.learner))
    result = measure(c, read.model, topology, grids)
    if not topology and starts_servers(c):
        check_gpus(gpus_of_servers(c), c.rollout.server_memory)
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
    print(f'mesh       {sizes} on {result.target.name}; attention {described(result.kernel)}')
    if result.target.servers:
        print(f'servers    {result.target.servers}')
    if result.compile_s is None:
        print('compile    nothing; activations are estimated as in docs/memory.md. A card by name (4xH100) is compiled for, '
              'after `make gpu-compiler`, with PYTHONPATH=.gpu-compiler')  # fmt: skip
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
        print(f'so should this setting with mesh.gather_once=True, which takes ~{more / GB:.1f} GB more: the mesh is crossed once a mini-batch')
    if result.target.platform == 'gpu' and result.target.device_bytes:
        print(*advice_of(result, c, read.model, topology, grids), sep='\n')
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
    text = f'{"fits" if result.fits else "does NOT fit"}: {result.total / GB:.1f} of {size / GB:.1f} GB'
    return f'{text} ({result.target.note})' if result.target.note else text


def advice_of(result: Result, config: ConfigDict, model: ModelConfig, topology: str, grids: Sequence[Grid]) -> Iterator[str]:
    """The table of settings that fit GPUs, or what would help if none does. GPUs of unknown speed have no table."""
    target = result.target
    found, best = chosen(target, config, model, topology, grids) if target.card else ([], None)
    if best:
        how = 'estimated' if result.compile_s is None else 'compiled'
        yield (
            f'settings that fit, fastest first; * is {how}, ~ estimated. Seconds are modelled: responses of full length, products at '
            f'{SHARE:.0%} of the peak'
        )
        yield from as_table(found, config, best)
    elif found:
        yield f'the compiler refuses the {TRIED} fastest settings that the formula lets fit. Others, estimated alone, with modelled seconds:'
        yield from as_table(found, config)
    elif target.card:
        yield 'no setting of mesh.data, mesh.fsdp, mesh.tensor, learner.micro_batch_rows and learner.remat fits'
    else:
        yield f'no table of settings: the speed of {target.name} is unknown'
    if not found and not result.fits:
        yield 'what would help, one on top of the other, estimated:'
        estimate = functools.partial(_estimate, model=model, topology=topology, grids=grids)
        yield from what_helps(config, target.mesh.size, estimate, target.device_bytes, target.most)


def chosen(
    target: Target, config: ConfigDict, model: ModelConfig, topology: str, grids: Sequence[Grid] = ()
) -> tuple[list[Setting], Setting | None]:
    """The settings that fit, and the fastest that fits by the compiler too, with its bytes. Without the compiler, by the formula.

    Settings that the compiler refuses are left out; it is asked for TRIED of them.
    """
    estimate = functools.partial(_estimate, model=model, topology=topology, grids=grids)
    found = settings(config, model, target.card, target.hosts, target.mesh.size, estimate, target.device_bytes)
    for setting in found[:TRIED]:
        result = measure(setting.applied(config), model, topology, grids)
        if result.fits:
            return found, setting._replace(bytes=result.total)
        found.remove(setting)
    return found, None


def _estimate(config: ConfigDict, model: ModelConfig, topology: str, grids: Sequence[Grid]) -> float:
    """Bytes of a device by the formula; infinite for more rows than the attention's kernel takes."""
    model = dataclasses.replace(model, dtype=config.model.dtype)  # a field that may be tried
    try:
        return measure(config, model, topology, grids, compiles=False).total
    except ValueError:
        return math.inf


def measure(config: ConfigDict, model: ModelConfig, topology: str, grids: Sequence[Grid] = (), compiles: bool = True) -> Result:
    """Measures a resolved config; `grids` are those of the images of its largest mini-batch. Raises as `dry_run` does.

    Without `compiles`, GPUs go by the formula.
    """
    target = find_target(topology, config, compiles)
    check_engine(config, target.hosts)  # of GPUs; a TPU slice may belong to one host or to several
    kernel = choose_kernel(config, model, target.mesh, target.platform, target.card and target.card.capability)
    if topology and target.card and kernel == 'cudnn':  # it asks a card what it can do, and plans its memory there
        target = find_target(topology, config, compiles=False)
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
