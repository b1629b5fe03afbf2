"""LUFFY: a trace takes the first place in each fresh group whose prompt has one, and all rewards of the group share a mean."""

import numpy as np
import pytest
from group_builders import assert_same_groups, graded, make_group
from ml_collections import ConfigDict

from bapo_jax.groups import X1, Author, Verdict
from bapo_jax.learner.credit import group_advantages
from bapo_jax.replay.luffy import Luffy
from bapo_jax.tasks.traces import trace


def demonstration(prompt_id, verdict=Verdict.CORRECT):
    """A judged trace, as a group of one response."""
    prompt = make_group(prompt_id, 1).prompt
    return graded(prompt, [trace(np.arange(3, dtype=np.int32) + prompt_id)], [verdict])


def make(*traces):
    replay = Luffy(ConfigDict(), 8)
    replay.receive({g.prompt.id: g for g in traces})
    return replay


def nothing(*_):
    raise AssertionError('LUFFY draws and scores nothing')


def compose(replay, fresh, step=1):
    assert replay.hard_prompts(step, nothing) == []
    batch = replay.compose(step, fresh, [], nothing, nothing)
    replay.add(step, fresh, batch)
    return batch


def test_a_trace_takes_the_first_place_and_the_group_keeps_its_size():
    fresh = [make_group(0, 2, step=5), make_group(1, 2, step=5)]
    given = demonstration(0)
    batch = compose(make(given), fresh, 5)
    mixed, plain = batch.groups
    assert plain is fresh[1] and batch.origins == (X1, X1)
    assert mixed.size == fresh[0].size == 8 and mixed.step == 5 and mixed.prompt is fresh[0].prompt
    assert mixed.responses == (*given.responses, *fresh[0].responses[1:])  # the very objects
    assert mixed.verdicts == (Verdict.CORRECT, *fresh[0].verdicts[1:])
    assert [r.by(Author.TRACE).all() for r in mixed.responses] == [True] + 7 * [False]


@pytest.mark.parametrize('verdict, reward', [(Verdict.CORRECT, 1.0), (Verdict.WRONG, 0.0)])
def test_the_mean_reward_of_a_group_includes_its_trace(verdict, reward):
    """A = r - mean of the trace's and the seven other rewards; the response that made room counts no more."""
    batch = compose(make(demonstration(0, verdict)), [make_group(0, 3)])
    rewards = np.array([reward, 1, 1, 0, 0, 0, 0, 0])
    [advantage] = group_advantages(batch, 'centred')
    np.testing.assert_allclose(advantage, rewards - rewards.mean(), atol=1e-7)


def test_where_all_fail_only_the_trace_has_a_positive_advantage_and_a_wrong_one_has_none():
    right, wrong = (compose(make(demonstration(0, v)), [make_group(0, 0)]) for v in (Verdict.CORRECT, Verdict.WRONG))
    np.testing.assert_allclose(group_advantages(right, 'centred')[0], [7 / 8] + 7 * [-1 / 8])
    assert not group_advantages(wrong, 'centred')[0].any()


def test_a_group_with_an_infrastructure_error_is_left_out_with_its_trace():
    fresh = [make_group(0, 2, infra=True), make_group(1, 2)]
    replay = make(demonstration(0), demonstration(1))
    batch = compose(replay, fresh)
    assert [g.prompt.id for g in batch.groups] == [1]
    assert replay.metrics(1) == {'traces/groups': 1, 'traces/correct': 1, 'traces/groups_total': 1}


def test_the_metrics_count_traces_and_a_restored_replay_goes_on_counting():
    given = [demonstration(0), demonstration(1, Verdict.WRONG)]
    replay, again = make(*given), make(*given)
    compose(replay, [make_group(i, 2) for i in range(3)])
    assert replay.metrics(1) == {'traces/groups': 2, 'traces/correct': 1, 'traces/groups_total': 2}
    saved = replay.state()
    assert all(array.size for array in saved.values())
    again.restore({name: array.copy() for name, array in saved.items()})
    fresh = [make_group(i, 1, step=2) for i in range(3)]
    one, two = compose(replay, fresh, 2), compose(again, fresh, 2)
    assert_same_groups(one.groups, two.groups)
    assert again.metrics(2) == replay.metrics(2) == {'traces/groups': 2, 'traces/correct': 1, 'traces/groups_total': 4}
    assert replay.times_trained(one) == [1, 1, 1]
