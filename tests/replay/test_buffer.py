import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from group_builders import assert_same_arrays, assert_same_groups, ids, make_group

from bapo_jax.replay.buffer import Eviction, ReplayBuffer, sample
from bapo_jax.replay.bapo import fill

C1 = 1 / 8


def make_buffer(bad_capacity=4, high_capacity=12, high_recent_steps=3, c1=C1):
    return ReplayBuffer(bad_capacity, high_capacity, high_recent_steps, c1)


def candidates(buffer, step, low=0.0, high=1.0, exclude=()):
    return ids(buffer.high_groups(step, low, high, exclude))


def test_what_enters_which_part():
    buffer = make_buffer(20, 20)
    assert buffer.add([make_group(k, k) for k in range(9)] + [make_group(9, 0, infra=True), make_group(10, 4, infra=True)], 1) == []
    assert list(buffer.bad) == [0, 1]
    assert list(buffer.high) == [1, 2, 3, 4, 5, 6, 7]
    assert [e.accuracy for e in buffer.bad.values()] == [0, 1 / 8]


def test_bad_is_the_grid_level_whatever_the_rounding_of_c1():
    for c1 in (0.125, 0.125 - 1e-9, 0.125 + 1e-9, 0.1 + 0.025):
        buffer = make_buffer(20, 20, c1=c1)
        buffer.add([make_group(k, k) for k in range(9)], 1)
        assert list(buffer.bad) == [0, 1]


def test_fifo_evicts_the_oldest_for_capacity():
    buffer = make_buffer(bad_capacity=4, high_capacity=3)
    buffer.add([make_group(i, 0) for i in range(3)] + [make_group(10 + i, 4) for i in range(2)], 1)
    evicted = buffer.add([make_group(i, 0) for i in range(3, 6)] + [make_group(12 + i, 4) for i in range(2)], 2)
    assert list(buffer.bad) == [2, 3, 4, 5]
    assert list(buffer.high) == [11, 12, 13]
    assert evicted == [
        Eviction('bad', 0, stored=1, sampled=0, step=2, reason='capacity'),
        Eviction('bad', 1, stored=1, sampled=0, step=2, reason='capacity'),
        Eviction('high', 10, stored=1, sampled=0, step=2, reason='capacity'),
    ]


def test_more_than_the_capacity_at_once():
    buffer = make_buffer(bad_capacity=2)
    evicted = buffer.add([make_group(i, 0) for i in range(5)], 7)
    assert list(buffer.bad) == [3, 4]
    assert [(e.prompt_id, e.stored, e.step) for e in evicted] == [(0, 7, 7), (1, 7, 7), (2, 7, 7)]


def test_x3_sees_the_three_most_recent_steps_and_no_other():
    buffer = make_buffer(high_capacity=100)
    for step in range(1, 8):
        assert candidates(buffer, step) == [s for s in (step - 3, step - 2, step - 1) if s >= 1]
        evicted = buffer.add([make_group(step, 4, step=step)], step)
        assert [(e.prompt_id, e.reason) for e in evicted] == ([(step - 3, 'age')] if step > 3 else [])
        # what the next step may read is what is held, no more
        assert list(buffer.high) == candidates(buffer, step + 1)


def test_reading_enforces_the_age_without_add():
    buffer = make_buffer()
    buffer.add([make_group(0, 4)], 1)
    assert [candidates(buffer, step) for step in (1, 2, 3, 4, 5)] == [[], [0], [0], [0], []]


def test_the_bad_part_has_no_age():
    buffer = make_buffer()
    buffer.add([make_group(0, 0)], 1)
    for step in range(2, 50):
        assert buffer.add([], step) == []
    assert ids_of(buffer.hard_prompts(np.random.default_rng(0), 8)) == [0]


def ids_of(prompts):
    return [p.id for p in prompts]


def reevaluated(buffer, rng, limit):
    """The ids of hard prompts that are drawn, and counted once they are answered."""
    drawn = ids_of(buffer.hard_prompts(rng, limit))
    buffer.mark_reevaluated([make_group(i, 0) for i in drawn])
    return drawn


