"""Advantages and token weights against numbers worked out by hand."""

import dataclasses

import numpy as np
import pytest
from group_builders import graded, make_group, masked
from hypothesis import given, strategies as st

from bapo_jax.groups import Batch, make_batch, sampled
from bapo_jax.learner.credit import (
    ADVANTAGES,
    AGGREGATIONS,
    advantages,
    gae,
    group_advantages,
    token_weights,
    value_advantages,
    whitened,
)  # fmt: skip


def groups_of(*rewards):
    """A group for each list of rewards."""
    groups = [make_group(i, 0, G=len(r)) for i, r in enumerate(rewards)]
    return [graded(g.prompt, g.responses, g.verdicts, rewards=r) for g, r in zip(groups, rewards, strict=True)]


def of(kind, *rewards):
    """The advantages of groups with these rewards, each normalised by itself."""
    groups = groups_of(*rewards)
    return group_advantages(make_batch(groups, ['x1'] * len(groups)), kind)


ONE_RIGHT = [1.0] + [0.0] * 7


@pytest.mark.parametrize(
    'kind, right, wrong',
    [
        ('group_std', 2.47487, -0.35355),  # (1 - 1/8) / (sqrt(1/8) + 1e-6), and -1/8 over the same
        ('paper_eq2', 2.64574, -0.37796),  # (1 - 1/8) / sqrt(7/64 + 1e-6)
    ],
)
def test_one_of_eight_right(kind, right, wrong):
    [advantage] = of(kind, ONE_RIGHT)
    assert advantage.dtype == np.float32
    np.testing.assert_allclose(advantage, [right] + [wrong] * 7, rtol=0, atol=2e-5)


