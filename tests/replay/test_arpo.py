"""ARPO: a success takes the first place of a group that failed whole, and of no other; its store is first in first out."""

from collections import deque

import numpy as np
import pytest
from group_builders import assert_same_arrays, assert_same_groups, make_group
from hypothesis import given, settings, strategies as st
from ml_collections import ConfigDict

from bapo_jax.groups import REPLAY, X1, Verdict
from bapo_jax.learner.credit import group_advantages
from bapo_jax.replay import PURPOSES
from bapo_jax.replay.arpo import Arpo


def make(per_prompt=8, batch_groups=8) -> Arpo:
    return Arpo(ConfigDict({'arpo': {'per_prompt': per_prompt}}), batch_groups)


def rng_of(step, seed=0):
    return lambda purpose: np.random.default_rng([seed, step, PURPOSES.index(purpose)])


def no_score(batch):
    raise AssertionError('ARPO scores nothing here')


def step_of(arpo, step, fresh, seed=0):
    assert arpo.hard_prompts(step, rng_of(step, seed)) == []
    batch = arpo.compose(step, fresh, [], rng_of(step, seed), no_score)
    arpo.add(step, fresh, batch)
    return batch


def successes(group):
    return [r for r, v in zip(group.responses, group.verdicts) if v == Verdict.CORRECT]


visits = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.booleans()), max_size=25)


@settings(max_examples=100, deadline=None)
@given(visits, st.integers(1, 6))
def test_a_success_replaces_the_first_response_only_where_all_failed_and_the_store_is_fifo(history, capacity):
    arpo, stored = make(per_prompt=capacity), {}
    for step, (prompt_id, k, infra) in enumerate(history, 1):
        fresh = make_group(prompt_id, k, 4, step, infra)
        batch = step_of(arpo, step, [fresh])
        if infra:
            assert batch.groups == ()
            continue
        [made] = batch.groups
        if k or not stored.get(prompt_id):
            assert made is fresh and batch.origins == (X1,) and arpo.times_trained(batch) == [1]
        else:
            assert batch.origins == (REPLAY,) and made is not fresh and arpo.times_trained(batch) == [None]
            assert any(made.responses[0] is r for r in stored[prompt_id])  # with its own spans
            assert made.verdicts == (Verdict.CORRECT, *fresh.verdicts[1:]) and made.rewards.tolist() == [1, 0, 0, 0]
            assert all(a is b for a, b in zip(made.responses[1:], fresh.responses[1:], strict=True))
            assert (made.prompt, made.step) == (fresh.prompt, step) and fresh.correct == 0
        stored.setdefault(prompt_id, deque(maxlen=capacity)).extend(successes(fresh))
    held = {i: list(g.responses) for i, g in arpo.history.items()}
    assert {i: [id(r) for r in q] for i, q in stored.items() if q} == {i: [id(r) for r in q] for i, q in held.items()}
    metrics = arpo.metrics(99)
    assert (metrics['buffer/arpo/prompts'], metrics['buffer/arpo/responses']) == (len(held), sum(map(len, held.values())))


def test_the_mixed_group_is_normalised_together():
    arpo = make()
    step_of(arpo, 1, [make_group(1, 2, step=1)])
    batch = step_of(arpo, 2, [make_group(1, 0, step=2), make_group(2, 0, step=2)])
    mixed, failed = group_advantages(batch, 'group_std')
    rewards = np.array([1.0] + [0.0] * 7)
    np.testing.assert_allclose(mixed, (rewards - 1 / 8) / (rewards.std(ddof=1) + 1e-6), rtol=1e-6)
    assert not failed.any()


def test_a_success_is_a_uniform_draw_of_the_steps_generator():
    arpo = make()
    step_of(arpo, 1, [make_group(1, 4, step=1)])
    stored, fresh = successes(make_group(1, 4, step=1)), make_group(1, 0, step=2)

    def drawn(seed):
        [group] = arpo.compose(2, [fresh], [], rng_of(2, seed), no_score).groups
        return next(i for i, r in enumerate(stored) if r is group.responses[0])

    draws = [drawn(seed) for seed in range(400)]
    assert draws == [drawn(seed) for seed in range(400)]
    counts = np.bincount(draws, minlength=4)
    assert ((counts - 100) ** 2 / 100).sum() < 16.3  # χ² with 3 degrees of freedom, p = 0.001


def test_a_reward_that_is_not_one_stays_with_its_response():
    """A success that was punished for its length keeps the lower reward, and a wrong response of reward 0.5 is no success."""
    import dataclasses

    arpo = make()
    first = dataclasses.replace(make_group(1, 1, 4, step=1), rewards=np.float32([0.75, 0.5, 0, 0]))
    step_of(arpo, 1, [first])
    [mixed] = step_of(arpo, 2, [make_group(1, 0, 4, step=2)]).groups
    assert mixed.rewards.tolist() == [0.75, 0, 0, 0]


@pytest.mark.parametrize('steps', [0, 1, 4])
def test_a_restored_store_goes_on_bit_for_bit(steps):
    def fresh(step):
        return [make_group(i, (3 * i + 5 * step) % 4 if step % 2 else 0, 4, step, infra=i == step) for i in range(6)]

    arpo, again = make(2), make(2)
    for step in range(1, steps + 1):
        step_of(arpo, step, fresh(step))
    step_of(again, 1, [make_group(9, 2, step=1)])  # what it held before is forgotten
    saved = arpo.state()
    assert all(a.size for a in saved.values())
    again.restore({name: a.copy() for name, a in saved.items()})
    assert_same_arrays(again.state(), saved)
    for step in range(steps + 1, steps + 6):
        a, b = step_of(arpo, step, fresh(step)), step_of(again, step, fresh(step))
        assert a.origins == b.origins
        assert_same_groups(a.groups, b.groups)
    assert REPLAY in a.origins + step_of(arpo, 20, fresh(20)).origins
    with pytest.raises(ValueError, match=r'holds 2 responses, more than replay\.arpo\.per_prompt=1'):
        make(1).restore(arpo.state())
