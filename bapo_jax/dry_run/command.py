"""Measures what a run needs without running it: `--dry_run` of bapo_jax.train.

    # the devices present
    python -m bapo_jax.train --dry_run --config=configs/math.py
    # a TPU slice, with its real compiler
    python -m bapo_jax.train --dry_run --config=configs/math.py --topology=v5e:2x4
    # GPUs, with their real compiler; 2x8xH200: two hosts
    python -m bapo_jax.train --dry_run --config=configs/math.py --topology=4xH100
    # any eight GPUs with that much memory, by formula
    python -m bapo_jax.train --dry_run --config=configs/math.py --topology=8x80GB

A dry run resolves the config, reads the data and the tokenizer, makes the mesh, and compiles the sharded
optimizer step from shapes. It allocates nothing, starts nothing and writes only to the hub's cache. It needs
only the configs and tokenizer of model.path.

The TPU and GPU compilers need no such device (`make tpu-compiler gpu-compiler`); the memory is what the
compiler plans. Without the GPU compiler, it is the exact state plus a model of the activations (memory.py).
For GPUs, a table of settings follows (advice.py).

1 GB is 10^9 bytes, as on the cards' labels. Memory is that of the trainer, with the in-process engine but
without vLLM servers. The GPUs of a topology that rollout.gpus names belong to the servers.
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
from jax.sharding import AbstractMesh
from ml_collections import ConfigDict

from bapo_jax.config.rules import full_batch_groups
from bapo_jax.dry_run.advice import SHARE, Setting, as_table, own_setting, settings, what_helps
from bapo_jax.dry_run.memory import bytes_of_a_copy, gpu_memory, numbers_idle, state_bytes
from bapo_jax.dry_run.targets import GB, Target, find_target, for_absent_devices
from bapo_jax.inputs import read_inputs
from bapo_jax.learner.build import check_engine, choose_kernel, rows_in_words
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.objective import REFERENCE, objective_of
from bapo_jax.learner.packing import most_groups
from bapo_jax.machine import terminal
from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig, trained_parameters
from bapo_jax.models.kernels import described
from bapo_jax.models.vision.layout import largest_images
from bapo_jax.models.vision.patches import Grid
from bapo_jax.rollout.inprocess.room import memory_of
from bapo_jax.rollout.schedule import policies_before
from bapo_jax.rollout.start import (
    cache_limits,
    check_commands,
    check_gpus,
    gpus_of_servers,
    slots_in_words,
    starts_servers,
)
from bapo_jax.run.checkpoint import copied_gb
from bapo_jax.run.log.sinks import check_sinks

TRIED = 3  # most settings to compile, about half a minute each, until one fits
# Bytes of a CPU's trainer process without its policy, with compiled programs (docs/reference/memory.md).
PROCESS = 700 * 10**6
OF_CRITIC, EARLIER = 'the critic and its moments', 'rollout policies before α'  # rows of the memory table


class Result(NamedTuple):
    target: Target
    kernel: str
    parameters: int
    memory: dict[str, int]  # bytes per device, by use
    compile_s: float | None  # None if nothing was compiled
    refused: str  # the compiler's message if the step does not fit, else ''
    gathered_once: int = 0  # bytes per device that mesh.gather_once would add

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None if the device's memory is unknown."""
        if self.refused:
            return False
        return None if self.target.device_bytes is None else self.total <= self.target.device_bytes


def dry_run(config: ConfigDict, topology: str) -> Result:
    """Prints what a run needs and returns it.

    Raises ValueError or FileNotFoundError, naming the field, if the run could not start.
    """
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
        check_gpus(gpus_of_servers(c), c.rollout.server.memory)
    mesh, sequences = result.target.mesh, full_batch_groups(c) * c.rollout.group_size
    longest = c.rollout.max_prompt_tokens + c.rollout.max_response_tokens
    say = functools.partial(terminal.console().print, highlight=False)
    idle = read.model.num_layers * numbers_idle(read.model)
    print(
        f'model      {read.model.model_type}, {read.model.num_layers} layers, {result.parameters:,} '
        f'parameters{f", {result.parameters - idle:,} of them for a token" if idle else ""}'
    )
    first = read.prompts[0]
    print(f'data       {len(read.prompts):,} prompts, {read.steps} steps')
    say(f'prompt     the first has {len(first.tokens)} tokens: {_cut(read.tokenizer.decode(first.tokens))}')
    print(
        f'step       up to {sequences:,} sequences = {sequences * longest:,} tokens, in micro-batches of '
        f'{c.learner.micro_batch_rows} rows of {c.learner.row_tokens:,} tokens{rows_in_words(c, mesh)}'
    )
    sizes = ' × '.join(f'{axis} {n}' for axis, n in mesh.shape.items())
    print(f'mesh       {sizes} on {result.target.name}; attention {described(result.kernel)}')
    if result.target.servers:
        print(f'servers    {result.target.servers}')
    if result.compile_s is None:
        say(
            'compile    skipped; activations are estimated (docs/reference/memory.md). To compile for a '
            'card by name (4xH100), run `make gpu-compiler` in a checkout of bapo_jax, and set '
            'PYTHONPATH=.gpu-compiler there'
        )
    else:
        print(f'compile    {result.compile_s:.1f} s')
    print('memory per device, GB')
    for what, n in result.memory.items():
        print(f'  {n / GB:7.2f}  {what}')
    if not result.refused:
        print(f'  {result.total / GB:7.2f}  total')
    print(verdict(result))
    if c.rollout.engine == 'jax':
        limits = cache_limits(c, mesh.size, result.target.platform, result.target.device_bytes)
        if said := slots_in_words(c, read.model, limits, mesh.size):
            print(said)
    if (
        mesh.shape['fsdp'] > 1
        and not c.mesh.gather_once
        and result.fits
        and result.total + result.gathered_once <= result.target.device_bytes
    ):
        print(
            f'mesh.gather_once=True should also fit, with ~{result.gathered_once / GB:.1f} GB more: weights '
            'are then gathered once per mini-batch'
        )
    if result.target.platform == 'gpu' and result.target.device_bytes:
        for line in advice_of(result, c, read.model, topology, grids):
            # A terminal wraps sentences; the rows of a table stay as they are.
            say(line, soft_wrap=line.startswith((' ', '*', '=')))
    return result


