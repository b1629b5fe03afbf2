"""Groups: what they say of themselves, and that arrays and back is the identity."""

import dataclasses

import numpy as np
import pytest
from group_builders import judged_group
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_jax.groups import Verdict, groups_from_arrays, groups_to_arrays, reward


def test_rewards_are_the_papers_binary_ones_and_an_infrastructure_error_is_not_a_zero():
    assert [reward(v) for v in (Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE)] == [1.0, 0.0, 0.0]
    assert np.isnan(reward(Verdict.INFRA_ERROR))


def test_a_group_counts_its_correct_responses():
    group = judged_group(1, [Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE, Verdict.CORRECT], np.random.default_rng(0))
    assert (group.correct, group.size, group.mean_reward, group.infra_error) == (2, 4, 0.5, False)
    assert group.rewards.tolist() == [1, 0, 0, 1]
    assert judged_group(1, [Verdict.CORRECT, Verdict.INFRA_ERROR], np.random.default_rng(0)).infra_error


def test_a_group_cannot_be_relabelled():
    group = judged_group(1, [Verdict.WRONG] * 2, np.random.default_rng(0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.verdicts = (Verdict.CORRECT,) * 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from(list(Verdict)), min_size=0, max_size=4), max_size=5), st.integers(0, 2**32 - 1))
def test_arrays_and_back_is_the_identity(verdicts, seed):
    rng = np.random.default_rng(seed)
    groups = [judged_group(i * 7, v, rng, step=i) for i, v in enumerate(verdicts)]
    arrays = groups_to_arrays(groups)
    assert all(a.size for a in arrays.values())  # array stores dislike empty arrays
    back = groups_from_arrays(arrays)
    assert len(back) == len(groups)
    for a, b in zip(groups, back, strict=True):
        assert (a.prompt.id, a.prompt.task, a.prompt.ground_truth) == (b.prompt.id, b.prompt.task, b.prompt.ground_truth)
        assert (a.verdicts, a.step) == (b.verdicts, b.step)
        assert np.array_equal(a.prompt.tokens, b.prompt.tokens)
        for x, y in zip(a.responses, b.responses, strict=True):
            assert (x.finish, x.version) == (y.finish, y.version)
            assert np.array_equal(x.tokens, y.tokens) and x.logp.tobytes() == y.logp.tobytes()
            assert (y.tokens.dtype, y.logp.dtype) == (np.int32, np.float32)
