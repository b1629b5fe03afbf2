"""Kernels and collectives of the learner's step on GPUs, counted in the programs that XLA's own compiler
makes for them.

    make gpu-compiler
    # the table of docs/reference/performance.md, some ten minutes
    PYTHONPATH=.:.gpu-compiler python -m benchmarks.compiled.gpu_step
    # one: model, cards, rows of a micro-batch on all of them
    PYTHONPATH=.:.gpu-compiler python -m benchmarks.compiled.gpu_step 8B 4xH100 4
    # an adapter, or another name of OTHER in benchmarks/compiled/fits.py; experts
    PYTHONPATH=.:.gpu-compiler python -m benchmarks.compiled.gpu_step 8B 8xH100 8 --other=LoRA
    PYTHONPATH=.:.gpu-compiler python -m benchmarks.compiled.gpu_step 30B-A3B 8xH200 8
    # a row of 32k whose tokens are split over the cards
    PYTHONPATH=.:.gpu-compiler python -m benchmarks.compiled.gpu_step 8B 8xH100 1 --response_tokens=30720

Rows have 2,048 + 8,192 tokens (configs/math.py) unless said otherwise, with remat=full. Nothing runs, and no
GPU is needed. "A micro-batch" and "a mini-batch" are as of benchmarks/compiled/step.py; the LM head's loop is
counted as if all tokens of a row were responses'. Kinds of kernels are those of
benchmarks/compiled/engine_kernels.py. Bytes are what a card receives, as hlo.py counts them. "Beside work"
are those of collectives between whose start and end the schedule has a product or an attention kernel.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import jax

from bapo_jax import config as config_lib
from bapo_jax.dry_run.targets import GB, find_target
from bapo_jax.learner.head import Tile
from bapo_jax.learner.build import choose_kernel
from bapo_jax.learner.learner import Learner
from bapo_jax.models.adapters import adapted, adapter_of
from benchmarks.compiled.absent import cards, require_compiler
from benchmarks.compiled.engine_kernels import kind_of
from benchmarks.compiled.fits import MODELS, OTHER
from benchmarks.compiled.hlo import (
    Computation,
    Program,
    arrays,
    groups_of,
    kind_of as collective_of,
    parse,
    received,
    visits,
)
from benchmarks.compiled.step import model_of
from configs import math

# model, cards, (data, fsdp), rows of a micro-batch: one a card, and a name of OTHER
SETTINGS = (
    ('1.5B', '1xH100', (1, 1), 1, ''),
    ('1.5B', '4xH100', (1, 4), 4, ''),
    ('8B', '4xH100', (1, 4), 4, ''),
    ('8B', '8xH100', (1, 8), 8, ''),
    ('8B', '2x8xH100', (2, 8), 16, ''),
    ('8B', '8xB200', (1, 8), 8, ''),
    ('8B', '8xH100', (1, 8), 8, 'LoRA'),
    ('30B-A3B', '8xH100', (1, 8), 8, 'LoRA of attention'),
    ('30B-A3B', '8xH200', (1, 8), 8, ''),
    ('30B-A3B', '4x8xH100', (1, 32), 32, 'LoRA of attention'),
    ('30B-A3B', '4x8xH100', (1, 32), 32, ''),
)
_COUNTED = ('all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'collective-permute')


class Counts(NamedTuple):
    """Of a micro-batch (True) and of what runs once a mini-batch (False)."""

    kernels: dict[bool, Counter[str]]  # launches by kind
    collectives: dict[bool, Counter[str]]  # executions by kind
    moved: dict[bool, Counter[str]]  # bytes that a card receives, by kind
    beside_work: dict[bool, int]  # of those bytes


def counted(program: Program) -> Counts:
    """Of a compiled step. Each trip of a loop counts, but those of the loop over micro-batches."""
    kernels, collectives, moved = ({True: Counter(), False: Counter()} for _ in range(3))
    beside_work = {True: 0, False: 0}
    for visit in visits(program):
        if visit.fused:
            continue
        computation = program.computations[visit.computation]
        for i in computation.values():
            if kind := collective_of(i):
                n = len(groups_of(i, program.devices)[0])
                each = sum(
                    received(kind, a.bytes, n) for name in i.operands for a in arrays(computation[name].shape)
                )
                collectives[visit.in_loop][kind] += visit.times
                moved[visit.in_loop][kind] += visit.times * each
                beside_work[visit.in_loop] += visit.times * each * is_beside_work(i.name, computation)
            elif launches := kind_of(i):
                kernels[visit.in_loop][launches] += visit.times * (not i.opcode.endswith('-done'))
    return Counts(kernels, collectives, moved, beside_work)


def is_beside_work(start: str, computation: Computation) -> bool:
    """Whether a product or a kernel of attention stands between an asynchronous collective's start and its
    end.
    """
    names = list(computation)
    ends = [
        at for at, i in enumerate(computation.values()) if i.opcode.endswith('-done') and start in i.operands
    ]
    between = names[names.index(start) + 1 : ends[0]] if ends else []
    return any(kind_of(computation[name]) in ('products', 'kernels') for name in between)


def compiled(
    name: str, cards: str, sizes: tuple[int, int], rows: int, other: str, response_tokens: int
) -> tuple[Program, int]:
    """The step of a model of benchmarks/compiled/fits.py, and the bytes of its peak on a card."""
    c = math.get_config()
    c.update_from_flattened_dict(OTHER[other] if other else {})
    c.rollout.max_response_tokens = response_tokens
    c.mesh.data, c.mesh.fsdp = sizes
    c.learner.micro_batch_rows, c.learner.remat = rows, 'full'
    target, c = find_target(cards, c), config_lib.resolve(c)
    model = adapted(model_of(name, c.model.dtype), adapter_of(c.model))
    try:
        kernel = choose_kernel(c, model, target.mesh, target.platform)
    except ValueError as e:
        sys.exit(f'error: {e}')
    step = Learner(c, model, target.mesh, kernel).compile_update()
    jax.clear_caches()
    memory = step.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    of_card = rows * c.learner.row_tokens // (sizes[0] * sizes[1])
    return parse(step.as_text())._replace(inner_trips=-(-of_card // Tile().tokens)), peak


def line(name: str, cards: str, sizes: tuple[int, int], rows: int, other: str, response_tokens: int) -> str:
    """The table's row."""
    program, peak = compiled(name, cards, sizes, rows, other, response_tokens)
    found = counted(program)
    kernels, moved = found.kernels[True], found.moved[True]
    cells = [
        ', '.join(filter(None, (name, other))),
        cards,
        ' × '.join(map(str, sizes)),
        *(kernels[kind] for kind in ('products', 'fusions', 'kernels', 'copies')),
    ]
    cells += [found.kernels[False].total()]
    cells += [
        f'{found.collectives[True][kind]} ({moved[kind] / GB:.2f})' if moved[kind] else ''
        for kind in _COUNTED[:2]
    ]
    others = _COUNTED[2:]
    cells += [
        f'{sum(found.collectives[True][k] for k in others)} ({sum(moved[k] for k in others) / GB:.2f})'
        if moved.total()
        else ''
    ]
    cells += [
        f'{found.beside_work[True] / moved.total():.0%}' if moved.total() else '',
        f'{found.moved[False].total() / GB:.2f}',
        f'{peak / GB:.1f}',
    ]
    return f'| {" | ".join(map(str, cells))} |'


