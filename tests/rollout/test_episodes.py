"""An engine around the in-process engine: its turns, what they depend on, and how a group of them ends."""

import dataclasses
import threading
import time
from concurrent.futures import wait

import jax
import numpy as np
import pytest
from tiny import STOP_TOKENS

from bapo_jax.config import default_config
from bapo_jax.groups import NO_VERSION, Author, Begun
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.rollout.engine import EVALUATION, FRESH, Draw, RolloutError, Sampling
from bapo_jax.rollout.episodes import Episodes, newest_turn
from bapo_jax.rollout.inprocess.engine import JaxEngine
from bapo_jax.rollout.inprocess.room import Limits
from bapo_jax.rollout.vllm.replies import BadResponse
from bapo_jax.run.evaluation import answer_and_judge
from bapo_jax.run.samples import sample_rows
from bapo_jax.scores import question, summary

SAMPLING, DRAW = Sampling(1.0, 24), Draw(5, 2, FRESH)
G, TURNS = 4, 2
TOKENIZER = character_tokenizer()  # the tiny policy's 96 tokens are its first ones
SAID = 'ABC'
ENVIRONMENT = TOKENIZER.encode(SAID)


def even(ground_truth, turn):
    """A tool that is called by turns of an even length."""
    return SAID if len(turn) % 2 == 0 else None


def make_engine(policy, reply=even, turns=TURNS, version=0):
    inner = JaxEngine(policy.graph, policy.config, STOP_TOKENS, Limits(32, 8 + SAMPLING.max_tokens))
    engine = Episodes(inner, TOKENIZER, reply, turns)
    engine.load(policy.params, version)
    return engine


def asked(engine, prompts, sampling=SAMPLING, size=G, **fields):
    some = [Begun(prompt, **fields) for prompt in prompts]
    return engine.ask(some, size, sampling, [DRAW] * len(prompts))


def results(futures):
    return [future.result(60) for future in futures]


@pytest.fixture(scope='module')
def answers(policy, prompts):
    engine = make_engine(policy)
    yield results(asked(engine, prompts))
    engine.close()


def each(answers):
    return [response for group in answers for response in group]


def replies_of(response):
    return [span for span in response.spans if span.author == Author.ENVIRONMENT]


def same(a, b):
    """Bit for bit, with the same authors and versions."""
    spans = [[(s.author, s.version, s.tokens.tolist(), None if s.logp is None else s.logp.tolist()) for s in r.spans] for r in (a, b)]
    return spans[0] == spans[1] and a.finish == b.finish


def test_the_policy_and_the_environment_take_turns(answers):
    counts = set()
    for response in each(answers):
        authors = [span.author for span in response.spans]
        assert authors == [Author.POLICY, Author.ENVIRONMENT] * len(replies_of(response)) + [Author.POLICY]
        for turn, reply in zip(response.spans[::2], replies_of(response)):
            assert turn.tokens[-1] in STOP_TOKENS and len(turn.tokens) % 2 == 0
            assert (reply.tokens.tolist(), reply.logp, reply.version) == (ENVIRONMENT, None, NO_VERSION)
        last = response.spans[-1].tokens
        np.testing.assert_array_equal(newest_turn(response), last)
        np.testing.assert_array_equal(response.trained_on, np.concatenate([[s.author == Author.POLICY] * len(s.tokens) for s in response.spans]))
        called = last[-1] in STOP_TOKENS and len(last) % 2 == 0
        no_room = len(response.tokens) + len(ENVIRONMENT) >= SAMPLING.max_tokens
        assert not called or len(replies_of(response)) == TURNS or (no_room and response.finish == 'length')
        assert len(response.tokens) <= SAMPLING.max_tokens
        counts.add(len(replies_of(response)))
    assert counts == {0, 1, 2}


