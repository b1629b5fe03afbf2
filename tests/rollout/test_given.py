"""Prompts with the first tokens of a response: what an engine reads, and that the whole response is judged and partly trained on."""

import dataclasses
from concurrent.futures import Future

import numpy as np
import pytest
from group_builders import graded

from bapo_jax.config import default_config, resolve
from bapo_jax.groups import Author, Prompt, Response, Verdict, make_batch
from bapo_jax.learner.packing import cut
from bapo_jax.models.tokenizer import load_tokenizer
from bapo_jax.replay.bapo import X2
from bapo_jax.rollout.collect import judge_as_they_come
from bapo_jax.rollout.engine import REEVALUATION, Draw
from bapo_jax.rollout.given import as_read, continued, longest_read
from bapo_jax.tasks import encode_prompts, solver
from configs import quickstart

PLAIN = Prompt(3, 'countdown', np.array([7, 8], np.int32), {'numbers': [1, 2], 'target': 3})
PROMPT = dataclasses.replace(PLAIN, given=np.array([20, 21, 22], np.int32))
OWN = Response(np.array([30, 31], np.int32), np.array([-0.5, -1.5], np.float32), 'stop', 4)


def test_an_engine_reads_the_given_tokens_behind_the_question():
    assert as_read(PLAIN) is PLAIN
    read = as_read(PROMPT)
    assert read.tokens.tolist() == [7, 8, 20, 21, 22] and read.given is None and read.id == 3


def test_a_response_is_whole_and_trained_on_where_the_policy_wrote_it():
    assert continued(PLAIN, OWN, 5) is OWN
    whole = continued(PROMPT, OWN, 5)
    assert whole.tokens.tolist() == [20, 21, 22, 30, 31] and whole.logp.tolist() == [0, 0, 0, -0.5, -1.5]
    assert whole.trained_on.tolist() == [False, False, False, True, True]
    assert (whole.finish, whole.version, whole.author) == ('stop', 4, Author.PREFIX)


def test_a_response_is_cut_where_both_parts_exceed_the_limit():
    whole = continued(PROMPT, OWN, 4)
    assert whole.tokens.tolist() == [20, 21, 22, 30] and whole.trained_on.tolist() == [False, False, False, True]
    assert whole.finish == 'length' and len(whole.logp) == 4


def test_tokens_that_the_policy_itself_masked_stay_masked():
    masked = dataclasses.replace(OWN, loss_mask=np.array([True, False]))
    assert continued(PROMPT, masked, 9).trained_on.tolist() == [False, False, False, True, False]


def test_the_loss_covers_no_given_token():
    config = default_config()
    config.learner.update({'row_tokens': 16, 'mini_batch_groups': 1, 'batch_groups': 1, 'micro_batch_rows': 1})
    group = graded(PLAIN, [continued(PROMPT, OWN, 5)] * 2, (Verdict.CORRECT, Verdict.WRONG))
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


def test_a_solvers_first_tokens_and_the_rest_of_them_are_judged_as_one_right_response():
    config = quickstart.get_config('bapo_continue')
    config.replay.given_by = 'solver'
    config = resolve(config)
    tokenizer, rng = load_tokenizer(config.model.path), np.random.default_rng(0)
    [prompt] = encode_prompts('countdown', [{'numbers': [59, 6, 30, 24], 'target': 95}], tokenizer, template='compact')
    solution = solver(config, tokenizer)(prompt, rng)
    prompt = dataclasses.replace(prompt, given=solution[:9])
    futures = [Future()]
    rest = np.append(solution[9:], tokenizer.eos_token_id).astype(np.int32)
    wrong = rest[:-2]  # the answer does not end
    futures[0].set_result(tuple(Response(r, np.zeros(len(r), np.float32), 'stop', 1) for r in (rest, wrong)))
    [group] = judge_as_they_come(futures, tokenizer, [prompt], [Draw(0, 2, REEVALUATION)], None, most_tokens=48).groups
    assert group.verdicts[0] == Verdict.CORRECT != group.verdicts[1]
    assert group.prompt is prompt
    np.testing.assert_array_equal(group.responses[0].tokens[:-1], solution)
    assert solver(config, tokenizer)(dataclasses.replace(prompt, ground_truth={'numbers': [1, 1], 'target': 99}), rng) is None
