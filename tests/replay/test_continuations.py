"""Hard prompts with help: what is given, by whom, how the share of help moves, and what a checkpoint keeps."""

import dataclasses

import numpy as np
import pytest
from group_builders import assert_same_arrays, graded, make_group, right

from bapo_jax.groups import Author, Verdict
from bapo_jax.replay.buffer import ReplayBuffer
from bapo_jax.replay.continuations import SHARES, Continuations

SOLUTION = np.arange(32, dtype=np.int32)


def solve(prompt, rng):
    return SOLUTION + 100 * prompt.id


def rng(seed=0):
    return np.random.default_rng(seed)


def hard(right_of, step=1):
    """A buffer that holds fresh groups, {prompt id: right of 8}."""
    buffer = ReplayBuffer(100, 100, 3, 1 / 8)
    buffer.add([make_group(i, k, step=step) for i, k in right_of.items()], step)
    return buffer


def answered(asked, k, step=2):
    """A group of 8 continuations of each of those asked, k of them right."""
    groups = []
    for begun in asked:
        plain = make_group(begun.prompt.id, k, step=step)
        responses = [dataclasses.replace(r, spans=begun.spans + r.spans) for r in plain.responses]
        groups.append(graded(plain.prompt, responses, right(k, 8), step))
    return groups


def test_half_of_a_solution_is_given_at_first():
    asked = Continuations(8, 48, solve).choose(2, hard({1: 0, 2: 1, 3: 4}), rng())
    assert [begun.prompt.id for begun in asked] == [1, 2]
    for prompt, [prefix], *_ in asked:
        np.testing.assert_array_equal(prefix.tokens, SOLUTION[:16] + 100 * prompt.id)
        assert (prefix.logp, prefix.author) == (None, Author.PREFIX)


def test_help_falls_where_more_than_half_are_right_and_rises_where_fewer_are():
    continuations, buffer = Continuations(8, 48, solve), hard({1: 0, 2: 1})
    asked = continuations.choose(2, buffer, rng())
    for k, given in ((5, 14), (8, 12), (4, 14), (0, 16), (3, 18)):
        continuations.observe(answered(asked, k), buffer)
        asked = continuations.choose(2, buffer, rng())
        assert {begun.length for begun in asked} == {given}, 'two tokens are a sixteenth of the solution'
    assert continuations.metrics()['retries/given_share'] == 9 / SHARES


def test_something_is_given_always_and_never_all():
    for k, given in ((8, 2), (0, 30)):
        continuations, buffer = Continuations(8, 48, solve), hard({1: 0})
        for _ in range(2 * SHARES):
            continuations.observe(answered(continuations.choose(2, buffer, rng()), k), buffer)
        assert [begun.length for begun in continuations.choose(2, buffer, rng())] == [given]


@pytest.mark.parametrize('k, given', [(8, 1), (0, 2)])
def test_of_a_short_solution_one_token_is_given_at_least_and_one_is_left(k, given):
    continuations, buffer = Continuations(8, 48, lambda prompt, rng: SOLUTION[:3]), hard({1: 0})
    for _ in range(2 * SHARES):
        continuations.observe(answered(continuations.choose(2, buffer, rng()), k), buffer)
    assert [begun.length for begun in continuations.choose(2, buffer, rng())] == [given]


def test_nothing_is_kept_where_a_solver_writes():
    continuations, buffer = Continuations(8, 48, solve), hard({1: 1})
    continuations.observe([make_group(1, 1), make_group(2, 5)], buffer)
    assert continuations.state()['count'].tolist() == [0]


def test_a_prompt_is_continued_once_for_each_time_it_enters_the_buffer():
    continuations, buffer = Continuations(1, 48, solve), hard({1: 0, 2: 0})
    [first] = continuations.choose(2, buffer, rng())
    buffer.mark_reevaluated(answered([first], 4))
    [second] = continuations.choose(3, buffer, rng())
    assert {first.prompt.id, second.prompt.id} == {1, 2}
    buffer.mark_reevaluated(answered([second], 4))
    assert continuations.choose(4, buffer, rng()) == []
    buffer.add([make_group(1, 0, step=4)], 4)
    assert [begun.prompt.id for begun in continuations.choose(5, buffer, rng())] == [1]


def test_success_with_help_is_not_the_best_that_the_policy_did_alone():
    buffer = hard({1: 0})
    asked = Continuations(8, 48, solve).choose(2, buffer, rng())
    buffer.mark_reevaluated(answered(asked, 4))
    assert buffer.bad[1].sampled == 1 and np.isnan(buffer.bad[1].best)


def test_a_solution_without_room_or_none_at_all_asks_nothing():
    buffer = hard({1: 0})
    assert Continuations(8, 31, solve).choose(2, buffer, rng()) == []
    assert Continuations(8, 48, lambda prompt, rng: None).choose(2, buffer, rng()) == []


def test_the_policys_own_newest_right_response_is_given():
    continuations, buffer = Continuations(8, 48, None), hard({1: 0, 2: 1})
    older, newer = make_group(1, 3, step=1), make_group(2, 1, step=1)
    longest = max(range(3), key=lambda i: len(older.responses[i].tokens))
    order = [i for i in range(8) if i != longest]
    verdicts = [Verdict.WRONG] * 7 + [Verdict.CORRECT]
    older = graded(older.prompt, [*(older.responses[i] for i in order), older.responses[longest]], verdicts)
    continuations.observe([older, newer], buffer)
    asked = {prompt.id: prefix.tokens for prompt, [prefix], *_ in continuations.choose(2, buffer, rng())}
    for prompt_id, response in ((1, older.responses[-1]), (2, newer.responses[0])):
        if len(response.tokens) >= 2:
            n = max(1, round(len(response.tokens) / 2))
            np.testing.assert_array_equal(asked[prompt_id], response.tokens[:n])
    assert 1 in asked
    assert continuations.metrics()['retries/may_be_asked'] == 2


def test_continuations_and_unjudged_groups_give_no_response_to_continue():
    continuations, buffer = Continuations(8, 48, None), hard({1: 0})
    asked = Continuations(8, 48, solve).choose(2, buffer, rng())
    continuations.observe([*answered(asked, 4), make_group(1, 4, infra=True)], buffer)
    assert continuations.choose(3, buffer, rng()) == []


@pytest.mark.parametrize('own', [False, True])
def test_restored_continuations_go_on_as_the_saved_ones(own):
    continuations, buffer = Continuations(8, 48, None if own else solve), hard({i: i % 2 for i in range(1, 9)})
    continuations.observe([make_group(i, 4) for i in range(1, 9)], buffer)
    continuations.observe(answered(continuations.choose(2, buffer, rng()), 0), buffer)
    restored = Continuations(8, 48, None if own else solve)
    restored.restore({name: array.copy() for name, array in continuations.state().items()})
    assert_same_arrays(restored.state(), continuations.state())
    for one, other in zip(continuations.choose(3, buffer, rng(1)), restored.choose(3, buffer, rng(1)), strict=True):
        assert one.prompt.id == other.prompt.id
        np.testing.assert_array_equal(one.spans[0].tokens, other.spans[0].tokens)