@pytest.mark.parametrize('kind', ADVANTAGES)
@pytest.mark.parametrize('reward', [0.0, 1.0, 0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(kind, reward):
    for G in (2, 3, 7, 8):
        for advantage in of(kind, [reward] * G, [reward] * G):
            assert advantage.shape == (G,) and (advantage == 0).all()


@pytest.mark.parametrize('kind', ADVANTAGES)
@given(k=st.integers(1, 15), G=st.just(16), shuffle=st.permutations(range(16)))
def test_mean_is_zero_sign_follows_the_reward_and_order_does_not_matter(kind, k, G, shuffle):
    rewards = (np.arange(G) < k).astype(np.float32)[list(shuffle)]
    [advantage] = of(kind, rewards)
    assert abs(advantage.mean()) < 1e-6
    assert ((advantage > 0) == (rewards == 1)).all()
    # Each value is that of its reward alone.
    assert len({float(a) for a in advantage}) == 2
    [unshuffled] = of(kind, (np.arange(G) < k).astype(np.float32))
    np.testing.assert_array_equal(advantage, unshuffled[list(shuffle)])


@pytest.mark.parametrize('kind', ADVANTAGES)
def test_groups_do_not_see_each_other(kind):
    rewards = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    together = of(kind, *rewards)
    np.testing.assert_array_equal(together, [of(kind, r)[0] for r in rewards])
    if kind not in ('over_mean', 'focal'):  # which weigh rare successes more
        np.testing.assert_allclose(together[0], -together[1][::-1], rtol=1e-6)
    assert (together[2] == 0).all()


@pytest.mark.parametrize('kind', ADVANTAGES)
def test_groups_that_share_a_number_are_normalised_together(kind):
    """A group of four and a group of two with one number are one of six; the third group keeps to itself."""
    a, b, c = groups_of([1, 0, 0, 0], [0.5, 2], [1, 0, 0])
    numbers = tuple(np.full(n, i, np.int32) for n, i in ((4, 7), (2, 7), (3, 0)))
    shared = group_advantages(Batch((a, b, c), ('x1', 'replay', 'x1'), numbers), kind)
    [joined] = of(kind, [1, 0, 0, 0, 0.5, 2])
    np.testing.assert_array_equal(np.concatenate(shared[:2]), joined)
    np.testing.assert_array_equal(shared[2], of(kind, [1, 0, 0])[0])
    assert [len(x) for x in shared] == [4, 2, 3]
    assert np.abs(shared[0] - of(kind, [1, 0, 0, 0])[0]).max() > 0.1  # alone it would have others


@pytest.mark.parametrize('kind', ADVANTAGES)
def test_a_group_may_be_split_into_normalisation_groups(kind):
    [group] = groups_of([1, 0, 3, 1])
    [split] = group_advantages(Batch((group,), ('x1',), (np.array([0, 0, 1, 1], np.int32),)), kind)
    np.testing.assert_array_equal(split, np.concatenate(of(kind, [1, 0], [3, 1])))


def test_a_group_of_equal_rewards_has_an_advantage_where_it_shares_a_number_with_others():
    a, b = groups_of([1, 1], [0, 0])
    numbers = (np.zeros(2, np.int32), np.zeros(2, np.int32))
    together = group_advantages(Batch((a, b), ('x1', 'x1'), numbers), 'group_std')
    assert (together[0] > 0.5).all() and (together[1] < -0.5).all()


def test_fractions_of_a_reward_change_advantages_and_not_k():
    plain = make_group(0, 2, G=4)
    shaped = graded(plain.prompt, plain.responses, plain.verdicts, rewards=[1.0, 1.0, 0.5, 0.0])
    binary, fractions = group_advantages(make_batch([plain, shaped], ['x1', 'x1']), 'group_std')
    assert plain.correct == shaped.correct == 2
    assert binary[2] == binary[3] < 0
    # mean 5/8; squared deviations 9/64, 9/64, 1/64, 25/64 sum to 11/16, over ddof 1: 11/48
    std = np.sqrt(11 / 48) + 1e-6
    np.testing.assert_allclose(fractions, np.array([3 / 8, 3 / 8, -1 / 8, -5 / 8]) / std, rtol=1e-6)


@pytest.mark.parametrize('kind', ADVANTAGES)
@given(
    st.lists(st.booleans(), min_size=2, max_size=16),
    st.sampled_from([(0, 1), (-1, 1), (-1, 0), (0.1, 1), (-2, -1)]),
    st.lists(st.floats(0, 0.5), min_size=16, max_size=16),
)
def test_whatever_the_rewards_an_advantage_has_the_sign_of_reward_less_mean_and_a_bound(kind, right, levels, penalties):
    """Rewards of any sign, less penalties (an overlong answer): no division by a mean of 0, no right answer pushed down for it."""
    wrong_reward, right_reward = levels
    rewards = np.array([right_reward if r else wrong_reward for r in right]) - np.array(penalties[: len(right)])
    [advantage] = of(kind, rewards.astype(np.float32))
    rewards = rewards.astype(np.float32).astype(np.float64)
    above = rewards - rewards.mean()
    clear = np.abs(above) > 1e-6
    assert (np.sign(advantage[clear]) == np.sign(above[clear])).all()
    n = len(rewards)
    bound = {'over_mean': n * np.ptp(rewards), 'centred': np.ptp(rewards)}.get(kind, np.sqrt(n))
    assert np.abs(advantage).max() <= bound * (1 + 1e-6) + 1e-6
    assert abs(advantage.mean()) <= 1e-6 * max(1, np.abs(advantage).max())


def test_over_mean_by_hand():
    """One of four right: 0/1 as ever; ±1 doubles the range, not the pass rate; half a point is half a success of one in four."""
    np.testing.assert_allclose(of('over_mean', [1, 0, 0, 0])[0], [3, -1, -1, -1], rtol=1e-5)
    np.testing.assert_allclose(of('over_mean', [1, -1, -1, -1])[0], [6, -2, -2, -2], rtol=1e-5)
    np.testing.assert_allclose(of('over_mean', [0.5, 0, 0, 0])[0], [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    np.testing.assert_allclose(of('over_mean', [1, 1, -0.5, 0.5])[0], np.array([1, 1, -2, 0]) * 0.5 / 0.625, rtol=1e-5)
    np.testing.assert_allclose(of('over_mean', [0, -1, -1, -1])[0], [0.75, -0.25, -0.25, -0.25], rtol=1e-5)
    for k in range(1, 8):  # bit for bit what it was
        rewards = (np.arange(8) < k).astype(np.float64)
        want = ((rewards - rewards.mean()) / (rewards.mean() + 1e-6)).astype(np.float32)
        np.testing.assert_array_equal(of('over_mean', rewards)[0], want)


def test_focal_by_hand():
    """k of 8 right: sqrt(1 - k/8) times group_std's. Other rewards of two values are a change of scale."""
    for k in range(1, 8):
        rewards = (np.arange(8) < k).astype(np.float64)
        [plain] = of('group_std', rewards)
        for shift, scale in ((0, 1), (-1, 2), (0.25, 0.5)):
            np.testing.assert_allclose(of('focal', shift + scale * rewards)[0], np.sqrt(1 - k / 8) * plain, rtol=2e-5)
    # mean 5/8 of the way from 0 to 1; the sum of squared deviations is 11/16, over ddof 1: 11/48
    want = np.sqrt(3 / 8) * np.array([3 / 8, 3 / 8, -1 / 8, -5 / 8]) / np.sqrt(11 / 48)
    np.testing.assert_allclose(of('focal', [1, 1, 0.5, 0])[0], want, rtol=1e-5)


def test_all_tokens_of_a_response_share_its_advantage():
    groups = groups_of([1, 0, 0.5], [0, 1])
    batch = make_batch(groups, ['x1', 'x1'])
    by_response, by_token = group_advantages(batch, 'group_std'), advantages(batch, 'group_std')
    for group, of_responses, of_tokens in zip(groups, by_response, by_token, strict=True):
        for response, a, each in zip(group.responses, of_responses, of_tokens, strict=True):
            assert each.dtype == np.float32 and each.tolist() == [float(a)] * len(response.tokens)


def test_a_batch_without_groups_has_no_advantages():
    assert of('group_std') == [] == advantages(make_batch([], []), 'group_std')


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=64), st.sampled_from(sorted(AGGREGATIONS)))
def test_the_weights_of_all_tokens_sum_to_one(lengths, aggregation):
    """To the mean share of the limit, where they are divided by it."""
    lengths = np.array(lengths)
    weights = token_weights(lengths, aggregation, 3000)
    assert weights.shape == lengths.shape and weights.dtype == np.float32
    total = lengths.mean() / 3000 if aggregation == 'seq_mean_token_sum' else 1
    assert (weights.astype(np.float64) * lengths).sum() == pytest.approx(total, abs=1e-6)


def test_token_weights_by_hand():
    np.testing.assert_allclose(token_weights([1, 3], 'token_mean', 8), [1 / 4, 1 / 4], rtol=1e-6)
    np.testing.assert_allclose(token_weights([1, 3], 'seq_mean_token_mean', 8), [1 / 2, 1 / 6], rtol=1e-6)


# ---- advantages from values

rates = st.sampled_from([0.0, 0.5, 0.95, 1.0])
numbers = st.floats(-2, 2, width=32)


@given(st.lists(st.tuples(numbers, st.lists(numbers, max_size=9)), max_size=6), rates, rates)
def test_gae_is_the_sum_of_discounted_errors(responses, gamma, gae_lambda):
    """A_t = Σ_l (γλ)^l δ_{t+l}, each response by itself, from the definition and not from the recursion."""
    got = gae(np.array([r for r, _ in responses]), [np.array(v) for _, v in responses], gamma, gae_lambda)
    for (reward, values), advantage in zip(responses, got, strict=True):
        n = len(values)
        error = [(gamma * values[t + 1] if t + 1 < n else reward) - values[t] for t in range(n)]
        want = [sum((gamma * gae_lambda) ** (u - t) * error[u] for u in range(t, n)) for t in range(n)]
        np.testing.assert_allclose(advantage, want, rtol=0, atol=1e-9)


@given(numbers, st.lists(numbers, min_size=1, max_size=9))
def test_without_discount_an_advantage_is_the_reward_less_the_value(reward, values):
    [advantage] = gae(np.array([reward]), [np.array(values)], 1.0, 1.0)
    np.testing.assert_allclose(advantage, reward - np.array(values), rtol=0, atol=1e-9)


def valued(rewards, lengths, masks=None):
    """A batch of one group a list of rewards, its responses of these lengths, and values drawn for every token."""
    rng, groups = np.random.default_rng(0), groups_of(*rewards)
    for i, (group, of_group) in enumerate(zip(groups, lengths, strict=True)):
        responses = [
            sampled(np.zeros(n, np.int32), np.zeros(n, np.float32), r.finish, 0)
            for r, n in zip(group.responses, of_group, strict=True)
        ]
        if masks:
            responses = [r if m is None else masked(r, m) for r, m in zip(responses, masks[i], strict=True)]
        groups[i] = dataclasses.replace(group, responses=tuple(responses))
    values = [[rng.normal(size=n).astype(np.float32) for n in of_group] for of_group in lengths]
    return make_batch(groups, ['x1'] * len(groups)), values


def test_returns_are_advantages_and_values_and_without_discount_the_reward():
    batch, values = valued([[1, 0], [0.5, 2]], [[3, 1], [2, 5]])
    advantage, returns = value_advantages(batch, values, 1.0, 1.0)
    for g, a, v, of_group in zip(batch.groups, advantage, values, returns, strict=True):
        for reward, x, y, r in zip(g.rewards, a, v, of_group, strict=True):
            assert x.dtype == r.dtype == np.float32
            np.testing.assert_allclose(x, reward - y, rtol=0, atol=1e-6)
            np.testing.assert_allclose(r, reward, rtol=0, atol=1e-6)
    advantage, returns = value_advantages(batch, values, 0.9, 0.8)
    np.testing.assert_allclose(returns[1][1], advantage[1][1] + values[1][1], rtol=0, atol=1e-6)
    assert np.ptp(returns[1][1]) > 0.01


def test_time_passes_on_trained_tokens_alone():
    """With a loss mask, the trained tokens get what they would if the response were those alone; the last has the reward."""
    mask = np.array([False, True, True, False, True, False])
    batch, values = valued([[1, 0]], [[6, 4]], masks=[(mask, None)])
    alone, _ = valued([[1, 0]], [[3, 4]])
    of_mask, of_alone = (
        value_advantages(b, v, 0.9, 0.8) for b, v in ((batch, values), (alone, [[values[0][0][mask], values[0][1]]]))
    )
    for got, want in zip(of_mask, of_alone, strict=True):
        np.testing.assert_array_equal(got[0][0][mask], want[0][0])
        np.testing.assert_array_equal(got[0][1], want[0][1])
        assert (got[0][0][~mask] == 0).all()


def test_whitening_is_over_the_trained_tokens_of_the_batch():
    advantage = [[np.array([1, 3], np.float32)], [np.array([8, 100], np.float32)]]
    trained = [[np.array([True, True])], [np.array([True, False])]]
    # mean 4, variance (9 + 1 + 16) / 3
    std = np.sqrt(26 / 3)
    got = whitened(advantage, trained)
    assert got[1][0].dtype == np.float32
    np.testing.assert_allclose(got[0][0], [-3 / std, -1 / std], rtol=1e-6)
    np.testing.assert_allclose(got[1][0], [4 / std, 0], rtol=1e-6)


def test_a_batch_without_groups_has_no_values_either():
    advantage, returns = value_advantages(make_batch([], []), [], 1.0, 1.0)
    assert whitened(advantage, []) == returns == []
