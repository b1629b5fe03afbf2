"""The engine's responses, judged, as groups. An engine that answers what it is told stands for the policy."""

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from group_builders import begun, graded
from real_servers import BASE

from bapo_jax.groups import X1, Author, Prompt, Response, Span, Verdict, make_batch, sampled, taken
from bapo_jax.machine import events
from bapo_jax.models.tokenizer import load_tokenizer
from bapo_jax.replay.arpo import led_by
from bapo_jax.rollout import collect as module
from bapo_jax.rollout.collect import TooFewJudged, check_judged, collect, judge, judge_as_they_come, judged_texts
from bapo_jax.rollout.engine import FRESH, REEVALUATION, Draw, Engine, RolloutError, Sampling
from bapo_jax.rollout.vllm.replies import BadResponse
from bapo_jax.run.log.measures import discarded_metrics, fresh_metrics

# 3 + 5 * 2 = 13 and 7 - 4 = 3
TRUTHS = {5: {'numbers': [3, 5, 2], 'target': 13}, 9: {'numbers': [7, 4], 'target': 3}}
PROMPTS = [Prompt(i, 'countdown', np.array([1], np.int32), truth) for i, truth in TRUTHS.items()]
ANSWERS = [['<answer>3+5*2</answer>', '<answer>3+5+2</answer>'], ['<answer>7-4</answer>', 'no idea']]
DRAWS = [Draw(0, 6, FRESH), Draw(0, 7, REEVALUATION)]


@pytest.fixture(scope='module')
def tokenizer():
    return load_tokenizer(BASE)


@pytest.fixture(scope='module')
def responses(tokenizer):
    def response(text):
        tokens = np.array(tokenizer.encode(text), np.int32)
        return sampled(tokens, np.zeros(len(tokens), np.float32), 'stop', 4)

    return [tuple(response(text) for text in of_prompt) for of_prompt in ANSWERS]


def spoken(tokenizer, *parts):
    """A response of texts, of which every second one is the environment's."""
    spans = []
    for i, text in enumerate(parts):
        tokens = np.array(tokenizer.encode(text), np.int32)
        logp = None if i % 2 else np.zeros(len(tokens), np.float32)
        spans.append(Span(tokens, logp, (Author.POLICY, Author.ENVIRONMENT)[i % 2], -1 if i % 2 else 4))
    return Response(tuple(spans), 'stop')


@pytest.mark.parametrize('parts, verdict', [
    (['7-4 is', '3 ', '<answer>7-4</answer>'], Verdict.CORRECT),
    (['7-4 is', '<answer>7-4</answer>', ''], Verdict.UNPARSEABLE),  # the environment's words are no answer
    (['7-4 is', '<answer>7-4</answer>', '<answer>7+4</answer>'], Verdict.WRONG),
    (['<answer>7', '-4</answer>', '-4</answer>'], Verdict.UNPARSEABLE),  # nor do they join the policy's
    (['<answer>7-4</answer>', 'Why?', 'Because.'], Verdict.UNPARSEABLE),  # the rule of this template: the last line counts
])  # fmt: skip
def test_a_response_is_judged_by_what_the_environment_did_not_write(tokenizer, parts, verdict):
    [group] = judge(tokenizer, PROMPTS[1:], [(spoken(tokenizer, *parts),)], DRAWS[1:], None)
    assert group.verdicts == (verdict,)


def test_a_think_that_the_environment_opened_is_to_be_closed(tokenizer):
    thinking = spoken(tokenizer, 'a</think> b', 'c<think>\n', 'd')
    given = Response((Span(np.array(tokenizer.encode('x'), np.int32), None, Author.PREFIX), *thinking.spans), 'stop')
    plain = spoken(tokenizer, 'a')
    texts = judged_texts(tokenizer, [thinking, given, plain, Response((), 'length')])
    assert texts == ['a</think> b\n<think>\nd', 'xa</think> b\n<think>\nd', 'a', '']


