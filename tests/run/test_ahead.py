"""The steps that a checkpoint holds because they were answered ahead of their turn."""

import numpy as np
import pytest
from group_builders import assert_same_groups, make_group

from bapo_jax.rollout.rollouts import Answered
from bapo_jax.run.ahead import from_arrays, to_arrays


@pytest.mark.parametrize('sizes', [(), (2,), (3, 0, 1)])
def test_arrays_and_back_is_the_identity_beside_any_other_arrays(sizes):
    ahead = {
        7 + i: Answered([make_group(10 * i + j, j, step=7 + i) for j in range(n)], [], 0.5 + i, 0.25, {'prompts/epoch': 1.5}, f'é{i}')
        for i, n in enumerate(sizes)
    }
    arrays = to_arrays(ahead)
    assert all(array.size for array in arrays.values())
    back = from_arrays({'step': np.zeros(1), 'tokens': np.ones(3), **arrays})
    assert list(back) == list(ahead)
    for step, answered in ahead.items():
        assert back[step][1:] == answered[1:]
        assert_same_groups(back[step].fresh, answered.fresh)