def test_every_turn_is_what_the_engine_samples_for_it_with_its_own_draw(policy, prompts, answers):
    engine = JaxEngine(policy.graph, policy.config, STOP_TOKENS, Limits(32, 8 + SAMPLING.max_tokens))
    engine.load(policy.params, 0)
    firsts = engine.generate(prompts, G, SAMPLING, [DRAW] * len(prompts))
    for prompt, group, first in zip(prompts, answers, firsts, strict=True):
        for j, response in enumerate(group):
            assert same(first[j], type(response)(response.spans[:1], first[j].finish))
            for t in range(1, len(replies_of(response)) + 1):
                some = [Begun(prompt, response.spans[: 2 * t], first=j)]
                [[want]] = results(engine.ask(some, 1, SAMPLING, [DRAW.again(2 * t)]))
                np.testing.assert_array_equal(want.spans[-1].tokens, response.spans[2 * t].tokens)
                np.testing.assert_array_equal(want.spans[-1].logp, response.spans[2 * t].logp)
    engine.close()


def test_log_probs_are_the_trainers_of_the_whole_response(policy, prompts, answers, score):
    rows = [(p, r) for p, group in zip(prompts, answers, strict=True) for r in group if replies_of(r)]
    width = max(len(p.tokens) + len(r.tokens) for p, r in rows)
    tokens, segment = (np.zeros((len(rows), width), np.int32) for _ in range(2))
    for i, (p, r) in enumerate(rows):
        sequence = np.concatenate([p.tokens, r.tokens])
        tokens[i, : len(sequence)], segment[i, : len(sequence)] = sequence, 1
    position = np.tile(np.arange(width, dtype=np.int32), (len(rows), 1))
    logp, _ = score(policy.params, tokens, segment, position, 1.0, graph=policy.graph)
    for i, (p, r) in enumerate(rows):
        of_response = logp[i, len(p.tokens) : len(p.tokens) + len(r.tokens)]
        np.testing.assert_allclose(r.logp[r.trained_on], of_response[r.trained_on], rtol=0, atol=2e-5)


def test_a_response_depends_neither_on_the_company_nor_on_when_replies_come(policy, prompts, answers):
    rng = np.random.default_rng(0)

    def slow(ground_truth, turn):
        time.sleep(rng.uniform(0, 0.05))
        return even(ground_truth, turn)

    engine = make_engine(policy, slow)
    together = asked(engine, prompts[::-1])
    for i in (1, 3):
        assert all(map(same, *(each(x) for x in (results(asked(engine, prompts[i : i + 1])), answers[i : i + 1]))))
    assert all(map(same, each(results(together)[::-1]), each(answers)))
    engine.close()


def test_a_group_is_finished_by_the_policy_that_it_was_requested_from(policy, prompts, answers):
    """Also if the next one is loaded while a tool works, and the parameters of the first are overwritten."""
    loaded, working = threading.Event(), threading.Event()

    def waits(ground_truth, turn):
        working.set()
        assert loaded.wait(60)
        return even(ground_truth, turn)

    engine = make_engine(policy, waits)
    before = asked(engine, prompts)
    assert working.wait(60)
    engine.load(jax.tree.map(lambda x: 1.1 * x, policy.params), 7)
    after = asked(engine, prompts)
    loaded.set()
    assert all(map(same, each(results(before)), each(answers)))
    later = each(results(after))
    assert {v for r in later for v in r.versions.tolist()} == {7} and not any(map(same, later, each(answers)))
    engine.close()


def test_a_reply_that_does_not_fit_ends_the_response_at_the_limit(policy, prompts):
    engine = make_engine(policy, lambda *_: SAID * 6)  # with one token of the policy it would fit
    for response in each(results(asked(engine, prompts))):
        room = len(response.spans[0].tokens) + 18 < SAMPLING.max_tokens
        if response.spans[0].tokens[-1] in STOP_TOKENS:
            assert len(replies_of(response)) == room and (room or response.finish == 'length')
    engine.close()


def test_what_a_step_has_no_tokens_left_for_is_unfinished_and_goes_on_with_its_turns(policy, prompts, answers):
    """Cut after a reply or within a turn. The environment's tokens count as added."""
    engine, most = make_engine(policy, lambda *_: SAID), 7
    cut, cuts = results(asked(engine, prompts, most=most)), set()
    for prompt, group in zip(prompts, cut, strict=True):
        for j, response in enumerate(group):
            if response.finish != 'unfinished':
                continue
            ends_in_reply = response.spans[-1].author == Author.ENVIRONMENT
            assert len(response.tokens) >= most if ends_in_reply else len(response.tokens) == most
            cuts.add(ends_in_reply)
            some = [Begun(prompt, response.spans, first=j)]
            [[rest]] = results(engine.ask(some, 1, SAMPLING, [Draw(5, 3, FRESH)]))
            assert rest.spans[: len(response.spans)] == response.spans and rest.finish in ('stop', 'length')
            assert len(replies_of(rest)) <= TURNS
    assert cuts == {True, False}
    engine.close()


