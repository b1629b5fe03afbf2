"""The ledger finds what is lost or doubled: prompts, groups of a batch, entries of the buffer."""

import json

import pytest
from group_builders import make_group

from bapo_jax.groups import X1, joined, make_batch, taken
from bapo_jax.replay.bapo import X2, X3
from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.run.ledger import Ledger, Unbalanced


@pytest.fixture
def buffer():
    return ReplayBuffer(bad_capacity=4, high_capacity=4, high_recent_steps=3, c1=1 / 8)


@pytest.fixture
def ledger(buffer, tmp_path):
    """Of epochs of two steps."""
    return Ledger(tmp_path, -1, 2, buffer)


def step_of(ledger, buffer, step, fresh, replayed=(), trained=None, reevaluated=(), x2=()):
    """A step as the loop takes it: mixed groups are X1 unless `trained` says which."""
    x1 = [g for g in fresh if 0 < g.correct < g.size] if trained is None else trained
    batch = make_batch([*x1, *x2, *replayed], [X1] * len(x1) + [X2] * len(x2) + [X3] * len(replayed))
    buffer.add(fresh, step, [g.prompt.id for g in x1])
    ledger.check(step, fresh, reevaluated, batch)


def test_a_sound_run_is_written_down(ledger, buffer, tmp_path):
    first = [make_group(0, 4, step=1), make_group(1, 0, step=1)]
    step_of(ledger, buffer, 1, first)
    step_of(ledger, buffer, 2, [make_group(2, 8, step=2), make_group(3, 3, step=2)], replayed=first[:1])
    step_of(ledger, buffer, 3, [make_group(0, 8, step=3), make_group(3, 3, step=3)])  # the next epoch
    rows = [json.loads(line) for line in (tmp_path / 'ledger.jsonl').read_text().splitlines()]
    assert [row['trained'] for row in rows] == [[0], [3], [3]]
    assert [row['filtered'] for row in rows] == [[1], [2], [0]]
    assert [row['stored'] for row in rows] == [[[0, 1]], [[3, 2]], [[3, 3]]]
    assert [row['evicted'] for row in rows] == [[], [], [[0, 1], [3, 2]]]


def test_a_group_with_an_earlier_response_in_the_place_of_a_fresh_one_is_the_fresh_ones_outcome(ledger, buffer, tmp_path):
    fresh, other = make_group(0, 4, step=1), make_group(0, 4, step=0)
    step_of(ledger, buffer, 1, [fresh, make_group(1, 0, step=1)], trained=[joined(taken(other, [0]), taken(fresh, range(1, 8)))])
    [row] = [json.loads(line) for line in (tmp_path / 'ledger.jsonl').read_text().splitlines()]
    assert (row['trained'], row['filtered']) == ([0], [1])
    with pytest.raises(Unbalanced, match=r'X1 has prompts that were not drawn: \[2\]'):  # with a fresh response of another prompt
        second = make_group(3, 4, step=2)
        step_of(ledger, buffer, 2, [second], trained=[second, joined(taken(second, [0]), make_group(2, 4, step=0))])


def test_a_run_that_goes_on_remembers_and_forgets_later_rows(ledger, buffer, tmp_path):
    step_of(ledger, buffer, 1, [make_group(0, 4, step=1)])
    saved = buffer.state()
    step_of(ledger, buffer, 2, [make_group(1, 4, step=2)])
    buffer.restore(saved)
    again = Ledger(tmp_path, 1, 2, buffer)
    with pytest.raises(Unbalanced, match=r'step 2: prompts already drawn in this epoch: \[0\]'):
        step_of(again, buffer, 2, [make_group(0, 4, step=2)])


@pytest.mark.parametrize(
    ('what', 'take'),
    [
        ('prompts drawn twice', lambda l, b, g: step_of(l, b, 2, [make_group(5, 4, step=2), make_group(5, 4, step=2)])),
        ('prompts already drawn in this epoch', lambda l, b, g: step_of(l, b, 2, [make_group(0, 4, step=2)])),
        ('the previous row is not of step 2', lambda l, b, g: step_of(l, b, 3, [make_group(5, 4, step=3)])),
        ('X1 has prompts that were not drawn', lambda l, b, g: step_of(l, b, 2, [], trained=[make_group(5, 4, step=2)])),
        ('X2 has prompts that were not re-evaluated', lambda l, b, g: step_of(l, b, 2, [], x2=[make_group(5, 4, step=2)])),
        ('X3 has groups that the buffer did not hold', lambda l, b, g: step_of(l, b, 2, [], replayed=[make_group(1, 4, step=1)])),
        ('X3 has groups that the buffer did not hold', lambda l, b, g: step_of(l, b, 2, [], replayed=[make_group(0, 4, step=0)])),
    ],
)
def test_what_is_lost_or_doubled_is_found(what, take, ledger, buffer):
    first = [make_group(0, 4, step=1)]
    step_of(ledger, buffer, 1, first)
    with pytest.raises(Unbalanced, match=f'{what}: '):
        take(ledger, buffer, first)


def test_an_entry_that_comes_back_or_from_nowhere_is_found(ledger, buffer):
    step_of(ledger, buffer, 1, [make_group(0, 4, step=1)])
    entry = buffer.high.pop(0)
    step_of(ledger, buffer, 2, [make_group(1, 8, step=2)])  # it is gone
    buffer.high[0] = entry
    with pytest.raises(Unbalanced, match=r'entries that returned after they were evicted: \[\(0, 1\)\]'):
        step_of(ledger, buffer, 3, [])
    buffer.high = {7: entry}
    with pytest.raises(Unbalanced, match=r'entries of groups that were not drawn: \[\(7, 1\)\]'):
        ledger.check(3, [], [], make_batch([], []))


def test_a_pooled_group_of_x2_is_of_a_prompt_that_was_asked(ledger, buffer):
    before, again, other = make_group(0, 0, step=1), make_group(0, 1, step=2), make_group(5, 1, step=2)
    step_of(ledger, buffer, 1, [before])
    step_of(ledger, buffer, 2, [make_group(1, 8, step=2)], reevaluated=[again], x2=[joined(before, again)])
    with pytest.raises(Unbalanced, match='X2 has prompts that were not re-evaluated'):
        step_of(ledger, buffer, 3, [make_group(2, 8, step=3)], reevaluated=[again], x2=[other])
