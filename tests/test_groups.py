"""Groups: what they say of themselves, that arrays and back is the identity, and what a batch adds to its groups."""

import dataclasses

import numpy as np
import pytest
from group_builders import graded, judged_group, make_group
from hypothesis import given, settings, strategies as st

from bapo_jax.groups import (
    last_success,
    Author,
    Batch,
    Response,
    Span,
    Verdict,
    binary_rewards,
    joined,
    lanes_of,
    make_batch,
    sampled,
    sampled_spans,
    taken,
)
from bapo_jax.replay.arrays import groups_from_arrays, groups_to_arrays


def test_rewards_are_the_papers_binary_ones_and_an_infrastructure_error_is_not_a_zero():
    rewards = binary_rewards(list(Verdict))
    assert rewards.dtype == np.float32
    assert rewards[:3].tolist() == [1.0, 0.0, 0.0]
    assert list(Verdict)[:3] == [Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE]
    assert np.isnan(rewards[Verdict.INFRA_ERROR])


def test_a_group_counts_its_correct_responses():
    group = judged_group(1, [Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE, Verdict.CORRECT], np.random.default_rng(0))
    assert (group.correct, group.size, group.accuracy, group.infra_error) == (2, 4, 0.5, False)
    assert group.rewards.tolist() == [1, 0, 0, 1]
    assert judged_group(1, [Verdict.CORRECT, Verdict.INFRA_ERROR], np.random.default_rng(0)).infra_error


def test_k_counts_correct_responses_whatever_their_rewards():
    plain = make_group(1, 2, G=4)
    shaped = graded(plain.prompt, plain.responses, plain.verdicts, rewards=[0.25, 0.5, 1.0, 0.75])
    assert (shaped.correct, shaped.accuracy) == (plain.correct, plain.accuracy) == (2, 0.5)
    assert shaped.rewards.tolist() == [0.25, 0.5, 1.0, 0.75]


def test_a_group_cannot_be_relabelled():
    group = judged_group(1, [Verdict.WRONG] * 2, np.random.default_rng(0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.verdicts = (Verdict.CORRECT,) * 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.rewards = np.ones(2, np.float32)


def test_the_arrays_of_a_response_are_those_of_its_spans():
    """What the policy and others' traces have is trained on, and nothing else."""
    first = Span(np.array([5, 6], np.int32), np.float32([-1, -2]), Author.POLICY, 3)
    given, trace = (Span(np.array([7], np.int32), logp, author) for logp, author in ((None, Author.PREFIX), (np.float32([-9]), Author.TRACE)))
    image, last = Span(np.array([8], np.int32), np.float32([-3]), Author.PLACEHOLDER, 3), Span(np.array([9], np.int32), np.float32([-4]), Author.POLICY, 4)
    reply = Span(np.array([10], np.int32), None, Author.ENVIRONMENT)
    response = Response((first, given, trace, image, reply, last), 'stop')
    assert response.tokens.tolist() == [5, 6, 7, 7, 8, 10, 9] and response.tokens.dtype == np.int32
    assert response.logp.tolist() == [-1, -2, 0, -9, -3, 0, -4] and response.logp.dtype == np.float32
    assert response.trained_on.tolist() == [True, True, False, True, False, False, True]
    assert response.by(Author.TRACE, Author.PREFIX).tolist() == [False, False, True, True, False, False, False]
    assert response.versions.tolist() == [3, 3, 4]
    assert response.nbytes == 4 * (7 + 5)
    assert Response((first,), 'stop').tokens is first.tokens
    group = graded(make_group(1, 1, G=2).prompt, [Response((last,), 'stop'), response], [Verdict.WRONG] * 2)
    assert group.older_than(4) and not group.older_than(3) and not group.continued
    nothing = Response((), 'length')
    assert [array.tolist() for array in (nothing.tokens, nothing.logp, nothing.trained_on, nothing.versions)] == [[]] * 4


def test_an_image_token_that_was_sampled_is_not_trained_on():
    tokens, logp = np.array([4, 7, 5, 7, 7, 3], np.int32), np.float32([-1, -2, -3, -4, -5, -6])
    response = Response(sampled_spans(tokens, logp, 9, image_token=7), 'stop')
    assert response.tokens.tolist() == tokens.tolist() and response.trained_on.tolist() == [True, False, True, False, False, True]
    assert response.logp.tolist() == logp.tolist() and response.versions.tolist() == [9] * 3
    for other in (6, None):
        [span] = sampled_spans(tokens, logp, 9, other)
        assert (span.author, span.version) == (Author.POLICY, 9)
        assert span.tokens.tolist() == tokens.tolist() and span.logp.tolist() == logp.tolist()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from(list(Verdict)), min_size=0, max_size=4), max_size=5), st.integers(0, 2**32 - 1))
