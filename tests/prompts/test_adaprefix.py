"""AdaPrefix: the control law by hand and at work, the withdrawal, whose tokens are given, and a state that survives a restart."""

import dataclasses

import numpy as np
import pytest
from group_builders import graded, make_group, right

from bapo_jax.groups import Author, Prompt
from bapo_jax.prompts.adaprefix import FIRST, AdaPrefix
from bapo_jax.prompts.epochs import ShuffledEpochs

PROMPTS = [Prompt(100 + i, 'countdown', np.array([i], np.int32), None) for i in range(12)]
SOLUTION = np.arange(40, dtype=np.int32)


def solve(prompt, rng):
    return SOLUTION + 100 * prompt.id


def make(solve=solve, batch=3, seed=7, steps=10_000, longest=48, gain=0.25, withdrawal=(0.6, 0.8)) -> AdaPrefix:
    return AdaPrefix(PROMPTS, batch, seed, steps=steps, longest=longest, solve=solve, gain=gain, withdrawal=withdrawal)


def answered(asked, k, step=1, G=8):
    """A group of G responses to each of those asked, k(prompt id, tokens given) of them right."""
    groups = []
    for begun in asked:
        plain = make_group(begun.prompt.id, k(begun.prompt.id, begun.length), G, step)
        responses = [dataclasses.replace(r, spans=begun.spans + r.spans) for r in plain.responses]
        groups.append(graded(begun.prompt, responses, plain.verdicts, step))
    return groups


def visit(selector, k):
    """One step: the tokens given with each prompt."""
    asked = selector.begin(selector.next())
    selector.observe(answered(asked, k))
    return {begun.prompt.id: begun.length for begun in asked}


def run(selector, steps):
    return [visit(selector, lambda i, given: (i + given + step) % 9) for step in steps]


def test_the_prompts_are_shuffled_epochs():
    selector, stream = make(), ShuffledEpochs(PROMPTS, 3, 7)
    for _ in range(8):
        assert selector.next() == stream.next()


def test_all_prompts_continue_half_of_their_reference_at_first():
    selector = make()
    asked = selector.begin(selector.next())
    for prompt, [prefix] in ((begun.prompt, begun.spans) for begun in asked):
        np.testing.assert_array_equal(prefix.tokens, SOLUTION[:20] + 100 * prompt.id)
        assert (prefix.logp, prefix.author) == (None, Author.PREFIX)
    assert selector.metrics() == {'prompts/prefixed': 3, 'prompts/given_share': 0.5}


def test_the_share_follows_the_control_law_of_each_prompt():
    """f ← clip(f + 1/4 (1/2 - k/8), 0, 0.9), of a reference of 40 tokens; a prompt whose verifier failed keeps its share."""
    selector, share = make(batch=12), dict.fromkeys(ids_of(PROMPTS), FIRST)
    right_of = {i: k for i, k in zip(share, (0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 8, 2))}
    for _ in range(9):
        given = visit(selector, lambda i, _: right_of[i])
        assert given == {i: round(40 * f) for i, f in share.items()}
        share = {i: min(0.9, max(0.0, f + 0.25 * (0.5 - right_of[i] / 8))) for i, f in share.items()}
    assert share[100] == 0.9 and share[108] == 0.0 and share[104] == FIRST
    before = selector.state()
    selector.observe([make_group(103, 8, infra=True)])
    assert selector.state() == before


def test_the_share_settles_where_half_are_right():
    """Success grows with the share given, k = round(8 (a + f)): each prompt ends where a + f is near 1/2."""
    selector, ease = make(batch=12), {p.id: -0.3 + 0.05 * i for i, p in enumerate(PROMPTS)}
    for _ in range(40):
        given = visit(selector, lambda i, tokens: int(np.clip(round(8 * (ease[i] + tokens / 40)), 0, 8)))
    for i, a in ease.items():
        assert abs(a + given[i] / 40 - 0.5) <= 1 / 16 + 1 / 40


def test_prefixes_are_withdrawn_linearly_between_two_shares_of_the_steps():
    selector = make(batch=12, steps=10, withdrawal=(0.4, 0.8))
    given = [set(visit(selector, lambda i, _: 4).values()) for _ in range(12)]
    assert given == [{20}] * 4 + [{15}, {10}, {5}] + [{0}] * 5
    assert selector.metrics() == {'prompts/prefixed': 0, 'prompts/given_share': 0.0}


def test_a_reference_is_the_same_at_every_visit_and_leaves_a_token_to_the_policy():
    drawn = make(lambda prompt, rng: rng.integers(0, 1000, 2).astype(np.int32), batch=12)
    first = drawn.begin(drawn.next())
    drawn.observe(answered(first, lambda i, _: 0))
    second = {begun.prompt.id: begun.spans[0].tokens.tolist() for begun in drawn.begin(drawn.next())}
    assert {begun.prompt.id: begun.spans[0].tokens.tolist() for begun in first} == second
    assert {len(tokens) for tokens in second.values()} == {1}, 'round(0.625 · 2) = 1 of 2'
    assert len({tuple(tokens) for tokens in second.values()}) > 1
    for _ in range(4):
        given = visit(drawn, lambda i, _: 0)
    assert set(given.values()) == {1}, 'not round(0.9 · 2) = 2'


@pytest.mark.parametrize('reference', [None, np.arange(49, dtype=np.int32), np.arange(1, dtype=np.int32)])
def test_a_prompt_without_a_reference_that_fits_is_asked_as_it_is(reference):
    selector = make(lambda prompt, rng: reference)
    assert {begun.spans for begun in selector.begin(selector.next())} == {()}


def test_without_a_solver_the_newest_right_response_of_the_prompt_is_continued():
    selector = make(None, batch=12)
    assert set(visit(selector, lambda i, _: 0).values()) == {0}
    plain = selector.begin(selector.next())
    groups = [graded(b.prompt, make_group(b.prompt.id, 2, step=5).responses, right(2, 8)) for b in plain]
    selector.observe(groups)  # the first success: the share is still the first
    longest = {g.prompt.id: g.responses[1].tokens for g in groups}
    asked = selector.begin(selector.next())
    for begun in asked:
        reference = longest[begun.prompt.id]
        want = min(len(reference) - 1, round(FIRST * len(reference)))
        assert begun.length == want
        assert [t for span in begun.spans for t in span.tokens] == reference[:want].tolist()
    assert any(begun.spans for begun in asked)


@pytest.mark.parametrize('given_by', [solve, None])
@pytest.mark.parametrize('consumed', [0, 1, 6])
def test_a_restored_controller_goes_on_where_it_stood(consumed, given_by):
    selector, again = (make(given_by, steps=16) for _ in range(2))
    run(selector, range(consumed))
    saved = selector.state()
    run(again, range(3))  # what it held before is forgotten
    again.restore(saved)
    assert again.state() == saved
    assert run(again, range(consumed, 20)) == run(selector, range(consumed, 20))
    assert again.state() == selector.state()


def test_the_given_tokens_depend_on_the_seed_and_the_results_alone():
    assert run(make(None), range(12)) == run(make(None), range(12))
    assert run(make(None), range(12)) != run(make(None, seed=8), range(12))


def ids_of(prompts):
    return [p.id for p in prompts]
