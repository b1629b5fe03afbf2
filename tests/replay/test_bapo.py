"""BAPO's batch: its parts, in their order; and the object that remembers between steps. Lines 8-9, 11-17 and 19 of Algorithm 1."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from group_builders import assert_same_arrays, assert_same_groups, graded, ids, make_group

from bapo_jax.config import default_config, resolve
from bapo_jax.methods import METHODS
from bapo_jax.replay import PURPOSES
from bapo_jax.replay.bapo import Bapo, fill, improved
from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.replay.filters import fresh_filter
from bapo_jax.replay.posterior import Posterior
from bapo_jax.replay.thresholds import threshold, update_r_tot


def make_buffer(groups=(), step=1):
    buffer = ReplayBuffer(bad_capacity=64, high_capacity=192, high_recent_steps=3, c1=1 / 8)
    buffer.add(groups, step)
    return buffer


def run(fresh=(), better=(), buffer=None, *, size=8, step=2, low=0.0, high=1.0, seed=0, use_x3=True):
    rng = np.random.default_rng(seed)
    return fill(
        fresh, better, make_buffer() if buffer is None else buffer, size=size, step=step, low=low, high=high, rng=rng, use_x3=use_x3
    )


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
    assert ids(batch.of_origin('x1')) == [0, 1]
    assert ids(batch.of_origin('x2')) == [2, 3]
    assert ids(batch.of_origin('x3')) == [4, 5]
    assert list(batch.origins) == ['x1'] * 2 + ['x2'] * 2 + ['x3'] * 2
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
        counts[np.array(ids(batch.of_origin('x2'))) - 100] += 1
    np.testing.assert_allclose(counts / 2000, 0.3, atol=4 * 0.5 / 2000**0.5)


def test_x3_fills_what_is_left_uniformly_and_only_the_taken_count_as_sampled():
    buffer = make_buffer([make_group(i, 4) for i in range(10)])
    counts = np.zeros(10)
    for seed in range(2000):
        batch = run([make_group(100 + i, 4) for i in range(5)], (), buffer, seed=seed)
        assert batch.count('x3') == 3
        counts[ids(batch.of_origin('x3'))] += 1
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
        batch = fill(
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
    assert ids(batch.of_origin('x1')) == list(range(21, 28))
    assert ids(batch.of_origin('x2')) == list(range(41, 48))
    assert ids(batch.of_origin('x3')) == [4]


levels = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8), st.booleans()), max_size=20, unique_by=lambda item: item[0])


@settings(max_examples=150, deadline=None)
@given(levels, levels, levels, st.integers(1, 20), st.integers(0, 99), st.booleans())
def test_any_batch_is_small_disjoint_and_whole(old, fresh, better, size, seed, use_x3):
    old, fresh, better = (
        [make_group(i, k, step=step, infra=infra) for i, k, infra in drawn] for step, drawn in enumerate((old, fresh, better), 1)
    )
    fresh = fresh[:size]
    batch = run(fresh, better, make_buffer(old), size=size, low=1 / 8, high=5 / 8, seed=seed, use_x3=use_x3)
    assert len(batch.groups) == len(batch.origins) <= size
    assert len(set(ids(batch.groups))) == len(batch.groups)
    given_as = {'x1': fresh, 'x2': better, 'x3': old}
    for group, origin in zip(batch.groups, batch.origins):
        assert not group.infra_error
        assert any(group is g for g in given_as[origin])
    assert [n.tolist() for n in batch.normalisation] == [[i] * g.size for i, g in enumerate(batch.groups)]
    assert batch.of_origin('x1') == [g for g in fresh if not g.infra_error]
    assert use_x3 or batch.count('x3') == 0


# ---- the object


def rng_of(step, asked=None):
    """A step's generators; the purposes that are asked for are noted in `asked`."""
    def rng(purpose):
        if asked is not None:
            asked.append(purpose)
        return np.random.default_rng([7, step, PURPOSES.index(purpose)])

    return rng


def no_score(batch):
    raise AssertionError('the paper scores nothing here')