def test_arrays_and_back_is_the_identity(verdicts, seed):
    rng = np.random.default_rng(seed)
    groups = [mixed(judged_group(i * 7, v, rng, step=i), rng) for i, v in enumerate(verdicts)]
    arrays = groups_to_arrays(groups)
    assert all(a.size for a in arrays.values())  # array stores dislike empty arrays
    assert arrays['response_len'][:-1].tolist() == [len(r.tokens) for g in groups for r in g.responses]
    back = groups_from_arrays(arrays)
    assert len(back) == len(groups)
    for a, b in zip(groups, back, strict=True):
        assert (a.prompt.id, a.prompt.task, a.prompt.ground_truth) == (b.prompt.id, b.prompt.task, b.prompt.ground_truth)
        assert (a.verdicts, a.step, a.answers) == (b.verdicts, b.step, b.answers)
        assert a.rewards.tobytes() == b.rewards.tobytes() and b.rewards.dtype == np.float32
        assert np.array_equal(a.prompt.tokens, b.prompt.tokens)
        for x, y in zip(a.responses, b.responses, strict=True):
            assert x.finish == y.finish and list(map(told, x.spans)) == list(map(told, y.spans))
            assert np.array_equal(x.tokens, y.tokens) and x.logp.tobytes() == y.logp.tobytes()
            assert (y.tokens.dtype, y.logp.dtype) == (np.int32, np.float32)
            assert np.array_equal(x.trained_on, y.trained_on) and y.trained_on.dtype == bool
            assert {role: a.tobytes() for role, a in x.scored.items()} == {role: a.tobytes() for role, a in y.scored.items()}


def told(span):
    return span.author, span.version, span.tokens.tolist(), span.logp is None or span.logp.tobytes()


def mixed(group, rng):
    """The group with other authors and scores of some responses, and rewards that are fractions."""

    def spans(response):
        [whole], pieces = response.spans, []
        for part in np.array_split(np.arange(len(whole.tokens)), rng.integers(1, 4)):
            author, known = Author(int(rng.integers(len(Author)))), rng.integers(2)
            if len(part):
                pieces.append(Span(whole.tokens[part], whole.logp[part] if known else None, author, int(rng.integers(-1, 5))))
        return tuple(pieces)

    responses = [
        dataclasses.replace(
            r, spans=spans(r), scored={'reference': -rng.random(len(r.tokens), np.float32)} if rng.integers(2) else {}
        )
        for r in group.responses
    ]
    rewards = np.where(np.isnan(group.rewards), np.nan, rng.standard_normal(group.size))
    answers = tuple(rng.choice([None, 'é', '1,2', '']) for _ in responses)
    return graded(group.prompt, responses, group.verdicts, group.step, rewards, answers)


@pytest.mark.parametrize('author, mask, want', [
    (Author.POLICY, [1, 1, 1], [(Author.POLICY, 4, 3, True)]),
    (Author.POLICY, [0, 1, 0], [(Author.PLACEHOLDER, 4, 1, True), (Author.POLICY, 4, 1, True), (Author.PLACEHOLDER, 4, 1, True)]),
    (Author.PREFIX, [0, 0, 1], [(Author.PREFIX, -1, 2, False), (Author.POLICY, 4, 1, True)]),
    (Author.PREFIX, [0, 1, 0], [(Author.PREFIX, -1, 1, False), (Author.POLICY, 4, 1, True), (Author.PLACEHOLDER, 4, 1, True)]),
    (Author.TRACE, [1, 1, 1], [(Author.TRACE, -1, 3, True)]),
])  # fmt: skip
def test_a_response_that_was_saved_with_one_author_and_a_mask_has_spans(author, mask, want):
    """As every version before spans saved it."""
    plain = graded(make_group(1, 1, G=2).prompt, [sampled(np.arange(3, dtype=np.int32), -np.ones(3, np.float32), 'stop', 4)] * 2,
                   [Verdict.CORRECT, Verdict.WRONG], 5)  # fmt: skip
    arrays = groups_to_arrays([plain])
    earlier = {name: a for name, a in arrays.items() if not name.startswith('span')} | {
        'response_len': np.array([3, 3, 0], np.int32), 'loss_mask': np.array([1, 1, 1, *mask, 0], np.int8),
        'author': np.array([0, author, 0], np.int8), 'version': np.array([4, 4, 0], np.int64),
    }  # fmt: skip
    [back] = groups_from_arrays(earlier)
    assert list(map(told, back.responses[0].spans)) == list(map(told, plain.responses[0].spans))
    assert [(s.author, s.version, len(s.tokens), s.logp is not None) for s in back.responses[1].spans] == want
    assert back.responses[1].tokens.tolist() == [0, 1, 2] and [r.finish for r in back.responses] == ['stop'] * 2


