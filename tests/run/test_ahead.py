"""What a checkpoint holds because it was sampled and is not yet trained on."""

import dataclasses
import json

import numpy as np
import pytest
from group_builders import assert_same_groups, make_group

from bapo_jax.groups import Group, Verdict
from bapo_jax.rollout.answered import Answered, Pending
from bapo_jax.rollout.unfinished import Unfinished
from bapo_jax.run.ahead import from_arrays, to_arrays


def unfinished(i):
    """A group of three, the second of which is to be continued."""
    group = make_group(i, 1, G=3, step=2)
    first, second, third = group.responses
    return Unfinished(group.prompt, (first, dataclasses.replace(second, finish='unfinished'), third))


def answered(i, n, cut=0):
    groups = [make_group(10 * i + j, j, step=7 + i) for j in range(n)]
    return Answered(groups, [], 0.5 + i, 0.25, {'prompts/epoch': 1.5}, f'é{i}', [unfinished(90 + i + j) for j in range(cut)])


def assert_same(left, right):
    """Unfinished groups, compared as groups."""
    made = [[Group(u.prompt, u.responses, (Verdict.WRONG,) * 3, np.zeros(3), 0) for u in some] for some in (left, right)]
    assert [u.rest() for u in left] == [u.rest() for u in right]
    assert_same_groups(*made)


@pytest.mark.parametrize(
    'pending',
    [
        Pending(),
        Pending({7: answered(0, 2)}),
        Pending({7: answered(0, 3), 8: answered(1, 0), 9: answered(2, 1)}),
        Pending({7: answered(0, 2, cut=1), 8: answered(1, 0, cut=2)}, [unfinished(50)], [make_group(60, 2), make_group(61, 3)]),
        Pending({}, [unfinished(50), unfinished(51)], []),
    ],
)
def test_arrays_and_back_is_the_identity_beside_any_other_arrays(pending):
    arrays = to_arrays(pending)
    assert bool(arrays) == any(pending) and all(array.size for array in arrays.values())
    back = from_arrays({'step': np.zeros(1), 'tokens': np.ones(3), **arrays})
    assert list(back.ahead) == list(pending.ahead)
    for step, of_step in pending.ahead.items():
        assert back.ahead[step][1:-1] == of_step[1:-1]
        assert_same_groups(back.ahead[step].fresh, of_step.fresh)
        assert_same(back.ahead[step].unfinished, of_step.unfinished)
    assert_same(back.unfinished, pending.unfinished)
    assert_same_groups(back.ready, pending.ready)


def test_arrays_of_an_earlier_version_had_no_unfinished_groups():
    arrays = to_arrays(Pending({7: answered(0, 2), 8: answered(1, 1)}))
    rows = [row[:6] for row in json.loads(arrays['ahead_steps'].tobytes())]
    earlier = {**arrays, 'ahead_steps': np.frombuffer(json.dumps(rows).encode(), np.uint8)}
    del earlier['ahead_counts']
    back = from_arrays(earlier)
    assert list(back.ahead) == [7, 8] and back[1:] == ([], []) and back.ahead[7][1:] == answered(0, 2)[1:]
    assert_same_groups(back.ahead[8].fresh, answered(1, 1).fresh)
