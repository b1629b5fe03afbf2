"""FreshPER: priorities against their formula, draws against their probabilities, weights, and an exact restore."""

import numpy as np
import pytest
from group_builders import assert_same_arrays, assert_same_groups, make_group
from ml_collections import ConfigDict

from bapo_jax.groups import REPLAY, X1
from bapo_jax.replay import PURPOSES
from bapo_jax.replay.freshper import Freshper


def make(capacity=40, ratio=1, batch_groups=4, base='advantage', tau=3.0, alpha=0.6, beta=0.4) -> Freshper:
    fields = {'capacity': capacity, 'ratio': ratio, 'base': base, 'tau': tau, 'alpha': alpha, 'beta': beta}
    return Freshper(ConfigDict({'freshper': fields}), batch_groups)


def rng_of(step, seed=0):
    return lambda purpose: np.random.default_rng([seed, step, PURPOSES.index(purpose)])


def no_score(batch):
    raise AssertionError('nothing is scored')


def fresh_of(step):
    """0, 1, 2 and 3 or 4 of 4 right; the last could not be judged at every fourth step."""
    return [make_group(i, (i + step) % 5, 4, step, infra=i == 3 and step % 4 == 0) for i in range(4)]


def step_of(freshper, step, seed=0):
    assert freshper.hard_prompts(step, rng_of(step, seed)) == []
    batch = freshper.compose(step, fresh_of(step), [], rng_of(step, seed), no_score)
    told = freshper.times_trained(batch)
    freshper.add(step, fresh_of(step), batch)
    return batch, told


def after(steps, **changes):
    freshper = make(**changes)
    for step in range(1, steps + 1):
        step_of(freshper, step)
    return freshper


@pytest.mark.parametrize('base', ['advantage', 'reward'])
def test_the_priority_is_base_times_age_decay_to_the_alpha(base):
    """By the formula, one group after the other: P ∝ (base · exp(-age / τ))^α."""
    freshper = after(6, base=base)
    priorities = []
    for g in freshper.groups:
        r = [float(x) for x in g.rewards]
        mean = sum(r) / 4
        std = (sum((x - mean) ** 2 for x in r) / 3) ** 0.5
        worth = sum(abs(x - mean) for x in r) / 4 / (std + 1e-6) if base == 'advantage' else sum(map(abs, r)) / 4
        priorities.append((worth * np.exp(-(9 - g.step) / 3.0)) ** 0.6)
    np.testing.assert_allclose(freshper.probabilities(9), np.array(priorities) / sum(priorities), rtol=1e-12)
    assert (freshper.probabilities(9) == 0).any()


def test_a_batch_is_all_fresh_groups_and_as_many_earlier_ones_with_weights():
    freshper, uses = make(ratio=2), {}
    for step in range(1, 15):
        held, chance = list(freshper.groups), freshper.probabilities(step)
        batch, told = step_of(freshper, step)
        x1, replayed = batch.of_origin(X1), batch.of_origin(REPLAY)
        assert [id(g) for g in x1] == [id(g) for g in fresh_of(step) if not g.infra_error]
        assert batch.origins == (X1,) * len(x1) + (REPLAY,) * len(replayed)
        assert len(replayed) == min(8, sum(0 < g.correct < 4 for g in held))  # a group of equal rewards has no priority
        place = {id(g): i for i, g in enumerate(held)}
        weight = np.array([(len(held) * chance[place[id(g)]]) ** -0.4 for g in replayed])
        if len(replayed):
            assert batch.weights[: len(x1)] == (1.0,) * len(x1)
            np.testing.assert_allclose(batch.weights[len(x1) :], weight / weight.max(), rtol=1e-12)
            assert freshper.metrics(step)['bapo/replay/weight'] == pytest.approx((weight / weight.max()).mean())
        else:
            assert batch.weights == ()
        for g, n in zip(batch.groups, told, strict=True):
            uses[id(g)] = uses.get(id(g), 0) + 1
            assert n == uses[id(g)]
    taken = batch.take([len(x1), 0])
    assert taken.weights == (batch.weights[len(x1)], 1.0)


def test_a_draw_of_one_has_the_probabilities():
    freshper = after(3, batch_groups=4)
    chance, counts = freshper.probabilities(4), np.zeros(len(freshper.groups))
    one = make(batch_groups=4)
    one.restore(freshper.state())
    one._batch_groups = 1  # one draw a step
    place = {id(g): i for i, g in enumerate(one.groups)}
    for seed in range(2000):
        [g] = one.compose(4, [], [], rng_of(4, seed), no_score).groups
        counts[place[id(g)]] += 1
    some = chance > 0
    assert not counts[~some].any()
    squares = (counts - 2000 * chance)[some] ** 2 / (2000 * chance)[some]
    assert squares.sum() < 2 * some.sum() + 12  # far above what chance gives with as many degrees of freedom


def test_without_decay_alpha_and_beta_the_draw_is_uniform_and_unweighted():
    freshper = after(5, tau=1e12, alpha=0.0, beta=0.0, base='reward')
    assert len(set(freshper.probabilities(6))) == 1
    assert set(step_of(freshper, 6)[0].weights) == {1.0}


def test_of_two_groups_alike_the_older_is_drawn_less():
    """5 steps apart with τ = 2 and α = 0.6: by e^(-0.6 · 5 / 2)."""
    freshper = after(8, tau=2.0)
    chance = {(g.prompt.id, g.step): p for g, p in zip(freshper.groups, freshper.probabilities(9), strict=True)}
    assert chance[0, 1] / chance[0, 6] == pytest.approx(np.exp(-0.6 * 5 / 2))


@pytest.mark.parametrize('steps', [0, 1, 7])
def test_a_restored_memory_goes_on_bit_for_bit(steps):
    freshper, again = after(steps, capacity=10), make(capacity=10)
    step_of(again, 3)  # what it held before is forgotten
    saved = freshper.state()
    assert all(a.size for a in saved.values())
    again.restore({name: a.copy() for name, a in saved.items()})
    assert_same_arrays(again.state(), saved)
    for step in range(steps + 1, steps + 7):
        (a, told), (b, told_again) = step_of(freshper, step), step_of(again, step)
        assert (a.origins, a.weights, told) == (b.origins, b.weights, told_again)
        assert freshper.metrics(step) == again.metrics(step)
        assert_same_groups(a.groups, b.groups)
    with pytest.raises(ValueError, match=r'holds 10 groups, more than replay\.freshper\.capacity=9'):
        make(capacity=9).restore(freshper.state())


def test_more_fresh_groups_than_b_are_refused():
    with pytest.raises(ValueError, match=r'4 fresh groups of step 1 exceed learner\.batch_groups=3; pass fewer'):
        make(batch_groups=3).compose(1, fresh_of(1), [], rng_of(1), no_score)