def make_bapo(method='bapo', batch_groups=8, due=lambda step: step % 2 == 0, retries=None, **changes):
    """BAPO as a row of the table has it, with changes to its replay's fields; hard prompts are due at even steps."""
    c = default_config()
    c.model.path = 'unused'
    c.learner.batch_groups = c.learner.mini_batch_groups = batch_groups
    c.update_from_flattened_dict(METHODS[method].fields)
    c.replay.update(changes)
    return Bapo(resolve(c).replay, batch_groups, due, retries)


def step_of(bapo, step, fresh, reevaluated=()):
    """One step as the loop takes it: (hard prompts, batch)."""
    rng = rng_of(step)
    hard = bapo.hard_prompts(step, rng)
    batch = bapo.compose(step, fresh, reevaluated, rng, no_score)
    bapo.add(step, fresh, batch)
    return hard, batch


def test_hard_prompts_are_those_the_buffer_holds_and_only_when_due():
    bapo, asked = make_bapo(max_reevaluate=2), []
    bapo.add(1, [make_group(i, k) for i, k in enumerate((0, 1, 2, 8, 0))], make_bapo().compose(1, [], [], rng_of(1), no_score))
    assert bapo.hard_prompts(3, rng_of(3, asked)) == [] and asked == []
    assert not any(e.sampled for e in bapo.buffer.bad.values())
    hard = bapo.hard_prompts(2, rng_of(2, asked))
    assert len(hard) == 2 and set(ids_of(hard)) < {0, 1, 4} and asked == ['reevaluate']
    assert ids_of(bapo.hard_prompts(2, rng_of(2))) == ids_of(hard)  # a step's draw is repeatable
    assert not any(e.sampled for e in bapo.buffer.bad.values())  # a step that is given up leaves no trace
    bapo.compose(2, [], [make_group(i, 3) for i in ids_of(hard)], rng_of(2), no_score)
    assert [e.sampled for i, e in bapo.buffer.bad.items()] == [int(i in set(ids_of(hard))) for i in (0, 1, 4)]
    assert make_bapo(due=lambda step: False).hard_prompts(2, rng_of(2)) == []


def ids_of(hard):
    return [begun.prompt.id for begun in hard]


def test_the_batch_is_filtered_improved_and_filled_as_the_parts_say():
    """Step 2, after a step of one group of each accuracy: X1 by the filter, X2 improved, X3 between the moved thresholds."""
    bapo = make_bapo(fresh_filter='range')
    first = [make_group(k, k, step=1) for k in range(8)]  # the batch takes 8
    step_of(bapo, 1, first)
    assert bapo.r_tot == update_r_tot(None, np.mean([g.accuracy for g in first]))
    fresh = [make_group(20 + k, k, step=2) for k in (0, 3, 8)]
    again = [make_group(0, 4, step=2), make_group(1, 1, step=2)]
    hard, batch = step_of(bapo, 2, fresh, again)
    assert ids_of(hard) == [0, 1]
    r_tot = update_r_tot(np.mean([k / 8 for k in range(8)]), np.mean([0, 3 / 8, 1]))
    assert bapo.r_tot == pytest.approx(r_tot)
    low, high = (threshold(c, r_tot, 'easy_to_hard') for c in ((4 / 8, 1 / 8), (5 / 8, 2 / 8)))
    assert (batch.of_origin('x1'), batch.of_origin('x2')) == ([fresh[1]], [again[0]])
    assert batch.of_origin('x3') == [g for g in first if low <= g.accuracy <= high] != []
    metrics = bapo.metrics(2)
    assert metrics['bapo/r_tot'] == pytest.approx(r_tot) and (metrics['bapo/c2'], metrics['bapo/c3']) == pytest.approx((low, high))
    assert (metrics['bapo/reevaluated'], metrics['bapo/improved']) == (2, 1)
    x3 = batch.of_origin('x3')
    assert (metrics['bapo/x3/age'], metrics['bapo/x3/mean_reward']) == (1, np.mean([g.accuracy for g in x3]))
    assert metrics['bapo/x3/uses'] == 1  # all of them were X1 of step 1