def _cut(text: str) -> str:
    """A prompt on one line. A long one is cut in the middle: question and instruction are at its two ends."""
    return repr(text if len(text) <= 800 else f'{text[:400]} … {text[-400:]}')


def verdict(result: Result) -> str:
    """One line that says whether the run fits, or why not."""
    size = result.target.device_bytes
    if result.refused:
        return f'does NOT fit: {result.refused}'
    if result.fits is None:
        return (
            f'whether the run fits is unknown: the devices ({result.target.name}) do not report their memory'
        )
    text = f'{"fits" if result.fits else "does NOT fit"}: {result.total / GB:.1f} of {size / GB:.1f} GB'
    return f'{text} ({result.target.note})' if result.target.note else text


def advice_of(
    result: Result, config: ConfigDict, model: ModelConfig, topology: str, grids: Sequence[Grid]
) -> Iterator[str]:
    """Yields the table of settings that fit the GPUs, or what would help if none fits.

    GPUs of unknown speed have no table.
    """
    target = result.target
    found, best = chosen(target, config, model, topology, grids) if target.card else ([], None)
    if best:
        compiled = result.compile_s is not None
        marks = '* is compiled, ~ is estimated' if compiled else 'memory is estimated (~)'
        yield (
            f'settings that fit, fastest first; = is the config, {marks}. Seconds are modelled, for '
            f'responses of full length and matrix products at {SHARE:.0%} of the peak'
        )
        own = own_setting(config, model, target, result.total) if result.fits else None
        yield from as_table(found, config, best if compiled else None, own)
    elif found:
        yield (
            f'the {TRIED} fastest settings that fit by the formula did not compile. Other settings, with '
            'estimated memory and modelled seconds:'
        )
        yield from as_table(found, config)
    elif target.card:
        yield (
            'no setting of mesh.data, mesh.fsdp, mesh.tensor, learner.micro_batch_rows and learner.remat fits'
        )
    else:
        yield f'no table of settings: the speed of {target.name} is unknown'
    if not found and not result.fits:
        yield 'what would help, each line in addition to those above, estimated:'
        estimate = functools.partial(_estimate, model=model, topology=topology, grids=grids)
        yield from what_helps(config, target.mesh.size, estimate, target.device_bytes, target.most)


def chosen(
    target: Target, config: ConfigDict, model: ModelConfig, topology: str, grids: Sequence[Grid] = ()
) -> tuple[list[Setting], Setting | None]:
    """Returns the settings that fit by the formula, and the fastest of them that compiles, with its bytes.

    At most TRIED settings are compiled; those that the compiler refuses are left out. Without the compiler,
    the formula decides.
    """
    estimate = functools.partial(_estimate, model=model, topology=topology, grids=grids)
    found = settings(
        config, model, target.card, target.hosts, target.mesh.size, estimate, target.device_bytes
    )
    for setting in found[:TRIED]:
        result = measure(setting.applied(config), model, topology, grids)
        if result.fits:
            return found, setting._replace(bytes=result.total)
        found.remove(setting)
    return found, None


def _estimate(config: ConfigDict, model: ModelConfig, topology: str, grids: Sequence[Grid]) -> float:
    """Bytes per device by the formula; infinite if the attention kernel does not take that many rows."""
    model = dataclasses.replace(model, dtype=config.model.dtype)  # the advice may vary it
    try:
        return measure(config, model, topology, grids, compiles=False).total
    except ValueError:
        return math.inf


