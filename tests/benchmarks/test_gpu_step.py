"""What benchmarks/compiled/gpu_step.py counts in a program's text, by hand."""

import pytest

from benchmarks.compiled.gpu_step import counted
from benchmarks.compiled.hlo import parse

# Two layers in each micro-batch. The first gather has a product beside it and the second only a fusion; one sum follows the loops.
TEXT = """HloModule jit_update, is_scheduled=true, num_partitions=4

%product (a.1: bf16[4,8]) -> bf16[4,8] {
  ROOT %a.1 = bf16[4,8]{1,0} parameter(0)
}

%layer (p.1: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p.1 = (s32[], bf16[4,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %x.1 = bf16[4,8]{1,0} get-tuple-element(%p.1), index=1
  %first-start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x.1), replica_groups={{0,1,2,3}}, dimensions={0}
  %gemm_fusion_dot = bf16[4,8]{1,0} fusion(%x.1), kind=kCustom, calls=%product, backend_config={"kind":"__triton_gemm_fusion"}, name=gemm_fusion_dot
  %first-done = bf16[16,8]{1,0} all-gather-done(%first-start)
  %second-start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x.1), replica_groups={{0,1,2,3}}, dimensions={0}
  %other = bf16[4,8]{1,0} fusion(%x.1), kind=kLoop, calls=%product
  %second-done = bf16[16,8]{1,0} all-gather-done(%second-start)
  %ours = bf16[4,8]{1,0} custom-call(%other), custom_call_target="__gpu$xla.gpu.triton"
  %copied = bf16[4,8]{1,0} copy(%ours)
  ROOT %of_layer = (s32[], bf16[4,8]{1,0}) tuple(%i.1, %copied)
}

%more_layers (p.2: (s32[], bf16[4,8])) -> pred[] {
  %p.2 = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %more.2 = pred[] constant(false)
}

%micro_batch (p.3: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p.3 = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %layers = (s32[], bf16[4,8]{1,0}) while(%p.3), condition=%more_layers, body=%layer, backend_config={"known_trip_count":{"n":"2"}}
}

%more_micro_batches (p.4: (s32[], bf16[4,8])) -> pred[] {
  %p.4 = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %more.4 = pred[] constant(false)
}

ENTRY %main (x.5: (s32[], bf16[4,8])) -> bf16[4,8] {
  %x.5 = (s32[], bf16[4,8]{1,0}) parameter(0)
  %loop = (s32[], bf16[4,8]{1,0}) while(%x.5), condition=%more_micro_batches, body=%micro_batch
  %last = bf16[4,8]{1,0} get-tuple-element(%loop), index=1
  %sum-start = bf16[4,8]{1,0} all-reduce-start(%last), replica_groups={{0,1},{2,3}}
  ROOT %sum-done = bf16[4,8]{1,0} all-reduce-done(%sum-start)
}
"""


@pytest.fixture
def found():
    return counted(parse(TEXT))


def test_launches_are_counted_by_kind_a_micro_batch_and_outside(found):
    assert found.kernels[True] == {'products': 2, 'fusions': 2, 'kernels': 2, 'copies': 2} and not found.kernels[False].total()


def test_a_card_receives_what_others_have_and_a_part_of_it_beside_work(found):
    part = 2 * 4 * 8
    assert found.collectives == {True: {'all-gather': 4}, False: {'all-reduce': 1}}
    assert found.moved == {True: {'all-gather': 4 * 3 * part}, False: {'all-reduce': part}}
    assert found.beside_work == {True: 2 * 3 * part, False: 0}