@pytest.mark.parametrize('changes, fresh', [({'shared_pool': True}, [make_group(1, 3)]), ({}, [make_group(1, 3, infra=True)])])
def test_before_any_performance_is_known_the_thresholds_are_those_of_r_tot_0(changes, fresh):
    """An empty buffer, or a first step without a verdict."""
    bapo = make_bapo(**changes)
    bapo.compose(1, fresh, [], rng_of(1), no_score)
    metrics = bapo.metrics(1)
    assert bapo.r_tot is None and (metrics['bapo/r_tot'], metrics['bapo/c2'], metrics['bapo/c3']) == (None, 4 / 8, 5 / 8)


def test_a_group_counts_how_often_it_was_trained_on_this_time_included():
    """X1 at step 1, X3 at 2 and 3; one that the filter left out of X1 comes to its first use as X3; X1 and X2 are at theirs."""
    bapo = make_bapo(fresh_filter='range', c2=(0.0,), c3=(1.0,), high_recent_steps=9)
    bapo.buffer.add([make_group(3, 4, step=0)], 0)  # never trained on
    for step, counts in ((1, {0: 1, 3: 1}), (2, {0: 2, 3: 2}), (3, {0: 3, 3: 3})):
        fresh = [make_group(0, 4, step=1)] if step == 1 else [make_group(10 + step, 4, step=step)]
        batch = bapo.compose(step, fresh, [], rng_of(step), no_score)
        times = dict(zip(ids(batch.groups), bapo.times_trained(batch), strict=True))
        assert {i: times[i] for i in counts} == counts and times[fresh[0].prompt.id] == 1
        bapo.add(step, fresh, batch)


def test_the_fresh_groups_enter_the_buffer_after_the_draws_from_it():
    bapo = make_bapo(fresh_filter='range', c2=(0.0,), c3=(1.0,))
    groups = [make_group(i, 4, step=1) for i in range(3)]
    _, batch = step_of(bapo, 1, groups)
    assert batch.count('x3') == 0 and batch.of_origin('x1') == groups
    assert ids(e.group for e in bapo.buffer.high.values()) == [0, 1, 2]
    assert all(e.was_x1 for e in bapo.buffer.high.values())
    _, batch = step_of(bapo, 2, [make_group(9, 0, step=2)])
    assert ids(batch.groups) == [0, 1, 2] and set(batch.origins) == {'x3'}


def test_a_step_that_no_verifier_judged_moves_neither_r_tot_nor_the_buffer():
    bapo = make_bapo(fresh_filter='none')
    broken = [make_group(i, 4, infra=True) for i in range(3)]
    _, batch = step_of(bapo, 1, broken)
    assert bapo.r_tot is None and batch.groups == () and not bapo.buffer.high
    assert bapo.metrics(1)['bapo/r_tot'] is None
    step_of(bapo, 2, [make_group(5, 4, step=2), *broken])
    assert bapo.r_tot == 0.5


def test_k_and_not_the_reward_decides():
    """Rewards of 0.9 for wrong responses: filter, hard prompts, r_tot, X2 and X3 go by correct responses."""
    def shaped(i, k, step):
        g = make_group(i, k, step=step)
        return graded(g.prompt, g.responses, g.verdicts, step, np.where(np.arange(8) < k, 1.0, 0.9))

    plain, fractions = make_bapo(fresh_filter='range', c2=(0.0,), c3=(0.5,)), make_bapo(fresh_filter='range', c2=(0.0,), c3=(0.5,))
    for step in (1, 2, 3):
        fresh, again = [(step * 10 + k, k) for k in (0, 1, 4, 8)], [(10, 3), (11, 0)] if step == 2 else []
        of_plain = ([make_group(i, k, step=step) for i, k in part] for part in (fresh, again))
        of_fractions = ([shaped(i, k, step) for i, k in part] for part in (fresh, again))
        hard, batch = step_of(plain, step, *of_plain)
        others_hard, other = step_of(fractions, step, *of_fractions)
        assert ids_of(hard) == ids_of(others_hard)
        assert (ids(batch.groups), batch.origins) == (ids(other.groups), other.origins)
        assert plain.metrics(step) == fractions.metrics(step)
    assert batch.count('x3') > 0


