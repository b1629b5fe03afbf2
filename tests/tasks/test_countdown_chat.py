"""Countdown for chat models: the prompt asks for an <answer> block, and the last one counts."""

import re

import pytest

from bapo_jax.groups import Verdict
from bapo_jax.tasks.countdown import task as cd

CORRECT, WRONG, UNPARSEABLE, _ = Verdict
TRUTH = {'numbers': [1, 2, 3], 'target': 9}


class ChatTokenizer:
    """A chat template that opens <think> or not."""

    def __init__(self, opening=''):
        self.chat_template, self._opening = 'messages', opening

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt is True and tokenize is False
        return ''.join(f'<{turn["role"]}>{turn["content"]}' for turn in messages) + f'<assistant>{self._opening}'


def demands(opening=''):
    return cd.with_demands(TRUTH, cd.prompt_text(TRUTH, 'chat', ChatTokenizer(opening)))


def test_the_prompt_asks_for_a_block_and_the_ground_truth_notes_it():
    text = cd.prompt_text(TRUTH, 'chat', ChatTokenizer())
    assert '[1, 2, 3]' in text and 'equals 9.' in text and text.endswith('<answer>(1 + 2) / 3</answer>.<assistant>')
    assert demands() == {**TRUTH, 'last_block': True, 'thinking': False}
    assert demands('<think>\n') == {**TRUTH, 'last_block': True, 'thinking': True}
    for template in ('tinyzero', 'tinyzero_chat', 'compact'):
        assert cd.with_demands(TRUTH, cd.prompt_text(TRUTH, template, ChatTokenizer())) == TRUTH


def test_a_question_behind_solved_ones_is_asked_and_judged_as_they_were():
    text = cd.prompt_text(TRUTH, 'examples', ChatTokenizer())
    *turns, question, last = re.findall('<(user|assistant)>([^<]*(?:<answer>.*?</answer>)?)', text)
    assert (question, last) == (('user', 'Write 9 with the numbers [1, 2, 3], each exactly once.'), ('assistant', ''))
    assert [role for role, _ in turns] == ['user', 'assistant'] * 4
    for (_, asked), (_, answer) in zip(turns[::2], turns[1::2], strict=True):
        target, *numbers = map(int, re.findall(r'\d+', asked))
        assert asked == question[1].replace('9', str(target), 1).replace('[1, 2, 3]', str(numbers))
        truth = cd.with_demands({'numbers': numbers, 'target': target}, text)
        assert truth['last_block'] and cd.verify(answer, truth)[0] is CORRECT
    opened = cd.with_demands(TRUTH, cd.prompt_text(TRUTH, 'examples', ChatTokenizer('<think>\n')))
    assert opened == {**TRUTH, 'last_block': True, 'thinking': True}


def test_a_prompt_that_offers_the_calculator_asks_for_the_same_answer():
    text = cd.prompt_text(TRUTH, 'calculator', ChatTokenizer())
    [example] = re.findall('for example (<calc>.*?</calc>)', text)
    assert cd.reply(TRUTH, f'First {example}') == '45\n'
    assert cd.with_demands(TRUTH, text) == {**TRUTH, 'last_block': True, 'thinking': False}


@pytest.mark.parametrize('turn, shown', [
    ('<calc>3*5-2</calc>', '13'), ('2+2=<calc> (1 + 2) * 3 </calc>\n', '9'), ('<calc>7/2</calc>', '7/2'), ('<calc>1-5/4</calc>', '-1/4'),
    ('<calc>1/0</calc>', 'error'), ('<calc>2**3</calc>', 'error'), ('<calc></calc>', 'error'), ('<calc>1<calc>2</calc>', '2'),
    ('<calc>1</calc> is it', None), ('<calc>1', None), ('1</calc>', None), ('<answer>1</answer>', None), ('', None),
    ('<calc>1</calc></calc>', None), ('<calc>1</calc><calc>4-1</calc>', '3'),
])  # fmt: skip
def test_the_calculator_shows_the_exact_value_of_what_a_turn_ends_with(turn, shown):
    assert cd.reply(TRUTH, turn) == (shown and shown + '\n')


