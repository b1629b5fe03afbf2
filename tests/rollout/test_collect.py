"""Sampling and judging: groups in the order of prompts, rewards of the verifier or of a user's function, the step of the draw."""

import numpy as np
import pytest

from bapo_jax.groups import Response, Verdict
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.rollout.collect import collect, judge
from bapo_jax.rollout.engine import FRESH, REEVALUATION, Draw, Sampling
from bapo_jax.tasks import countdown, encode_prompts
from real_servers import BASE
from bapo_jax.groups import Prompt
from bapo_jax.models.tokenizer import load_tokenizer

SAMPLING = Sampling(1.0, 40)
TRUTHS = [{'numbers': [3, 5, 2], 'target': 30}, {'numbers': [7, 2, 9], 'target': 18}]
RIGHT, WRONG, NONE = '<answer>3*5*2</answer>', '<answer>3+5+2</answer>', 'I do not know'
TEXTS = [(RIGHT, WRONG, NONE), (RIGHT, '<answer>7+2+9</answer>', WRONG)]  # the first answer is of the other prompt's numbers
DRAWS = [Draw(0, 4, FRESH), Draw(0, 9, REEVALUATION)]
CORRECT, INCORRECT, UNPARSEABLE, INFRA_ERROR = Verdict


@pytest.fixture(scope='module')
def tokenizer():
    return character_tokenizer()


@pytest.fixture(scope='module')
def prompts(tokenizer):
    return encode_prompts('countdown', TRUTHS, tokenizer, template='compact', first_id=70)


class Scripted:
    """An engine that gives TEXTS, and notes what it is asked."""

    servers = 0

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def generate(self, prompts, group_size, sampling, draws):
        self.asked.append(([p.id for p in prompts], group_size, sampling, list(draws)))
        return [tuple(map(self.respond, texts)) for texts in TEXTS]

    def respond(self, text):
        tokens = np.array(self.tokenizer.encode(text), np.int32)
        return Response(tokens, np.zeros(len(tokens), np.float32), 'stop', 3)


def test_the_verifiers_rewards_are_binary_and_groups_keep_the_order_of_prompts_and_the_step_of_their_draws(tokenizer, prompts):
    engine = Scripted(tokenizer)
    got = collect(engine, tokenizer, prompts, 3, SAMPLING, DRAWS, None)
    assert engine.asked == [([70, 71], 3, SAMPLING, DRAWS)]
    assert [g.prompt for g in got.groups] == prompts
    assert [g.verdicts for g in got.groups] == [(CORRECT, INCORRECT, UNPARSEABLE), (INCORRECT, CORRECT, INCORRECT)]
    assert [g.rewards.tolist() for g in got.groups] == [[1, 0, 0], [0, 1, 0]]
    assert [g.step for g in got.groups] == [4, 9]
    assert tuple(tokenizer.decode(r.tokens) for r in got.groups[1].responses) == TEXTS[1]
    assert got.generate_s > 0 and got.verify_s > 0


def test_without_prompts_the_engine_is_not_asked(tokenizer):
    engine = Scripted(tokenizer)
    assert collect(engine, tokenizer, [], 3, SAMPLING, [], None).groups == [] and engine.asked == []


def test_a_users_function_gives_any_reward_and_what_it_fails_on_has_none(tokenizer, prompts):
    seen = []

    def reward(data_source, response, ground_truth, extra):
        seen.append((data_source, ground_truth['target'], extra))
        if response == NONE:
            raise RuntimeError('no sandbox')
        return {'score': 1 if response == RIGHT else -0.25, 'pred': response[8:-9]}

    responses = Scripted(tokenizer).generate(prompts, 3, SAMPLING, DRAWS)
    judged = judge(tokenizer, prompts, responses, DRAWS, reward)
    assert [g.verdicts for g in judged.groups] == [(CORRECT, INCORRECT, INFRA_ERROR), (CORRECT, INCORRECT, INCORRECT)]
    np.testing.assert_array_equal([g.rewards for g in judged.groups], [[1, -0.25, np.nan], [1, -0.25, -0.25]])
    assert {g.rewards.dtype for g in judged.groups} == {np.dtype(np.float32)}
    assert judged.answers == [('3*5*2', '3+5+2', None), ('3*5*2', '7+2+9', '3+5+2')]
    assert seen[2] == ('countdown', 30, {'prompt_id': 70, 'tokens': len(NONE), 'finish': 'stop'})
    assert [target for _, target, _ in seen] == [30] * 3 + [18] * 3


def test_the_verifiers_own_failure_is_a_reward_of_nobody(tokenizer, prompts, monkeypatch):
    monkeypatch.setattr(countdown, 'verify_all', lambda responses, truths: [(INFRA_ERROR, None)] * len(responses))
    [group, _] = judge(tokenizer, prompts, Scripted(tokenizer).generate(prompts, 3, SAMPLING, DRAWS), DRAWS, None).groups
    assert group.infra_error and np.isnan(group.rewards).all()


PROMPTS = [Prompt(i, 'countdown', np.array([1], np.int32), truth) for i, truth in TRUTHS.items()]


ANSWERS = [['<answer>3+5*2</answer>', '<answer>3+5+2</answer>'], ['<answer>7-4</answer>', 'no idea']]


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
    def __init__(self, responses):
        self.responses, self.asked = responses, []

    def generate(self, *asked):
        self.asked.append(asked)
        return self.responses


def test_the_engine_is_asked_once_and_not_at_all_without_prompts(tokenizer, responses):
    engine, sampling = Told(responses), Sampling(0.6, 32)
    collected = collect(engine, tokenizer, PROMPTS, 2, sampling, DRAWS, None)
    assert engine.asked == [(PROMPTS, 2, sampling, DRAWS)]
    assert [g.correct for g in collected.groups] == [1, 1]
    assert collected.generate_s >= 0 and collected.verify_s > 0
    assert collect(engine, tokenizer, [], 2, sampling, [], None).groups == [] and len(engine.asked) == 1