def by_length(rows, budget_s):
    """A reward of one's own: shorter is better, and those of prompt 9 are correct. It fails on one."""
    return [
        (Verdict.INFRA_ERROR, float('nan'), None)
        if response.startswith('no')
        else (Verdict.CORRECT if extra['prompt_id'] == 9 else Verdict.WRONG, 1 / extra['tokens'], response[-1])
        for _, response, _, extra in rows
    ]


def test_the_verifiers_verdicts_give_binary_rewards(tokenizer, responses):
    groups = judge(tokenizer, PROMPTS, responses, DRAWS, None)
    assert [g.prompt for g in groups] == PROMPTS and [g.responses for g in groups] == responses
    assert [g.step for g in groups] == [6, 7]
    assert [g.correct for g in groups] == [1, 1]
    assert [g.rewards.tolist() for g in groups] == [[1, 0], [1, 0]] and groups[0].rewards.dtype == np.float32
    assert groups[1].verdicts[1] == Verdict.UNPARSEABLE and groups[1].answers[1] is None


def test_a_reward_of_ones_own_gives_verdicts_and_rewards_apart(tokenizer, responses):
    groups = judge(tokenizer, PROMPTS, responses, DRAWS, by_length)
    assert groups[0].verdicts == (Verdict.WRONG, Verdict.WRONG)
    assert groups[0].rewards.tolist() == [np.float32(1 / len(r.tokens)) for r in responses[0]]
    assert groups[1].verdicts == (Verdict.CORRECT, Verdict.INFRA_ERROR) and groups[1].infra_error
    assert groups[1].rewards[0] > 0 and np.isnan(groups[1].rewards[1])
    assert [g.answers for g in groups] == [('>', '>'), ('>', None)]


class Told:
    """An engine whose answers come when they are given."""

    def __init__(self):
        self.asked, self.answers = [], [Future() for _ in PROMPTS]

    generate = Engine.generate

    def ask(self, *asked):
        self.asked.append(asked)
        return self.answers[: len(asked[0])]


def as_they_come(engine, tokenizer, rewards=None, budget_s=60.0):
    return judge_as_they_come(engine.answers, tokenizer, PROMPTS, DRAWS, rewards, budget_s)


def test_the_engine_is_asked_once_and_answers_of_any_order_are_in_the_prompts_order(tokenizer, responses):
    engine, sampling = Told(), Sampling(0.6, 32)
    for i in (1, 0):
        engine.answers[i].set_result(responses[i])
    groups = collect(engine, tokenizer, PROMPTS, 2, sampling, DRAWS, None)
    assert engine.asked == [(begun(PROMPTS), 2, sampling, DRAWS)] and [g.prompt.id for g in groups] == [5, 9]
    collected = as_they_come(engine, tokenizer)
    assert [g.prompt.id for g in collected.groups] == [5, 9] and [g.correct for g in collected.groups] == [1, 1]
    assert collected.generate_s >= 0 and collected.verify_s > 0
    assert collect(engine, tokenizer, [], 2, sampling, [], None) == []


def test_a_group_is_judged_while_others_are_still_to_come(tokenizer, responses, monkeypatch):
    engine, judged = Told(), threading.Event()
    monkeypatch.setattr(module, 'judge', lambda *args: judged.set() or judge(*args))
    engine.answers[1].set_result(responses[1])
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(as_they_come, engine, tokenizer)
        assert judged.wait(10) and not collected.done()
        engine.answers[0].set_result(responses[0])
        assert [g.prompt.id for g in collected.result(10).groups] == [5, 9]


