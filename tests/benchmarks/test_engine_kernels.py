"""What benchmarks/compiled/engine_kernels.py counts of a token in a program's text, by hand."""

import pytest

from benchmarks.compiled.engine_kernels import counted

# Two slots, a vocabulary of 16 words and caches of 1,024 keys. Slots are refilled by a short loop, and given tokens by the long one.
TEXT = """HloModule jit_sample, is_scheduled=true

%product (a.1: bf16[2,8]) -> bf16[2,16] {
  ROOT %a.1 = bf16[2,8]{1,0} parameter(0)
}

%widened (a.2: bf16[2,16]) -> f32[2,16] {
  %a.2 = bf16[2,16]{1,0} parameter(0)
  ROOT %wide = f32[2,16]{1,0} convert(%a.2)
}

%largest (a.3: f32[2,16]) -> f32[2] {
  %a.3 = f32[2,16]{1,0} parameter(0)
  %none = f32[] constant(0)
  ROOT %most = f32[2]{0} reduce(%a.3, %none), dimensions={1}, to_apply=%larger
}

%looked_up (a.4: f32[2,16]) -> f32[2,1] {
  %a.4 = f32[2,16]{1,0} parameter(0)
  ROOT %one = f32[2,1]{1,0} slice(%a.4), slice={[0:2], [0:1]}
}

%turned (a.5: bf16[2,8]) -> bf16[2,8] {
  %a.5 = bf16[2,8]{1,0} parameter(0)
  ROOT %minus = bf16[2,8]{1,0} negate(%a.5)
}

%block (p.1: (bf16[2,8])) -> (bf16[2,8]) {
  %p.1 = (bf16[2,8]{1,0}) parameter(0)
  %x.1 = bf16[2,8]{1,0} get-tuple-element(%p.1), index=0
  %of_block = bf16[2,8]{1,0} fusion(%x.1), kind=kLoop, calls=%turned
  ROOT %of_loop = (bf16[2,8]{1,0}) tuple(%of_block)
}

%more (p.2: (bf16[2,8])) -> pred[] {
  %p.2 = (bf16[2,8]{1,0}) parameter(0)
  ROOT %no = pred[] constant(false)
}

%token (p.3: (bf16[2,8], bf16[2,1024,8])) -> (bf16[2,8], bf16[2,1024,8]) {
  %p.3 = (bf16[2,8]{1,0}, bf16[2,1024,8]{2,1,0}) parameter(0)
  %x.3 = bf16[2,8]{1,0} get-tuple-element(%p.3), index=0
  %keys = bf16[2,1024,8]{2,1,0} get-tuple-element(%p.3), index=1
  %gemm_fusion_dot = bf16[2,16]{1,0} fusion(%x.3), kind=kCustom, calls=%product, backend_config={"kind":"__triton_gemm_fusion"}, name=gemm_fusion_dot
  %scores = f32[2,16]{1,0} fusion(%gemm_fusion_dot), kind=kLoop, calls=%widened
  %best = f32[2]{0} fusion(%scores), kind=kInput, calls=%largest
  %found = f32[2,1]{1,0} fusion(%scores), kind=kLoop, calls=%looked_up
  %ours = bf16[2,8]{1,0} custom-call(%x.3, %keys), custom_call_target="__gpu$xla.gpu.triton"
  %copied = bf16[2,8]{1,0} copy(%ours)
  %in = (bf16[2,8]{1,0}) tuple(%copied)
  %three = (bf16[2,8]{1,0}) while(%in), condition=%more, body=%block, backend_config={"known_trip_count":{"n":"3"}}
  %blocks = (bf16[2,8]{1,0}) while(%three), condition=%more, body=%block
  %out = bf16[2,8]{1,0} get-tuple-element(%blocks), index=0
  ROOT %of_token = (bf16[2,8]{1,0}, bf16[2,1024,8]{2,1,0}) tuple(%out, %keys)
}

%refill (p.4: (bf16[2,8], bf16[2,1024,8])) -> (bf16[2,8], bf16[2,1024,8]) {
  %p.4 = (bf16[2,8]{1,0}, bf16[2,1024,8]{2,1,0}) parameter(0)
  %first = (bf16[2,8]{1,0}) while(%p.4), condition=%more, body=%block
  ROOT %tokens = (bf16[2,8]{1,0}, bf16[2,1024,8]{2,1,0}) while(%p.4), condition=%more, body=%token
}

ENTRY %main (p.5: (bf16[2,8], bf16[2,1024,8])) -> (bf16[2,8], bf16[2,1024,8]) {
  %p.5 = (bf16[2,8]{1,0}, bf16[2,1024,8]{2,1,0}) parameter(0)
  ROOT %all = (bf16[2,8]{1,0}, bf16[2,1024,8]{2,1,0}) while(%p.5), condition=%more, body=%refill
}
"""
BLOCKS = 1024 // 256


@pytest.fixture(scope='module')
def found():
    return counted(TEXT, words=16, rows=2, keys=1024)


def test_launches_of_a_token_are_counted_by_kind_and_a_loop_of_unknown_length_has_a_trip_for_each_block_of_keys(found):
    assert found.launched == {'products': 1, 'fusions': 3 + 3 + BLOCKS, 'kernels': 1, 'copies': 1}
    assert (found.loops, found.unknown, found.in_loops) == (2, 1, 3 + BLOCKS)


def test_a_pass_over_the_scores_reads_or_writes_all_of_them(found):
    """They are written once and summed up once; what looks one up is no pass."""
    assert found.scores == 2


def test_attention_is_what_loops_move_and_what_our_own_kernels_read(found):
    queries, keys = 2 * 8 * 2, 2 * 1024 * 8 * 2
    assert found.attention_bytes == queries + keys + (3 + BLOCKS) * 2 * queries