def test_a_batch_normalises_every_group_by_itself_unless_told_otherwise():
    groups = [make_group(i, 1, G=size) for i, size in enumerate((2, 4, 3))]
    batch = make_batch(groups, ['x1', 'x3', 'x1'])
    assert [n.tolist() for n in batch.normalisation] == [[0] * 2, [1] * 4, [2] * 3]
    assert all(n.dtype == np.int32 for n in batch.normalisation)
    assert (batch.groups, batch.origins) == (tuple(groups), ('x1', 'x3', 'x1'))


def test_a_batch_counts_and_gives_its_groups_by_origin():
    groups = [make_group(i, 1) for i in range(4)]
    batch = make_batch(groups, ['x1', 'x3', 'x1', 'replay'])
    assert [batch.count(o) for o in ('x1', 'x2', 'x3', 'replay')] == [2, 0, 1, 1]
    assert [[groups.index(g) for g in batch.of_origin(o)] for o in ('x1', 'x2', 'x3', 'replay')] == [[0, 2], [], [1], [3]]


def test_take_keeps_each_groups_origin_and_normalisation_group():
    groups = [make_group(i, 1, G=2) for i in range(3)]
    batch = Batch(tuple(groups), ('x1', 'x2', 'x3'), tuple(np.array(n, np.int32) for n in ([0, 0], [5, 6], [7, 0])))
    taken = batch.take(np.array([2, 1]))
    assert taken.groups == (groups[2], groups[1])
    assert taken.origins == ('x3', 'x2')
    assert [n.tolist() for n in taken.normalisation] == [[7, 0], [5, 6]]  # the numbers stay: 0 is still that of the group left out
    assert batch.take([]).groups == ()


def test_each_origin_has_a_lane_that_of_fresh_groups_the_first_and_too_many_are_refused():
    def batch(*origins):
        return make_batch([make_group(i, 1, G=2) for i in range(len(origins))], origins)

    assert lanes_of(batch('x3', 'x1', 'x3')) == ('x1', 'x3') and lanes_of(batch()) == ('x1',)
    assert lanes_of(batch('replay', 'a', 'b')) == ('x1', 'replay', 'a', 'b')
    with pytest.raises(ValueError, match=r'groups of 5 origins, more than LANES=4 in groups\.py; name fewer, or raise it'):
        lanes_of(batch(*'abcd'))


def test_answers_that_an_earlier_version_did_not_save_are_unknown():
    arrays = groups_to_arrays([make_group(1, 1, G=2), make_group(2, 1, G=3)])
    back = groups_from_arrays({name: a for name, a in arrays.items() if name != 'answers'})
    assert [g.answers for g in back] == [(None,) * 2, (None,) * 3]


def test_joined_groups_keep_each_response_with_its_verdict_reward_and_answer():
    """The old responses first; what is taken of both is what they were."""
    old, new = make_group(3, 1, G=3, step=1), make_group(3, 2, G=2, step=4)
    old = dataclasses.replace(old, answers=('7', '8', None))
    both = joined(old, new)
    assert both.responses == (*old.responses, *new.responses) and (both.step, both.correct, both.size) == (4, 3, 5)
    for part, places in ((old, (0, 1, 2)), (new, (3, 4))):
        again = taken(both, places)
        assert (again.responses, again.verdicts, again.answers) == (part.responses, part.verdicts, part.answers)
        np.testing.assert_array_equal(again.rewards, part.rewards)


def test_the_last_success_that_can_be_given_has_no_sampled_image_token():
    group = make_group(1, 3, G=4)
    assert last_success(group) == 2 and last_success(make_group(1, 0, G=4)) is None
    third = group.responses[2]
    drawn = dataclasses.replace(third, spans=(*third.spans, Span(np.array([9], np.int32), np.float32([-1]), Author.PLACEHOLDER, 0)))
    assert last_success(dataclasses.replace(group, responses=(*group.responses[:2], drawn, group.responses[3]))) == 1