def test_the_best_re_evaluation_of_a_hard_prompt_is_kept_and_survives_a_checkpoint():
    buffer = make_buffer()
    buffer.add([make_group(1, 0), make_group(2, 0)], 1)
    assert np.isnan(buffer.bad[1].best)
    for group in (make_group(1, 2), make_group(1, 5), make_group(1, 3), make_group(1, 7, infra=True), make_group(2, 6, infra=True)):
        buffer.mark_reevaluated([group])
    saved = buffer.state()
    restored = make_buffer()
    restored.restore(saved)
    for b in (buffer, restored):  # a group whose verifier failed is a re-evaluation, and says nothing of the policy
        assert (b.bad[1].best, b.bad[1].sampled, b.bad[2].sampled) == (5 / 8, 4, 1) and np.isnan(b.bad[2].best)
    restored.restore({name: a for name, a in saved.items() if name != 'bad_best'})  # as an earlier version saved it
    assert np.isnan(restored.bad[1].best) and restored.bad[1].sampled == 4


def test_a_duplicate_prompt_replaces_its_entry_and_moves_to_the_tail():
    buffer = make_buffer(bad_capacity=3)
    buffer.add([make_group(i, 1, step=1) for i in range(3)], 1)
    reevaluated(buffer, np.random.default_rng(0), 3)
    newer = make_group(0, 1, step=2)
    evicted = buffer.add([newer, make_group(3, 0, step=2)], 2)
    assert evicted == [
        Eviction('bad', 0, stored=1, sampled=1, step=2, reason='replaced'),
        Eviction('high', 0, stored=1, sampled=0, step=2, reason='replaced'),
        Eviction('bad', 1, stored=1, sampled=1, step=2, reason='capacity'),
    ]
    assert list(buffer.bad) == [2, 0, 3]
    assert list(buffer.high) == [1, 2, 0]
    assert buffer.high[0].group is newer
    assert buffer.bad[0].sampled == 0


@pytest.mark.parametrize('k, bad, high', [(0, [0], []), (1, [0], [0]), (4, [], [0]), (8, [], [])])
def test_newest_evidence_wins_in_both_parts(k, bad, high):
    buffer = make_buffer()
    buffer.add([make_group(0, 1, step=1)], 1)
    evicted = buffer.add([make_group(0, k, step=2)], 2)
    assert [(e.part, e.reason) for e in evicted] == [('bad', 'replaced'), ('high', 'replaced')]
    assert (list(buffer.bad), list(buffer.high)) == (bad, high)


def test_an_infrastructure_error_is_no_evidence():
    buffer = make_buffer()
    buffer.add([make_group(0, 1, step=1)], 1)
    assert buffer.add([make_group(0, 7, step=2, infra=True)], 2) == []
    assert (buffer.bad[0].stored, buffer.high[0].stored) == (1, 1)


def test_hard_prompts_are_uniform_without_replacement_and_stay():
    buffer = make_buffer(bad_capacity=10)
    buffer.add([make_group(i, 0) for i in range(10)], 1)
    counts = np.zeros(10)
    for seed in range(2000):
        drawn = reevaluated(buffer, np.random.default_rng(seed), 4)
        assert len(set(drawn)) == 4
        assert drawn == sorted(drawn)  # oldest first
        counts[drawn] += 1
    np.testing.assert_allclose(counts / 2000, 0.4, atol=4 * 0.5 / 2000**0.5)
    assert [e.sampled for e in buffer.bad.values()] == counts.tolist()
    assert len(buffer.bad) == 10
    a, b = (buffer.hard_prompts(np.random.default_rng(3), 4) for _ in range(2))
    assert ids_of(a) == ids_of(b)
    assert ids_of(buffer.hard_prompts(np.random.default_rng(3), 128)) == list(range(10))
    assert buffer.hard_prompts(np.random.default_rng(3), 0) == []
    assert make_buffer().hard_prompts(np.random.default_rng(3), 128) == []


