"""DAPO's soft overlong punishment and Kimi k1.5's length reward by hand; verdicts and k do not change."""

import dataclasses

import numpy as np
import pytest
from group_builders import graded

from bapo_jax.groups import Author, Prompt, Response, Span, Verdict, sampled
from bapo_jax.tasks.shaping import length_reward, overlong_penalty, punish_overlong, reward_length, shaped_rewards

LENGTHS, PENALTIES = (1, 75, 80, 95, 100), (0, 0, -0.2, -0.8, -1)  # of a limit of 100 tokens, the last quarter punished


def group_of(verdicts):
    """A group of responses of LENGTHS."""
    responses = [sampled(np.zeros(n, np.int32), np.zeros(n, np.float32), 'stop', 0) for n in LENGTHS]
    return graded(Prompt(5, 'countdown', np.array([1], np.int32), {}), responses, verdicts, step=3)


@pytest.mark.parametrize(('length', 'penalty'), list(zip(LENGTHS, PENALTIES, strict=True)))
def test_the_penalty_falls_from_0_at_the_knee_to_minus_1_at_the_limit(length, penalty):
    assert overlong_penalty(np.array([length]), limit=100, share=0.25) == pytest.approx([penalty], abs=1e-12)


def test_the_penalty_is_added_to_the_rewards_and_nothing_else_changes():
    group = group_of([Verdict.CORRECT, Verdict.WRONG, Verdict.CORRECT, Verdict.UNPARSEABLE, Verdict.CORRECT])
    punished = punish_overlong(group, 100, 0.25)
    np.testing.assert_allclose(punished.rewards, [1, 0, 0.8, -0.8, 0], atol=1e-7)
    assert punished.rewards.dtype == np.float32
    np.testing.assert_array_equal(group.rewards, [1, 0, 1, 0, 1])  # the group given stays as it was
    assert (punished.verdicts, punished.correct, punished.accuracy) == (group.verdicts, 3, group.accuracy)
    assert (punished.prompt, punished.responses, punished.step) == (group.prompt, group.responses, 3)


def test_a_reward_that_nobody_gave_stays_nan():
    group = group_of([Verdict.CORRECT] * 3 + [Verdict.INFRA_ERROR] * 2)
    np.testing.assert_allclose(punish_overlong(group, 100, 0.25).rewards, [1, 1, 0.8, np.nan, np.nan], atol=1e-7)


def test_the_length_reward_is_highest_for_the_shortest_right_response_and_never_above_0_for_a_wrong_one():
    lengths, right = np.array([10, 20, 30, 40, 50]), np.array([True, False, True, False, True])
    np.testing.assert_allclose(length_reward(lengths, right), [0.5, 0, 0, -0.25, -0.5], atol=1e-12)
    assert not length_reward(np.full(5, 7), right).any()


def test_the_length_reward_is_added_with_its_weight_and_nothing_else_changes():
    group = group_of([Verdict.CORRECT, Verdict.WRONG, Verdict.CORRECT, Verdict.UNPARSEABLE, Verdict.CORRECT])
    share = 0.5 - (np.array(LENGTHS) - 1) / 99
    want = group.rewards + 0.2 * np.where(group.rewards > 0, share, np.minimum(0, share))
    shaped = reward_length(group, 0.2)
    np.testing.assert_allclose(shaped.rewards, want, atol=1e-6)
    assert shaped.rewards.dtype == np.float32 and shaped.verdicts == group.verdicts and shaped.responses is group.responses
    lost = dataclasses.replace(group, responses=(), verdicts=(), rewards=np.zeros(0, np.float32))
    assert reward_length(lost, 0.2) is lost
    assert shaped_rewards(group, 100, 0.0, 0.0) is group
    both = shaped_rewards(group, 100, 0.25, 0.2)
    np.testing.assert_allclose(both.rewards, want + overlong_penalty(np.array(LENGTHS), 100, 0.25), atol=1e-6)


def test_the_length_reward_does_not_count_the_replies_of_a_tool():
    group = group_of([Verdict.CORRECT] * 5)
    reply = Span(np.zeros(1000, np.int32), None, Author.ENVIRONMENT)
    replied = dataclasses.replace(
        group, responses=tuple(Response((*r.spans, reply) if i % 2 else r.spans, r.finish) for i, r in enumerate(group.responses))
    )
    np.testing.assert_array_equal(reward_length(replied, 0.2).rewards, reward_length(group, 0.2).rewards)
