"""Reads the text of a compiled program (optimized HLO): loops and their trip counts, collectives, matrix
products.

    program = parse(compiled.as_text())        # of jax.stages.Compiled, for CPU or TPU
    collectives(program), flops(program)

The compiler's own cost analysis counts a loop's body once. Here everything is multiplied by the trip counts
of the loops around it. One loop's count may be a runtime value: the loop over micro-batches. Work inside it
is counted for one trip and kept apart from the work outside it (`in_loop`). Such loops are not nested, so
`in_loop` says all.

The TPU compiler starts a collective in one fusion, continues it in others that compute at the same time, and
awaits it in a last one. The text shows a clone of the collective in each; only the first counts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import numpy as np


class Instruction(NamedTuple):
    name: str
    shape: str  # as the text has it: 'bf16[8,128]{1,0:T(8,128)S(1)}', or a tuple of such
    opcode: str
    arguments: str  # between the opcode's parentheses
    operands: tuple[str, ...]  # names
    rest: str  # attributes, metadata, backend_config
    root: bool


Computation = dict[
    str, Instruction
]  # in the order of the text, which is the schedule where the program says is_scheduled


class Program(NamedTuple):
    computations: dict[str, Computation]
    entry: str
    devices: int
    inner_trips: int = (
        0  # of a loop that is inside the micro-batch loop and has a runtime trip count too; 0: there is none
    )


class Array(NamedTuple):
    dtype: str
    dims: tuple[int, ...]
    bytes: int
    in_hbm: bool  # not in a TPU's vector memory, which layouts show as S(1), nor in another on-chip memory


class Visit(NamedTuple):
    """A computation at one place that runs it."""

    computation: str
    times: int
    in_loop: bool  # inside the loop with a runtime trip count; `times` is then for one trip
    fused: bool


class Collective(NamedTuple):
    """One array that a collective instruction moves; an instruction with several operands has several.

    A chip receives, of an operand of `size` bytes among n chips: all-gather (n - 1) size, all-reduce 2 (n -
    1) / n size, reduce-scatter and all-to-all (n - 1) / n size, collective-permute size.
    """

    kind: str
    dtype: str
    bytes: int  # that a chip receives, by that rule, in one execution
    groups: tuple[
        tuple[int, ...], ...
    ]  # of positions in the mesh; of a collective-permute the pairs (source, target)
    executions: int
    in_loop: bool
    asynchronous: bool
    name: str  # of the instruction


class Work(NamedTuple):
    """A count inside one trip of the loop with a runtime trip count, and outside it."""

    in_loop: int
    outside: int


_HEADER = re.compile(r'(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$')
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?([\w.\-]+) = (.*)$', re.DOTALL)
_NUMBERS = r'(\[[\d,]+\])(T\([\d,]+\))?'  # see _numbers
_KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute')


# ---- text


def parse(text: str) -> Program:
    """The computations of a program's text. Raises ValueError where there is no entry computation."""
    computations: dict[str, Computation] = {}
    entry, lines, into = '', [], None

    def close() -> None:
        """Ends the instruction that `lines` hold; a kernel's metadata goes over several."""
        match = _INSTRUCTION.match('\n'.join(lines)) if lines else None
        if match and into is not None:
            instruction = _instruction(match[2], match[3], bool(match[1]))
            into[instruction.name] = instruction
        lines.clear()

    for line in text.splitlines():
        header = _HEADER.match(line)
        if header or line == '}' or not line:
            close()
            into = computations.setdefault(header[2], {}) if header else None
            entry = header[2] if header and header[1] else entry
        elif _INSTRUCTION.match(line):
            close()
            lines.append(line)
        elif lines:
            lines.append(line)
    close()
    if not entry:
        raise ValueError('the text has no ENTRY computation; pass the whole of Compiled.as_text()')
    devices = [
        int(n) for n in re.findall(r'(?:num_partitions|replica_count)=(\d+)', text[: text.index('\n')])
    ]
    return Program(computations, entry, prod(devices))


