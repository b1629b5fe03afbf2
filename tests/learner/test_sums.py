"""The sums of a mini-batch's parts: three kinds add up, and `largest` is the largest of all parts."""

import jax
import numpy as np

from bapo_jax.learner.sums import Sums, joined_sums, over_mesh


def parts(rng, number):
    return [
        Sums({'loss': rng.normal(size=())}, {'kl': rng.normal(size=())}, {'gap': rng.random(4)}, {'gap': rng.random(4)})
        for _ in range(number)
    ]


def assert_joined(result, of):
    for kind in ('weighted', 'over_tokens', 'by_origin'):
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
