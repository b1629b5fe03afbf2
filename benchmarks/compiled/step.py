"""What the compiled training step costs, read from the program that the real TPU compiler makes for an absent
slice.

    make tpu-compiler
    PYTHONPATH=.:.tpu-compiler python -m benchmarks.compiled.step 8B v5p:2x2x2    # or 1.5B; one row a chip
    PYTHONPATH=.:.tpu-compiler python -m benchmarks.compiled.step 8B v5p:2x2x2 --rows=16 \\
        --config.learner.remat=attention_and_mlp_inputs
    # an adapter; experts
    PYTHONPATH=.:.tpu-compiler python -m benchmarks.compiled.step 8B v5e:4x8 --config.model.adapter.rank=16
    PYTHONPATH=.:.tpu-compiler python -m benchmarks.compiled.step 30B-A3B v5p:2x4x4
    # a row of 32k whose tokens are split over the chips
    PYTHONPATH=.:.tpu-compiler python -m benchmarks.compiled.step 8B v5p:2x2x2 --rows=1 \\
        --config.rollout.max_response_tokens=30720
    # the table of docs/reference/performance.md
    PYTHONPATH=.:.tpu-compiler python -m benchmarks.compiled.step --all

Rows have 2,048 + 8,192 tokens (configs/math.py) unless said otherwise. Needs no weights and no TPU; a program compiles in 1 to 4
minutes on two cores. --hlo=DIR keeps the programs' text. All figures are of one chip. "A micro-batch" is one
trip of the loop over micro-batches, "a mini-batch" what runs outside it, once an optimizer step. Inner loops
are multiplied by their trip counts (benchmarks/compiled/hlo.py), the LM head's loop over tiles of tokens as
if all tokens of a row were responses'.

    moved         bytes that a chip receives from others. Of an operand of s bytes among n chips: all-gather
                  (n - 1) s, all-reduce 2 (n - 1) / n s, reduce-scatter and all-to-all (n - 1) / n s,
                  collective-permute s
    arithmetic    matrix products as in the text; Splash kernels by formula, full tiles up to the diagonal;
                  kernels of experts by formula (benchmarks/compiled/hlo_time.py)
    model         the arithmetic of learner/speed.py: attention causal over the whole row, nothing recomputed
    HBM           operands and results of each instruction or fusion that are not in on-chip memory; an
                  estimate
    seconds       a model: the compiler's estimated_cycles of each instruction, kernels at the peak, transfers
                  at the links' full rate, overlapped as the compiler scheduled them
                  (benchmarks/compiled/hlo_time.py). No latency, no contention
    utilisation   model arithmetic / (seconds × peak): of a micro-batch, without the optimizer's part

cost_analysis()['optimal_seconds'] is no help: it counts a loop's body once, knows nothing of kernels, and can
be negative.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
from absl import app, flags
from jax.sharding import Mesh
from ml_collections import ConfigDict, config_flags

from bapo_jax import config as config_lib
from bapo_jax.dry_run.targets import GB, find_target
from bapo_jax.learner.head import Tile
from bapo_jax.learner.build import choose_kernel
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.speed import model_flops
from bapo_jax.models import hf
from bapo_jax.models.adapters import adapted, adapter_of
from bapo_jax.models.decoder import ModelConfig
from benchmarks.compiled.absent import require_compiler
from benchmarks.compiled.fits import MODELS
from benchmarks.compiled.hlo import Collective, Work, axes_of, collectives, flops, parse, total, visits
from benchmarks.compiled.hlo_time import CHIPS, WAITING, Chip, kernel_flops, seconds, traffic

# model, slice, rows in all: what benchmarks/compiled/fits.py found to fit, and the usual setting of one row a
# chip.
SETTINGS = (
    ('1.5B', 'v5e:2x4', 8),
    ('1.5B', 'v5p:2x2x1', 4),
    ('1.5B', 'v6e:2x2', 4),
    ('8B', 'v5e:4x8', 32),
    ('8B', 'v5p:2x2x2', 8),
    ('8B', 'v5p:2x2x2', 16),
    ('8B', 'v6e:2x4', 8),
)


class Step(NamedTuple):
    """A compiled optimizer step, as one chip runs it."""

    chip: Chip
    mesh: dict[str, int]
    rows: float  # of a micro-batch on one chip
    peak_bytes: int
    argument_bytes: int
    moved: list[Collective]
    products: Work  # FLOPs
    kernels: Work  # FLOPs, of attention and experts
    model_flops: float  # of a micro-batch
    traffic: Work  # bytes
    micro_batch: Counter[str]  # seconds
    mini_batch: Counter[str]

    @property
    def utilisation(self) -> float:
        return self.model_flops / (self.micro_batch.total() * self.chip.flops)

    def moved_bytes(self, *kinds: str, in_loop: bool) -> int:
        """By collectives of those kinds, or of all."""
        return sum(
            c.bytes * c.executions
            for c in self.moved
            if c.in_loop == in_loop and (c.kind in kinds or not kinds)
        )


def main(argv: list[str]) -> None:
    if not FLAGS.all and (len(argv) != 3 or argv[1] not in MODELS or argv[2].split(':')[0] not in CHIPS):
        sys.exit(
            f'error: give a model ({", ".join(MODELS)}) and a slice of {", ".join(CHIPS)}, as in: '
            'compiled.py 8B v5p:2x2x2; or --all'
        )
    require_compiler('tpu')
    installed = ', '.join(f'{name} {version(name)}' for name in ('jax', 'libtpu'))
    config = FLAGS.config
    tokens = config.rollout.max_response_tokens
    print(f'{datetime.date.today()}, {installed}; rows of 2,048 + {tokens:,} tokens\n')
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = FLAGS.data, FLAGS.fsdp, FLAGS.tensor
    try:
        if FLAGS.all:
            print_table(config, FLAGS.hlo)
        else:
            print_step(step_of(argv[1], argv[2], config, FLAGS.rows, FLAGS.hlo))
    except ValueError as e:
        sys.exit(f'error: {e}')


def step_of(name: str, topology: str, config: ConfigDict, rows: int | None, keep: str) -> Step:
    """Compiles the step of a model of MODELS for a slice. Raises as find_target.

    `rows` are a micro-batch's on all chips, None: one a chip. The program's text goes into the directory
    `keep`, if that is named.
    """
    target = find_target(topology, config)
    config.learner.micro_batch_rows = rows or target.mesh.shape['data'] * target.mesh.shape['fsdp']
    config = config_lib.resolve(config)
    model = adapted(model_of(name, config.model.dtype), adapter_of(config.model))
    learner = Learner(config, model, target.mesh, choose_kernel(config, model, target.mesh, target.platform))
    compiled = learner.compile_update()
    jax.clear_caches()
    text = compiled.as_text()
    if keep:
        sizes = 'x'.join(map(str, target.mesh.shape.values()))
        file = f'{name}_{topology.replace(":", "_")}_{sizes}_rows{config.learner.micro_batch_rows}.hlo'
        Path(keep).mkdir(parents=True, exist_ok=True)
        (Path(keep) / file).write_text(text)
    return read(text, compiled, target.mesh, CHIPS[topology.split(':')[0]], config, model)


def read(
    text: str, compiled: jax.stages.Compiled, mesh: Mesh, chip: Chip, config: ConfigDict, model: ModelConfig
) -> Step:
    """What the text of a compiled step says."""
    learner, memory = config.learner, compiled.memory_analysis()
    T = learner.row_tokens
    rows = learner.micro_batch_rows / (mesh.shape['data'] * mesh.shape['fsdp'])
    program = parse(text)._replace(inner_trips=-(-int(rows * learner.row_tokens) // Tile().tokens))
    places = tuple(tuple(device.coords) for device in mesh.devices.flat)
    loop_body = next(visit.computation for visit in visits(program) if visit.in_loop)
    return Step(
        chip=chip,
        mesh=dict(mesh.shape),
        rows=rows,
        peak_bytes=memory.peak_memory_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        moved=collectives(program),
        products=flops(program),
        kernels=total(program, lambda computation, i, fused: kernel_flops(computation, i)),
        model_flops=learner.micro_batch_rows * model_flops(model, T, T, T * T / 2) / mesh.size,
        traffic=traffic(program),
        micro_batch=seconds(program, loop_body, chip, places),
        mini_batch=seconds(program, program.entry, chip, places),
    )


def model_of(name: str, dtype: str) -> ModelConfig:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / 'config.json').write_text(json.dumps(MODELS[name]))
        return hf.read_config(directory, dtype)


# ---- what is printed


def print_step(step: Step) -> None:
    sizes = ' × '.join(f'{axis} {n}' for axis, n in step.mesh.items())
    print(f'mesh {sizes}; {step.rows:g} row{"s" * (step.rows > 1)} a chip in a micro-batch')
    print(f'memory: peak {step.peak_bytes / GB:.2f} GB, of it arguments {step.argument_bytes / GB:.2f} GB\n')
    print_moved(step)
    chip, in_loop, outside = step.chip, step.products.in_loop + step.kernels.in_loop, step.products.outside
    print('\n| | a micro-batch | a mini-batch |\n|---|---|---|')
    for what, micro, mini in (
        ('matrix products, TFLOP', step.products.in_loop / 1e12, outside / 1e12),
        ('kernels, TFLOP', step.kernels.in_loop / 1e12, step.kernels.outside / 1e12),
        ('model, TFLOP', step.model_flops / 1e12, 0),
        ('HBM traffic, GB', step.traffic.in_loop / GB, step.traffic.outside / GB),
        (
            'moved between chips, GB',
            step.moved_bytes(in_loop=True) / GB,
            step.moved_bytes(in_loop=False) / GB,
        ),
        ('seconds at least: arithmetic at the peak', in_loop / chip.flops, outside / chip.flops),
        (
            'seconds at least: HBM at its full rate',
            step.traffic.in_loop / chip.hbm,
            step.traffic.outside / chip.hbm,
        ),
        *(
            (f'modelled seconds: {what}', step.micro_batch[what], step.mini_batch[what])
            for what in step.micro_batch
        ),
        ('modelled seconds', step.micro_batch.total(), step.mini_batch.total()),
    ):
        print(f'| {what} | {micro:,.3f} | {mini:,.3f} |')
    print(f'\nmodelled utilisation: {step.utilisation:.1%} of {chip.flops / 1e12:.0f} TFLOP/s')


def print_moved(step: Step) -> None:
    """A line for each kind of collective, dtype and mesh axes."""
    lines: dict[tuple[str, str, str], Counter[str]] = {}
    for c in step.moved:
        line = lines.setdefault((c.kind, c.dtype, axes_of(c.groups, step.mesh) or '-'), Counter())
        line['micro' if c.in_loop else 'mini'] += c.bytes * c.executions
        line['micro times' if c.in_loop else 'mini times'] += c.executions
        line['asynchronous'] += c.bytes * c.executions * c.asynchronous
    print(
        '| collective | dtype | axes | GB a micro-batch | executions | GB a mini-batch | executions | '
        'asynchronous |'
    )
    print('|' + '---|' * 8)
    for key, line in sorted(lines.items(), key=lambda item: -item[1].total()):
        share = line['asynchronous'] / max(1, line['micro'] + line['mini'])
        counts = (f'{line[part] / GB:.4f} | {line[f"{part} times"]}' for part in ('micro', 'mini'))
        print(f'| {" | ".join([*key, *counts])} | {share:.0%} |')


def print_table(config: ConfigDict, keep: str) -> None:
    """A line for each of SETTINGS; the units are GB, TFLOP and seconds, a micro-batch but where the header
    says otherwise.
    """
    header = (
        'model',
        'slice',
        'rows a chip',
        'peak GB',
        'moved GB',
        'gathered',
        'reduced',
        'permuted',
        'moved GB a mini-batch',
        'HBM GB',
        'TFLOP',
        'model TFLOP',
        's',
        'waiting for chips s',
        'attention s',
        's a mini-batch',
        'utilisation',
    )
    print(f'| {" | ".join(header)} |\n|{"---|" * len(header)}')
    for name, topology, rows in SETTINGS:
        step = step_of(name, topology, config.copy_and_resolve_references(), rows, keep)
        numbers = (
            step.peak_bytes / GB,
            step.moved_bytes(in_loop=True) / GB,
            step.moved_bytes('all-gather', in_loop=True) / GB,
            step.moved_bytes('all-reduce', 'reduce-scatter', in_loop=True) / GB,
            step.moved_bytes('collective-permute', 'all-to-all', in_loop=True) / GB,
            step.moved_bytes(in_loop=False) / GB,
            step.traffic.in_loop / GB,
            (step.products.in_loop + step.kernels.in_loop) / 1e12,
            step.model_flops / 1e12,
            step.micro_batch.total(),
            step.micro_batch[WAITING],
            step.micro_batch['attention'],
            step.mini_batch.total(),
        )
        cells = (
            name,
            topology,
            f'{step.rows:g}',
            *(f'{n:,.0f}' if n >= 100 else f'{n:.2f}' for n in numbers),
        )
        print(f'| {" | ".join(cells)} | {step.utilisation:.1%} |', flush=True)


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_bool('all', False, 'The table of all SETTINGS.')
    flags.DEFINE_integer('data', 1, 'mesh.data')
    flags.DEFINE_integer('fsdp', -1, 'mesh.fsdp; -1: all chips that are left')
    flags.DEFINE_integer('tensor', 1, 'mesh.tensor')
    flags.DEFINE_integer(
        'rows', None, 'Rows of a micro-batch on all chips together; default: one a chip of data × fsdp.'
    )
    flags.DEFINE_string('hlo', '', "A directory for the programs' text; default: it is not kept.")
    config_flags.DEFINE_config_file(
        'config', 'configs/math.py', 'What the step is compiled from; as in bapo_jax.train.'
    )
    app.run(main)
