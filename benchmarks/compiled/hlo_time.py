"""What a TPU program's instructions cost: traffic with the memory, arithmetic of the attention kernels,
seconds.

Seconds are a model, and no measurement. Each computation is walked in the order that the compiler scheduled:

    fusion, copy, …         the compiler's estimated_cycles, which the text holds, at the clock of `Chip`;
    without them, its traffic
    attention kernel        its arithmetic at the peak, or at a head's part of a wider matrix unit; a lower
    bound
    collective              bytes received / (links of the chip with fewest neighbours in its group), each
    link at its full rate
    collective-permute      bytes × the most messages that cross one link, routed along one dimension after
    the other
    asynchronous copy       its traffic at the HBM's full rate

What is synchronous stops everything else. What is asynchronous runs beside it, one transfer after another;
the instruction that awaits it costs the rest of its time. Latency is left out, and contention of copies with
the other instructions' traffic.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from math import prod
from typing import NamedTuple

from benchmarks.compiled.hlo import (
    Computation,
    Instruction,
    Program,
    Work,
    arrays,
    attribute,
    called,
    continues,
    groups_of,
    kind_of,
    received,
    root,
    size,
    starts,
    total,
    trip_count,
)


class Chip(NamedTuple):
    """Of one JAX device. Sources: cloud.google.com/tpu/docs/{v5e,v5p,v6e}, tables "key specifications", read
    2026-11-23.

    Those pages give the interconnect of a chip as the sum of its links in both directions: 400, 1200 and 800
    GB/s over 4, 6 and 4 links. The clock is the peak over the arithmetic of a cycle. By it, the compiler
    expects 88, 90 and 70 % of the peak of an 8192³ product.
    """

    flops: float  # bfloat16, a second
    flops_of_a_cycle: int
    unit: int  # side of a matrix unit; a product over fewer numbers uses a part of it
    hbm: float  # bytes a second
    link: float  # bytes a second, one link in one direction

    @property
    def clock(self) -> float:
        return self.flops / self.flops_of_a_cycle


CHIPS = {
    'v5e': Chip(197e12, 131_072, 128, 819e9, 50e9),
    'v5p': Chip(459e12, 262_144, 128, 2765e9, 100e9),
    'v6e': Chip(918e12, 524_288, 256, 1640e9, 100e9),
}
WAITING = 'waiting for collectives'
Places = tuple[tuple[int, ...], ...]  # coordinates in the slice of each position in the mesh

# ---- attention kernels

# By the start of its name, the matrix products that each of Splash attention's kernels does for a pair of
# tiles, and what the names of its tile sizes end in. The products: scores and output; scores, dV, dP and dK;
# scores, dP and dQ.
_PRODUCTS = {'splash_mha_fwd': (2, ''), 'splash_mha_dkv': (4, '_dkv'), 'splash_mha_dq': (3, '_dq')}


# Of experts: rows times their group's matrix [P, I] → [P, O], and its gradient [P, A], [P, B] → [E, A, B].
# The first's preparation multiplies nothing.
_GROUPED, _PREPARES = ('ragged-dot', 'tgmm'), 'ragged-dot-metadata'


def kernel_flops(computation: Computation, i: Instruction) -> int:
    """Arithmetic of a kernel; 0 of what is no custom kernel.

    Attention, on full tiles up to the diagonal: products × 2 × rows × heads × head size × Σ over tiles of
    queries (tile × keys up to the end of the tile that its last sees). Segments shorten none of it. Experts:
    2 P I O; tiles that two experts share are not counted twice. Raises ValueError for a kernel without a
    formula.
    """
    if not _is_kernel(i) or i.name.startswith(_PREPARES):
        return 0
    if is_grouped(i):
        rows, inputs = _queries(computation, i)
        output = arrays(i.shape)[0].dims
        return 2 * rows * inputs * output[-1]
    known = [(products, tile) for name, (products, tile) in _PRODUCTS.items() if i.name.startswith(name)]
    tiles = {name: int(n) for name, n in re.findall(r'(block_\w+)\\*": (\d+)', i.rest)}
    if not known or not tiles:
        raise ValueError(
            f'the custom kernel %{i.name} has no formula; add one to _PRODUCTS of '
            'benchmarks/compiled/hlo_time.py'
        )
    [(products, suffix)] = known
    if suffix == '_dkv' and re.search(r'use_fused_bwd_kernel\\*": true', i.rest):
        products += 1  # dQ in the same kernel
    queries, keys = tiles[f'block_q{suffix}'], tiles[f'block_kv{suffix}']
    *heads, tokens, head = _queries(computation, i)
    pairs = sum(queries * min(tokens, -(-end // keys) * keys) for end in range(queries, tokens + 1, queries))
    return products * 2 * prod(heads) * head * pairs


def is_grouped(i: Instruction) -> bool:
    """Whether it is a product of experts."""
    return _is_kernel(i) and i.name.startswith(_GROUPED)


def _is_kernel(i: Instruction) -> bool:
    return i.opcode == 'custom-call' and '"tpu_custom_call"' in i.rest


def _queries(computation: Computation, i: Instruction) -> tuple[int, ...]:
    """[heads, T, H], [rows, heads, T, H] or [P, I]: a kernel's first operand that is no integer."""
    return next(a.dims for name in i.operands for a in arrays(computation[name].shape) if 'f' in a.dtype)