def _instruction(name: str, text: str, root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text[0] == '(' else text.index(' ')
    opened = text.index('(', end)
    closed = _closing(text, opened)
    arguments = text[opened + 1 : closed]
    operands = tuple(re.findall(r'%([\w.\-]+)', arguments))
    return Instruction(
        name, text[:end], text[end:opened].strip(), arguments, operands, text[closed + 1 :], root
    )


def _closing(text: str, opened: int) -> int:
    """Where the parenthesis at `opened` is closed."""
    depth = 0
    for match in re.compile(r'[()]').finditer(text, opened):
        depth += 1 if match[0] == '(' else -1
        if not depth:
            return match.start()
    raise ValueError(f'a parenthesis is not closed in: {text[:200]}')


@functools.cache
def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape; several of a tuple's."""
    found = []
    for dtype, dims, layout in re.findall(r'(\w+)\[([\d,]*)\](\{[^}]*\})?', shape):
        sizes = tuple(map(int, dims.split(','))) if dims else ()
        bits = re.search(r'\d+', dtype)  # 'f8e4m3fn' has 8; 'pred' is a byte; a token is nothing
        width = int(bits[0]) if bits else 8 if dtype == 'pred' else 0
        found.append(Array(dtype, sizes, prod(sizes) * width // 8, 'S(' not in layout))
    return tuple(found)


def size(shape: str) -> int:
    return sum(a.bytes for a in arrays(shape))


def attribute(instruction: Instruction, key: str) -> str:
    """The computation that the attribute `key` names; '' where there is none."""
    found = re.search(rf'\b{key}=%?([\w.\-]+)', instruction.rest)
    return found[1] if found else ''


def root(computation: Computation) -> Instruction:
    return next(i for i in computation.values() if i.root)


# ---- loops


def visits(
    program: Program, name: str = '', times: int = 1, in_loop: bool = False, fused: bool = False
) -> Iterator[Visit]:
    """Every computation at every place that runs it, from the entry down; of a conditional all branches.

    Raises ValueError where a loop inside the loop with a runtime trip count has one itself, and the program's
    inner_trips is 0.
    """
    name = name or program.entry
    yield Visit(name, times, in_loop, fused)
    computation = program.computations[name]
    for i in computation.values():
        if i.opcode == 'while':
            trips = trip_count(program, computation, i)
            inner = in_loop and trips is None
            if inner and not program.inner_trips:
                raise ValueError(
                    f'the trip count of %{i.name}, inside a loop with a runtime trip count, is not in the '
                    'text'
                )
            for part in ('body', 'condition'):
                trips_of_body = program.inner_trips if inner else trips or 1
                yield from visits(
                    program, attribute(i, part), times * trips_of_body, in_loop or trips is None, fused
                )
        else:
            for name in called(i):
                yield from visits(program, name, times, in_loop, fused or i.opcode == 'fusion')


def called(i: Instruction) -> list[str]:
    """Computations that an instruction runs once; not those that it applies to each element."""
    if i.opcode in ('fusion', 'async-start'):
        return [attribute(i, 'calls')]
    if i.opcode == 'call':
        return [attribute(i, 'to_apply')]
    if i.opcode == 'conditional':
        branches = re.search(r'branch_computations=\{([^}]*)\}', i.rest)
        names = branches[1].replace('%', '').split(', ') if branches else []
        return names or [attribute(i, 'true_computation'), attribute(i, 'false_computation')]
    return []


def trip_count(program: Program, outer: Computation, loop: Instruction) -> int | None:
    """How often a loop's body runs; None where that is a runtime value. `outer` is the computation that has
    the loop.

    The text says known_trip_count, or the condition compares a counter with a constant. The body raises the
    counter, by 2 where the compiler unrolled it once.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
        return int(known[1])
    condition, body = (program.computations[attribute(loop, part)] for part in ('condition', 'body'))
    test, initial = root(condition), outer[loop.operands[0]]
    if test.opcode != 'compare' or 'direction=LT' not in test.rest or initial.opcode != 'tuple':
        return None

    def at_first(name: str) -> int | None:
        """A number that the condition reads, at the first trip."""
        index = _element(condition, name)
        return _constant(condition, name) if index is None else _constant(outer, initial.operands[index])

    first, end = map(at_first, test.operands)
    if first is None or end is None:
        return None
    counter = _element(condition, test.operands[0])
    raised = _origin(body, root(body).operands[counter])
    steps = [_constant(body, name) for name in raised.operands if _element(body, name) != counter]
    if raised.opcode != 'add' or len(steps) != 1 or not steps[0]:
        raise ValueError(f'the step of the counter of %{loop.name} is no constant: {raised}')
    return -(-(end - first) // steps[0])


def _origin(computation: Computation, name: str) -> Instruction:
    """The instruction that a value comes from, copies left out."""
    i = computation[name]
    return _origin(computation, i.operands[0]) if i.opcode in ('copy', 'bitcast', 'convert') else i


def _element(computation: Computation, name: str) -> int | None:
    """Which element of the loop's state a value is; None where it is none."""
    i = _origin(computation, name)
    return int(re.search(r'index=(\d+)', i.rest)[1]) if i.opcode == 'get-tuple-element' else None


def _constant(computation: Computation, name: str) -> int | None:
    i = _origin(computation, name)
    return int(i.arguments) if i.opcode == 'constant' else None


# ---- collectives


def kind_of(i: Instruction, computation: str = '') -> str:
    """'all-gather' of all-gather and all-gather-start; '' of what is no collective, or awaits one.

    The TPU compiler's reduce-scatter is a fusion of that name around an all-reduce and the slices of its
    result.
    """
    kind = i.opcode.removesuffix('-start')
    if kind == 'all-reduce' and computation.startswith('all-reduce-scatter'):
        return 'reduce-scatter'
    return kind if kind in _KINDS else ''


def received(kind: str, operand: int, n: int) -> int:
    """Bytes that a chip receives where each of `n` chips has an operand of that many."""
    factor = {'all-gather': n * (n - 1), 'all-reduce': 2 * (n - 1), 'collective-permute': n}
    return operand * factor.get(kind, n - 1) // n


def continues(i: Instruction, computation: Computation) -> bool:
    """Whether a collective is a clone of one that another fusion starts."""
    return 'async_collective_fusion_config' in i.rest and not starts(computation)


def starts(computation: Computation) -> bool:
    """Whether a fused computation starts an asynchronous collective."""
    return any('"AsyncCollectiveStart"' in i.rest for i in computation.values())


def collectives(program: Program) -> list[Collective]:
    """Every array that collectives move, once for each place that runs the instruction."""
    found = []
    for visit in visits(program):
        computation = program.computations[visit.computation]
        for i in computation.values():
            kind = kind_of(i, visit.computation)
            if kind and not continues(i, computation):
                groups = groups_of(i, program.devices)
                asynchronous = (
                    i.opcode.endswith('-start')
                    or starts(computation)
                    or visit.computation.startswith('async')
                )
                for a in (a for name in i.operands for a in arrays(computation[name].shape)):
                    moved = received(kind, a.bytes, len(groups[0]))
                    found.append(
                        Collective(
                            kind, a.dtype, moved, groups, visit.times, visit.in_loop, asynchronous, i.name
                        )
                    )
    return found


def groups_of(i: Instruction, devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that exchange data: listed, or numbers in an array, or axes of a mesh of numbers."""
    listed = re.search(r'(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})?\}', i.rest)
    array = re.search(rf'replica_groups=(\[[\d,]+\])<={_NUMBERS}', i.rest)
    mesh = re.search(
        rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_NUMBERS}\))? \{{('[^}}]*')\}}", i.rest
    )
    if listed:
        groups = [_integers(group) for group in re.findall(r'\{([\d,]+)\}', listed[1] or '')] or [
            range(devices)
        ]
    elif array:
        groups = _numbers(array[2], array[3]).reshape(_integers(array[1]))
    elif mesh:
        sizes, names = zip(
            *((int(n), name) for name, n in re.findall(r"('\w+')=(\d+)", mesh[1])), strict=True
        )
        along = [names.index(name) for name in mesh[4].split(',')]
        numbers = _numbers(mesh[2] or f'[{prod(sizes)}]', mesh[3]).reshape(sizes)
        groups = np.moveaxis(numbers, along, range(-len(along), 0)).reshape(
            -1, prod(sizes[axis] for axis in along)
        )
    else:
        raise ValueError(f'%{i.name}: no known form of replica_groups in {i.rest[:300]!r}')
    return tuple(tuple(map(int, group)) for group in groups)


def _numbers(dims: str, order: str | None) -> np.ndarray:
    """0, 1, 2, … as the text has them: '[4,2]' and 'T(1,0)' are the numbers of 4 rows and 2 columns,
    transposed.
    """
    numbers = np.arange(prod(_integers(dims))).reshape(_integers(dims))
    return (numbers.transpose(_integers(order)) if order else numbers).reshape(-1)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r'\d+', text)))


def axes_of(groups: tuple[tuple[int, ...], ...], mesh: dict[str, int]) -> str:
    """The axes of the mesh along which a group's members differ: 'fsdp', 'data × fsdp'; '' of groups of one."""
    axes = set()
    for group in groups:
        places = np.unravel_index(group, tuple(mesh.values()))
        axes |= {axis for axis, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1}
    return ' × '.join(axis for axis in mesh if axis in axes)


# ---- arithmetic


def flops(program: Program) -> Work:
    """Floating-point operations of the matrix products on one device, two a multiplication; custom kernels
    are not counted.
    """
    return total(program, lambda computation, i, fused: product_flops(computation, i))


def total(program: Program, count) -> Work:
    """The sum of `count(computation, instruction, fused)` over all executions."""
    sums = {True: 0, False: 0}
    for visit in visits(program):
        computation = program.computations[visit.computation]
        sums[visit.in_loop] += visit.times * sum(
            count(computation, i, visit.fused) for i in computation.values()
        )
    return Work(sums[True], sums[False])


def product_flops(computation: Computation, i: Instruction) -> int:
    """Of a dot or a convolution, which the TPU compiler makes of every dot; 0 of anything else."""
    if i.opcode not in ('dot', 'convolution'):
        return 0
    left, right = (arrays(computation[name].shape)[0].dims for name in i.operands)
    output = arrays(i.shape)[0].dims
    if i.opcode == 'dot':
        contracted = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', i.rest)[1]
        return 2 * prod(output) * prod(left[int(d)] for d in contracted.split(',') if d)
    of_left, of_right, of_output = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', i.rest).groups()
    count = 2 * output[of_output.index('b')] * output[of_output.index('f')] * right[of_right.index('i')]
    for axis in (label for label in of_output if label.isdigit()):
        count *= _overlaps(
            i,
            int(axis),
            left[of_left.index(axis)],
            right[of_right.index(axis)],
            output[of_output.index(axis)],
        )
    return count


def _overlaps(i: Instruction, axis: int, inputs: int, kernel: int, outputs: int) -> int:
    """Pairs (output, kernel element) of one axis of a convolution whose input exists: not padding, not a
    dilation's hole.
    """

    def window(key: str, default: str) -> str:
        found = re.search(rf'window=\{{[^}}]*\b{key}=([\d_x\-]+)', i.rest)
        return found[1].split('x')[axis] if found else default

    stride, before, holes, spread = (
        int(window(key, default).split('_')[0])
        for key, default in (('stride', '1'), ('pad', '0_0'), ('lhs_dilate', '1'), ('rhs_dilate', '1'))
    )
    at = np.arange(outputs)[:, None] * stride + np.arange(kernel)[None] * spread - before
    return int(np.sum((at >= 0) & (at <= (inputs - 1) * holes) & (at % holes == 0)))
