import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from group_builders import ids, make_group

from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.replay.compose import compose, improved
from bapo_jax.replay.filters import fresh_filter


def make_buffer(groups=(), step=1):
    buffer = ReplayBuffer(bad_capacity=64, high_capacity=192, high_recent_steps=3, c1=1 / 8)
    buffer.add(groups, step)
    return buffer


def run(fresh=(), better=(), buffer=None, *, size=8, step=2, low=0.0, high=1.0, seed=0, use_x3=True):
    rng = np.random.default_rng(seed)
    return compose(
        fresh, better, make_buffer() if buffer is None else buffer, size=size, step=step, low=low, high=high, rng=rng, use_x3=use_x3
    )


def part(batch, source):
    return [g for g, s in zip(batch.groups, batch.sources) if s == source]


@pytest.mark.parametrize('c1, lowest', [(1 / 8, 2), (0.1 + 0.025, 2), (1 / 8 - 1e-9, 2), (2 / 8, 3), (0, 1)])
def test_x2_is_strictly_between_c1_and_one(c1, lowest):
    assert ids(improved([make_group(k, k) for k in range(9)], c1)) == list(range(lowest, 8))


def test_x2_without_a_verdict_is_no_improvement():
    assert improved([make_group(0, 4, infra=True)], 1 / 8) == []


def test_priority_is_x1_then_x2_then_x3_and_a_prompt_comes_once():
    old = [make_group(i, 4, step=1) for i in range(6)]
    fresh = [make_group(i, 3, step=2) for i in (0, 1)]
    better = [make_group(i, 2, step=2) for i in (1, 2, 3)]
    batch = run(fresh, better, make_buffer(old))
    assert ids(part(batch, 'x1')) == [0, 1]
    assert ids(part(batch, 'x2')) == [2, 3]
    assert ids(part(batch, 'x3')) == [4, 5]
    assert list(batch.sources) == ['x1'] * 2 + ['x2'] * 2 + ['x3'] * 2
    assert batch.groups == (fresh[0], fresh[1], better[1], better[2], old[4], old[5])


def test_groups_are_the_very_objects():
    old, fresh, better = [make_group(i, 4) for i in range(3)], [make_group(10, 4)], [make_group(20, 4)]
    batch = run(fresh, better, make_buffer(old))
    assert all(any(g is h for h in old + fresh + better) for g in batch.groups)
    assert len(batch.groups) == 5


def test_too_many_improved_groups_are_cut_to_a_random_subset():
    fresh, better = [make_group(i, 4) for i in range(5)], [make_group(100 + i, 4) for i in range(10)]
    buffer = make_buffer([make_group(200, 4)])
    counts = np.zeros(10)
    for seed in range(2000):
        batch = run(fresh, better, buffer, seed=seed)
        assert (batch.count('x1'), batch.count('x2'), batch.count('x3')) == (5, 3, 0)
        counts[np.array(ids(part(batch, 'x2'))) - 100] += 1
    np.testing.assert_allclose(counts / 2000, 0.3, atol=4 * 0.5 / 2000**0.5)


def test_x3_fills_what_is_left_uniformly_and_only_the_taken_count_as_sampled():
    buffer = make_buffer([make_group(i, 4) for i in range(10)])
    counts = np.zeros(10)
    for seed in range(2000):
        batch = run([make_group(100 + i, 4) for i in range(5)], (), buffer, seed=seed)
        assert batch.count('x3') == 3
        counts[ids(part(batch, 'x3'))] += 1
    np.testing.assert_allclose(counts / 2000, 0.3, atol=4 * 0.5 / 2000**0.5)
    assert [e.sampled for e in buffer.high.values()] == counts.tolist()


def test_x3_respects_c2_c3_and_the_step():
    buffer = make_buffer([make_group(k, k) for k in range(9)], step=1)
    assert ids(run(buffer=buffer, low=2 / 8, high=3 / 8).groups) == [2, 3]
    assert [len(run(buffer=buffer, step=step).groups) for step in (1, 2, 4, 5)] == [0, 7, 7, 0]


def test_fresh_groups_alone():
    fresh = [make_group(i, i % 9) for i in range(8)]
    buffer = make_buffer([make_group(50, 4)])
    batch = run(fresh[:3], (), buffer, use_x3=False)
    assert batch.groups == tuple(fresh[:3])
    assert buffer.high[50].sampled == 0
    assert run(fresh).groups == tuple(fresh)  # all of B, degenerate groups too: the filter's business
    assert run().groups == ()


