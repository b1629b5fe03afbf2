"""Every packed kernel is the dense masked formula: value and gradient, on one device and on eight.

The accelerators' kernels run in Pallas's interpreter, and cuDNN has a stand-in that reads the flat arrays at the offsets it is given.
Eight fake CPU devices need a process of their own, which runs this file as a script. Tolerance: 1e-5 of the largest value, float32; 2e-2 in
bfloat16, which keeps 8 bits.
"""

import functools
import importlib
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import eight_devices
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from bapo_jax.cluster.mesh import ROWS as SPLIT_ROWS, make_mesh, per_device
from bapo_jax.config import rows
from bapo_jax.models import attention, cudnn_attention, kernels

TOLERANCE = 1e-5


def by_offsets(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale):
    """cuDNN's packed call as JAX documents it, over the offsets that JAX makes of its arguments. Outside of segments all is NaN."""
    (B, T, N, H), K = q_BxTxNxH.shape, k_BxTxKxH.shape[2]
    lengths_and_begins = fused._fix_seqlen_offsets(q_seqlen, kv_seqlen, q_offsets, kv_offsets, q_BxTxNxH, k_BxTxKxH)
    q_length, kv_length, q_begin, kv_begin = (x.reshape(-1) for x in lengths_and_begins)
    token_C = jnp.arange(B * T)

    def segment_of(begin, length, stride):
        """[B · T]: the segment that a token of the flat array lies in, counted from 1; 0 if in none."""
        begin_M = (begin // stride)[: length.size]
        inside_CxM = (token_C[:, None] >= begin_M[None]) & (token_C[:, None] < (begin_M + length)[None])
        return jnp.where(inside_CxM.any(1), 1 + inside_CxM.argmax(1), 0)

    of_query_C, of_key_C = segment_of(q_begin, q_length, N * H), segment_of(kv_begin, kv_length, K * H)
    written_BxTx1x1 = (of_query_C > 0).reshape(B, T, 1, 1)
    q_BxTxNxH, k_BxTxKxH, v_BxTxKxH = (with_its_gradient_where(written_BxTx1x1, x) for x in (q_BxTxNxH, k_BxTxKxH, v_BxTxKxH))
    sees_CxC = (of_query_C[:, None] == of_key_C[None]) & (token_C[:, None] >= token_C[None])
    k_CxNxH, v_CxNxH = (jnp.repeat(x, N // K, axis=2).reshape(B * T, N, H).astype(jnp.float32) for x in (k_BxTxKxH, v_BxTxKxH))
    score_NxCxC = jnp.einsum('cnh,dnh->ncd', q_BxTxNxH.reshape(B * T, N, H).astype(jnp.float32), k_CxNxH) * scale
    weight_NxCxC = jax.nn.softmax(jnp.where(sees_CxC[None], score_NxCxC, jnp.finfo(jnp.float32).min), axis=-1)
    out_BxTxNxH = jnp.einsum('ncd,dnh->cnh', weight_NxCxC, v_CxNxH).reshape(q_BxTxNxH.shape).astype(q_BxTxNxH.dtype)
    return jnp.where(written_BxTx1x1, out_BxTxNxH, jnp.nan)


@jax.custom_vjp
def with_its_gradient_where(written, x):
    """`x`. Its gradient is NaN where nothing is written."""
    return x


with_its_gradient_where.defvjp(lambda written, x: (x, written), lambda written, g: (None, jnp.where(written, g, jnp.nan)))


KERNELS = {
    'xla': attention.xla,
    'splash': functools.partial(attention.splash, interpret=True),
    'triton': functools.partial(attention.triton, interpret=True),
    'cudnn': functools.partial(attention.cudnn, call=by_offsets),
}
# For `make quick` the kernel of CPUs: the others run in an interpreter, and it compiles that.
EVERY = ['xla', *(pytest.param(name, marks=pytest.mark.slow) for name in ('splash', 'triton'))]
ROWS = {'several and padding': [(1, 70), (2, 1), (3, 130), (0, 55)], 'one': [(1, 256)], 'padding alone': [(0, 256)],
        'ends with the row': [(1, 100), (2, 156)]}  # fmt: skip


def dense(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT):
    """softmax(q · k / √H) v, the scores of all pairs written out."""
    B, T, N, H = q_BxTxNxH.shape
    k_BxNxTxH, v_BxNxTxH = (jnp.repeat(x.astype(jnp.float32), N // x.shape[1], axis=1) for x in (k_BxKxTxH, v_BxKxTxH))
    score_BxNxTxS = jnp.einsum('btnh,bnsh->bnts', q_BxTxNxH.astype(jnp.float32), k_BxNxTxH) / np.sqrt(H)
    seen_BxTxS = np.tril(np.ones((T, T), bool))[None] & (segment_BxT[:, :, None] == segment_BxT[:, None, :])
    weight_BxNxTxS = jax.nn.softmax(jnp.where(seen_BxTxS[:, None], score_BxNxTxS, -jnp.inf), axis=-1)
    return jnp.einsum('bnts,bnsh->btnh', weight_BxNxTxS, v_BxNxTxH).reshape(B, T, N * H)


def inputs(rows, N=4, K=2, H=16, dtype=np.float32):
    segment_BxT = np.stack([np.repeat(*np.array(row, np.int32).T) for row in rows])
    (B, T), rng = segment_BxT.shape, np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((B, T, N, H), (B, K, T, H), (B, K, T, H)))
    return q, k, v, jnp.asarray(segment_BxT)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(kernel, q, k, v, segment):
    def real_tokens(*qkv):  # what padding gives is meaningless
        out = kernel(*qkv, segment)
        return jnp.where((segment > 0)[:, :, None], out, jnp.zeros_like(out))

    out, pullback = jax.vjp(real_tokens, q, k, v)
    return out, *pullback(jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype))


def assert_same(got, want, tolerance=TOLERANCE):
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


def on_eight_devices():
    """Two meshes: every axis split, and rows alone."""
    assert jax.device_count() == 8
    arrays = inputs([*ROWS.values()] * 2)
    want = value_and_gradients(dense, *arrays)
    q, kv, segment, out = (PartitionSpec(*s) for s in ((SPLIT_ROWS, None, 'tensor'), (SPLIT_ROWS, 'tensor'), (SPLIT_ROWS,), (SPLIT_ROWS, None, 'tensor')))
    for sizes in ((2, 2, 2), (2, 4, 1)):
        for kernel in KERNELS.values():
            on_each = per_device(kernel, make_mesh(*sizes), (q, kv, kv, segment), out)
            assert_same(value_and_gradients(on_each, *arrays), want)


if __name__ == '__main__':
    attention._XLA_BLOCK = 30
    on_eight_devices()
    sys.exit()


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Nine query blocks to a row of 256 in four spans, the last one ragged."""
    monkeypatch.setattr(attention, '_XLA_BLOCK', 30)
    jax.clear_caches()


@pytest.mark.parametrize('heads', [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize('kernel', EVERY)
def test_a_kernel_is_the_dense_formula(kernel, heads):
    arrays = inputs(ROWS.values(), *heads)
    assert_same(value_and_gradients(KERNELS[kernel], *arrays), value_and_gradients(dense, *arrays))


@pytest.mark.slow
@pytest.mark.parametrize('kernel, T', [('xla', 31), ('xla', 120), ('xla', 256), ('splash', 384), ('triton', 48), ('triton', 80)])
def test_rows_of_any_length_a_kernel_takes(kernel, T):
    arrays = inputs([[(1, 20), (2, T - 25), (0, 5)]])
    assert_same(value_and_gradients(KERNELS[kernel], *arrays), value_and_gradients(dense, *arrays))


@pytest.mark.slow
@pytest.mark.parametrize('kernel', KERNELS)
def test_bfloat16_and_the_head_size_of_the_real_models(kernel):
    arrays = inputs([ROWS['several and padding']], 6, 2, 128, jnp.bfloat16)
    got = value_and_gradients(KERNELS[kernel], *arrays)
    assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
    assert_same(got, value_and_gradients(dense, *arrays), 2e-2)


@pytest.mark.parametrize('kernel', EVERY)
def test_a_token_of_another_segment_changes_nothing(kernel):
    """Not one bit of segment 3's outputs and gradients, whatever its neighbours 1 and 2 and the padding hold."""
    q, k, v, segment = inputs([ROWS['several and padding']])
    own = np.asarray(segment)[0] == 3
    other = [jnp.where(own[None, :, None, None] if x is q else own[None, None, :, None], x, 2 * x + 1) for x in (q, k, v)]
    a, b = (value_and_gradients(KERNELS[kernel], *x, segment) for x in ((q, k, v), other))
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        at = (0, own) if i < 2 else (0, slice(None), own)  # out and the gradient of q have tokens second
        np.testing.assert_array_equal(x[at], y[at])
        assert jnp.abs(x - y).max() > 1e-2  # the neighbours themselves did change


@pytest.mark.parametrize('kernel', [*EVERY, 'cudnn'])
def test_packed_is_unpacked(kernel):
    """Two sequences in a row are the same two, each in a padded row of its own."""
    q, k, v, segment = inputs([[(1, 100), (2, 156)]])
    halves = (slice(0, 100), slice(100, 256))

    def alone(x, axis, half):
        x = jax.lax.slice_in_dim(x, half.start, half.stop, axis=axis)
        return jnp.pad(x, [(0, 256 - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])

    attend = jax.jit(KERNELS[kernel])
    packed = attend(q, k, v, segment)
    for half in halves:
        n = half.stop - half.start
        got = attend(alone(q, 1, half), alone(k, 2, half), alone(v, 2, half), alone(jnp.minimum(segment, 1), 1, half))
        np.testing.assert_allclose(got[:, :n], packed[:, half], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_on_eight_devices():
    done = subprocess.run([sys.executable, __file__], env=eight_devices(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]


def test_short_rows_are_one_block(monkeypatch):
    monkeypatch.setattr(attention, '_XLA_BLOCK', 512)
    q, k, v, segment = inputs(ROWS.values())
    np.testing.assert_array_equal(
        attention.xla(q, k, v, segment), attention.masked(q, k, v, attention.segment_mask(segment))
    )
    assert 'checkpoint' not in str(jax.make_jaxpr(attention.xla)(q, k, v, segment))


def shapes_within(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from shapes_within(inner)


@pytest.mark.parametrize('kernel', ['xla', 'splash', 'triton'])
def test_scores_of_all_pairs_never_exist(kernel):
    """Of a row of 2,048: no array anywhere, the backward pass included, has two axes of that length."""
    q, k, v, segment = inputs([[(1, 2048)]])
    for function, square in ((getattr(attention, kernel), False), (dense, True)):
        found = {s for s in shapes_within(jax.make_jaxpr(functools.partial(value_and_gradients, function))(q, k, v, segment).jaxpr)}
        assert any(s.count(2048) > 1 for s in found) == square


def test_the_backward_pass_holds_one_block_of_scores(monkeypatch):
    """Of 32 blocks of a row of 2,048: all that XLA plans, gradients included, is less than the scores of eight."""
    monkeypatch.setattr(attention, '_XLA_BLOCK', 64)
    q, k, v, segment = inputs([[(1, 2048)]], 8, 2, 16)
    planned = value_and_gradients.lower(attention.xla, q, k, v, segment).compile().memory_analysis().temp_size_in_bytes
    assert planned < 8 * (8 * 64 * 2048 * 4), planned


@pytest.mark.parametrize('kernel, platform, calls', [('triton', 'cuda', 'attention_dkv'), ('splash', 'tpu', 'splash_mha_dkv')])
def test_accelerator_kernels_lower_from_here(kernel, platform, calls):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    qkv = shape((2, 1024, 12, 128)), shape((2, 2, 1024, 128)), shape((2, 2, 1024, 128))
    device = jax.sharding.AbstractDevice(device_kind='NVIDIA H200', num_cores=None, platform='gpu')  # jax 0.11 asks for one
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = value_and_gradients.trace(getattr(attention, kernel), *qkv, jax.ShapeDtypeStruct((2, 1024), jnp.int32))
        assert calls in traced.lower(lowering_platforms=(platform,)).as_text()


def test_the_mask_by_hand():
    segment = jnp.array([[1, 1, 2, 0]])
    whole = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], bool)
    np.testing.assert_array_equal(attention.segment_mask(segment)[0], whole)


QWEN_1_5B = SimpleNamespace(num_heads=12, num_kv_heads=2, head_dim=128, dtype='bfloat16')
A100, L40S, H100, B200 = (8, 0), (8, 9), (9, 0), (10, 0)


def choose(name, platform, model=QWEN_1_5B, row_tokens=10_240, tensor=1, **more):
    return kernels.kernel_for(name, platform, model, row_tokens=row_tokens, tensor=tensor, **more)


def model_of(**fields):
    return SimpleNamespace(**vars(QWEN_1_5B) | fields)


@pytest.fixture
def said(monkeypatch):
    """What `auto` says of itself, each time."""
    lines = []
    monkeypatch.setattr(kernels.logging, 'log_first_n', lambda level, text, n, *values: lines.append(text % values))
    return lines


def test_auto_is_the_platforms_own():
    assert [choose('auto', p) for p in ('cpu', 'gpu', 'tpu')] == ['xla', 'triton', 'splash']
    assert [choose('auto', 'gpu', capability=card) for card in (A100, H100, B200)] == ['triton'] * 3
    assert [choose('xla', p, tensor=2) for p in ('cpu', 'gpu', 'tpu')] == ['xla'] * 3


def test_the_table_ends_with_the_kernel_that_runs_anywhere_and_the_config_names_its_rows():
    assert list(kernels.KERNELS)[-1] == 'xla' and kernels.KERNELS['xla'] == kernels.Kernel(attention.xla)
    assert {row.platform for row in kernels.KERNELS.values()} == {'', 'gpu', 'tpu'}
    named = dict(rows())['model.attention'].check
    assert all(named.holds(name) for name in ('auto', *kernels.KERNELS)) and not named.holds('flash')
    assert [name for name in kernels.KERNELS if kernels.described(name) != name] == ['cudnn']  # what no card has confirmed


def test_a_jax_without_pallas_triton_has_a_successor_and_loads(monkeypatch):
    """cuDNN's where the card takes it, and else XLA's; who asks for the old one is told. CPU and TPU do not notice."""
    monkeypatch.setitem(sys.modules, 'jax.experimental.pallas.triton', None)
    monkeypatch.delitem(sys.modules, 'bapo_jax.models.gpu_attention', raising=False)
    importlib.import_module('bapo_jax.models.gpu_attention')
    assert [choose('auto', 'gpu', capability=card) for card in (A100, H100, B200, None)] == ['xla', 'cudnn', 'cudnn', 'cudnn']
    assert [choose('auto', p) for p in ('cpu', 'tpu')] == ['xla', 'splash']
    with pytest.raises(ValueError, match='triton needs jax.experimental.pallas.triton, which jax .*; set model.attention=auto'):
        choose('triton', 'gpu')
    monkeypatch.delitem(sys.modules, 'jax._src.cudnn.fused_attention_stablehlo')
    monkeypatch.setitem(sys.modules, 'jax._src.cudnn', None)
    assert choose('auto', 'gpu', capability=H100) == 'xla'


@pytest.mark.parametrize(
    'platform, card, fields, takes, says',
    [
        ('gpu', L40S, {'head_dim': 128, 'dtype': 'float32'}, 'triton', ''),
        ('gpu', L40S, {'head_dim': 256}, 'xla', 'the kernel triton supports head sizes of up to 128 on cards .* 8.9.*; using xla instead'),
        ('gpu', A100, {'head_dim': 256}, 'triton', ''),
        ('gpu', A100, {'head_dim': 512}, 'xla', 'triton supports heads of up to 512 bytes, and the model has 1024'),
        ('gpu', (12, 0), {'head_dim': 256}, 'cudnn', 'using cudnn instead'),
        ('gpu', H100, {'head_dim': 256, 'dtype': 'float32'}, 'xla', 'using xla instead'),  # cuDNN does not support float32
        ('tpu', None, {'head_dim': 80}, 'xla', 'splash needs a head size .* has 80'),
        ('cpu', None, {'head_dim': 512}, 'xla', ''),
    ],
)  # fmt: skip
def test_auto_passes_over_a_kernel_that_does_not_take_the_models_heads_and_says_so(platform, card, fields, takes, says, said):
    """What tests/gpu_compiled.py finds not to compile."""
    assert choose('auto', platform, model_of(**fields), capability=card) == takes
    assert (len(said) == bool(says)) and re.search(says, ''.join(said))


@pytest.mark.parametrize('platform, says', [('cpu', ''), ('gpu', 'triton does not support learner.slot_tokens=48'), ('tpu', 'splash does not support')])
def test_auto_is_xla_for_rows_of_slots(platform, says, said):
    assert choose('auto', platform, slot_tokens=48, row_tokens=208) == 'xla'
    assert (len(said) == bool(says)) and re.search(says, ''.join(said))


def test_cudnns_offsets_are_right_up_to_the_bound_and_wrap_beyond():
    """As JAX computes them: the end of the last row is the largest."""
    B, T, H = 16, 2**16, 128
    length, start = (np.full((B, n), -1, np.int32) for n in (2, 3))
    length[:, 0], start[:, 0] = T, 0

    @jax.jit
    def offsets_of(length, start):
        queries = [SimpleNamespace(shape=(B, T, N, H)) for N in (15, 16)]
        return [fused._fix_seqlen_offsets(length, length, start, start, q, q)[2] for q in queries]

    for N, offsets, right in zip((15, 16), offsets_of(length, start), (True, False), strict=True):
        assert (int(offsets.min()) >= 0) == (B <= cudnn_attention.most_rows(T, N, H)) == right
    assert choose('cudnn', 'gpu', row_tokens=10_240, rows=136) == choose('cudnn', 'gpu', row_tokens=10_240, rows=272, tensor=2) == 'cudnn'


def test_splash_is_given_queries_that_one_exact_factor_scaled(monkeypatch):
    """In bfloat16 each is rounded, and their mean factor is 1 / √H, which bfloat16 would miss by 1.3e-3 for heads of 192."""
    given = []
    kernels = importlib.import_module('jax.experimental.pallas.ops.tpu.splash_attention')
    monkeypatch.setattr(kernels, 'make_splash_mha_single_device', lambda *_, **__: lambda q, k, v, segment_ids: given.append(q) or q)
    monkeypatch.setattr(jax, 'vmap', lambda f: lambda *rows: f(*rows))
    q, k, v, segment = inputs([ROWS['one']], 4, 2, 192, jnp.bfloat16)
    attention.splash(q, k, v, segment)
    scaled, q = (np.asarray(x, np.float64).reshape(-1) for x in (given[0].swapaxes(1, 2), q))
    assert given[0].dtype == jnp.bfloat16 and (scaled @ q) / (q @ q) * np.sqrt(192) == pytest.approx(1, abs=1e-4)


def test_cudnns_lengths_and_starts_by_hand(monkeypatch):
    monkeypatch.setattr(cudnn_attention, 'SEGMENTS', 4)
    lengths, starts = cudnn_attention.lengths_and_starts(jnp.array([[1, 1, 2, 3, 0], [1, 1, 1, 1, 1]]))
    np.testing.assert_array_equal(lengths, [[2, 1, 1, -1], [5, -1, -1, -1]])
    np.testing.assert_array_equal(starts, [[0, 2, 3, -1, -1], [0, -1, -1, -1, -1]])


def test_a_row_of_more_segments_than_cudnn_is_compiled_for_is_no_number(monkeypatch):
    monkeypatch.setattr(cudnn_attention, 'SEGMENTS', 2)
    q, k, v, segment = inputs([[(1, 20), (2, 20), (3, 24)], [(1, 20), (2, 40), (0, 4)]])
    out = np.asarray(jax.jit(KERNELS['cudnn'])(q, k, v, segment))
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all() and not out[1, 60:].any()


@pytest.mark.parametrize(
    'arguments, says',
    [
        ({'name': 'splash', 'platform': 'cpu'}, 'splash only runs on TPU, and the devices are CPU; set model.attention=auto'),
        ({'name': 'triton', 'platform': 'tpu'}, 'triton only runs on GPU, and the devices are TPU; set model.attention=auto'),
        ({'name': 'cudnn', 'platform': 'gpu', 'capability': A100}, 'compute capability 9.0 .* has 8.0; set model.attention=auto'),
        ({'name': 'cudnn', 'platform': 'gpu', 'row_tokens': 1000}, 'learner.row_tokens=1000 .*multiple of 64; raise it'),
        (
            {'name': 'cudnn', 'platform': 'gpu', 'model': model_of(dtype='float32')},
            'cudnn does not support float32; set model.dtype=bfloat16, or set model.attention=xla',
        ),
        ({'name': 'cudnn', 'platform': 'gpu', 'model': model_of(head_dim=264)}, 'up to 256, .*has 264; set model.attention=xla'),
        ({'name': 'triton', 'platform': 'gpu', 'model': model_of(head_dim=264)}, r'up to 512 bytes, .*528 \(264 numbers in bfloat16\); set'),
        (
            {'name': 'triton', 'platform': 'gpu', 'capability': L40S, 'model': model_of(head_dim=136)},
            'up to 128 on cards of compute capability 8.9, .*for 136; set model.attention=xla',
        ),
        ({'name': 'cudnn', 'platform': 'gpu', 'rows': 137}, '137 rows of 10240 tokens .*learner.micro_batch_rows to 136 per device, or set'),
        ({'name': 'auto', 'platform': 'tpu', 'row_tokens': 1000}, 'learner.row_tokens=1000 .*multiple of 128; raise it'),
        ({'name': 'auto', 'platform': 'gpu', 'tensor': 4}, 'mesh.tensor=4 does not divide 12 query and 2 key-value heads; lower'),
        ({'name': 'xla', 'platform': 'cpu', 'tensor': 4}, 'mesh.tensor=4 does not divide 12 query and 2 key-value heads; lower'),
        ({'name': 'splash', 'platform': 'tpu', 'slot_tokens': 128}, 'learner.slot_tokens=128.*set it to 0, or set model.attention=auto'),
        ({'name': 'splash', 'platform': 'tpu', 'model': model_of(head_dim=80)}, 'head size .* has 80; set model.attention=xla'),
    ],
)
def test_a_kernel_that_cannot_run_is_an_error_with_reason_and_remedy(arguments, says):
    with pytest.raises(ValueError, match=f'model.attention=.*{says}'):
        choose(**arguments)


def test_a_mesh_of_another_platform_is_no_fallback():
    """What was chosen is what runs: packed() on a mesh of CPUs gives splash, which then refuses, and not xla."""
    q, k, v, segment = inputs([ROWS['one']])
    with pytest.raises(ValueError, match='interpret mode'):
        kernels.packed('splash', make_mesh(1, 1, 1))(q, k, v, segment)


@pytest.mark.parametrize('blocks', [30, 512])
def test_a_row_of_slots_is_every_response_alone_behind_the_prompt(blocks, monkeypatch):
    """Value and gradient; the prompt's gradient is the sum over its responses. Prompts of 11 of 16 tokens and of 16; two or one to a slot."""
    monkeypatch.setattr(attention, '_XLA_BLOCK', blocks)
    shared, slot, prompts, responses = 16, 40, (11, 16), (((1, 9), (2, 31)), ((3, 25),))
    rows = [[(1, prompt), (0, shared - prompt)] for prompt in prompts]
    for row in rows:
        for of_slot in responses:
            row += [(2 + number, n) for number, n in of_slot] + [(0, slot - sum(n for _, n in of_slot))]
    q, k, v, segment = inputs(rows)
    kernel = functools.partial(attention.slotted, shared=shared, slot=slot)

    def alone(q, k, v, segment):
        """The same outputs, each response with its prompt in a row of the dense formula; 0 on padding."""
        out = jnp.zeros((2, q.shape[1], q.shape[2] * q.shape[3]))
        for b, prompt in enumerate(prompts):
            for number in (3, 4, 5):
                own = np.flatnonzero(np.asarray(segment)[b] == number)
                at = np.concatenate([np.arange(prompt), own])
                of_row = dense(q[b : b + 1, at], k[b : b + 1, :, at], v[b : b + 1, :, at], jnp.ones((1, len(at)), jnp.int32))
                out = out.at[b, own].set(of_row[0, prompt:])
            at = np.arange(prompt)
            of_row = dense(q[b : b + 1, at], k[b : b + 1, :, at], v[b : b + 1, :, at], jnp.ones((1, prompt), jnp.int32))
            out = out.at[b, at].set(of_row[0])
        return out

    def of_tokens(q, k, v):
        return jnp.where((segment > 0)[..., None], kernel(q, k, v, segment), 0.0)

    def pulled(function, *qkv):
        out, pullback = jax.vjp(function, *qkv)
        return out, *pullback(jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    got, want = (jax.jit(functools.partial(pulled, f))(q, k, v) for f in (of_tokens, lambda *qkv: alone(*qkv, segment)))
    assert_same(got, want)
