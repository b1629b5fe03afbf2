"""Log-probs of packed rows. Tolerances, float32: values 2e-5, gradients 1e-5 of the largest entry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bapo_jax.cluster.split import Split
from bapo_jax.learner.head import Tile, head
from bapo_jax.learner.logprobs import Compute, token_logprobs
from bapo_jax.learner.mini_batch import Sequences
from bapo_jax.models.attention import xla

ATOL = 2e-5


def layout(rows, T):
    """Rows of lists of sequences -> tokens, segment, position [B, T] and, for every token, (sequence, index) or (-1, -1)."""
    tokens, segment, position = (np.zeros((len(rows), T), np.int32) for _ in range(3))
    for r, row in enumerate(rows):
        start = 0
        for s, sequence in enumerate(row, start=1):
            at = slice(start, start + len(sequence))
            tokens[r, at], segment[r, at], position[r, at] = sequence, s, np.arange(len(sequence))
            start = at.stop
    return tokens, segment, position


@pytest.fixture(scope='module')
def sequences():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 96, n) for n in (9, 7, 5, 3)]


def of_sequences(x_BxT, rows):
    """The entries that are defined (a sequence's first token is not), in the order of the rows, as one list of arrays."""
    parts = []
    for r, row in enumerate(rows):
        start = 0
        for sequence in row:
            parts.append(np.asarray(x_BxT[r, start + 1 : start + len(sequence)]))
            start += len(sequence)
    return parts


def weights_like(rows, T):
    """A weight for every defined token that depends on the sequence and index alone, so that losses are comparable."""
    weight = np.zeros((len(rows), T), np.float32)
    for r, row in enumerate(rows):
        start = 0
        for sequence in row:
            n = len(sequence)
            weight[r, start + 1 : start + n] = np.sin(np.arange(1, n) + sequence[0])
            start += n
    return weight


@pytest.fixture(scope='module')
def value_and_gradient(policy):
    def loss(params, tokens, segment, position, weight, compute):
        sequences = Sequences(tokens, segment, position, response=jnp.where(position > 0, segment, 0))
        model = nnx.merge(policy.graph, params)
        logp, entropy, *_ = token_logprobs(model, sequences, 0.8, compute, entropy_gradient=True)
        return jnp.sum(weight * (logp + 0.5 * entropy))

    return jax.jit(jax.value_and_grad(loss), static_argnums=5)


def assert_same_gradient(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.abs(y).max() > 0
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * float(jnp.abs(y).max()))


LAYOUTS = {
    'packed': ([[0, 3], [1, 2]], 12),
    'packed in another order': ([[3, 0], [2, 1]], 12),
    'all in one row': ([[2, 0, 1, 3]], 24),
    'over-padded': ([[0], [1, 2], [], [3], []], 32),
}


@pytest.mark.parametrize('name', LAYOUTS)
def test_packed_is_unpacked_is_over_padded(name, policy, sequences, score, value_and_gradient):
    indices, T = LAYOUTS[name]
    rows = [[sequences[i] for i in row] for row in indices]
    alone = [[s] for s in sequences]
    order = [i for row in indices for i in row]
    got, want = (score(policy.params, *layout(r, t), 0.8) for r, t in ((rows, T), (alone, 9)))
    for x, y in zip(got, want, strict=True):
        y = of_sequences(y, alone)
        for part, i in zip(of_sequences(x, rows), order, strict=True):
            np.testing.assert_allclose(part, y[i], rtol=0, atol=ATOL)
    value, gradient = value_and_gradient(policy.params, *layout(rows, T), weights_like(rows, T), Compute())
    want_value, want_gradient = value_and_gradient(policy.params, *layout(alone, 9), weights_like(alone, 9), Compute())
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert_same_gradient(gradient, want_gradient)


@pytest.mark.slow
@pytest.mark.parametrize('tile, remat', [((1, 96), 'none'), ((7, 96), 'none'), ((48, 1000), 'full'), ((16, 25), 'none')])
def test_in_tiles_or_rematerialised_is_full(tile, remat, policy, sequences, score, value_and_gradient):
    """Tiles of tokens and of words, the last of each not full."""
    rows, compute = [sequences, sequences[::-1]], Compute(remat=remat, tile=Tile(*tile))
    full, cut = (score(policy.params, *layout(rows, 24), 0.8, compute=c) for c in (Compute(), compute))
    for a, b in zip(cut, full, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=ATOL)
    value, gradient = value_and_gradient(policy.params, *layout(rows, 24), weights_like(rows, 24), compute)
    want_value, want_gradient = value_and_gradient(policy.params, *layout(rows, 24), weights_like(rows, 24), Compute())
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert_same_gradient(gradient, want_gradient)


@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_log_prob_and_entropy_are_their_definitions(temperature, policy, sequences, score):
    tokens, segment, position = layout([[sequences[0]]], 9)
    logp, entropy = (np.asarray(x) for x in score(policy.params, tokens, segment, position, temperature))
    model = nnx.merge(policy.graph, policy.params)
    logits = model.logits(model(tokens, position, lambda *qkv: xla(*qkv, segment)))
    logits = np.asarray(logits, np.float64)[0] / temperature
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    assert logp[0, 0] == entropy[0, 0] == 0
    np.testing.assert_allclose(logp[0, 1:], np.log(p)[np.arange(8), tokens[0, 1:]], rtol=0, atol=ATOL)
    np.testing.assert_allclose(entropy[0, 1:], -(p * np.log(p)).sum(axis=-1)[:8], rtol=0, atol=ATOL)


@pytest.mark.parametrize('temperature', [1.0, 0.6])
@pytest.mark.parametrize('entropy_gradient', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_heads_gradient_is_that_of_the_definitions_at_a_temperature(temperature, entropy_gradient):
    """Σ a log-prob + b entropy by states and weights; the entropy is a constant where its gradient is not wanted."""
    rng = np.random.default_rng(0)
    hidden, weight, a, b = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((6, 4), (9, 4), 6, 6))
    token, scale = jnp.asarray(rng.integers(0, 9, 6), jnp.int32), jnp.float32(temperature)

    def by_rule(hidden, weight):
        logp, entropy = head(hidden, weight, token, jnp.int32(6), scale, Split(), entropy_gradient, Tile(6, 5))
        return jnp.sum(a * logp + b * entropy)

    def by_definition(hidden, weight):
        logp = jax.nn.log_softmax(hidden @ weight.T / scale)
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=1)
        return jnp.sum(a * logp[jnp.arange(6), token] + b * (entropy if entropy_gradient else jax.lax.stop_gradient(entropy)))

    (value, got), (want_value, want) = (jax.value_and_grad(f, argnums=(0, 1))(hidden, weight) for f in (by_rule, by_definition))
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert_same_gradient(got, want)


def test_segments_do_not_see_each_other(policy, sequences, score):
    """Another neighbour of the same length, before or after: not one bit changes."""
    a, b, c = sequences[0], sequences[1], (sequences[1] + 1) % 96
    for one, other, at in (([a, b], [a, c], slice(1, 9)), ([b, a], [c, a], slice(8, 16))):
        x, y = (score(policy.params, *layout([row], 24), 1.0) for row in (one, other))
        for before, after in zip(x, y, strict=True):
            np.testing.assert_array_equal(before[0, at], after[0, at])
    assert np.abs(x[0] - y[0]).max() > 1e-3  # the neighbour itself did change
