"""The GPU's attention over the cache, in Pallas's interpreter: it is masked softmax in float64, and a row's own.

Tolerance, of the largest value: 1e-5 in float32; 2e-2 in bfloat16, which keeps 8 bits.
"""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from bapo_jax.models import kernels
from bapo_jax.rollout.inprocess import decoding, drawing, gpu_decoding, gpu_drawing, slots

POSITIONS = (0, 1, 63, 64, 65, 200)  # tokens before the new one: none, one, and as many as blocks end and begin with
attend = jax.jit(functools.partial(gpu_decoding.attend, used=None, interpret=True))


def case(heads=(14, 2, 8), slots=256, dtype=jnp.float32):
    """(q, k, v of the new token, k, v of the cache, positions); 7 query heads a key head fill no whole tile, nor do heads of 8."""
    rng, (N, K, H), A = np.random.default_rng(0), heads, len(POSITIONS)
    shapes = (A, 1, N, H), (A, K, 1, H), (A, K, 1, H), (A, K, slots, H), (A, K, slots, H)
    return *(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes), jnp.array(POSITIONS, jnp.int32)


def dense(q_Ax1xNxH, k_AxKxSxH, v_AxKxSxH):
    """Softmax of each row's keys up to the new token's, [A, 1, N·H]."""
    (A, _, N, H), K = q_Ax1xNxH.shape, k_AxKxSxH.shape[1]
    score = np.einsum('akgh,aksh->akgs', q_Ax1xNxH.reshape(A, K, N // K, H), k_AxKxSxH) / np.sqrt(H)
    weight = np.exp(score) * (np.arange(k_AxKxSxH.shape[2]) <= np.array(POSITIONS)[:, None])[:, None, None]
    return np.einsum('akgs,aksh->akgh', weight / weight.sum(-1, keepdims=True), v_AxKxSxH).reshape(A, 1, N * H)


@pytest.mark.parametrize(
    'heads, dtype, tolerance',
    [
        ((14, 2, 8), jnp.float32, 1e-5),
        pytest.param((4, 4, 24), jnp.float32, 1e-5, marks=pytest.mark.slow),
        pytest.param((6, 2, 64), jnp.bfloat16, 2e-2, marks=pytest.mark.slow),
    ],
)
def test_it_is_masked_softmax_and_the_cache_has_the_new_token(heads, dtype, tolerance):
    q, new_k, new_v, k, v, position = case(heads, dtype=dtype)
    out, k_after, v_after = attend(q, new_k, new_v, k, v, position)
    q, new_k, new_v, k, v, out = (np.array(x, np.float64) for x in (q, new_k, new_v, k, v, out))
    for a, n in enumerate(POSITIONS):
        k[a, :, n], v[a, :, n] = new_k[a, :, 0], new_v[a, :, 0]
    np.testing.assert_array_equal(np.asarray(k_after, np.float64), k)
    np.testing.assert_array_equal(np.asarray(v_after, np.float64), v)
    want = dense(q, k, v)
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance * np.abs(want).max())


def test_a_row_does_not_depend_on_the_others_nor_on_the_cache_behind_its_end():
    """Bit for bit: two rows in other company, with more slots, and with no numbers behind the last token and in its place."""
    *given, position = case()
    out, _, _ = attend(*given, position)
    q, new_k, new_v, *cache = (x[3:5] for x in given)
    behind = np.arange(320)[None] >= np.array(position)[3:5, None]
    longer = (np.where(behind[:, None, :, None], np.nan, np.pad(x, ((0, 0), (0, 0), (0, 64), (0, 0)))) for x in cache)
    np.testing.assert_array_equal(attend(q, new_k, new_v, *longer, position[3:5])[0], out[3:5])


@pytest.mark.slow
def test_a_token_read_with_it_has_the_hidden_state_that_other_devices_give_it(policy):
    """Of four rows, the last without a cache."""
    weights, rng = decoding.unstacked(policy.params, policy.config), np.random.default_rng(0)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), decoding.empty_cache(policy.config, 3, 20))
    token, position = jnp.array([20, 30, 40, 50]), jnp.array([0, 7, 19, 3])
    of_gpu = functools.partial(gpu_decoding.attend, interpret=True)
    given = policy.graph, weights, token, position, cache, jnp.int32(20), None
    decode = jax.jit(decoding.decode, static_argnums=(0, 7))
    got, want = decode(*given, of_gpu), decode(*given, decoding.attend)
    np.testing.assert_allclose(got[0][:3], want[0][:3], rtol=0, atol=5e-5)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-5)


def test_a_cpu_keeps_its_own_ways_and_a_gpu_has_ours_unless_it_cannot_or_xla_is_asked_for_and_says_why(monkeypatch):
    """The learner's kernel decides nothing: with rows of slots it is XLA's under `auto`, and the engine keeps its own."""
    said = []
    monkeypatch.setattr(slots.logging, 'log_first_n', lambda level, text, n, *values: said.append(text % values))
    on_gpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform='gpu')]))
    ours, of_xla = (gpu_decoding.attend, gpu_drawing.choose), (decoding.attend, gpu_drawing.choose)
    for asked in ('auto', 'xla'):
        assert slots.ways_of(Mesh(jax.devices()[:1], 'rows'), asked, 4096) == (decoding.attend, drawing.choose)
    assert slots.ways_of(on_gpu) == slots.ways_of(on_gpu, 'cudnn', 512) == ours and not said
    assert slots.ways_of(on_gpu, 'xla') == slots.ways_of(on_gpu, 'auto', 520) == of_xla
    monkeypatch.setattr(kernels, '_importable', lambda module: False)
    assert slots.ways_of(on_gpu) == of_xla
    for line, why in zip(said, ('model.attention=xla disables it; use auto', 'at most 512 bytes, .* 520', 'needs jax.experimental'), strict=True):
        assert re.match(f'the in-process engine uses XLA attention instead of the GPU kernel: .*{why}', line)
