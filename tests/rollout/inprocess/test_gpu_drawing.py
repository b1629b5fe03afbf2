"""How a GPU chooses tokens: by the softmax, exactly enough, and with the log-probs that other devices give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from bapo_jax.rollout.inprocess import gpu_drawing
from bapo_jax.rollout.inprocess.drawing import VOCABULARY_BLOCK
from benchmarks.engine.sampling import decided_otherwise, logits_of

N, V = 1024, VOCABULARY_BLOCK + 17
choose = jax.jit(gpu_drawing.choose, static_argnames='greedy')
key_N = jax.random.split(jax.random.key(0), N)


@pytest.mark.parametrize('greedy, top_p', [(False, None), (False, 0.5), (True, None)])
def test_a_token_has_the_log_prob_of_the_whole_distribution(greedy, top_p):
    """Greedy takes the likeliest; the draws are not always that. A row's token depends on its own key and scores alone."""
    logits = np.random.default_rng(0).normal(0, 3, (N, V)).astype(np.float32)
    token, logp = map(np.asarray, choose(logits, key_N, greedy=greedy, top_p=top_p))
    np.testing.assert_allclose(logp, np.asarray(jax.nn.log_softmax(logits))[np.arange(N), token], rtol=0, atol=1e-5)
    assert (token == logits.argmax(axis=1)).all() == greedy
    others = np.where(np.arange(N)[:, None] == 7, logits, logits[::-1])
    assert choose(others, key_N, greedy=greedy, top_p=top_p)[0][7] == token[7]


@pytest.mark.parametrize('top_p, share', [(None, [0.1, 0.2, 0.4, 0.3]), (0.6, [0, 0, 4 / 7, 3 / 7])])
def test_words_come_in_proportion(top_p, share):
    """Four words in two blocks, one of them the last; with `top_p` the likeliest two. Chi-square at the 0.1 % level."""
    at, share = np.array([5, 700, VOCABULARY_BLOCK + 3, V - 1]), np.array(share)
    logits = np.full((N, V), -100, np.float32)
    logits[:, at] = np.log([0.1, 0.2, 0.4, 0.3]) + 3
    token = np.asarray(choose(logits, key_N, greedy=False, top_p=top_p)[0])
    seen = np.array([(token == word).sum() for word in at])
    assert seen.sum() == seen[share > 0].sum() == N
    assert scipy.stats.chisquare(seen[share > 0], N * share[share > 0]).pvalue > 1e-3


@pytest.mark.slow
def test_rounding_decides_next_to_no_draw():
    """Float32 is off by 2^-20 or so in each of two steps: .4 of 200,000 draws go wrong, and five but once in 10,000 times.

    Noise from 23 bits would be ∞ for one number in 2^23, and the draws have 208 million.
    """
    assert decided_otherwise(logits_of('flat', V), 200_000) < 5


def test_the_highest_random_number_has_finite_noise(monkeypatch):
    """Else a word would lose to those that the nucleus leaves out."""
    monkeypatch.setattr(jax.random, 'bits', lambda key, n: jnp.full(n, 2**32 - 1, jnp.uint32))
    assert np.isfinite(gpu_drawing.gumbel(jax.random.key(0), 3)).all()
