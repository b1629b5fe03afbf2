"""Replay without removal: a uniform sample of the last N groups, none before there is a batch, uses counted."""

import numpy as np
import pytest
from group_builders import assert_same_arrays, assert_same_groups, make_group
from ml_collections import ConfigDict

from bapo_jax.groups import REPLAY, X1
from bapo_jax.replay import PURPOSES
from bapo_jax.replay.fifo import Fifo


def make(capacity=12, ratio=2, batch_groups=3) -> Fifo:
    return Fifo(ConfigDict({'fifo': {'capacity': capacity, 'ratio': ratio}}), batch_groups)


def rng_of(step, seed=0):
    return lambda purpose: np.random.default_rng([seed, step, PURPOSES.index(purpose)])


def no_score(batch):
    raise AssertionError('nothing is scored')


def fresh_of(step):
    """Three groups of other prompts than those of the steps around; one could not be judged at every third step."""
    return [make_group(3 * (step % 4) + i, (step + i) % 5, 4, step, infra=i == 2 and step % 3 == 0) for i in range(3)]


def step_of(fifo, step, seed=0):
    assert fifo.hard_prompts(step, rng_of(step, seed)) == []
    batch = fifo.compose(step, fresh_of(step), [], rng_of(step, seed), no_score)
    told = fifo.times_trained(batch)
    fifo.add(step, fresh_of(step), batch)
    return batch, told


def test_a_batch_is_of_the_last_n_groups_and_each_is_counted():
    fifo, came, uses = make(), [], {}
    for step in range(1, 30):
        batch, told = step_of(fifo, step)
        came += [g for g in fresh_of(step) if not g.infra_error]
        last = [id(g) for g in came[-12:]]
        assert len(batch.groups) == (6 if len(came) >= 6 else 0)  # waits for a batch
        assert len({id(g) for g in batch.groups}) == len(batch.groups)  # without replacement
        assert {id(g) for g in batch.groups} <= set(last)
        assert batch.origins == tuple(sorted(batch.origins, reverse=True))  # x1, then replay
        assert [g.step == step for g in batch.groups] == [o == X1 for o in batch.origins]
        for g, n in zip(batch.groups, told, strict=True):
            uses[id(g)] = uses.get(id(g), 0) + 1
            assert n == uses[id(g)]
        assert [id(g) for g in fifo.groups] == last and fifo.uses == [uses.get(i, 0) for i in last]
        metrics, replayed = fifo.metrics(step), batch.of_origin(REPLAY)
        assert metrics['buffer/fifo/groups'] == len(last)
        if replayed:
            assert metrics['bapo/replay/age'] == np.mean([step - g.step for g in replayed]) > 0
            assert metrics['bapo/replay/uses'] == np.mean([uses[id(g)] - 1 for g in replayed])
            assert metrics['bapo/replay/mean_reward'] == pytest.approx(np.mean([g.accuracy for g in replayed]))


def test_every_group_of_the_last_n_has_the_same_chance_the_fresh_ones_too():
    """Each of 12 groups is in 6 / 12 of the batches: χ² over 1,000 draws, whose counts have variance n p (1 - p) and sum 6,000."""
    fifo = make()
    for step in range(1, 10):
        step_of(fifo, step)
    counts = {id(g): 0 for g in [*fifo.groups, *fresh_of(10)][-12:]}
    for seed in range(1000):
        for g in fifo.compose(10, fresh_of(10), [], rng_of(10, seed), no_score).groups:
            counts[id(g)] += 1
    deviation = np.array([*counts.values()]) - 500
    assert len(deviation) == 12 and deviation.sum() == 0
    assert (deviation**2).sum() * 11 / (12 * 1000 * 0.25) < 31.3  # 11 degrees of freedom, p = 0.001


def test_compose_changes_nothing_and_repeats():
    fifo = make()
    for step in range(1, 6):
        step_of(fifo, step)
    before = fifo.state()
    first, second = (fifo.compose(6, fresh_of(6), [], rng_of(6), no_score) for _ in range(2))
    assert [id(g) for g in first.groups] == [id(g) for g in second.groups]
    assert_same_arrays(fifo.state(), before)


@pytest.mark.parametrize('steps', [0, 1, 7])
def test_a_restored_memory_goes_on_bit_for_bit(steps):
    fifo, again = make(), make()
    for step in range(1, steps + 1):
        step_of(fifo, step)
    step_of(again, 3)  # what it held before is forgotten
    saved = fifo.state()
    assert all(a.size for a in saved.values())
    again.restore({name: a.copy() for name, a in saved.items()})
    assert_same_arrays(again.state(), saved)
    for step in range(steps + 1, steps + 7):
        (a, told), (b, told_again) = step_of(fifo, step), step_of(again, step)
        assert (a.origins, told) == (b.origins, told_again) and fifo.metrics(step) == again.metrics(step)
        assert_same_groups(a.groups, b.groups)
    with pytest.raises(ValueError, match=r'holds 12 groups, more than replay\.fifo\.capacity=6'):
        make(capacity=6).restore(fifo.state())
