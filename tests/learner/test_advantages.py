"""Group advantages against numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from bapo_jax.learner.advantages import ADVANTAGES, group_advantage


def one_right(G=8):
    return np.array([[1.0] + [0.0] * (G - 1)], np.float32)


@pytest.mark.parametrize(
    'kind, right, wrong',
    [
        ('group_std', 2.47487, -0.35355),  # (1 - 1/8) / (sqrt(1/8) + 1e-6), and -1/8 over the same
        ('paper_eq2', 2.64574, -0.37796),  # (1 - 1/8) / sqrt(7/64 + 1e-6)
    ],
)
def test_one_of_eight_right(kind, right, wrong):
    advantage = group_advantage(one_right(), kind)
    assert advantage.dtype == np.float32
    np.testing.assert_allclose(advantage, [[right] + [wrong] * 7], rtol=0, atol=2e-5)


@pytest.mark.parametrize('kind', ADVANTAGES)
@pytest.mark.parametrize('reward', [0.0, 1.0, 0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(kind, reward):
    for G in (2, 3, 7, 8):
        advantage = group_advantage(np.full((2, G), reward, np.float32), kind)
        assert (advantage == 0).all()


@pytest.mark.parametrize('kind', ADVANTAGES)
@given(k=st.integers(1, 15), G=st.just(16), shuffle=st.permutations(range(16)))
def test_mean_is_zero_sign_follows_the_reward_and_order_does_not_matter(kind, k, G, shuffle):
    rewards = (np.arange(G) < k).astype(np.float32)[list(shuffle)]
    advantage = group_advantage(rewards[None], kind)[0]
    assert abs(advantage.mean()) < 1e-6
    assert ((advantage > 0) == (rewards == 1)).all()
    # Each value is that of its reward alone.
    assert len({float(a) for a in advantage}) == 2
    unshuffled = group_advantage((np.arange(G) < k).astype(np.float32)[None], kind)[0]
    np.testing.assert_array_equal(advantage, unshuffled[list(shuffle)])


@pytest.mark.parametrize('kind', ADVANTAGES)
def test_groups_do_not_see_each_other(kind):
    rewards = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], np.float32)
    together = group_advantage(rewards, kind)
    np.testing.assert_array_equal(together, np.concatenate([group_advantage(r[None], kind) for r in rewards]))
    np.testing.assert_allclose(together[0], -together[1, ::-1], rtol=1e-6)
    assert (together[2] == 0).all()


def test_unknown_kind_is_an_error_that_names_the_field():
    with pytest.raises(ValueError, match="learner.advantage='median'.*group_std"):
        group_advantage(one_right(), 'median')