def test_high_groups_by_range_and_exclusion():
    buffer = make_buffer()
    buffer.add([make_group(k, k) for k in range(9)], 1)
    assert candidates(buffer, 2, 2 / 8, 4 / 8) == [2, 3, 4]
    assert candidates(buffer, 2, 2 / 8, 4 / 8, exclude={3}) == [2, 4]
    assert candidates(buffer, 2, 0.5, 0.5) == [4]
    assert all(e.sampled == 0 for e in buffer.high.values())
    buffer.mark_sampled(buffer.high_groups(2, 0.5, 0.5, ()))
    assert [e.sampled for e in buffer.high.values()] == [0, 0, 0, 1, 0, 0, 0]


def test_sample_is_uniform_over_pairs():
    seen = {}
    for seed in range(3000):
        pair = tuple(sample(np.random.default_rng(seed), range(4), 2))
        seen[pair] = seen.get(pair, 0) + 1
    assert sorted(seen) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    np.testing.assert_allclose(np.array(list(seen.values())) / 3000, 1 / 6, atol=0.03)


def test_metrics():
    buffer = make_buffer(bad_capacity=2, high_capacity=2)
    assert buffer.metrics(0)['buffer/high/age_mean'] == 0.0
    buffer.add([make_group(0, 0), make_group(1, 0)], 1)
    reevaluated(buffer, np.random.default_rng(0), 1)
    groups = [make_group(2, 0), make_group(3, 1), make_group(4, 5)]
    buffer.add(groups, 3)
    assert buffer.metrics(4) == {
        'buffer/bad/size': 2,
        'buffer/bad/added': 2,
        'buffer/bad/evicted': 2,
        'buffer/bad/evicted_unseen': 1,
        'buffer/bad/age_mean': 1.0,
        'buffer/bad/bytes': sum(g.prompt.tokens.nbytes for g in groups[:2]),
        'buffer/high/size': 2,
        'buffer/high/added': 2,
        'buffer/high/evicted': 0,
        'buffer/high/age_mean': 1.0,
        'buffer/high/bytes': sum(
            g.prompt.tokens.nbytes + sum(r.tokens.nbytes + r.logp.nbytes for r in g.responses) for g in groups[1:]
        ),
    }


def test_a_shared_pool_is_first_in_first_out_whichever_part_a_prompt_is_in():
    """The same as one list of prompts in the order in which they came; and after a checkpoint, also an earlier version's."""
    pool = ReplayBuffer(5, 12, 3, C1, shared=True)
    pool.add([make_group(i, k) for i, k in enumerate((4, 0, 1, 5, 0, 3))], 1)
    assert (list(pool.bad), list(pool.high)) == ([1, 2, 4], [2, 3, 5])  # not the hard prompts first: 0 came before them
    restored = ReplayBuffer(5, 12, 3, C1, shared=True)
    restored.restore(pool.state())
    for p in (pool, restored):
        evicted = p.add([make_group(6, 0, step=2), make_group(3, 2, step=2), make_group(7, 4, step=2)], 2)
        assert [(e.part, e.prompt_id, e.reason) for e in evicted] == [
            ('high', 3, 'replaced'), ('bad', 1, 'capacity'), ('bad', 2, 'capacity'), ('high', 2, 'capacity')
        ]  # fmt: skip
        assert (list(p.bad), list(p.high)) == ([4, 6], [5, 3, 7])
    assert_same_arrays(pool.state(), restored.state())
    old = {name: array for name, array in pool.state().items() if not name.endswith('_order')}
    restored.restore(old)
    assert (list(restored.bad), list(restored.high)) == ([4, 6], [5, 3, 7])


def test_refusals():
    for capacities in [(0, 1, 1), (1, 0, 1), (1, 1, 0)]:
        with pytest.raises(ValueError, match='replay.bad_capacity'):
            ReplayBuffer(*capacities, C1)
    buffer = make_buffer()
    buffer.add([make_group(i, 0) for i in range(4)], 5)
    for step in (4, 5):
        with pytest.raises(ValueError, match='in order'):
            buffer.add([], step)
    with pytest.raises(ValueError, match='replay.bad_capacity'):
        make_buffer(bad_capacity=3).restore(buffer.state())
    with pytest.raises(KeyError):
        buffer.mark_sampled([make_group(99, 4)])


