"""Prompts read at once and tokens read one by one give the full forward pass, whatever the lengths and however blocks are cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import QWEN3

from bapo_jax.models.attention import masked, xla
from bapo_jax.rollout.inprocess import decoding

TOLERANCE = 5e-5
rng = np.random.default_rng(0)


@pytest.mark.parametrize('family', [{}, pytest.param(QWEN3, marks=pytest.mark.slow)], ids=['Qwen2', 'Qwen3'])
def test_prompts_and_then_a_token_at_a_time_are_the_full_forward_pass(family, make_policy):
    """Prompts of 7, 3 and 1 tokens; what stands behind the shorter ones changes nothing."""
    policy, lengths, steps = make_policy(**family), np.array([7, 3, 1]), 5
    tokens = rng.integers(15, 96, (3, 12))
    model = nnx.merge(policy.graph, policy.params)
    positions = jnp.broadcast_to(jnp.arange(12), (3, 12))
    full = model.logits(model(tokens, positions, functools.partial(xla, segment_BxT=jnp.ones((3, 12), jnp.int32))))

    weights = decoding.unstacked(policy.params, policy.config)
    hidden, prompts = decoding.prefill(policy.graph, weights, tokens[:, :7], jnp.array(lengths))
    cache = jax.tree.map(lambda x, new: x.at[:, :, :7].set(new), decoding.empty_cache(policy.config, 3, 12), prompts)
    rows = np.arange(3)
    for t in range(steps + 1):
        scores = decoding.logits(policy.graph, weights, hidden)
        np.testing.assert_allclose(scores, full[rows, lengths + t - 1], rtol=0, atol=TOLERANCE)
        fed = jnp.array(tokens[rows, np.minimum(lengths + t, 11)])
        hidden, cache = decoding.decode(policy.graph, weights, fed, jnp.array(lengths + t), cache, jnp.int32(lengths.max() + t + 1))


def attention_case(slots):
    q, k, v = (jnp.array(rng.normal(size=s), jnp.float32) for s in ((4, 1, 4, 8), (4, 2, slots, 8), (4, 2, slots, 8)))
    return q, k, v, jnp.array([1, 256, 257, 700], jnp.int32)


def test_attention_in_blocks_is_attention_to_all():
    q, k, v, lengths = attention_case(768)
    want = masked(q, k, v, (jnp.arange(768)[None] < lengths[:, None])[:, None])
    np.testing.assert_allclose(decoding.attend_to(q, k, v, lengths, jnp.int32(700)), want, rtol=0, atol=1e-5)


def test_blocks_that_a_row_does_not_use_change_no_bit_of_it():
    """With one block read, two or three; what stands in the slots behind a row's end does not count."""
    q, k, v, lengths = attention_case(768)
    attend = jax.jit(decoding.attend_to)
    few, more, all_ = (np.asarray(attend(q, k, v, lengths, jnp.int32(used))) for used in (256, 512, 768))
    np.testing.assert_array_equal(few[:2], more[:2])
    np.testing.assert_array_equal(more[:3], all_[:3])
    other = np.asarray(attend(q, k.at[:, :, 300:].set(9.0), v.at[:, :, 300:].set(9.0), lengths, jnp.int32(768)))
    np.testing.assert_array_equal(other[:3], all_[:3])


@pytest.mark.parametrize(
    'tokens, most, slots', [(9, 64, 64), (64, 64, 64), (9, 256, 256), (9, 257, 512), (257, 257, 512), (1280, 2000, 1280)]
)
def test_a_long_cache_is_whole_blocks(tokens, most, slots):
    assert decoding.cache_slots(tokens, most) == slots