def test_a_cancelled_group_is_given_up_and_wakes_who_waits(policy, prompts):
    go_on, calls = threading.Event(), []

    def waits(ground_truth, turn):
        calls.append(turn)
        assert go_on.wait(60)
        return SAID

    engine = make_engine(policy, waits)
    given_up, kept = asked(engine, prompts[:2])
    while not calls:
        time.sleep(0.01)
    timer = threading.Timer(0.05, given_up.cancel)
    timer.start()
    assert given_up in wait([given_up], 60).done and given_up.cancelled()
    go_on.set()
    assert len(kept.result(60)) == G
    assert not engine._pending
    engine.close()


def test_a_tool_that_fails_costs_its_group_alone(policy, prompts):
    def fails(ground_truth, turn):
        if ground_truth.get('fails'):
            raise OSError('no space left')
        return even(ground_truth, turn)

    engine = make_engine(policy, fails)
    broken = type(prompts[0])(prompts[0].id, 'countdown', prompts[0].tokens, {'fails': True})
    lost, sound = asked(engine, [broken, prompts[1]])
    with pytest.raises(BadResponse, match='no reply to a response.*OSError: no space left'):
        lost.result(60)
    assert len(sound.result(60)) == G

    # In an evaluation its question has no verdicts, and the others do.
    config = default_config()
    config.task.name, config.evaluate.samples, config.evaluate.temperature = 'countdown', G, 1.0
    config.evaluate.max_response_tokens = SAMPLING.max_tokens
    asked_of = [broken, dataclasses.replace(prompts[1], ground_truth={'numbers': [1, 2], 'target': 3})]
    [[no_verdicts, judged]] = answer_and_judge(engine, TOKENIZER, asked_of, config, EVALUATION)
    assert no_verdicts.infra_error and no_verdicts.size == judged.size == G and not judged.infra_error
    scored = summary([question(no_verdicts), question(judged)], votes=False)
    assert (scored['infra_errors'], scored['correct']) == (G, [0, judged.correct])
    rows = sample_rows('x', 0, [no_verdicts, judged], TOKENIZER)
    assert [row['verdict'] for row in rows[:G]] == ['infra_error'] * G and rows[0]['tokens'] == 0
    replied = [any(s.author == Author.ENVIRONMENT for s in r.spans) for r in judged.responses]
    assert any(replied) and ['spans' in row for row in rows[G:]] == replied
    engine.close()


def test_closing_ends_what_waits_for_a_tool(policy, prompts):
    go_on, working = threading.Event(), threading.Event()

    def waits(ground_truth, turn):
        working.set()
        go_on.wait(60)
        return SAID

    engine = make_engine(policy, waits)
    futures = asked(engine, prompts)
    assert working.wait(60)
    engine.close()
    assert wait(futures, 60).not_done == set()
    for future in futures:
        assert future.cancelled() or isinstance(future.exception(), RolloutError)
    go_on.set()


def test_without_an_answer_nothing_changes(policy, prompts):
    """A tool that is never called, and one that says nothing."""
    inner = JaxEngine(policy.graph, policy.config, STOP_TOKENS, Limits(32, 8 + SAMPLING.max_tokens))
    inner.load(policy.params, 0)
    plain = each(inner.generate(prompts, G, SAMPLING, [DRAW] * len(prompts)))
    inner.close()
    for reply in (lambda *_: None, lambda *_: ''):
        engine = make_engine(policy, reply)
        assert all(map(same, each(results(asked(engine, prompts))), plain))
        engine.close()


def test_the_policy_reads_the_text_of_the_newest_turn_alone(policy, prompts, answers):
    heard = []
    engine = make_engine(policy, lambda truth, turn: heard.append(turn) or even(truth, turn))
    again = each(results(asked(engine, prompts)))
    engine.close()
    turns = [TOKENIZER.decode(s.tokens) for r in again for s in r.spans if s.author == Author.POLICY and s.tokens[-1] in STOP_TOKENS]
    assert all(map(same, again, each(answers))) and set(heard) <= set(turns)
