"""Generated arithmetic: what is asked, that no test question is trained on, and which number of a response counts."""

import collections

import pytest

from bapo_jax.groups import Verdict
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.tasks import arithmetic, encode_prompts

TRUTH = {'a': 41, 'sign': '-', 'b': 12}
CHAT = '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>'


def key(question):
    return question['sign'], *sorted((question['a'], question['b']))


@pytest.mark.parametrize('seed', [0, 1])
def test_no_question_of_the_test_set_is_trained_on_in_either_order(seed):
    test, train = arithmetic.benchmark('arithmetic'), arithmetic.training_problems('generated', limit=500, seed=seed)
    assert len(test) == 200 and len(train) == 500
    assert not {key(q) for q in test} & {key(q) for q in train}
    for questions, products in ((test, 30), (train, 30)):
        assert len({tuple(q.values()) for q in questions}) == len(questions)
        counts = collections.Counter(q['sign'] for q in questions)
        assert counts['×'] == products and min(counts['+'], counts['-']) > 0.4 * (len(questions) - products)
        assert all(q['a'] >= q['b'] for q in questions if q['sign'] == '-')
    assert test == arithmetic.benchmark('arithmetic')
    assert train != arithmetic.training_problems('generated', limit=500, seed=seed + 1)


@pytest.mark.parametrize('response, verdict, answer', [
    ('29', 'CORRECT', '29'),
    ('41 - 12 = 29.', 'CORRECT', '29'),
    ('The answer is 29.0', 'CORRECT', '29.0'),
    ('29 is 41 - 12', 'WRONG', '12'),  # the last number counts
    ('-29', 'WRONG', '-29'),
    ('29.5', 'WRONG', '29.5'),
    ('1,029', 'WRONG', '1,029'),
    ('twenty-nine', 'UNPARSEABLE', None),
    ('', 'UNPARSEABLE', None),
    ('<think>29', 'UNPARSEABLE', None),
    ('<think>30?</think>29', 'CORRECT', '29'),
    ('9' * 1000, 'WRONG', '9' * 1000),
])  # fmt: skip
def test_the_last_number_counts(response, verdict, answer):
    assert arithmetic.verify(response, TRUTH) == (Verdict[verdict], answer)
    assert arithmetic.verify_all([response], [TRUTH]) == [(Verdict[verdict], answer)]


@pytest.mark.parametrize('sign, value', [('+', 53), ('-', 29), ('×', 492)])
def test_every_sign_has_its_value(sign, value):
    assert arithmetic.verify(str(value), TRUTH | {'sign': sign})[0] == Verdict.CORRECT
    assert arithmetic.verify(str(value + 1), TRUTH | {'sign': sign})[0] == Verdict.WRONG


def test_the_question_is_a_turn_of_the_chat():
    tokenizer = character_tokenizer(chat_template=CHAT)
    [prompt] = encode_prompts('arithmetic', [TRUTH], tokenizer, template='chat')
    assert tokenizer.decode(prompt.tokens) == '<user>What is 41 - 12? Reply with the number.<assistant>'
    thinking = arithmetic.with_demands(TRUTH, 'x<think>\n')
    assert arithmetic.verify('29', thinking)[0] == Verdict.UNPARSEABLE
    assert arithmetic.verify('5</think>29', thinking)[0] == Verdict.CORRECT
    with pytest.raises(ValueError, match='has no chat template'):
        encode_prompts('arithmetic', [TRUTH], character_tokenizer(), template='chat')


@pytest.mark.parametrize('truth, named', [
    ({}, '"a" must be a whole number'), ({'a': 1, 'b': '2', 'sign': '+'}, '"b" must be'), ({'a': 1, 'b': 2, 'sign': '/'}, '"sign" must be'),
    ([], '"a" must be'),
])  # fmt: skip
def test_a_ground_truth_that_asks_nothing_is_refused(truth, named):
    with pytest.raises(ValueError, match=named):
        arithmetic.verify('1', truth)


def test_what_is_not_there_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown arithmetic benchmark 'x'; choose one of arithmetic"):
        arithmetic.benchmark('x')
    with pytest.raises(ValueError, match='set task.train=generated'):
        arithmetic.training_problems('x', limit=1, seed=0)
    with pytest.raises(ValueError, match='task.limit is 6000; set it to a number of questions from 1 to 5000'):
        arithmetic.training_problems('generated', limit=6000, seed=0)
    with pytest.raises(ValueError, match="task.template is 'x'"):
        arithmetic.prompt_text(TRUTH, 'x', character_tokenizer(chat_template=CHAT))
