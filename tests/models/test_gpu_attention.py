"""The GPU kernel in Pallas's interpreter: it is the dense formula in float64, and it reads the blocks that segments need.

Tolerance: 1e-5 of the largest value in float32; 2e-2 in bfloat16, which keeps 8 bits. Small tiles of unequal sizes make many blocks
of a short row, so that segments begin inside a block, end with one and span several.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax.models import gpu_attention
from bapo_jax.models.gpu_tiles import TILES, KernelTile, Tiles, key_bounds, query_bounds, tiles_of

TOLERANCE = 1e-5
SMALL = Tiles(KernelTile(16, 8, 4, 2), KernelTile(8, 16, 4, 2), KernelTile(16, 8, 4, 2))
ROWS = (
    [(1, 3), (2, 50), (3, 1), (4, 26), (0, 16)],  # begins inside a block, spans many, one token alone, padded tail
    [(1, 32), (2, 16), (3, 48)],  # begins and ends with blocks
    [(1, 96)],
    [(0, 96)],
)


def segments(*rows):
    return np.stack([np.repeat(*np.array(row, np.int32).T) for row in rows])


def inputs(segment_BxT, N, K, H=16, dtype=np.float32):
    (B, T), rng = segment_BxT.shape, np.random.default_rng(0)
    shapes = (B, T, N, H), (B, K, T, H), (B, K, T, H), (B, T, N * H)
    q, k, v, do = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return q, k, v, jnp.asarray(segment_BxT), jnp.where(segment_BxT[..., None] > 0, do, jnp.zeros((), dtype))


def visible(segment_BxT):
    """bool [B, T, T]: what each query sees; padding sees itself alone."""
    T = segment_BxT.shape[1]
    same = (segment_BxT[:, :, None] == segment_BxT[:, None]) & (segment_BxT[:, :, None] > 0)
    return np.tril(same) | np.eye(T, dtype=bool)


def dense(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, do_BxTxD):
    """(out, dq, dk, dv) in float64, the gradients written out."""
    (B, T, N, H), K = q_BxTxNxH.shape, k_BxKxTxH.shape[1]
    q, do = (np.asarray(x, np.float64).reshape(B, T, K, N // K, H) for x in (q_BxTxNxH, do_BxTxD))
    k, v = (np.asarray(x, np.float64) for x in (k_BxKxTxH, v_BxKxTxH))
    score = np.where(visible(np.asarray(segment_BxT))[:, None, None], np.einsum('btkgh,bksh->bkgts', q, k) / np.sqrt(H), -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    dweight = np.einsum('btkgh,bksh->bkgts', do, v)
    dscore = weight * (dweight - (weight * dweight).sum(-1, keepdims=True)) / np.sqrt(H)
    return (
        np.einsum('bkgts,bksh->btkgh', weight, v).reshape(B, T, N * H),
        np.einsum('bkgts,bksh->btkgh', dscore, k).reshape(B, T, N, H),
        np.einsum('bkgts,btkgh->bksh', dscore, q),
        np.einsum('bkgts,btkgh->bksh', weight, do),
    )


@functools.partial(jax.jit, static_argnames='tiles')
def run(q, k, v, segment, do, tiles=SMALL):
    """(out, dq, dk, dv) of the kernel."""
    attend = functools.partial(gpu_attention.attention, segment_BxT=segment, tiles=tiles, interpret=True)
    out, pullback = jax.vjp(attend, q, k, v)
    return out, *pullback(do)


def assert_same(got, want, tolerance=TOLERANCE):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize('heads', [(4, 2), (6, 1)])
def test_value_and_gradients_are_the_dense_formulas(heads):
    arrays = inputs(segments(*ROWS), *heads)
    assert_same(run(*arrays), dense(*arrays))


@pytest.mark.slow
def test_many_programs_take_all_query_heads_of_a_key_head_each(monkeypatch):
    """Few programs, as in the other tests, take one query head each."""
    monkeypatch.setattr(gpu_attention, 'ENOUGH_PROGRAMS', 0)
    arrays = inputs(segments(ROWS[0]), 4, 2)
    assert_same(run.__wrapped__(*arrays), dense(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize('T, H', [(48, 16), (67, 24)])
def test_rows_and_heads_of_any_size_with_the_tables_tiles(T, H):
    arrays = inputs(segments([(1, T - 9), (2, 6), (0, 3)]), 4, 2, H)
    assert_same(run(*arrays, tiles=None), dense(*arrays))


@pytest.mark.slow
def test_bfloat16_at_the_head_size_of_the_real_models():
    arrays = inputs(segments([(1, 100), (2, 140), (0, 16)]), 6, 1, 128, jnp.bfloat16)
    got = run(*arrays, tiles=None)
    assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
    assert_same(got, dense(*arrays), 2e-2)


@pytest.mark.slow
def test_packed_is_alone():
    """Each segment of a row, value and gradients, as in a row of its own that is padded."""
    lengths = [n for number, n in ROWS[0] if number]
    starts = np.cumsum([0, *lengths])
    arrays = [np.asarray(x) for x in inputs(segments(ROWS[0]), 4, 2)]
    token_axes = (1, 2, 2, 1, 1)
    alone = [np.zeros((len(lengths), *(64 if i == axis else size for i, size in enumerate(x.shape) if i)), x.dtype)
             for x, axis in zip(arrays, token_axes, strict=True)]  # fmt: skip
    for row, (start, n) in enumerate(zip(starts, lengths, strict=False)):
        for x, y, axis in zip(arrays, alone, token_axes, strict=True):
            np.moveaxis(y, axis, 1)[row, :n] = np.moveaxis(x, axis, 1)[0, start : start + n]

    for packed, of_alone, axis in zip(run(*arrays), run(*alone), (1, 1, 2, 2), strict=True):
        packed, of_alone = np.moveaxis(np.asarray(packed), axis, 1), np.moveaxis(np.asarray(of_alone), axis, 1)
        for row, (start, n) in enumerate(zip(starts, lengths, strict=False)):
            got = of_alone[row, :n]
            np.testing.assert_allclose(got, packed[0, start : start + n], rtol=0, atol=TOLERANCE * np.abs(packed).max())


def test_another_segments_tokens_change_not_one_bit():
    q, k, v, segment, do = inputs(segments(ROWS[0]), 4, 2)
    own = np.asarray(segment)[0] == 2
    of_queries, of_keys = own[None, :, None, None], own[None, None, :, None]
    before = run(q, k, v, segment, do)
    after = run(jnp.where(of_queries, q, 9 - q), jnp.where(of_keys, k, 9 - k), jnp.where(of_keys, v, 9 - v), segment, do)
    for i, (x, y) in enumerate(zip(before, after, strict=True)):
        at = (0, own) if i < 2 else (0, slice(None), own)  # out and dq have tokens second
        np.testing.assert_array_equal(x[at], y[at])
        assert jnp.abs(x - y).max() > 1e-2  # the others did change


def test_padding_is_finite_and_reaches_nothing():
    """Large values and a large cotangent at the padding change no gradient of a real token."""
    q, k, v, segment, do = inputs(segments(ROWS[0]), 4, 2)
    padding = np.asarray(segment) == 0
    of_queries, of_keys = padding[:, :, None, None], padding[:, None, :, None]
    loud = [jnp.where(of, 10 * x, x) for x, of in ((q, of_queries), (k, of_keys), (v, of_keys))]
    before, after = run(q, k, v, segment, do), run(*loud, segment, jnp.where(padding[..., None], 10.0, do))
    for i, (x, y) in enumerate(zip(before, after, strict=True)):
        assert np.isfinite(y).all()
        at = (0, ~padding[0]) if i < 2 else (0, slice(None), ~padding[0])
        np.testing.assert_array_equal(x[at], y[at])


@pytest.mark.parametrize('Q, S', [(8, 8), (16, 8), (8, 32)])
def test_the_blocks_read_are_those_with_a_visible_pair(Q, S):
    """From the first to the last such block; unmasked are those with nothing but visible pairs."""
    segment_BxT = segments(*ROWS)
    B, T = segment_BxT.shape
    ids = jnp.asarray(np.where(segment_BxT > 0, segment_BxT, -1 - np.arange(T, dtype=np.int32)))
    pairs = visible(segment_BxT).reshape(B, T // Q, Q, T // S, S).transpose(0, 1, 3, 2, 4)
    some, every = pairs.any((3, 4)), pairs.all((3, 4))
    of_queries = key_bounds(ids, Q, S), some, every
    of_keys = query_bounds(ids, Q, S), some.swapaxes(1, 2), every.swapaxes(1, 2)
    for bounds, some, every in (of_queries, of_keys):
        bounds = np.asarray(bounds)
        for b in range(B):
            for i, (first, whole, edge, last) in enumerate(bounds[b]):
                assert first <= whole <= edge <= last
                assert (first, last) == (np.flatnonzero(some[b, i])[0], np.flatnonzero(some[b, i])[-1] + 1)
                np.testing.assert_array_equal(np.flatnonzero(every[b, i]), np.arange(whole, edge))


def test_the_cost_is_the_segments_squares():
    """Of a row of 8,192 in blocks of 128: eight segments read an eighth of one segment's blocks, and padding its own alone."""
    def read(row):
        bounds = np.asarray(key_bounds(jnp.asarray(segments(row)), 128, 128))[0]
        return int((bounds[:, 3] - bounds[:, 0]).sum()), int((bounds[:, 2] - bounds[:, 1]).sum())

    assert read([(1, 8192)]) == (64 * 65 // 2, 64 * 63 // 2)
    assert read([(i, 1024) for i in range(1, 9)]) == (8 * 8 * 9 // 2, 8 * 8 * 7 // 2)
    assert read([(1, 4096), *((-i, 1) for i in range(1, 4097))])[0] == 32 * 33 // 2 + 32


def test_what_the_backward_pass_keeps_has_a_name(capsys):
    """So a policy that saves it runs the forward kernel once: the output and the log-sums, and no more of the forward pass."""
    q, k, v, segment, _ = inputs(segments(ROWS[0]), 4, 2)
    policy = jax.checkpoint_policies.save_only_these_names('kept')

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(q, k, v):
        return jnp.sum(gpu_attention.attention(q, k, v, segment, tiles=SMALL, residual_name='kept', interpret=True))

    jax.ad_checkpoint.print_saved_residuals(layer, q, k, v)
    kept = [line for line in capsys.readouterr().out.splitlines() if 'argument' not in line and 'constant' not in line]
    assert [line.split(' ')[0] for line in kept if "named 'kept'" in line] == ['f32[1,96,4,16]', 'f32[1,4,96]']
    assert len(kept) == 2, kept


def test_it_lowers_for_cuda_with_loops_that_triton_pipelines():
    """From here, forward and backward; Triton pipelines the loads of counted loops (scf.for), and not those of while loops."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    shapes = shape((1, 1024, 12, 128)), shape((1, 2, 1024, 128)), shape((1, 2, 1024, 128)), shape((1, 1024, 1536))

    @jax.jit
    def value_and_gradients(q, k, v, do, segment):
        out, pullback = jax.vjp(lambda *x: gpu_attention.attention(*x, segment), q, k, v)
        return out, *pullback(do)

    device = jax.sharding.AbstractDevice(device_kind='NVIDIA H200', num_cores=None, platform='gpu')  # jax 0.11 asks for one
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = value_and_gradients.trace(*shapes, jax.ShapeDtypeStruct((1, 1024), jnp.int32))
        text = traced.lower(lowering_platforms=('cuda',)).as_text()
    assert all(name in text for name in ('attention_forward', 'attention_dq', 'attention_dkv'))
    operations = re.findall(r'\\00(?:[a-z_.]+\\00){9,}', text)  # the names in a kernel's bytecode
    assert len(operations) == 3
    assert all('00for' in names and '00while' not in names for names in operations)


def test_a_head_too_long_for_the_table_is_an_error_with_a_remedy():
    assert tiles_of(2 * 128) == TILES[256]
    with pytest.raises(ValueError, match='has 1024 bytes, and the kernel supports at most 512; set model.attention=xla'):
        tiles_of(4 * 256)