# ---- traffic with the memory

_MOVES_NOTHING = {
    'parameter',
    'constant',
    'tuple',
    'get-tuple-element',
    'bitcast',
    'while',
    'call',
    'conditional',
    'after-all',
    'partition-id',
    'replica-id',
    'opt-barrier',
    'add-dependency',
    'async-start',
    'async-update',
}
_BUFFERS_ALONE = re.compile(r'"(AllocateBuffer|ConcatBitcast|AsyncCollectiveStart|AsyncCollectiveDone)"')
_SLICES = ('dynamic-slice', 'slice', 'gather')


def traffic(program: Program) -> Work:
    """Bytes that a device reads from and writes to its HBM, an estimate: operands and results of each
    instruction.

    A fusion counts once, by what it reads and writes: of an operand that it only slices the slices, of a
    result that it updates in place the update. On-chip memory is free. A kernel may read an operand several
    times; it counts once.
    """

    def of(computation: Computation, i: Instruction, fused: bool) -> int:
        if kind_of(i):
            return 0 if continues(i, computation) else _collective_traffic(computation, i, fused)
        return 0 if fused else instruction_traffic(program, computation, i)

    return total(program, of)


def _collective_traffic(computation: Computation, i: Instruction, fused: bool) -> int:
    if starts(computation):  # the fusion hands on its operand and its result
        return _in_hbm(root(computation).shape)
    return sum(_in_hbm(computation[name].shape) for name in i.operands) + (
        0 if fused else _result(computation, i)
    )


def instruction_traffic(program: Program, computation: Computation, i: Instruction) -> int:
    """Bytes of one execution of an instruction outside fusions that is no collective."""
    if i.opcode in _MOVES_NOTHING or i.opcode.endswith('-done') or _BUFFERS_ALONE.search(i.rest):
        return 0
    operands = [computation[name].shape for name in i.operands]
    if i.opcode == 'fusion':
        body = program.computations[attribute(i, 'calls')]
        parameters = {int(p.arguments): p.name for p in body.values() if p.opcode == 'parameter'}
        reads = sum(_read(program, body, parameters[n]) for n, shape in enumerate(operands) if _in_hbm(shape))
        return reads + _written(program, body, root(body).name)
    if i.opcode == 'dynamic-update-slice':
        return (bool(_in_hbm(operands[1])) + bool(_in_hbm(i.shape))) * size(operands[1])
    if i.opcode in _SLICES:
        return (bool(_in_hbm(operands[0])) + bool(_in_hbm(i.shape))) * size(i.shape)
    if i.opcode == 'slice-start':
        part = arrays(i.shape)[len(operands)]
        return (bool(_in_hbm(operands[0])) + part.in_hbm) * part.bytes
    return sum(map(_in_hbm, operands)) + _result(computation, i)