def asked(argv: list[str]) -> tuple[Sequence[tuple[str, str, tuple[int, int], int, str]], int]:
    """The settings that a command line names, and the tokens of a response.

    Exits with status 2 and a line that names what is wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument(
        'setting',
        nargs='*',
        metavar='MODEL CARDS ROWS',
        help='such as 8B 4xH100 4; default: the table of docs/reference/performance.md',
    )
    parser.add_argument(
        '--response_tokens', type=int, default=8192, help='rollout.max_response_tokens (default: %(default)s)'
    )
    parser.add_argument('--other', choices=list(OTHER), default='', help='fields that a setting has beside')
    flags = parser.parse_args(argv)
    given = flags.setting
    if not given:
        return SETTINGS, flags.response_tokens
    if len(given) != 3:
        parser.error(
            f'got {" ".join(given)!r}; give a model, cards and the rows of a micro-batch, such as 8B 4xH100 '
            '4, or nothing'
        )
    name, topology, rows = given
    if name not in MODELS:
        parser.error(f'no model {name!r}; there are {", ".join(MODELS)}')
    try:
        hosts, of_host = cards(topology)
    except ValueError as e:
        parser.error(str(e))
    n = int(rows) if rows.isdigit() else 0
    if not n or n % hosts or 0 < n % (hosts * of_host) < n:
        parser.error(
            f'{rows!r} rows; give a multiple of the {hosts * of_host} cards or, to split their tokens, a '
            f'smaller one of the hosts ({hosts})'
        )
    return ((name, topology, (hosts, of_host), n, flags.other),), flags.response_tokens


def main(argv: list[str]) -> None:
    settings, response_tokens = asked(argv)
    require_compiler('gpu')
    installed = ', '.join(f'{package} {version(package)}' for package in ('jax', 'jax-cuda13-pjrt'))
    print(f'{datetime.date.today()}, {installed}; rows of 2,048 + {response_tokens:,} tokens, remat=full\n')
    head = (
        'model',
        'cards',
        'data × fsdp',
        'products',
        'fusions',
        'kernels',
        'copies',
        'all launches outside',
        'all-gathers (GB)',
        'reduce-scatters (GB)',
        'others (GB)',
        'beside work',
        'GB a mini-batch',
        'peak GB',
    )
    print(f'| {" | ".join(head)} |\n|{"---|" * len(head)}')
    for setting in settings:
        print(line(*setting, response_tokens), flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