def test_two_groups_of_one_prompt_in_one_step_are_one_entry():
    buffer = make_buffer()
    later = make_group(0, 5)
    assert buffer.add([make_group(0, 1), make_group(1, 4), later], 1) == []
    assert list(buffer.bad) == []
    assert buffer.high[0].group is later
    assert buffer.metrics(1)['buffer/high/added'] == 2


def test_groups_are_held_by_reference():
    group = make_group(0, 4)
    buffer = make_buffer()
    buffer.add([group], 1)
    assert buffer.high_groups(2, 0, 1, ())[0] is group


def test_state_round_trip_is_bit_equal_also_when_empty():
    buffer = make_buffer()
    for step in range(4):
        state = buffer.state()
        assert all(isinstance(a, np.ndarray) and a.size >= 1 for a in state.values())
        other = make_buffer()
        other.add([make_group(77, 1)], 0)  # forgotten by restore
        other.restore(state)
        assert_same_arrays(other.state(), state)
        assert other.metrics(step) == buffer.metrics(step)
        buffer.add([make_group(10 * step + k, k, step=step) for k in range(9)], step)
        reevaluated(buffer, np.random.default_rng(step), 2)
        buffer.mark_sampled(buffer.high_groups(step + 1, 3 / 8, 4 / 8, ()))
    assert_same_groups([e.group for e in buffer.high.values()], buffer.high_groups(4, 0, 1, ()))


def test_state_is_a_snapshot():
    buffer = make_buffer()
    buffer.add([make_group(0, 1)], 0)
    state = buffer.state()
    before = {name: a.copy() for name, a in state.items()}
    reevaluated(buffer, np.random.default_rng(0), 1)
    buffer.add([make_group(1, 1)], 1)
    assert_same_arrays(state, before)


group_kinds = st.tuples(st.integers(0, 15), st.integers(0, 8), st.sampled_from([False, False, False, True]))