def _in_hbm(shape: str) -> int:
    return sum(a.bytes for a in arrays(shape) if a.in_hbm)


def _result(computation: Computation, i: Instruction) -> int:
    """Bytes that an instruction writes; what starts a transfer has its operands in its shape too."""
    operands = (
        sum(_in_hbm(computation[name].shape) for name in i.operands) if i.opcode.endswith('-start') else 0
    )
    return _in_hbm(i.shape) - operands


def _read(program: Program, body: Computation, name: str) -> int:
    """Bytes that a fusion reads of a value that it is given."""
    reads = 0
    for user in (i for i in body.values() if name in i.operands):
        if user.opcode == 'bitcast':
            reads += _read(program, body, user.name)
        elif user.opcode in _SLICES and user.operands[0] == name:
            reads += size(user.shape)
        elif user.opcode == 'fusion':
            inner = program.computations[attribute(user, 'calls')]
            given = [
                p.name
                for p in inner.values()
                if p.opcode == 'parameter' and user.operands[int(p.arguments)] == name
            ]
            reads += sum(_read(program, inner, parameter) for parameter in given)
        elif user.opcode == 'dynamic-update-slice' and user.operands[0] == name:
            pass  # updated in place
        elif user.opcode == 'tuple' or kind_of(user) or _BUFFERS_ALONE.search(user.rest):
            pass  # handed on, or counted with the collective
        else:
            return size(body[name].shape)
    return min(reads, size(body[name].shape))


def _written(program: Program, body: Computation, name: str) -> int:
    """Bytes that a fusion writes of a value that it gives back."""
    i = body[name]
    if i.opcode == 'tuple':
        return sum(_written(program, body, operand) for operand in i.operands)
    if (
        i.opcode in ('parameter', 'get-tuple-element')
        or kind_of(i)
        or _BUFFERS_ALONE.search(i.rest)
        or not _in_hbm(i.shape)
    ):
        return 0
    if i.opcode == 'bitcast':
        return (
            _written(program, body, i.operands[0])
            if body[i.operands[0]].opcode == 'dynamic-update-slice'
            else size(i.shape)
        )
    return size(body[i.operands[1]].shape) if i.opcode == 'dynamic-update-slice' else size(i.shape)


# ---- seconds


def seconds(program: Program, name: str, chip: Chip, places: Places) -> Counter[str]:
    """Modelled seconds of one run of a computation, by what takes them.

    The micro-batch loop is left out of the entry; loops in it with a runtime trip count run `inner_trips`
    times. Every branch of a conditional counts.
    """
    computation, spent = program.computations[name], Counter()
    free: dict[
        object, float
    ] = {}  # when the HBM, the links, or a permutation's links have done all that was asked of them
    ready: dict[str, float] = {}  # when asynchronous work is done, by its instruction's name or its channel

    def enqueue(resource: object, work: float) -> float:
        """When the resource will have done it."""
        free[resource] = max(spent.total(), free.get(resource, 0.0)) + work
        return free[resource]

    def wait(what: str, until: float) -> None:
        spent[what] += max(0.0, until - spent.total())

    for i in computation.values():
        body_name = attribute(i, 'calls') if i.opcode in ('fusion', 'async-start') else ''
        body = program.computations.get(body_name, {})
        if i.opcode == 'while':
            trips = trip_count(program, computation, i)
            if trips is None and name != program.entry:
                trips = program.inner_trips
            if trips:
                of_body = seconds(program, attribute(i, 'body'), chip, places)
                spent.update({what: trips * time for what, time in of_body.items()})
        elif i.opcode in ('call', 'conditional'):
            for branch in called(i):
                spent.update(seconds(program, branch, chip, places))
        elif i.opcode in ('copy-start', 'slice-start'):
            ready[i.name] = enqueue('hbm', instruction_traffic(program, computation, i) / chip.hbm)
        elif i.opcode.endswith('-done'):
            wait(
                'waiting for copies' if i.opcode in ('copy-done', 'slice-done') else WAITING,
                ready.get(i.operands[0], 0.0),
            )
        else:
            spent[_what(program, i)] += _compute_seconds(program, computation, i, chip)
        around = computation if kind_of(i) else body
        for moving in [i] if kind_of(i) else [j for j in body.values() if kind_of(j)]:
            if continues(moving, around):
                if any('"AsyncCollectiveDone"' in j.rest for j in body.values()):
                    wait(WAITING, ready.get(_channel(moving), 0.0))
                continue
            done = enqueue(*_transfer(program, around, moving, kind_of(moving, body_name), chip, places))
            if i.opcode.endswith('-start') or starts(body):
                ready[i.name] = ready[_channel(moving)] = done
            else:
                wait(WAITING, done)
    return spent