def test_a_group_of_bad_responses_leaves_the_others_alone_and_its_prompt_has_an_outcome(tokenizer, responses, tmp_path):
    engine = Told()
    engine.answers[0].set_exception(BadResponse('http://a: a response has a token outside the vocabulary'))
    engine.answers[1].set_result(responses[1])
    with events.recorded(tmp_path):
        lost, sound = as_they_come(engine, tokenizer).groups
    assert (lost.prompt, lost.responses, lost.step, lost.infra_error) == (PROMPTS[0], (), 6, True)
    assert sound.responses == responses[1] and not sound.infra_error
    told = json.loads((tmp_path / events.EVENTS_FILE).read_text())
    assert (told['event'], told['prompt']) == ('group lost', 5) and 'outside the vocabulary' in told['message']
    with pytest.raises(BadResponse):  # of the probe, it is an error: the answer is what is asked for
        collect(engine, tokenizer, PROMPTS, 2, Sampling(0.6, 32), DRAWS, None)
    row = fresh_metrics([lost, sound])
    assert (row['accuracy_bins'], row['critic/score/mean']) == ([0, 1, 0], 0.5)
    assert discarded_metrics([lost, sound], make_batch([sound], [X1])) == {'bapo/discarded/filtered': 0, 'bapo/discarded/infra_error': 1}
    assert discarded_metrics([lost, sound], make_batch([], [])) == {'bapo/discarded/filtered': 1, 'bapo/discarded/infra_error': 1}
    mixed = led_by(taken(sound, [1]), sound)
    assert discarded_metrics([sound], make_batch([mixed], ['replay'])) == {'bapo/discarded/filtered': 0, 'bapo/discarded/infra_error': 0}


def test_groups_that_are_all_lost_are_groups_all_the_same(tokenizer):
    groups = judge(tokenizer, PROMPTS, [(), ()], DRAWS, None)
    assert [(g.prompt.id, g.size, g.infra_error, g.answers) for g in groups] == [(5, 0, True, ()), (9, 0, True, ())]


@pytest.mark.parametrize('error', [RolloutError('no server answers'), OSError('the engine is gone')])
def test_any_other_error_ends_the_step(tokenizer, error):
    engine = Told()
    engine.answers[1].set_exception(error)
    with pytest.raises(type(error), match=str(error)):
        as_they_come(engine, tokenizer)
    assert engine.answers[0].cancelled()


def test_more_than_a_fifth_without_a_verdict_ends_the_run(tokenizer, responses):
    """Of ten groups of two responses: two are a fifth, and one response more is too many."""
    sound, lost = judge(tokenizer, PROMPTS[:1], responses[:1], DRAWS[:1], None)[0], graded(PROMPTS[0], (), (), 6)
    failed = graded(PROMPTS[0], responses[0], (Verdict.CORRECT, Verdict.INFRA_ERROR), 6)
    check_judged([*[sound] * 8, lost, lost], 2)
    check_judged([*[sound] * 6, *[failed] * 4], 2)
    with pytest.raises(TooFewJudged, match=r'5 of 20 responses of step 6 .*gave up 2 groups of 2, .* failed on 1 responses.*task\.judging\.step_s'):
        check_judged([*[sound] * 7, lost, lost, failed], 2)


def test_groups_that_later_steps_finish_count_among_those_of_the_step(responses):
    """With a budget of tokens, the one group that has finished may be the one that was lost."""
    lost = graded(PROMPTS[0], (), (), 6)
    check_judged([lost], 2, unfinished=4)
    with pytest.raises(TooFewJudged, match='2 of 8 responses'):
        check_judged([lost], 2, unfinished=3)


def test_what_is_left_of_the_steps_time_is_what_each_judging_gets(tokenizer, responses):
    """The first group's judging takes all of it, so the second has none."""
    engine, budgets = Told(), []
    engine.answers[0].set_result(responses[0])

    def slow(rows, budget_s):
        budgets.append(budget_s)
        engine.answers[1].done() or engine.answers[1].set_result(responses[1])
        time.sleep(0.1)
        return by_length(rows, budget_s)

    as_they_come(engine, tokenizer, slow, 0.1)
    assert budgets[0] == 0.1 and budgets[1] <= 0