class BufferMachine(RuleBasedStateMachine):
    """Any sequence of steps. The twin is saved and restored at any point and must never differ; `open` and `closed` are the
    histories of every entry, kept from what the buffer reports and what was put in."""

    @initialize(bad=st.integers(1, 6), high=st.integers(1, 10), recent=st.integers(1, 4), c1=st.sampled_from([0.0, 1 / 8, 2 / 8]))
    def start(self, bad, high, recent, c1):
        self.arguments = (bad, high, recent, c1)
        self.buffer, self.twin = ReplayBuffer(*self.arguments), ReplayBuffer(*self.arguments)
        self.step = 0
        self.open = {'bad': {}, 'high': {}}  # prompt id -> [stored, times sampled, group]; oldest first
        self.closed = set()

    @rule(kinds=st.lists(group_kinds, max_size=12), steps=st.sampled_from([1, 1, 1, 2, 3]))
    def end_of_step(self, kinds, steps):
        bad_capacity, high_capacity, recent, c1 = self.arguments
        groups = [make_group(i, k, step=self.step, infra=infra) for i, k, infra in kinds]
        # what should happen, said once more and naively
        expected = []

        def close(part, prompt_id, reason):
            stored, sampled, _ = self.open[part].pop(prompt_id)
            expected.append(Eviction(part, prompt_id, stored, sampled, self.step, reason))

        for prompt_id, (stored, _, _) in list(self.open['high'].items()):
            if stored < self.step + 1 - recent:
                close('high', prompt_id, 'age')
        sound = [g for g in groups if not g.infra_error]
        for prompt_id in dict.fromkeys(ids(sound)):
            g = [g for g in sound if g.prompt.id == prompt_id][-1]
            for part in ('bad', 'high'):
                if g.prompt.id in self.open[part]:
                    close(part, g.prompt.id, 'replaced')
            if g.correct <= round(c1 * 8):
                self.open['bad'][g.prompt.id] = [self.step, 0, g]
            if 1 <= g.correct <= 7:
                self.open['high'][g.prompt.id] = [self.step, 0, g]
        for part, capacity in (('bad', bad_capacity), ('high', high_capacity)):
            while len(self.open[part]) > capacity:
                close(part, next(iter(self.open[part])), 'capacity')

        evictions = self.buffer.add(groups, self.step)
        assert evictions == self.twin.add(groups, self.step)
        for e in evictions:
            assert (e.part, e.prompt_id, e.stored) not in self.closed
            self.closed.add((e.part, e.prompt_id, e.stored))
        assert sorted(evictions, key=repr) == sorted(expected, key=repr)
        self.step += steps

    @rule(seed=st.integers(0, 99), limit=st.integers(0, 8))
    def draw_hard(self, seed, limit):
        drawn = reevaluated(self.buffer, np.random.default_rng(seed), limit)
        assert drawn == reevaluated(self.twin, np.random.default_rng(seed), limit)
        assert len(drawn) == len(set(drawn)) == min(limit, len(self.open['bad']))
        for prompt_id in drawn:
            self.open['bad'][prompt_id][1] += 1

    @rule(
        seed=st.integers(0, 99),
        size=st.integers(6, 18),
        x1=st.lists(st.integers(0, 15), max_size=6, unique=True),
        x2=st.lists(st.integers(0, 15), max_size=9, unique=True),
        bounds=st.tuples(st.integers(0, 5), st.integers(3, 8)),
    )
    def draw_batch(self, seed, size, x1, x2, bounds):
        fresh, better = [make_group(i, 3, step=self.step) for i in x1], [make_group(i, 2, step=self.step) for i in x2]
        low, high = bounds
        arguments = dict(size=size, step=self.step, low=low / 8, high=high / 8, use_x3=True)
        batch = fill(fresh, better, self.buffer, rng=np.random.default_rng(seed), **arguments)
        other = fill(fresh, better, self.twin, rng=np.random.default_rng(seed), **arguments)
        assert batch.origins == other.origins
        assert_same_groups(batch.groups, other.groups)

        assert len(batch.groups) <= size
        assert len(set(ids(batch.groups))) == len(batch.groups)
        _, _, recent, _ = self.arguments
        possible = {
            i
            for i, (stored, _, g) in self.open['high'].items()
            if self.step - recent <= stored <= self.step - 1 and low <= g.correct <= high and i not in ids(batch.groups[: len(x1)])
        }
        x3 = batch.of_origin('x3')
        x2_ids = set(ids(batch.of_origin('x2')))
        assert len(x3) == min(len(possible - x2_ids), size - len(x1) - len(x2_ids))
        for g in x3:
            assert g.prompt.id in possible
            assert g is self.open['high'][g.prompt.id][2]
            self.open['high'][g.prompt.id][1] += 1

    @rule()
    def stop_and_continue(self):
        state = self.twin.state()
        assert all(isinstance(a, np.ndarray) and a.size >= 1 for a in state.values())
        self.twin = ReplayBuffer(*self.arguments)
        self.twin.restore(state)

    @invariant()
    def parts_are_as_told(self):
        bad_capacity, high_capacity, recent, _ = self.arguments
        assert len(self.buffer.bad) <= bad_capacity
        assert len(self.buffer.high) <= high_capacity
        for part in ('bad', 'high'):
            entries = getattr(self.buffer, part)
            told = [(i, stored, sampled) for i, (stored, sampled, _) in self.open[part].items()]
            assert [(i, e.stored, e.sampled) for i, e in entries.items()] == told
            assert [e.stored for e in entries.values()] == sorted(e.stored for e in entries.values())
        assert all(self.step - recent <= g.step <= self.step - 1 for g in self.buffer.high_groups(self.step, 0, 1, ()))
        assert_same_arrays(self.buffer.state(), self.twin.state())
        assert self.buffer.metrics(self.step) == self.twin.metrics(self.step)


BufferMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_any_sequence_of_operations = BufferMachine.TestCase
