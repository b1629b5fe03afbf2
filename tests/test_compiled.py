"""What benchmarks/compiled/step.py reads from a program's text: trip counts, bytes, arithmetic and seconds by hand."""

import os
import subprocess
import sys

import pytest
from small_run import ROOT

from benchmarks.compiled.hlo import (
    Work,
    attribute,
    axes_of,
    collectives,
    flops,
    groups_of,
    parse,
    product_flops,
    received,
    total,
    trip_count,
    visits,
)
from benchmarks.compiled.hlo_time import WAITING, Chip, fewest_links, kernel_flops, most_on_a_link, seconds, traffic

TPU_COMPILER = ROOT / '.tpu-compiler'
LINE = ((0,), (1,), (2,), (3,))  # four chips in a row
SQUARE = ((0, 0), (1, 0), (0, 1), (1, 1))

# As the TPU compiler writes it, shortened: a loop over micro-batches and a sum after it. In the loop: one that it unrolled by two,
# an all-gather over three fusions, a reduce-scatter, and a kernel with its metadata over several lines.
TEXT = """\
HloModule step, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%permuted_body (state: (u32[], bf16[8,4], bf16[16,8])) -> (u32[], bf16[8,4], bf16[16,8]) {
  %two = u32[]{:T(128)} constant(2)
  %state = (u32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}, bf16[16,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %counter = u32[]{:T(128)} get-tuple-element(%state), index=0
  %shard = bf16[8,4]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %rows = bf16[16,8]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %permute = (bf16[8,4]{1,0:T(8,128)(2,1)}, bf16[8,4]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) collective-permute-start(%shard), \
channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %product = bf16[16,4]{1,0:T(8,128)(2,1)} fusion(%rows, %shard), kind=kOutput, calls=%multiply, \
backend_config={"window_config":{"estimated_cycles":"100"}}
  %permuted = bf16[8,4]{1,0:T(8,128)(2,1)} collective-permute-done(%permute)
  %raised = u32[]{:T(128)} add(%counter, %two)
  ROOT %next = (u32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}, bf16[16,8]{1,0:T(8,128)(2,1)}) tuple(%raised, %permuted, \
/*index=2*/%rows)
}

%permuted_condition (state.1: (u32[], bf16[8,4], bf16[16,8])) -> pred[] {
  %state.1 = (u32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}, bf16[16,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %six = u32[]{:T(128)} constant(6)
  %counter.1 = u32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%counter.1, %six), direction=LT
}

%multiply (left: bf16[16,8], right: bf16[8,4]) -> bf16[16,4] {
  %left = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(0)
  %right = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution = bf16[16,4]{1,0:T(8,128)(2,1)} convolution(%left, %right), dim_labels=bf_io->bf
}

%gather_starts (own: bf16[2,4]) -> (bf16[2,4], bf16[8,4], u32[]) {
  %own = bf16[2,4]{1,0:T(8,128)(2,1)} parameter(0)
  %gathered = bf16[8,4]{1,0:T(8,128)(2,1)} all-gather(%own), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %started = (bf16[2,4]{1,0:T(8,128)(2,1)}, bf16[8,4]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) custom-call(%gathered), \
custom_call_target="AsyncCollectiveStart"
}

%gather_continues (left.1: bf16[16,8], right.1: bf16[8,4], own.1: bf16[2,4], whole.1: bf16[8,4]) -> (bf16[16,4], bf16[8,4]) {
  %left.1 = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(0)
  %right.1 = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(1)
  %convolution.1 = bf16[16,4]{1,0:T(8,128)(2,1)} convolution(%left.1, %right.1), dim_labels=bf_io->bf
  %own.1 = bf16[2,4]{1,0:T(8,128)(2,1)} parameter(2)
  %whole.1 = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(3)
  %gathered.1 = bf16[8,4]{1,0:T(8,128)(2,1)} all-gather(%own.1), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %both = (bf16[16,4]{1,0:T(8,128)(2,1)}, bf16[8,4]{1,0:T(8,128)(2,1)}) tuple(%convolution.1, %whole.1)
}

%gather_ends (own.2: bf16[2,4], whole.2: bf16[8,4]) -> bf16[8,4] {
  %own.2 = bf16[2,4]{1,0:T(8,128)(2,1)} parameter(0)
  %whole.2 = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(1)
  %gathered.2 = bf16[8,4]{1,0:T(8,128)(2,1)} all-gather(%own.2), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %ended = bf16[8,4]{1,0:T(8,128)(2,1)} custom-call(%own.2, %whole.2, %gathered.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.1 (whole.3: f32[8,4]) -> f32[2,4] {
  %whole.3 = f32[8,4]{1,0:T(8,128)} parameter(0)
  %reduced = f32[8,4]{1,0:T(8,128)} all-reduce(%whole.3), channel_id=8, replica_groups={{0,1,2,3}}, to_apply=%add
  %where = u32[] partition-id()
  ROOT %part = f32[2,4]{1,0:T(8,128)S(1)} dynamic-slice(%reduced, %where, %where), dynamic_slice_sizes={2,4}
}

%micro_batch (carry: (s32[], bf16[2,4], bf16[16,8], f32[8,4], f32[3,2,4], s32[])) -> (s32[], bf16[2,4], bf16[16,8], f32[8,4], \
f32[3,2,4], s32[]) {
  %carry = (s32[]{:T(128)}, bf16[2,4]{1,0:T(8,128)(2,1)}, bf16[16,8]{1,0:T(8,128)(2,1)}, f32[8,4]{1,0:T(8,128)}, \
f32[3,2,4]{2,1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %weight = bf16[2,4]{1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=1
  %x = bf16[16,8]{1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=2
  %gradient = f32[8,4]{1,0:T(8,128)} get-tuple-element(%carry), index=3
  %sums = f32[3,2,4]{2,1,0:T(8,128)} get-tuple-element(%carry), index=4
  %n = s32[]{:T(128)} get-tuple-element(%carry), index=5
  %start = (bf16[2,4]{1,0:T(8,128)(2,1)}, bf16[8,4]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) fusion(%weight), kind=kCustom, \
calls=%gather_starts
  %own.3 = bf16[2,4]{1,0:T(8,128)(2,1)} get-tuple-element(%start), index=0
  %whole.4 = bf16[8,4]{1,0:T(8,128)(2,1)} get-tuple-element(%start), index=1
  %between = (bf16[16,4]{1,0:T(8,128)(2,1)}, bf16[8,4]{1,0:T(8,128)(2,1)}) fusion(%x, %whole.4, %own.3, %whole.4), kind=kOutput, \
calls=%gather_continues, backend_config={"window_config":{"estimated_cycles":"100"}}
  %whole.5 = bf16[8,4]{1,0:T(8,128)(2,1)} fusion(%own.3, %whole.4), kind=kCustom, calls=%gather_ends
  %zero = u32[]{:T(128)} constant(0)
  %first = (u32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}, bf16[16,8]{1,0:T(8,128)(2,1)}) tuple(%zero, %whole.5, %x)
  %permuting = (u32[]{:T(128)}, bf16[8,4]{1,0:T(8,128)(2,1)}, bf16[16,8]{1,0:T(8,128)(2,1)}) while(%first), \
condition=%permuted_condition, body=%permuted_body
  %splash_mha_fwd_segmented.1 = bf16[2,16,4]{2,1,0:T(8,128)(2,1)} custom-call(%mask, %queries), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 8, \\"block_kv\\": 4, \\"use_fused_bwd_kernel\\": false}"
}}
  %mask = s8[1,2,2]{2,1,0:T(8,128)} get-tuple-element(%carry), index=6
  %queries = bf16[2,16,4]{2,1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=7
  %scattered = f32[2,4]{1,0:T(8,128)S(1)} fusion(%gradient), kind=kCustom, calls=%all-reduce-scatter.1
  %summed = f32[3,2,4]{2,1,0:T(8,128)} fusion(%sums, %scattered, %i), kind=kLoop, calls=%add_in_place, \
backend_config={"window_config":{"estimated_cycles":"50"}}
  ROOT %carried = (s32[]{:T(128)}, bf16[2,4]{1,0:T(8,128)(2,1)}, bf16[16,8]{1,0:T(8,128)(2,1)}, f32[8,4]{1,0:T(8,128)}, \
f32[3,2,4]{2,1,0:T(8,128)}, s32[]{:T(128)}) tuple(%i, %weight, %x, %gradient, %summed, %n)
}

%add_in_place (all: f32[3,2,4], new: f32[2,4], at: s32[]) -> f32[3,2,4] {
  %all = f32[3,2,4]{2,1,0:T(8,128)} parameter(0)
  %new = f32[2,4]{1,0:T(8,128)S(1)} parameter(1)
  %at = s32[]{:T(128)S(6)} parameter(2)
  %old = f32[1,2,4]{2,1,0:T(8,128)} dynamic-slice(%all, %at, %at, %at), dynamic_slice_sizes={1,2,4}
  %new.1 = f32[1,2,4]{2,1,0:T(8,128)} bitcast(%new)
  %sum.1 = f32[1,2,4]{2,1,0:T(8,128)} add(%old, %new.1)
  ROOT %updated = f32[3,2,4]{2,1,0:T(8,128)} dynamic-update-slice(%all, %sum.1, %at, %at, %at)
}

%more (carry.1: (s32[], bf16[2,4], bf16[16,8], f32[8,4], f32[3,2,4], s32[])) -> pred[] {
  %carry.1 = (s32[]{:T(128)}, bf16[2,4]{1,0:T(8,128)(2,1)}, bf16[16,8]{1,0:T(8,128)(2,1)}, f32[8,4]{1,0:T(8,128)}, \
f32[3,2,4]{2,1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%carry.1), index=0
  %n.1 = s32[]{:T(128)} get-tuple-element(%carry.1), index=5
  ROOT %less.1 = pred[]{:T(512)} compare(%i.1, %n.1), direction=LT
}

ENTRY %main (number: s32[], params: bf16[2,4], batch: bf16[16,8], grads: f32[8,4], moments: f32[3,2,4]) -> f32[8,4] {
  %number = s32[]{:T(128)} parameter(0)
  %params = bf16[2,4]{1,0:T(8,128)(2,1)} parameter(1)
  %batch = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(2)
  %grads = f32[8,4]{1,0:T(8,128)} parameter(3)
  %moments = f32[3,2,4]{2,1,0:T(8,128)} parameter(4)
  %none = s32[]{:T(128)} constant(0)
  %initial = (s32[]{:T(128)}, bf16[2,4]{1,0:T(8,128)(2,1)}, bf16[16,8]{1,0:T(8,128)(2,1)}, f32[8,4]{1,0:T(8,128)}, \
f32[3,2,4]{2,1,0:T(8,128)}, s32[]{:T(128)}) tuple(%none, %params, %batch, %grads, %moments, %number)
  %loop = (s32[]{:T(128)}, bf16[2,4]{1,0:T(8,128)(2,1)}, bf16[16,8]{1,0:T(8,128)(2,1)}, f32[8,4]{1,0:T(8,128)}, \
f32[3,2,4]{2,1,0:T(8,128)}, s32[]{:T(128)}) while(%initial), condition=%more, body=%micro_batch
  ROOT %norms = f32[8,4]{1,0:T(8,128)} all-reduce(%grads), channel_id=9, replica_groups=mesh['a'=2,'b'=2] {'b'}, to_apply=%add
}
"""
PROGRAM = parse(TEXT)
# 1,000 FLOP/s, 100 cycles a second, heads of 4 are half a matrix unit, 1,000 bytes/s of memory, 10 bytes/s a link.
CHIP = Chip(1000, 10, 8, 1000, 10)


