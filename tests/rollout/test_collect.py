"""The engine's responses, judged, as groups. An engine that answers what it is told stands for the policy."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from real_servers import BASE

from bapo_jax.groups import Prompt, Response, Verdict
from bapo_jax.models.tokenizer import load_tokenizer
from bapo_jax.rollout import collect as module
from bapo_jax.rollout.collect import collect, judge
from bapo_jax.rollout.engine import FRESH, REEVALUATION, Draw, Sampling

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
        return Response(tokens, np.zeros(len(tokens), np.float32), 'stop', 4)

    return [tuple(response(text) for text in of_prompt) for of_prompt in ANSWERS]


def by_length(data_source, response, ground_truth, extra):
    """A reward of one's own: shorter is better, and those of prompt 9 are correct."""
    if response.startswith('no'):
        raise RuntimeError('cannot judge this one')
    return {'score': 1 / extra['tokens'], 'correct': extra['prompt_id'] == 9, 'pred': response[-1]}


def test_the_verifiers_verdicts_give_binary_rewards(tokenizer, responses):
    groups, answers = judge(tokenizer, PROMPTS, responses, DRAWS, None)
    assert [g.prompt for g in groups] == PROMPTS and [g.responses for g in groups] == responses
    assert [g.step for g in groups] == [6, 7]
    assert [g.correct for g in groups] == [1, 1]
    assert [g.rewards.tolist() for g in groups] == [[1, 0], [1, 0]] and groups[0].rewards.dtype == np.float32
    assert groups[1].verdicts[1] == Verdict.UNPARSEABLE and answers[1][1] is None


def test_a_reward_of_ones_own_gives_verdicts_and_rewards_apart(tokenizer, responses):
    groups, answers = judge(tokenizer, PROMPTS, responses, DRAWS, by_length)
    assert groups[0].verdicts == (Verdict.WRONG, Verdict.WRONG)
    assert groups[0].rewards.tolist() == [np.float32(1 / len(r.tokens)) for r in responses[0]]
    assert groups[1].verdicts == (Verdict.CORRECT, Verdict.INFRA_ERROR) and groups[1].infra_error
    assert groups[1].rewards[0] > 0 and np.isnan(groups[1].rewards[1])
    assert answers == [('>', '>'), ('>', None)]


class Told:
    """An engine whose answers come when they are given."""

    def __init__(self):
        self.asked, self.answers = [], [Future() for _ in PROMPTS]

    def ask(self, *asked):
        self.asked.append(asked)
        return self.answers[: len(asked[0])]


def test_the_engine_is_asked_once_and_answers_of_any_order_are_in_the_prompts_order(tokenizer, responses):
    engine, sampling = Told(), Sampling(0.6, 32)
    for i in (1, 0):
        engine.answers[i].set_result(responses[i])
    collected = collect(engine, tokenizer, PROMPTS, 2, sampling, DRAWS, None)
    assert engine.asked == [(PROMPTS, 2, sampling, DRAWS)]
    assert [g.prompt.id for g in collected.groups] == [5, 9] and [g.correct for g in collected.groups] == [1, 1]
    assert collected.generate_s >= 0 and collected.verify_s > 0
    assert collect(engine, tokenizer, [], 2, sampling, [], None).groups == []


def test_a_group_is_judged_while_others_are_still_to_come(tokenizer, responses, monkeypatch):
    engine, judged = Told(), threading.Event()
    monkeypatch.setattr(module, 'judge', lambda *args: judged.set() or judge(*args))
    engine.answers[1].set_result(responses[1])
    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(collect, engine, tokenizer, PROMPTS, 2, Sampling(0.6, 32), DRAWS, None)
        assert judged.wait(10) and not collected.done()
        engine.answers[0].set_result(responses[0])
        assert [g.prompt.id for g in collected.result(10).groups] == [5, 9]


def test_after_an_error_the_others_are_not_waited_for(tokenizer):
    engine = Told()
    engine.answers[1].set_exception(OSError('the engine is gone'))
    with pytest.raises(OSError, match='the engine is gone'):
        collect(engine, tokenizer, PROMPTS, 2, Sampling(0.6, 32), DRAWS, None)
    assert engine.answers[0].cancelled()
