"""ReLIFT: failed prompts wait, the newest first; once N of them wait, N traces join the batch."""

import numpy as np
import pytest
from group_builders import graded, ids, make_group
from hypothesis import given, settings, strategies as st
from ml_collections import ConfigDict

from bapo_jax.groups import X1, Author, Verdict
from bapo_jax.learner.credit import group_advantages, weights
from bapo_jax.replay.relift import DEMONSTRATIONS, Relift
from bapo_jax.tasks.traces import trace

TRACES = {
    i: graded(make_group(i, 1).prompt, [trace(np.arange(2 + i, dtype=np.int32))], [Verdict.CORRECT]) for i in range(12)
}


def make(count, traces=TRACES):
    replay = Relift(ConfigDict({'traces': {'demonstrations': count}}), 8)
    replay.receive(traces)
    return replay


def nothing(*_):
    raise AssertionError('ReLIFT draws and scores nothing')


def compose(replay, fresh, step=1):
    assert replay.hard_prompts(step, nothing) == []
    batch = replay.compose(step, fresh, [], nothing, nothing)
    replay.add(step, fresh, batch)
    return batch


def failed(*prompt_ids, step=1):
    return [make_group(i, 0, step=step) for i in prompt_ids]


def test_only_prompts_of_which_all_responses_fail_wait():
    replay = make(1)
    fresh = [make_group(0, 1), make_group(1, 8), make_group(2, 0, infra=True), *failed(20)]  # prompt 20 has no trace
    batch = compose(replay, fresh)
    assert batch.groups == (fresh[0], fresh[1], fresh[3]) and replay.metrics(1) == {'traces/demonstrations': 0, 'traces/queued': 0}
    assert compose(replay, failed(3)).count(DEMONSTRATIONS) == 1


def test_the_newest_are_taken_first_and_the_others_stay():
    replay = make(3)
    assert compose(replay, failed(0, 1), 1).count(DEMONSTRATIONS) == 0 and replay.metrics(1)['traces/queued'] == 2
    batch = compose(replay, failed(2, 3, step=2), 2)
    assert ids(batch.of_origin(DEMONSTRATIONS)) == [2, 3, 0]
    assert replay.metrics(2) == {'traces/demonstrations': 3, 'traces/queued': 1}
    assert ids(compose(replay, failed(4, 0, step=3), 3).of_origin(DEMONSTRATIONS)) == [4, 0, 1]  # 0 failed again


def test_at_most_n_join_a_batch_even_if_many_wait():
    replay = make(2)
    assert ids(compose(replay, failed(0, 1, 2, 3, 4)).of_origin(DEMONSTRATIONS)) == [0, 1]
    assert ids(compose(replay, [make_group(7, 3)], 2).of_origin(DEMONSTRATIONS)) == [2, 3]
    assert compose(replay, [make_group(7, 3)], 3).count(DEMONSTRATIONS) == 0 and replay.metrics(3)['traces/queued'] == 1


def test_failed_groups_stay_in_the_batch_beside_the_demonstrations_which_have_a_term_of_their_own():
    """A demonstration's advantage is 0, and responses without tokens of the policy do not lower its responses' weights."""
    fresh = failed(0) + [make_group(1, 3)]
    batch = compose(make(1), fresh)
    assert batch.groups == (*fresh, TRACES[0]) and batch.origins == (X1, X1, DEMONSTRATIONS)
    assert [a.tolist() for a in group_advantages(batch, 'centred')][::2] == [[0.0] * 8, [0.0]]
    own = weights(batch, Author.POLICY, (), 'seq_mean_token_sum', 10)
    assert own[0][0] == pytest.approx(1 / (16 * 10)) and not own[2][0].any()
    assert weights(batch, Author.TRACE, (), 'token_mean', 10)[2][0] == pytest.approx([1 / 2] * 2)
    assert make(1).times_trained(batch) == [1, 1, None]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 11), max_size=6, unique=True), max_size=12), st.integers(1, 5), st.integers(0, 11))
def test_the_queue_is_the_authors_list_also_from_a_checkpoint(steps, count, at):
    """New rows in front of the old ones; if there are as many as a batch, the first of them go. Saved and restored at any step."""
    replay, queue = make(count), []
    for step, prompts in enumerate(steps):
        batch = compose(replay, failed(*prompts, step=step), step)
        queue = prompts + queue
        taken, queue = (queue[:count], queue[count:]) if len(queue) >= count else ([], queue)
        assert ids(batch.of_origin(DEMONSTRATIONS)) == taken
        assert replay.metrics(step) == {'traces/demonstrations': len(taken), 'traces/queued': len(queue)}
        if step == at:
            saved, replay = replay.state(), make(count)
            assert all(array.size for array in saved.values())
            replay.restore({name: array.copy() for name, array in saved.items()})


def test_a_wrong_trace_is_not_imitated():
    wrong = {1: graded(TRACES[1].prompt, TRACES[1].responses, [Verdict.WRONG])}
    batch = compose(make(1, {**TRACES, **wrong}), failed(1, 2))
    assert ids(batch.of_origin(DEMONSTRATIONS)) == [2]


def test_a_prompt_that_lost_its_trace_no_longer_waits():
    replay = make(9)
    compose(replay, failed(0, 1, 2))
    again = make(9, {i: TRACES[i] for i in (0, 2)})
    again.restore(replay.state())
    assert again.metrics(1)['traces/queued'] == 2
