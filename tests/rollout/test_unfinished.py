"""Responses that a budget of tokens cuts: they are asked for again, and a group is whole once its last response has ended."""

from concurrent.futures import CancelledError, Future

import numpy as np
import pytest
from group_builders import make_group

from bapo_jax.config import default_config, resolve
from bapo_jax.groups import Begun, Response, Span, sampled_spans
from bapo_jax.rollout.collect import judge_as_they_come
from bapo_jax.rollout.engine import FRESH, REEVALUATION, Draw, Sampling, finish_of, tokens_left
from bapo_jax.rollout.unfinished import Unfinished, ask_rest, budget_of, check_room, first_of

DRAW, SAMPLING = Draw(3, 5, FRESH), Sampling(1.0, 12)


def part(n, finish):
    """A response of n tokens."""
    return Response((Span(np.arange(n, dtype=np.int32), np.zeros(n, np.float32), version=4),), finish)


class Asked:
    """Keeps what is asked for; a test ends the futures, in any order and with errors."""

    def ask(self, begun, group_size, sampling, draws):
        self.begun, self.size, self.draws, self.futures = begun, group_size, draws, [Future() for _ in begun]
        return self.futures


PROMPTS = [make_group(i, 1).prompt for i in range(2)]
GROUPS = [
    Unfinished(PROMPTS[0], (part(4, 'unfinished'), part(2, 'stop'), part(4, 'unfinished'))),
    Unfinished(PROMPTS[1], (part(3, 'stop'), part(4, 'unfinished'), part(1, 'stop'))),
]


def asked():
    engine = Asked()
    return engine, ask_rest(engine, GROUPS, 4, SAMPLING, DRAW)


def test_only_unfinished_responses_are_continued_each_from_its_own_tokens_and_with_its_own_index():
    engine, wholes = asked()
    assert [(b.prompt.id, b.first, b.length, b.most) for b in engine.begun] == [(0, 0, 4, 4), (0, 2, 4, 4), (1, 1, 4, 4)]
    assert [b.spans for b in engine.begun] == [GROUPS[0].responses[0].spans, GROUPS[0].responses[2].spans, GROUPS[1].responses[1].spans]
    assert engine.size == 1 and set(engine.draws) == {DRAW.again(1)} and len(wholes) == 2
    new = [part(n, 'stop') for n in (5, 6, 7)]
    for i in (2, 1):
        engine.futures[i].set_result((new[i],))
    assert wholes[1].result() == (GROUPS[1].responses[0], new[2], GROUPS[1].responses[2]) and not wholes[0].done()
    engine.futures[0].set_result((new[0],))
    assert wholes[0].result() == (new[0], GROUPS[0].responses[1], new[1])


def test_two_groups_of_one_prompt_are_continued_by_draws_of_their_own():
    engine = Asked()
    ask_rest(engine, [GROUPS[0], GROUPS[1], GROUPS[0], GROUPS[0]], 4, SAMPLING, DRAW)
    assert engine.draws == [DRAW.again(1, group) for group in (0, 0, 0, 1, 1, 2, 2)]


def test_an_error_of_one_response_is_its_groups():
    engine, wholes = asked()
    engine.futures[0].set_exception(ValueError('broken'))
    engine.futures[1].set_result((part(5, 'stop'),))
    engine.futures[2].cancel(), engine.futures[2].set_running_or_notify_cancel()
    with pytest.raises(ValueError, match='broken'):
        wholes[0].result(1)
    with pytest.raises(CancelledError):
        wholes[1].result(1)


class Ended(Asked):
    """Every response has ended by the time that the engine returns."""

    def ask(self, begun, group_size, sampling, draws):
        futures = super().ask(begun, group_size, sampling, draws)
        for future in futures:
            future.set_result((part(5, 'stop'),))
        return futures


def test_a_group_ends_once_also_if_its_parts_have_ended_before(caplog):
    wholes = ask_rest(Ended(), GROUPS, 4, SAMPLING, DRAW)
    assert [[len(r.tokens) for r in whole.result(1)] for whole in wholes] == [[5, 2, 5], [3, 5, 1]]
    assert not caplog.records  # a second end would be logged as an error of the callback


def test_giving_up_a_group_gives_up_its_parts():
    engine, wholes = asked()
    wholes[0].cancel()
    assert [future.cancelled() for future in engine.futures] == [True, True, False]