@pytest.mark.parametrize('template', ['chat', 'examples', 'calculator', 'tinyzero_chat'])
def test_an_answer_within_a_think_that_is_not_closed_does_not_count(template):
    for opening, response in (('', '<think> it is '), ('<think>\n', 'it is ')):
        truth = cd.with_demands(TRUTH, cd.prompt_text(TRUTH, template, ChatTokenizer(opening)))
        assert cd.verify(f'{response}<answer>(1+2)*3</answer>', truth) == (UNPARSEABLE, None)
        assert cd.verify(f'{response}so</think> <answer>(1+2)*3</answer>', truth) == (CORRECT, '(1+2)*3')


def test_the_think_of_tinyzeros_own_text_need_not_be_closed():
    """As in the published reward: base models answer without closing it."""
    truth = cd.with_demands(TRUTH, cd.prompt_text(TRUTH, 'tinyzero', None))
    assert cd.verify('1+2 is 3. <answer>(1+2)*3</answer>', truth) == (CORRECT, '(1+2)*3')
    assert cd.verify('Hm. <think> <answer>(1+2)*3</answer>', truth) == (UNPARSEABLE, None)


@pytest.mark.parametrize(
    ('response', 'verdict', 'answer'),
    [
        ('First 1+2=3.\n\n<answer>\n(1 + 2) * 3\n</answer>', CORRECT, '(1 + 2) * 3'),
        ('<answer>(1+2)\n  *3</answer>\n\nThis gives 9.', CORRECT, '(1+2) *3'),
        ('<answer>1</answer> no:\n<answer>\n(1+2)*3\n</answer>\nDone.', CORRECT, '(1+2)*3'),
        ('<answer>(1+2)*3</answer>\n<answer>1+2+3</answer>', WRONG, '1+2+3'),  # the last one, right or wrong
        ('<think>\n<answer>1+2+3</answer>\n</think>\n<answer>(1+2)*3</answer>', CORRECT, '(1+2)*3'),
        ('<think>\n<answer>(1+2)*3</answer>', UNPARSEABLE, None),  # cut while it thinks
        ('<think>\n<answer>(1+2)*3</answer></think>So there.', UNPARSEABLE, None),
        ('<answer>(1+2)*3', UNPARSEABLE, None),
        ('<answer>\n</answer>', UNPARSEABLE, ''),
        ('<answer>(1+2)*3 = 9</answer>', UNPARSEABLE, '(1+2)*3 = 9'),
        ('', UNPARSEABLE, None),
    ],
)
def test_the_last_block_counts_over_however_many_lines(response, verdict, answer):
    assert cd.verify(response, demands()) == (verdict, answer)


def test_what_the_prompt_opened_the_response_must_close():
    assert cd.verify('<answer>(1+2)*3</answer>', demands('<think>\n')) == (UNPARSEABLE, None)
    assert cd.verify('so</think>\n<answer>(1+2)*3</answer>', demands('<think>\n')) == (CORRECT, '(1+2)*3')


def test_a_block_over_lines_is_no_answer_for_base_models():
    assert cd.verify('<answer>\n(1+2)*3\n</answer>', TRUTH) == (UNPARSEABLE, None)


def test_a_malformed_ground_truth_names_its_field():
    with pytest.raises(ValueError, match=r'ground_truth\.last_block must be true or false, got .yes.'):
        cd.verify('<answer>1</answer>', {**TRUTH, 'last_block': 'yes'})
    for target in (10**309, -(10**309), float('inf'), float('nan')):
        with pytest.raises(ValueError, match=r'ground_truth\.target must be a number of at most 18 digits'):
            cd.verify('<answer>1</answer>', {**TRUTH, 'target': target})