def test_grpo_is_the_row_that_trains_on_every_fresh_group():
    bapo = make_bapo('grpo', due=lambda step: False)
    for step in (1, 2, 3):
        fresh = [make_group(step * 10 + k, k, step=step) for k in range(8)]
        hard, batch = step_of(bapo, step, fresh)
        assert hard == [] and batch.groups == tuple(fresh) and set(batch.origins) == {'x1'}


@pytest.mark.parametrize('steps', [0, 1, 4])
@pytest.mark.parametrize('judged', [True, False])
def test_a_restored_bapo_goes_on_as_the_one_that_was_saved(steps, judged):
    """Also where no group was ever judged, so that r_tot is None. All arrays of the state are equal, byte for byte."""
    def fresh(step):
        rng = np.random.default_rng(step)
        return [make_group(int(i), int(rng.integers(9)), step=step, infra=not judged) for i in rng.choice(20, 6, replace=False)]

    whole = make_bapo('bapo', c2=(0.0,), c3=(1.0,))
    for step in range(1, steps + 1):
        step_of(whole, step, fresh(step))
    state = whole.state()
    assert all(isinstance(a, np.ndarray) and a.size for a in state.values())
    restored = make_bapo('bapo', c2=(0.0,), c3=(1.0,))
    restored.restore(state)
    assert (whole.r_tot is None) == (not judged or steps == 0)
    assert restored.r_tot == whole.r_tot
    assert_same_arrays(restored.state(), state)
    judged = True
    for step in range(steps + 1, steps + 4):
        (hard, batch), (same_hard, same) = (step_of(b, step, fresh(step)) for b in (whole, restored))
        assert ids_of(hard) == ids_of(same_hard) and batch.origins == same.origins
        assert_same_groups(batch.groups, same.groups)
        assert whole.metrics(step) == restored.metrics(step)
        assert_same_arrays(restored.state(), whole.state())


def test_a_state_that_does_not_fit_the_capacities_is_refused():
    bapo = make_bapo()
    step_of(bapo, 1, [make_group(i, 0) for i in range(8)])
    with pytest.raises(ValueError, match='replay.bad_capacity=2'):
        make_bapo(bad_capacity=2).restore(bapo.state())


@pytest.mark.parametrize('rule, entering', [('threshold', [2, 7]), ('mixed', [1, 2, 7]), ('strict_increase', [1, 2, 7, 8])])
def test_what_enters_x2_follows_the_rule(rule, entering):
    """Of prompts that failed every time and now succeed 0, 1, 2, 7 and 8 of 8 times."""
    now = (0, 1, 2, 7, 8)
    bapo = make_bapo(improved_rule=rule)
    step_of(bapo, 1, [make_group(k, 0, step=1) for k in now])
    _, batch = step_of(bapo, 2, [], [make_group(k, k, step=2) for k in now])
    assert ids(batch.of_origin('x2')) == entering


def test_what_retries_remember_is_saved_beside_the_buffer_and_told_when_something_was_asked():
    bapo, again = (make_bapo(retries=Posterior(8, 8, 1, 0.0)) for _ in range(2))
    step_of(bapo, 1, [make_group(i, i % 2, step=1) for i in range(4)])
    again.restore(bapo.state())
    assert_same_arrays(again.state(), bapo.state())
    [asked, _], [as_saved, _] = (step_of(one, 2, [], [make_group(1, 3, step=2)]) for one in (bapo, again))
    assert bapo.state()['retries_known'][:4].tolist() == [[0, 8, 0, 1], [1, 16, 4, 2], [2, 8, 0, 1], [3, 8, 1, 1]]
    assert ids_of(as_saved) == ids_of(asked) == [1, 3, 0, 2]
    assert bapo.metrics(2)['retries/may_be_asked'] == 4
    step_of(bapo, 3, [])
    assert not any(name.startswith('retries/') for name in bapo.metrics(3))
