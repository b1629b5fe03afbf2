"""Rollout replay: what a batch has, what the memory keeps, how uses are counted, and a state that survives a restart."""

import numpy as np
import pytest
from group_builders import assert_same_arrays, ids, make_group
from ml_collections import ConfigDict

from bapo_jax.groups import REPLAY, X1
from bapo_jax.replay.rollout_replay import RolloutReplay


def make(B=6, fresh=3, capacity=6):
    return RolloutReplay(ConfigDict({'rollout_replay': {'fresh': fresh, 'capacity': capacity}}), B)


def step_of(replay, step, groups, seed=0):
    batch = replay.compose(step, groups, [], lambda purpose: np.random.default_rng([seed, step, len(purpose)]), None)
    uses = replay.times_trained(batch)
    replay.add(step, groups, batch)
    return batch, uses


def fresh(step, *prompt_ids):
    return [make_group(i, 4, step=step) for i in prompt_ids]


def test_a_batch_is_the_first_fresh_groups_and_earlier_ones_up_to_b():
    """The fourth fresh group is a reference: it is neither trained on nor kept."""
    replay = make()
    first, _ = step_of(replay, 1, fresh(1, 1, 2, 3, 99))
    assert ids(first.groups) == [1, 2, 3] and first.origins == (X1,) * 3
    second, uses = step_of(replay, 2, fresh(2, 4, 5, 6))
    assert ids(second.groups) == [4, 5, 6, 1, 2, 3] and second.origins == (X1,) * 3 + (REPLAY,) * 3
    assert uses == [1, 1, 1, 2, 2, 2] and ids(replay.groups) == [1, 2, 3, 4, 5, 6]
    third, _ = step_of(replay, 3, fresh(3, 7, 8, 9))
    assert ids(third.groups)[:3] == [7, 8, 9] and set(ids(third.groups)[3:]) < {1, 2, 3, 4, 5, 6} and len(third.groups) == 6
    assert ids(replay.groups) == [4, 5, 6, 7, 8, 9]
    assert [int(n[0]) for n in third.normalisation] == list(range(6))


def test_groups_are_drawn_uniformly_from_what_the_memory_held_before_the_step():
    counts = dict.fromkeys(range(6), 0)
    for seed in range(3000):
        replay = make(capacity=9)
        step_of(replay, 1, fresh(1, 0, 1, 2), seed)
        step_of(replay, 2, fresh(2, 3, 4, 5), seed)
        batch, _ = step_of(replay, 3, fresh(3, 6, 7, 8), seed)
        for prompt_id in ids(batch.of_origin(REPLAY)):
            counts[prompt_id] += 1
    np.testing.assert_allclose(np.array([*counts.values()]) / 3000, 0.5, atol=0.04)


def test_a_prompts_newest_group_replaces_its_earlier_one():
    replay = make()
    step_of(replay, 1, fresh(1, 1, 2, 3))
    batch, uses = step_of(replay, 2, fresh(2, 2, 4, 5))
    assert ids(batch.groups) == [2, 4, 5, 1, 2, 3] and {g.step for g in batch.of_origin(REPLAY)} == {1}
    assert uses == [1, 1, 1, 2, 2, 2]
    assert [(g.prompt.id, g.step) for g in replay.groups] == [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (5, 2)]
    for seed in range(20):
        batch = replay.compose(3, [], [], lambda purpose: np.random.default_rng(seed), None)
        assert {(g.prompt.id, g.step) for g in batch.groups} <= {(1, 1), (3, 1), (2, 2), (4, 2), (5, 2)}


def test_a_group_whose_verifier_failed_is_neither_trained_on_nor_kept():
    replay = make()
    batch, _ = step_of(replay, 1, [make_group(1, 4, step=1, infra=True), *fresh(1, 2, 3, 4)])
    assert ids(batch.groups) == [2, 3] == ids(replay.groups), 'the fourth is a reference'


def test_its_metrics_are_means_over_the_replayed_groups():
    replay = make()
    step_of(replay, 1, [make_group(i, k, step=1) for i, k in ((1, 0), (2, 4), (3, 8))])
    assert 'bapo/replay/age' not in replay.metrics(1)
    step_of(replay, 3, fresh(3, 4, 5, 6))
    found = replay.metrics(3)
    assert (found['bapo/replay/age'], found['bapo/replay/mean_reward'], found['bapo/replay/uses']) == (2.0, 0.5, 1.0)
    assert found['buffer/rollout_replay/groups'] == 6 and found['buffer/rollout_replay/bytes'] > 0


@pytest.mark.parametrize('steps', [0, 1, 4])
def test_a_restored_memory_goes_on_where_it_stood(steps):
    replay, again = make(), make()
    for step in range(1, steps + 1):
        step_of(replay, step, fresh(step, *range(2 * step, 2 * step + 3)))
    step_of(again, 1, fresh(1, 50, 51, 52))  # what it held before is forgotten
    again.restore(replay.state())
    assert_same_arrays(again.state(), replay.state())
    for step in range(steps + 1, steps + 4):
        (a, uses), (b, want) = (step_of(r, step, fresh(step, *range(2 * step, 2 * step + 3))) for r in (again, replay))
        assert ids(a.groups) == ids(b.groups) and uses == want
    assert_same_arrays(again.state(), replay.state())


def test_a_memory_above_its_capacity_is_refused():
    replay = make(capacity=6)
    step_of(replay, 1, fresh(1, 1, 2, 3))
    with pytest.raises(ValueError, match=r'holds 3 groups, more than replay\.rollout_replay\.capacity=2'):
        make(capacity=2).restore(replay.state())
