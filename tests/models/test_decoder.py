"""The decoder against Hugging Face's, and against itself. Tolerance of float32 logits (size about 1): 2e-5."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from scored import causal, forward, logits_in

from bapo_jax.cluster.split import Split, matmul
from bapo_jax.models import hf
from bapo_jax.models.decoder import swiglu
from bapo_jax.models.remat import REMAT

TOLERANCE = 2e-5
SHAPES = {
    'tied, one key head': {'num_key_value_heads': 1},
    'untied, two key heads': {'num_key_value_heads': 2, 'tie_word_embeddings': False},
    'as many key heads as query heads': {'num_key_value_heads': 4, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6}},
    'heads wider than the model, other eps': {'num_key_value_heads': 2, 'head_dim': 16, 'rms_norm_eps': 1e-3},
    'Qwen3, tied, one key head': {'model_type': 'qwen3', 'head_dim': 8, 'num_key_value_heads': 1},
    'Qwen3, untied, two key heads, wide': {'model_type': 'qwen3', 'head_dim': 16, 'tie_word_embeddings': False},
    'Qwen3, as many key heads as query heads, narrow, other eps': {
        'model_type': 'qwen3', 'head_dim': 4, 'num_key_value_heads': 4, 'rms_norm_eps': 1e-3,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6},
    },
    'Llama, tied, three key heads': {'model_type': 'llama', 'hidden_size': 48, 'num_attention_heads': 6, 'num_key_value_heads': 3},
    'Llama, untied, other eps': {'model_type': 'llama', 'tie_word_embeddings': False, 'rms_norm_eps': 1e-3},
    'llama3': {'model_type': 'llama', 'rope_parameters': {
        'rope_type': 'llama3', 'rope_theta': 1e4, 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
        'original_max_position_embeddings': 64}},
    'linear': {'rope_parameters': {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 3.0}},
    'yarn': {'head_dim': 32, 'rope_parameters': {
        'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 4.0, 'original_max_position_embeddings': 64}},
    'Qwen3, yarn, all stated': {'model_type': 'qwen3', 'head_dim': 32, 'rope_parameters': {
        'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 4.0, 'original_max_position_embeddings': 64, 'beta_fast': 8.0,
        'beta_slow': 0.5, 'truncate': False, 'attention_factor': 0.7}},
    'yarn, both scales': {'model_type': 'llama', 'head_dim': 32, 'rope_parameters': {
        'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 4.0, 'original_max_position_embeddings': 64, 'mscale': 1.5,
        'mscale_all_dim': 0.5}},
}  # fmt: skip


@pytest.fixture(scope='module')
def tokens():
    return np.random.default_rng(1).integers(0, 96, (3, 20))


@pytest.mark.parametrize('shape', SHAPES)
def test_logits_are_hugging_faces(shape, make_policy, tokens):
    import torch
    from transformers import AutoModelForCausalLM

    policy = make_policy(**SHAPES[shape])
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(policy.path)(torch.tensor(tokens)).logits.numpy()
    assert want.std() > 0.5
    np.testing.assert_allclose(forward(policy, tokens), want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize('shape', ['Qwen3, untied, two key heads, wide', 'Llama, tied, three key heads', 'llama3', 'yarn', 'linear'])
def test_gradients_are_hugging_faces(shape, make_policy, tokens):
    """Of the mean of sin(logits), for each tensor by its name: 5e-5 of the largest."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = make_policy(**SHAPES[shape])
    theirs = AutoModelForCausalLM.from_pretrained(policy.path)
    torch.sin(theirs(torch.tensor(tokens)).logits).mean().backward()
    want = {name: x.grad.numpy() for name, x in theirs.named_parameters()}
    got = dict(hf.to_hf(policy.config, jax.jit(jax.grad(lambda p: jnp.sin(logits_in(policy.graph, p, tokens)).mean()))(policy.params)))
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert np.abs(gradient).max() > 0
        np.testing.assert_allclose(got[name], gradient, rtol=0, atol=5e-5 * np.abs(gradient).max(), err_msg=name)


def test_a_later_token_changes_nothing_earlier(policy, tokens):
    changed = tokens.copy()
    changed[:, 11] = (changed[:, 11] + 1) % 96
    a, b = forward(policy, tokens), forward(policy, changed)
    np.testing.assert_array_equal(a[:, :11], b[:, :11])
    assert (np.abs(a - b)[:, 11:].max(axis=-1) > 1e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize('remat', sorted(REMAT.keys() - {'none'}))
def test_rematerialised_is_the_same_value_and_gradient(remat, policy, tokens):
    def loss(params, remat):
        model = nnx.merge(policy.graph, params)
        return jnp.mean(jnp.sin(model.logits(model(tokens, *causal(tokens), remat=remat))))

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    (value, gradient), (value_remat, gradient_remat) = run(policy.params, 'none'), run(policy.params, remat)
    np.testing.assert_allclose(value_remat, value, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(gradient_remat), jax.tree.leaves(gradient), strict=True):
        assert jnp.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * float(jnp.abs(b).max()))


def test_bfloat16_compute_stays_close_and_parameters_stay_float32(policy, make_policy, tokens):
    """bfloat16 keeps 8 bits: 1 % of the logits' size on average over two layers, 5 % is alarm."""
    low = make_policy(dtype='bfloat16')
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(low.params))
    hidden = jax.eval_shape(lambda: nnx.merge(low.graph, low.params)(tokens, *causal(tokens)))
    assert hidden.dtype == jnp.bfloat16
    a, b = forward(policy, tokens), forward(low, tokens)
    assert b.dtype == jnp.float32
    error = float(jnp.abs(a - b).mean() / a.std())
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize('shape', [(5,), (4, 5), (2, 3, 5)])
def test_the_spelled_out_gradient_of_matmul_is_that_of_autodiff(shape):
    rng = np.random.default_rng(2)
    x, w, ct = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (shape, (5, 7), (*shape[:-1], 7)))
    def product(x, w):
        return matmul(x, w, Split(), 0)

    value, pullback = jax.vjp(product, x, w)
    want_value, want_pullback = jax.vjp(lambda x, w: x @ w, x, w)
    np.testing.assert_array_equal(value, want_value)
    for a, b in zip(pullback(ct), want_pullback(ct), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    check_grads(product, (x, w), order=1, modes=['rev'], atol=1e-2, rtol=1e-2)


def test_the_spelled_out_gradient_of_swiglu_is_that_of_autodiff():
    """silu(g) u, gates of both signs and far from 0; float32, 1e-6 of the largest."""
    gate, up, by = jax.random.normal(jax.random.key(0), (3, 4, 50)) * jnp.array([8.0, 1.0, 1.0])[:, None, None]
    got, want = (jax.vjp(f, gate, up) for f in (swiglu, lambda g, u: jax.nn.silu(g) * u))
    np.testing.assert_array_equal(got[0], want[0])
    for ours, theirs in zip(got[1](by), want[1](by), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * np.abs(theirs).max())