def test_loops_multiply_what_is_in_them():
    runs = {visit.computation: (visit.times, visit.in_loop) for visit in visits(PROGRAM)}
    assert runs['main'] == (1, False)
    assert runs['micro_batch'] == (1, True)  # for one trip
    assert runs['permuted_body'] == runs['multiply'] == (3, True)  # from 0 to 6 by 2
    assert 'add' not in runs  # applied to elements


def test_trip_counts():
    outer = PROGRAM.computations['micro_batch']
    assert trip_count(PROGRAM, outer, outer['permuting']) == 3
    stated = outer['permuting']._replace(rest=', backend_config={"known_trip_count":{"n":"28"}}')
    assert trip_count(PROGRAM, outer, stated) == 28
    assert trip_count(PROGRAM, PROGRAM.computations['main'], PROGRAM.computations['main']['loop']) is None
    with pytest.raises(ValueError, match='trip count of %permuting, inside a loop'):
        list(visits(parse(TEXT.replace('constant(6)', 'parameter(1)'))))
    with pytest.raises(ValueError, match='step of the counter of %permuting is no constant'):
        list(visits(parse(TEXT.replace('%raised = u32[]{:T(128)} add', '%raised = u32[]{:T(128)} multiply'))))


def test_collectives_once_each_with_bytes_and_executions():
    found = {c.name: c for c in collectives(PROGRAM)}
    assert set(found) == {'permute', 'gathered', 'reduced', 'norms'}  # and no clone of the all-gather
    facts = {name: (c.kind, c.dtype, c.bytes, c.executions, c.in_loop, c.asynchronous) for name, c in found.items()}
    assert facts == {
        'permute': ('collective-permute', 'bf16', 64, 3, True, True),
        'gathered': ('all-gather', 'bf16', 16 * 3, 1, True, True),
        'reduced': ('reduce-scatter', 'f32', 128 * 3 // 4, 1, True, False),
        'norms': ('all-reduce', 'f32', 2 * 128 // 2, 1, False, False),
    }
    mesh = {'data': 2, 'fsdp': 2, 'tensor': 1}
    assert {name: axes_of(c.groups, mesh) for name, c in found.items()} == {
        'permute': 'data × fsdp', 'gathered': 'data × fsdp', 'reduced': 'data × fsdp', 'norms': 'fsdp',
    }  # fmt: skip


def test_bytes_received_by_one_of_four_chips():
    by_hand = {'all-gather': 3000, 'all-reduce': 1500, 'reduce-scatter': 750, 'all-to-all': 750, 'collective-permute': 1000}
    assert {kind: received(kind, 1000, 4) for kind in by_hand} == by_hand


@pytest.mark.parametrize(
    'text, groups',
    [
        ('replica_groups={{0,2},{1,3}}', ((0, 2), (1, 3))),
        ('replica_groups={}', ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ('source_target_pairs={{0,1},{1,0}}', ((0, 1), (1, 0))),
        ('replica_groups=[2,4]<=[8]', ((0, 1, 2, 3), (4, 5, 6, 7))),
        ('replica_groups=[2,4]<=[4,2]T(1,0)', ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=2] {'c'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_every_way_to_write_groups(text, groups):
    instruction = PROGRAM.computations['main']['norms']
    assert groups_of(instruction._replace(rest=f', channel_id=1, {text}, to_apply=%add'), 8) == groups
    with pytest.raises(ValueError, match='%norms: no known form'):
        groups_of(instruction._replace(rest=', replica_groups=new'), 8)


def test_axes_along_which_groups_differ():
    mesh = {'data': 2, 'fsdp': 2, 'tensor': 2}
    assert axes_of(((0, 1), (2, 3), (4, 5), (6, 7)), mesh) == 'tensor'
    assert axes_of(((0, 2, 4, 6), (1, 3, 5, 7)), mesh) == 'data × fsdp'
    assert axes_of(((0,),), mesh) == ''


def test_arithmetic_by_hand():
    product = 2 * 16 * 4 * 8
    assert flops(PROGRAM) == Work(3 * product + product, 0)
    # Two rows of 16 queries of 4, tiles of 8 queries and 4 keys: the first tile sees 8 keys, the second 16; scores and output.
    kernels = total(PROGRAM, lambda computation, i, fused: kernel_flops(computation, i))
    assert kernels == Work(2 * 2 * 2 * 4 * (8 * 8 + 8 * 16), 0)
    unknown = parse(TEXT.replace('splash_mha_fwd_segmented', 'other_kernel'))
    with pytest.raises(ValueError, match='custom kernel %other_kernel.1 has no formula'):
        total(unknown, lambda computation, i, fused: kernel_flops(computation, i))


@pytest.mark.parametrize(
    'left, right, output, attributes, count',
    [
        ('bf16[6,2,5]', 'bf16[2,5,7]', 'bf16[6,7,1]', 'window={size=2}, dim_labels=b0f_0io->bf0', 840),
        # One row against two of the kernel, with padding: each output element has one factor that exists.
        ('bf16[6,7,1]', 'bf16[7,2,5]', 'bf16[6,2,5]', 'window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_i0o->b0f', 840),
        # Eight products of their own, written as strides and holes: no element of one meets another's.
        ('f32[8,6,5]', 'f32[8,5,7]', 'f32[8,6,7]', 'window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf', 8 * 420),
    ],
)  # fmt: skip
def test_a_convolution_counts_what_exists(left, right, output, attributes, count):
    text = f'ENTRY %main (a: {left}) -> {output} {{\n  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n'
    program = parse(f'HloModule m\n\n{text}  ROOT %c = {output} convolution(%a, %b), {attributes}\n}}\n')
    main = program.computations['main']
    assert product_flops(main, main['c']) == count


def test_traffic_by_hand():
    permute, product, counter = 64 + 64, 256 + 64 + 128, 3 * 4 + (4 + 4 + 1)  # the counter's sum and comparison
    start, between = 16 + 64, 256 + 64 + 128  # the gathered array only passes through what continues the gather
    kernel = 4 + 256 + 256  # mask, queries, output
    scatter = 128  # the slice of the result stays on the chip
    in_place = 32 + 32 + 4  # of the sums one part is read and written, at an index
    comparison = 4 + 4 + 1
    inside = 3 * (permute + product + counter) + start + between + kernel + scatter + in_place + comparison
    assert traffic(PROGRAM) == Work(inside, 128 + 128)


def test_seconds_by_hand():
    """Four chips in a line: the outer ones have one link for what they receive."""
    spent = seconds(PROGRAM, 'micro_batch', CHIP, LINE)
    gather = 48 / 10  # 1 s of it beside the product
    permute = 64 / 10  # three messages to the right, one all the way back: no two over a link in one direction
    assert spent['matrix products'] == pytest.approx(1 + 3 * 1)
    assert spent['attention'] == pytest.approx(2 * 2 * 2 * 4 * (8 * 8 + 8 * 16) / (1000 / 2))
    assert spent[WAITING] == pytest.approx((gather - 1) + 3 * (permute - 1) + 96 / 10)
    assert spent['other'] == pytest.approx(0.5 + 3 * 12 / 1000)  # the sums, and the counter at the memory's rate
    outside = seconds(PROGRAM, 'main', CHIP, LINE)
    assert outside.total() == outside[WAITING] == pytest.approx(128 / 10)


def test_transfers_queue():
    """Two copies of 400 bytes at 1,000 a second: who awaits the second awaits both."""
    copy = '= (f32[100]{0:S(1)}, f32[100]{0}, u32[]{:S(2)}) copy-start(%a)'
    text = f'%a = f32[100]{{0}} parameter(0)\n  %b {copy}\n  %c {copy}\n  ROOT %d = f32[100]{{0:S(1)}} copy-done(%c)'
    program = parse(f'HloModule m\n\nENTRY %main (a: f32[100]) -> f32[100] {{\n  {text}\n}}\n')
    assert seconds(program, 'main', CHIP, LINE).total() == pytest.approx(0.8)


def test_links():
    whole, halves = ((0, 1, 2, 3),), ((0, 1), (2, 3))
    assert (fewest_links(whole, LINE), fewest_links(whole, SQUARE), fewest_links(halves, SQUARE)) == (1, 2, 1)
    ring = ((0, 1), (1, 2), (2, 3), (3, 0))
    assert most_on_a_link(ring, LINE) == 1
    assert most_on_a_link(ring, SQUARE) == 1
    assert most_on_a_link(((0, 3), (1, 3)), SQUARE) == 2  # what comes from 0 passes 1
    assert most_on_a_link(((0, 2), (1, 3)), LINE) == 2


STEP = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import numpy as np

def micro_batches(weights, x, n):
    def layer(x, shard):
        weight = jax.lax.all_gather(shard, 'fsdp', axis=0, tiled=True)
        return jnp.tanh(x @ weight), jax.lax.psum_scatter(weight * 2, 'fsdp', scatter_dimension=0, tiled=True)

    def one(i, carry):
        y, gradient = jax.lax.scan(layer, x + carry[0], weights)
        return jax.lax.psum(y, 'data'), carry[1] + gradient

    return jax.lax.fori_loop(0, n, one, (jnp.zeros_like(x), jnp.zeros_like(weights)))

if sys.argv[1:]:
    from bapo_jax.dry_run.targets import tpu_devices
    devices = tpu_devices(*sys.argv[1:])
else:
    devices = jax.devices()
mesh = Mesh(np.array(devices).reshape(2, 4), ('data', 'fsdp'))
rows, split = P(('data', 'fsdp')), P(None, 'fsdp')
step = jax.shard_map(micro_batches, mesh=mesh, in_specs=(split, rows, P()), out_specs=(rows, split), check_vma=False)
shapes = [((5, 256, 256), split), ((64, 256), rows)]
arguments = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in shapes]
number = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
print(jax.jit(step).lower(*arguments, number).compile().as_text())
"""


@pytest.mark.slow
@pytest.mark.parametrize('topology', ['', 'v5e:2x4'])
def test_a_compiled_step_by_hand(topology):
    """Five layers in a loop over micro-batches on 2 × 4 devices: eight of the CPU, or a TPU slice. In a process of its own."""
    assert not topology or (TPU_COMPILER / 'libtpu').is_dir(), 'run make tpu-compiler'
    path = f'{ROOT}:{TPU_COMPILER}' if topology else str(ROOT)
    environment = os.environ | {'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8'}
    command = [sys.executable, '-c', STEP, *topology.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    program = parse(done.stdout)
    weight, mesh = 256 * 256 * 4, {'data': 2, 'fsdp': 4}
    found = [(c.kind, axes_of(c.groups, mesh), c.bytes, c.executions, c.in_loop) for c in collectives(program)]
    assert sorted(found) == [
        ('all-gather', 'fsdp', weight * 3 // 4, 5, True),
        ('all-reduce', 'data', 8 * 256 * 4, 1, True),
        ('reduce-scatter', 'fsdp', weight * 3 // 4, 5, True),
    ]
    assert flops(program) == Work(5 * 2 * 8 * 256 * 256, 0)
    entry = program.computations[program.entry]
    assert [trip_count(program, entry, i) for i in entry.values() if i.opcode == 'while'] == [None]
    if topology:
        body = next(attribute(i, 'body') for i in entry.values() if i.opcode == 'while')
        spent = seconds(program, body, CHIP, tuple((x, y) for y in range(4) for x in range(2)))
        assert spent['matrix products'] > 0 and spent[WAITING] > 0
