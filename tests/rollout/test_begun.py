"""Responses with given tokens: what an engine reads, and that the whole response is judged and partly trained on."""

import dataclasses
from concurrent.futures import Future

import numpy as np
import pytest
from group_builders import graded

from bapo_jax.config import default_config, resolve
from bapo_jax.groups import Author, Begun, Prompt, Response, Span, Verdict, make_batch
from bapo_jax.learner.packing import cut
from bapo_jax.models.tokenizer import load_tokenizer
from bapo_jax.replay.bapo import X2
from bapo_jax.rollout.collect import judge_as_they_come
from bapo_jax.rollout.engine import REEVALUATION, Draw, Sampling, tokens_left
from bapo_jax.rollout.start import longest_read
from bapo_jax.tasks import encode_prompts, solver
from configs import quickstart

PLAIN = Prompt(3, 'countdown', np.array([7, 8], np.int32), {'numbers': [1, 2], 'target': 3})
PREFIX = Span(np.array([20, 21, 22], np.int32), None, Author.PREFIX)
OWN = Span(np.array([30, 31], np.int32), np.array([-0.5, -1.5], np.float32), Author.POLICY, 4)


def test_an_engine_reads_the_given_tokens_behind_the_question():
    assert Begun(PLAIN).read.tokens.tolist() == [7, 8] and Begun(PLAIN).length == 0
    begun = Begun(PLAIN, (PREFIX,))
    assert begun.read.tokens.tolist() == [7, 8, 20, 21, 22] and (begun.read.id, begun.length) == (3, 3)


def test_a_response_that_is_given_whole_is_refused():
    assert tokens_left(Begun(PLAIN, (PREFIX,)), Sampling(1.0, 5)) == 2
    with pytest.raises(ValueError, match='prompt 3: 3 tokens are given of a response of at most 3; give fewer'):
        tokens_left(Begun(PLAIN, (PREFIX,)), Sampling(1.0, 3))


def test_the_loss_covers_no_given_token():
    config = default_config()
    config.learner.update({'row_tokens': 16, 'mini_batch_groups': 1, 'batch_groups': 1, 'micro_batch_rows': 1})
    group = graded(PLAIN, [Response((PREFIX, OWN), 'stop')] * 2, (Verdict.CORRECT, Verdict.WRONG))
    [part] = cut(make_batch([group], [X2]), np.arange(1), config.learner)
    sequences = part.sequences()
    covered = sequences.tokens[sequences.response > 0]
    assert covered.tolist() == [30, 31] * 2


@pytest.mark.parametrize('fields, longest', [({}, 512), ({'reevaluate': 'continue'}, 512 + 2048)])
def test_an_engine_has_room_for_given_tokens_where_a_row_gives_some(fields, longest):
    config = default_config()
    config.replay.update(fields)
    assert longest_read(config) == longest
    config.replay.use_x2 = False
    assert longest_read(config) == 512
    config.prompts.selector = 'adaprefix'
    assert longest_read(config) == 512 + 2048
    config.prompts.selector, config.task.turns = 'shuffled', 1
    assert longest_read(config) == 512 + 2048


def test_a_solvers_first_tokens_and_the_rest_of_them_are_judged_as_one_right_response():
    config = quickstart.get_config('bapo_continue')
    config.replay.given_by = 'solver'
    config = resolve(config)
    tokenizer, rng = load_tokenizer(config.model.path), np.random.default_rng(0)
    [prompt] = encode_prompts('countdown', [{'numbers': [59, 6, 30, 24], 'target': 95}], tokenizer, template='compact')
    solution = solver(config, tokenizer)(prompt, rng)
    prefix, futures = Span(solution[:9], None, Author.PREFIX), [Future()]
    rest = np.append(solution[9:], tokenizer.eos_token_id).astype(np.int32)
    wrong = rest[:-2]  # the answer does not end
    own = [Span(r, np.zeros(len(r), np.float32), Author.POLICY, 1) for r in (rest, wrong)]
    futures[0].set_result(tuple(Response((prefix, span), 'stop') for span in own))
    [group] = judge_as_they_come(futures, tokenizer, [prompt], [Draw(0, 2, REEVALUATION)], None).groups
    assert group.verdicts[0] == Verdict.CORRECT != group.verdicts[1]
    assert group.prompt is prompt
    np.testing.assert_array_equal(group.responses[0].tokens[:-1], solution)
    assert solver(config, tokenizer)(dataclasses.replace(prompt, ground_truth={'numbers': [1, 1], 'target': 99}), rng) is None