def measure(
    config: ConfigDict, model: ModelConfig, topology: str, grids: Sequence[Grid] = (), compiles: bool = True
) -> Result:
    """Measures a resolved config; `grids` are the image grids of its largest mini-batch.

    Without `compiles`, the formula is used for GPUs. Raises the same errors as `dry_run`.
    """
    target = find_target(topology, config, compiles)
    check_engine(config, target.hosts)  # only GPUs: a TPU slice may belong to one host or to several
    kernel = choose_kernel(
        config, model, target.mesh, target.platform, target.card and target.card.capability
    )
    # cuDNN needs a real card, which it queries and on which it plans its memory.
    if topology and target.card and kernel == 'cudnn':
        target = find_target(topology, config, compiles=False)
    trained = trained_parameters(model, vision=config.learner.vision_rate > 0)
    a_copy = bytes_of_a_copy(model, target.mesh, of=trained)
    of_all, of_trained = (bytes_of_a_copy(model, target.mesh, model.dtype, of) for of in (None, trained))
    never_trained = of_all - of_trained
    frozen = 0 if config.mesh.frozen_on_host else of_trained
    of_state = functools.partial(
        state_bytes, learner=config.learner, devices=target.mesh.size, platform=target.platform
    )
    memory = {'α, the rollout policy': frozen}
    if REFERENCE in objective_of(config.learner).roles:
        memory['θ_0, the reference policy'] = frozen
    if config.rollout.mixture.share:
        memory[EARLIER] = config.rollout.mixture.policies * frozen
    if config.learner.advantage == 'gae':
        # Its gradients and activations reuse the space of the policy's, which are larger and counted below.
        critic = dataclasses.replace(model, value_head=True)
        of_critic = trained_parameters(critic, vision=config.learner.vision_rate > 0)
        memory[OF_CRITIC] = of_state(bytes_of_a_copy(critic, target.mesh, of=of_critic))
    by_formula, sizes = isinstance(target.mesh, AbstractMesh), dict(target.mesh.shape)
    if by_formula and never_trained:  # the compiled step has them among its arguments
        memory['weights that are not trained'] = never_trained
    # Of what is trained, three whole copies replace two shards; of the rest, there is one whole copy more.
    once = a_copy * (3 * sizes['fsdp'] - 2) + never_trained * sizes['fsdp']
    compile_s, refused, kept = None, '', set(memory)
    if by_formula:
        memory |= gpu_memory(
            model, config.learner, sizes, a_copy, never_trained, config.mesh.gather_once, grids
        )
    else:
        started = time.perf_counter()
        learner = Learner(config, model, target.mesh, kernel)
        try:
            step = learner.compile_update(grids).memory_analysis()
        except jax.errors.JaxRuntimeError as e:
            if 'RESOURCE_EXHAUSTED' not in str(e):
                raise
            refused = re.sub(r'\s+', ' ', str(e))[:300]
            memory['θ and the moments'] = of_state(a_copy) + never_trained
        else:
            memory['θ, the moments and the mini-batch'] = step.argument_size_in_bytes
            memory['gradients and activations'] = _beside_arguments(step, target.platform)
        compile_s = time.perf_counter() - started
    parameters = sum(x.size for x in jax.tree.leaves(hf.abstract_params(model)[1]))
    if config.rollout.engine == 'jax':
        r, e = config.rollout, config.evaluate
        limits = cache_limits(config, target.mesh.size, target.platform, target.device_bytes)
        policies = 1 + policies_before(r)
        of_engine = functools.partial(
            memory_of, model, 4 * parameters, limits, policies=policies, platform=target.platform
        )
        engine = max(
            of_engine(group_size=r.group_size, response_tokens=r.max_response_tokens),
            of_engine(group_size=e.samples, response_tokens=e.max_response_tokens),
        )
        # A CPU's allocator keeps the engine's many small arrays, so the update cannot reuse their memory.
        at_once = r.overlap or target.platform == 'cpu'
        what = (
            'the in-process engine'
            if at_once
            else 'the in-process engine, beyond what the update needs before and after it'
        )
        of_update = sum(n for what, n in memory.items() if what not in kept and not what.startswith('θ'))
        memory[what] = engine if at_once else max(0, engine - of_update)
    if target.platform == 'cpu':
        # Arrays that are being written are not reused: training continues in new ones. Some are copied first.
        saved, copied = (
            frozen + of_state(a_copy),
            GB * copied_gb(hf.abstract_params(model)[1]),
        )
        saved += sum(memory.get(what, 0) for what in (OF_CRITIC, EARLIER))
        memory['a checkpoint that is written meanwhile'] = (saved + min(saved, copied)) // target.mesh.shape[
            'data'
        ]
        memory['the process: libraries, compiled programs'] = PROCESS // target.mesh.size
    return Result(target, kernel, parameters, memory, compile_s, refused, once)


def _beside_arguments(step: Any, platform: str) -> int:
    """Bytes that the compiled step needs besides its arguments; its results reuse the arguments' buffers."""
    if platform == 'tpu':
        # The compiler compares the peak with the chip's memory. The sum of temporaries may be larger: some
        # steps compile although arguments and temporaries together exceed the chip
        # (docs/reference/memory.md).
        return step.peak_memory_in_bytes - step.argument_size_in_bytes
    return (
        step.temp_size_in_bytes
        + step.output_size_in_bytes
        - step.alias_size_in_bytes
        + step.generated_code_size_in_bytes
    )
