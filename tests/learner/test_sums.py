"""The sums of a mini-batch's parts: four kinds add up, and `largest` is the largest of all parts."""

import jax
import numpy as np

from bapo_jax.learner.sums import TOKENS, Sums, Updated, joined_sums, means, over_mesh


def parts(rng, number):
    return [
        Sums({'loss': rng.normal(size=())}, {'kl': rng.normal(size=())}, {'gap': rng.random(4)}, {'load': rng.random(6)}, {'gap': rng.random(4)})
        for _ in range(number)
    ]


def assert_joined(result, of):
    for kind in ('weighted', 'over_tokens', 'by_origin', 'counts'):
        for name, x in getattr(result, kind).items():
            np.testing.assert_allclose(x, sum(getattr(part, kind)[name] for part in of), rtol=1e-6)
    np.testing.assert_allclose(result.largest['gap'], np.max([part.largest['gap'] for part in of], axis=0), rtol=1e-6)


def test_micro_batches_join():
    a, b = parts(np.random.default_rng(0), 2)
    assert_joined(joined_sums(a, b), (a, b))


def test_devices_join():
    """Mapped axes stand for those of a mesh of 2 × 2."""
    of = parts(np.random.default_rng(1), 4)
    stacked = jax.tree.map(lambda *x: np.stack(x).reshape(2, 2, *np.shape(x[0])).astype(np.float32), *of)
    joined = jax.vmap(jax.vmap(over_mesh, axis_name='fsdp'), axis_name='data')(stacked)
    for i, j in np.ndindex(2, 2):
        assert_joined(jax.tree.map(lambda x: x[i, j], joined), of)


def test_a_mini_batch_of_traces_alone_counts_in_no_mean_over_tokens():
    def update(tokens, entropy, loss):
        return Updated(Sums({'actor/pg_loss': loss}, {'actor/entropy': entropy}, {TOKENS: np.array([tokens, 0.0])}), 1.0, 0)

    of_traces, own, more = update(0, 0.0, 0.0), update(4, 2.0, 3.0), update(2, 3.0, 3.0)
    got = means([of_traces, own, more], 'actor')
    assert got['actor/entropy'] == 1.0 and got['actor/pg_loss'] == 2.0
    assert 'actor/entropy' not in means([of_traces], 'actor')
