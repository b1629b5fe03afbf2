"""Kernels that a GPU launches for a token of the in-process engine, counted in the program that XLA's own
compiler makes for it.

    make gpu-compiler
    # Qwen2.5-0.5B and 1.5B for an H100
    PYTHONPATH=.:.gpu-compiler python -m benchmarks.compiled.engine_kernels
    PYTHONPATH=.:.gpu-compiler python -m benchmarks.compiled.engine_kernels 0.5B --nucleus    # with top_p < 1

Nothing runs, and no GPU is needed. Counted is the loop that gives every slot a token while no slot is
refilled. A loop inside it has its trip count, or, where that is a runtime value, the most it can have: a trip
for each block of the cache's keys. Such a loop also sends its condition to the host and waits, every trip.

    products      matrix products that the compiler writes in Triton; on a card it may choose a library's,
    after trying both
    fusions       kernels that the compiler makes of other arithmetic
    kernels       our own, and calls of libraries
    copies        from one buffer of the card to another, or to the host
    scores        passes over the scores [slots, words] in float32, each a read or a write of all of them
    attention     bytes that loops and our own kernels read and write, where every slot's keys are all in use
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections import Counter
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bapo_jax.cluster.mesh import with_sharding
from bapo_jax.config import default_config
from bapo_jax.dry_run.targets import GB, find_target
from bapo_jax.models import hf
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.rotary import Rotation
from bapo_jax.rollout.inprocess import slots
from bapo_jax.rollout.inprocess.decoding import CACHE_BLOCK
from benchmarks.compiled.absent import card, require_compiler
from benchmarks.compiled.hlo import (
    Computation,
    Instruction,
    Program,
    arrays,
    attribute,
    called,
    parse,
    size,
    trip_count,
)
from benchmarks.compiled.hlo_time import instruction_traffic

MODELS = {  # Qwen2.5-0.5B and -1.5B, of their config.json
    '0.5B': ModelConfig('qwen2', 151_936, 896, 4864, 24, 14, 2, 64, Rotation(1e6), 1e-6, True, 'bfloat16'),
    '1.5B': ModelConfig('qwen2', 151_936, 1536, 8960, 28, 12, 2, 128, Rotation(1e6), 1e-6, True, 'bfloat16'),
}
SLOTS, GROUP, PROMPT, RESPONSE = 256, 8, 256, 1024
_NO_KERNEL = (
    'parameter',
    'get-tuple-element',
    'constant',
    'tuple',
    'bitcast',
    'while',
    'conditional',
    'call',
    'after-all',
)


class Count(NamedTuple):
    """Of one token of every slot."""

    launched: Counter[str]  # by kind
    loops: int
    unknown: int  # of them with a runtime trip count
    in_loops: int  # of the launches
    scores: int  # passes
    attention_bytes: int


def sample_program(
    model: ModelConfig,
    mesh: Mesh,
    *,
    rows: int = SLOTS,
    prompt: int = PROMPT,
    response: int = RESPONSE,
    nucleus: bool = False,
) -> jax.stages.Lowered:
    """`slots.sample` as the engine calls it, for the devices of `mesh`, with caches of all rows for that many
    tokens.
    """
    line, whole, split = 4 * rows // GROUP, NamedSharding(mesh, PartitionSpec()), slots.split_rows(mesh)
    graph, shapes = hf.abstract_params(model)

    def array(dtype, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def on(sharding: NamedSharding, tree):
        return with_sharding(tree, jax.tree.map(lambda _: sharding, tree))

    weights = jax.eval_shape(lambda params: slots.lay_out_weights(params, model=model, mesh=mesh), shapes)
    state = jax.eval_shape(
        lambda: slots.nothing_yet(
            model=model, mesh=mesh, rows=rows, places=rows + line * GROUP, line=line, prompt_tokens=prompt,
            response_tokens=response, cached=rows, key_slots=prompt + response,
        )
    )  # fmt: skip
    waiting = slots.Waiting(*[array(jnp.int32, line * GROUP)] * 3)
    of_devices = [waiting, array(jnp.int32, 1), array(jnp.int32, 1)]
    numbers = [array(jnp.int32), array(jnp.float32), array(jnp.float32)]
    return slots.sample_responses.lower(
        on(whole, weights),
        *on(split, (*state, *of_devices)),
        *on(whole, numbers),
        graph=graph,
        mesh=mesh,
        stop_tokens=(1, 2),
        greedy=False,
        nucleus=nucleus,
    )


def token_loop(program: Program) -> str:
    """The body of the loop over tokens: inside the loop that refills slots, the one that has most to do."""
    [outer] = [i for i in program.computations[program.entry].values() if i.opcode == 'while']
    inside = [i for i in program.computations[attribute(outer, 'body')].values() if i.opcode == 'while']
    return max((attribute(i, 'body') for i in inside), key=lambda body: len(program.computations[body]))


def kind_of(i: Instruction) -> str:
    """What launches a kernel; '' of what launches none."""
    if i.opcode == 'fusion':
        return 'products' if 'gemm_fusion' in i.rest else 'fusions'
    if i.opcode in _NO_KERNEL:
        return ''
    return {'custom-call': 'kernels', 'copy': 'copies'}.get(i.opcode, 'fusions')


def counted(text: str, words: int, rows: int = SLOTS, keys: int = PROMPT + RESPONSE) -> Count:
    """The token loop of a compiled `slots.sample`."""
    program, launched, loops = parse(text), Counter(), []
    scores = attention = in_loops = 0

    def visit(name: str, times: int, looped: bool) -> None:
        nonlocal scores, attention, in_loops
        computation = program.computations[name]
        for i in computation.values():
            if kind_of(i):
                launched[kind_of(i)] += times
                in_loops += times * looped
                scores += times * _passes(program, computation, i, rows * words)
                if kind_of(i) == 'kernels':  # what it writes, it writes in place, or is little
                    attention += times * sum(size(computation[name].shape) for name in i.operands)
                elif looped:
                    attention += times * instruction_traffic(program, computation, i)
            if i.opcode == 'while':
                trips = trip_count(program, computation, i)
                loops.append(trips)
                for part in ('body', 'condition'):
                    visit(attribute(i, part), times * (trips or -(-keys // CACHE_BLOCK)), True)
            elif i.opcode != 'fusion':
                for inner in called(i):
                    visit(inner, times, looped)

    visit(token_loop(program), 1, False)
    return Count(launched, len(loops), loops.count(None), in_loops, scores, attention)


def _passes(program: Program, computation: Computation, i: Instruction, numbers: int) -> int:
    """How often an instruction reads or writes all of a float32 array of so many numbers, which only the
    scores have.
    """

    def is_scores(shape: str) -> bool:
        return any(a.dtype == 'f32' and prod(a.dims) >= numbers for a in arrays(shape))

    read, written = sum(is_scores(computation[name].shape) for name in i.operands), is_scores(i.shape)
    if i.opcode == 'fusion' and not written:  # without a sum or the like over them it looks some up
        body = program.computations[attribute(i, 'calls')]
        read *= any(
            j.opcode.startswith('reduce') and is_scores(body[j.operands[0]].shape) for j in body.values()
        )
    return read + written


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('models', nargs='*', metavar='MODEL', help=f'of {", ".join(MODELS)}; default: all')
    parser.add_argument('--card', default='H100', type=card, help='a GPU that the dry run knows')
    parser.add_argument('--nucleus', action='store_true', help='with top_p < 1')
    parser.add_argument(
        '--hlo', default='', help="a directory for the programs' text; default: it is not kept"
    )
    asked = parser.parse_args(argv)
    models = asked.models or list(MODELS)
    if unknown := [name for name in models if name not in MODELS]:
        parser.error(f'no model {unknown[0]!r}; there are {", ".join(MODELS)}')
    require_compiler('gpu')
    installed = ', '.join(f'{package} {version(package)}' for package in ('jax', 'jax-cuda13-pjrt'))
    print(f'{datetime.date.today()}, {installed}; {asked.card}, {SLOTS} slots of {PROMPT + RESPONSE} keys\n')
    kinds = ('products', 'fusions', 'kernels', 'copies')
    head = (
        'model',
        *kinds,
        'in all',
        'of them in loops',
        'loops',
        'of unknown length',
        'scores',
        'attention GB',
    )
    print(f'| {" | ".join(head)} |\n|{"---|" * len(head)}')
    mesh = find_target(f'1x{asked.card}', default_config()).mesh
    for name in models:
        text = sample_program(MODELS[name], mesh, nucleus=asked.nucleus).compile().as_text()
        if asked.hlo:
            Path(asked.hlo).mkdir(parents=True, exist_ok=True)
            (Path(asked.hlo) / f'sample_{name}_{asked.card}.hlo').write_text(text)
        found = counted(text, MODELS[name].vocab_size)
        by_kind = [found.launched[kind] for kind in kinds]
        numbers = (*by_kind, found.launched.total(), found.in_loops, found.loops, found.unknown, found.scores)
        print(f'| {name} | {" | ".join(map(str, numbers))} | {found.attention_bytes / GB:.2f} |', flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