def test_refusals():
    with pytest.raises(ValueError, match='learner.batch_groups'):
        run([make_group(i, 4) for i in range(9)])
    with pytest.raises(ValueError, match='twice'):
        run([make_group(0, 4), make_group(0, 3)])
    with pytest.raises(ValueError, match='twice'):
        run((), [make_group(0, 4), make_group(0, 3)])


def test_infrastructure_errors_are_never_in_a_batch():
    old = [make_group(i, 4, infra=i % 2 == 0) for i in range(4)]
    fresh = [make_group(10 + i, 4, infra=i % 2 == 0) for i in range(4)]
    better = [make_group(20 + i, 4, infra=i % 2 == 0) for i in range(4)]
    assert ids(run(fresh, better, make_buffer(old)).groups) == [11, 13, 21, 23, 1, 3]
    # and they take no place
    assert len(run([make_group(i, 4, infra=i > 7) for i in range(12)]).groups) == 8


def test_x3_untrained_takes_nothing_a_second_time_also_after_a_restart():
    """Groups 0 and 1 were trained on as X1; 2, 3 and 4 were filtered out, and one of them is taken each time."""
    buffer = ReplayBuffer(64, 192, 3, c1=1 / 8)
    buffer.add([make_group(i, 4) for i in range(5)], 1, x1={0, 1})
    taken = []
    for _ in range(4):
        batch = compose(
            (), (), buffer, size=1, step=2, low=0.0, high=1.0, rng=np.random.default_rng(0), use_x3=True, x3_untrained=True
        )
        taken += ids(batch.groups)
        state, buffer = buffer.state(), ReplayBuffer(64, 192, 3, c1=1 / 8)
        buffer.restore(state)
    assert sorted(taken) == [2, 3, 4]
    assert [buffer.uses(e.group) for e in buffer.high.values()] == [1] * 5
    # Without the restriction they are all there.
    assert len(run(buffer=buffer).groups) == 5 and [buffer.uses(e.group) for e in buffer.high.values()] == [2] * 5


def test_same_rng_same_batch():
    buffer = make_buffer([make_group(i, 4) for i in range(30)])
    assert ids(run(buffer=buffer, seed=3).groups) == ids(run(buffer=buffer, seed=3).groups)
    assert ids(run(buffer=buffer, seed=3).groups) != ids(run(buffer=buffer, seed=4).groups)


def test_mini_test_variant():
    """Section 5.2 of the paper: c1 = 0 and c2 = c3 = 1/2, so nothing to tune."""
    buffer = ReplayBuffer(64, 192, 3, c1=0)
    buffer.add([make_group(k, k, step=1) for k in range(9)], 1)
    assert [p.id for p in buffer.hard_prompts(np.random.default_rng(0), 32)] == [0]
    x1 = fresh_filter([make_group(20 + k, k, step=2) for k in range(9)], 'range', np.random.default_rng(0))
    x2 = improved([make_group(40 + k, k, step=2) for k in range(9)], 0)
    batch = run(x1, x2, buffer, size=64, low=0.5, high=0.5)
    assert ids(part(batch, 'x1')) == list(range(21, 28))
    assert ids(part(batch, 'x2')) == list(range(41, 48))
    assert ids(part(batch, 'x3')) == [4]


levels = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8), st.booleans()), max_size=20, unique_by=lambda item: item[0])


@settings(max_examples=150, deadline=None)
@given(levels, levels, levels, st.integers(1, 20), st.integers(0, 99), st.booleans())
def test_any_batch_is_small_disjoint_and_whole(old, fresh, better, size, seed, use_x3):
    old, fresh, better = (
        [make_group(i, k, step=step, infra=infra) for i, k, infra in drawn] for step, drawn in enumerate((old, fresh, better), 1)
    )
    fresh = fresh[:size]
    batch = run(fresh, better, make_buffer(old), size=size, low=1 / 8, high=5 / 8, seed=seed, use_x3=use_x3)
    assert len(batch.groups) == len(batch.sources) <= size
    assert len(set(ids(batch.groups))) == len(batch.groups)
    origin = {'x1': fresh, 'x2': better, 'x3': old}
    for group, source in zip(batch.groups, batch.sources):
        assert not group.infra_error
        assert any(group is g for g in origin[source])
    assert part(batch, 'x1') == [g for g in fresh if not g.infra_error]
    assert use_x3 or batch.count('x3') == 0