def _channel(i: Instruction) -> str:
    return re.search(r'channel_id=(\d+)', i.rest)[0]


def _what(program: Program, i: Instruction) -> str:
    if is_grouped(i):
        return 'experts'
    if _is_kernel(i):
        return 'attention'
    return 'matrix products' if _multiplies(program, i) else 'other'


def _multiplies(program: Program, i: Instruction) -> bool:
    if i.opcode == 'fusion':
        return any(_multiplies(program, j) for j in program.computations[attribute(i, 'calls')].values())
    return i.opcode in ('dot', 'convolution')


def _compute_seconds(program: Program, computation: Computation, i: Instruction, chip: Chip) -> float:
    cycles = re.search(r'"estimated_cycles":"(\d+)"', i.rest)
    if cycles:
        return int(cycles[1]) / chip.clock
    if kind_of(i) or (
        i.opcode == 'fusion' and any(map(kind_of, program.computations[attribute(i, 'calls')].values()))
    ):
        return 0.0
    if is_grouped(i):
        return kernel_flops(computation, i) / chip.flops
    if _is_kernel(i):  # each of its products is over the head size, or gives it
        return kernel_flops(computation, i) / (chip.flops * min(1, _queries(computation, i)[-1] / chip.unit))
    return instruction_traffic(program, computation, i) / chip.hbm


def _transfer(
    program: Program, computation: Computation, i: Instruction, kind: str, chip: Chip, places: Places
):
    """(what does it, seconds) of a collective. Permutations in opposite directions run side by side, on
    different links.
    """
    groups = groups_of(i, program.devices)
    moved = sum(received(kind, size(computation[name].shape), len(groups[0])) for name in i.operands)
    if kind == 'collective-permute':
        return groups, moved * most_on_a_link(groups, places) / chip.link
    return 'links', moved / (fewest_links(groups, places) * chip.link)


@functools.cache
def fewest_links(groups: tuple[tuple[int, ...], ...], places: Places) -> int:
    """Neighbours within its group of the chip that has fewest; no link wraps around in a slice smaller than a
    cube or a pod.
    """

    def neighbours(chip: int, group: tuple[int, ...]) -> int:
        return sum(
            sum(abs(a - b) for a, b in zip(places[chip], places[other], strict=True)) == 1 for other in group
        )

    return max(1, min(neighbours(chip, group) for group in groups for chip in group))


@functools.cache
def most_on_a_link(pairs: tuple[tuple[int, ...], ...], places: Places) -> int:
    """Messages over the busiest link in its direction, each routed along the first dimension, then the
    second, …
    """
    load: Counter[tuple] = Counter()
    for source, target in pairs:
        at = list(places[source])
        for dimension, end in enumerate(places[target]):
            while at[dimension] != end:
                before = tuple(at)
                at[dimension] += 1 if end > at[dimension] else -1
                load[before, tuple(at)] += 1
    return max(load.values(), default=0)