def test_the_draw_of_a_continuation_is_no_other_draw():
    """Nor is that of a turn after it: turn t has `again(2 t)`."""
    continued = [Draw(3, 5, purpose).again(1, group) for purpose in (FRESH, REEVALUATION) for group in range(3)]
    draws = {draw.again(2 * turn) for draw in [*continued, DRAW] for turn in range(100)}
    assert len(draws) == 700 and DRAW.again(0) == DRAW


@pytest.mark.parametrize('share, budget', [(1.0, 0), (0.5, 1024), (0.001, 3)])
def test_the_budget_is_a_share_of_the_limit_rounded_up(share, budget):
    config = default_config()
    config.rollout.step_share = share
    assert budget_of(config.rollout) == budget


def test_a_response_is_unfinished_if_the_budget_cut_it_before_the_limit():
    begun = Begun(PROMPTS[0], GROUPS[0].responses[0].spans, 0, 4)  # 4 of at most 12 tokens
    three, four, twelve = (part(n, '').spans for n in (3, 4, 12))
    assert tokens_left(begun, SAMPLING) == 4 and tokens_left(begun, Sampling(1.0, 7)) == 3
    assert finish_of(begun, four, False, SAMPLING) == 'unfinished' and finish_of(begun, four, True, SAMPLING) == 'stop'
    assert finish_of(begun, three, False, Sampling(1.0, 7)) == 'length' and finish_of(begun, four, False, Sampling(1.0, 8)) == 'length'
    assert finish_of(Begun(PROMPTS[0]), twelve, False, SAMPLING) == 'length'


def test_a_response_with_a_sampled_image_token_is_not_continued():
    """In a prompt, which it would belong to, an image would have to stand there."""
    begun, tokens, logp = Begun(PROMPTS[0], (), 0, 4), np.array([5, 9, 5, 5], np.int32), np.zeros(4, np.float32)
    assert finish_of(begun, sampled_spans(tokens, logp, 1, image_token=9), False, SAMPLING) == 'length'
    assert finish_of(begun, sampled_spans(tokens, logp, 1, image_token=8), False, SAMPLING) == 'unfinished'


def test_a_limit_that_leaves_nothing_to_continue_is_refused():
    check_room(GROUPS, 5)
    check_room([], 1)
    with pytest.raises(ValueError, match=r'rollout\.max_response_tokens=4 leaves no token .* of 4 tokens .* at least 5'):
        check_room(GROUPS, 4)


def test_a_step_takes_the_oldest_groups_and_each_prompt_once():
    groups = [make_group(i, 1, step=s) for s, i in enumerate((4, 5, 4, 6, 5))]
    taken, rest = first_of(groups, 2)
    assert (taken, rest) == ([groups[0], groups[1]], groups[2:])
    taken, rest = first_of(rest, 9)
    assert (taken, rest) == (groups[2:], [])
    assert first_of([groups[0], groups[2]], 9) == ([groups[0]], [groups[2]])


def test_an_unfinished_group_is_not_judged(tokenizer_of_words):
    whole, cut = Future(), Future()
    whole.set_result((part(2, 'stop'),)), cut.set_result((part(2, 'stop'), part(4, 'unfinished')))
    judged = judge_as_they_come([cut, whole], tokenizer_of_words, PROMPTS, [DRAW] * 2, lambda rows, _: [(0, 1.0, None)] * len(rows))
    assert [g.prompt.id for g in judged.groups] == [1] and [u.prompt.id for u in judged.unfinished] == [0]
    assert judged.unfinished[0].rest() == [1]


@pytest.fixture
def tokenizer_of_words():
    class Words:
        def batch_decode(self, rows, skip_special_tokens):
            return [' '.join(map(str, row)) for row in rows]

    return Words()


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'rollout.refill_batches': 2, 'replay.fresh_filter': 'range'}, r'rollout\.step_share=0\.5 continues .*refill_batches=2'),
        ({'rollout.mixture.share': 0.4}, r'rollout\.step_share=0\.5 continues .*mixture\.share=0\.4'),
        ({'rollout.overlap': True, 'prompts.selector': 'mopps'}, r"with rollout\.overlap=True: prompts\.selector='mopps'"),
        ({'rollout.step_share': 0.0}, r'rollout\.step_share=0\.0'),
    ],
)
def test_what_cannot_be_continued_is_refused(changes, message):
    config = default_config()
    config.model.path = 'somewhere'
    config.update_from_flattened_dict({'rollout.step_share': 0.5, 'replay.use_x2': False, 'rollout.sync_every': 1, **changes})
    with pytest.raises(ValueError, match=message):
        resolve(config)
