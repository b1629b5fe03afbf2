"""Where a response states its answer, and what an answer is as text."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from bapo_jax.tasks.mathematics.conversion import ratio
from bapo_jax.tasks.mathematics.elisions import written_out
from bapo_jax.tasks.mathematics.numerals import parse_numeral, without_periods
from bapo_jax.tasks.mathematics.plain_numbers import Number, parse_number, same_number
from bapo_jax.tasks.mathematics.text import after_thinking, elements, last_box, split
from bapo_jax.tasks.mathematics.units import Quantity, quantity

# ---- where the answer is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('response', 'opened', 'rest'),
    [
        ('a', False, 'a'),
        ('<think>a</think>b', False, 'b'),
        ('a</think>b', False, 'b'),
        ('a</think>b', True, 'b'),
        ('a', True, None),  # cut off while thinking
        ('<think>a', False, None),
        ('<think>a</think>b<think>c', False, None),
        ('<think>a</think>b</think>c', False, 'c'),
        ('', False, ''),
        ('', True, None),
    ],
)
def test_the_answer_follows_the_thinking(response, opened, rest):
    assert after_thinking(response, opened=opened) == rest


@pytest.mark.parametrize(
    ('text', 'content'),
    [
        ('', None),
        (r'\boxed{5}', '5'),
        (r'\boxed {5}', '5'),
        (r'\fbox{5}', '5'),
        (r'\\boxed{5}', '5'),
        (r'\boxed{ 5 }', '5'),
        (r'\boxed{}', None),
        (r'\boxed5', '5'),
        (r'\boxed 5.', '5'),
        (r'\boxed{\frac{1}{2}}', r'\frac{1}{2}'),
        (r'\boxed{\{1, 2\}}', r'\{1, 2\}'),
        (r'\boxed{\left\{1\right.}', r'\left\{1\right.'),
        (r'\boxed{1', None),
        (r'\boxed{{1}', None),
        (r'\boxed{1\}', None),
        (r'\boxed{\frac{1}{2}', None),
        (r'\boxed{2} ... \boxed{1', '2'),
        (r'first \boxed{2}. Then \boxed{3}.', '3'),
        (r'\boxed{2}. Wait, it is \boxed{3}.', '3'),
        (r'\boxed{x = \boxed{3}}', '3'),
        (r'\boxed{-2} \quad \text{and} \quad \boxed{1}.', '-2, 1'),
        (r'\boxed{2}, \boxed{3}', '2, 3'),
        (r'\boxed{2} or \boxed{3}', '2, 3'),
        (r'$a=\boxed{2}$ and so the answer is $\boxed{5}$', '5'),
        (r'} stray \boxed{2}', '2'),
        (r'{ stray \boxed{2}', '2'),
        ('5', None),
        (r'\boxed', None),
        ('boxed{5}', None),
    ],
)
def test_the_last_closed_box_counts(text, content):
    assert last_box(text) == content


def test_a_final_answer_in_minervas_format_is_a_box_where_asked_for():
    text = r'\boxed{255}, so in all: Final Answer: The final answer is $10,455$. I hope it is correct.'
    assert (last_box(text), last_box(text, stated=True)) == ('255', '10,455')
    text = r'The final answer is $\boxed{7}$. I hope it is correct.'
    assert (last_box(text), last_box(text, stated=True)) == ('7', '7')


balanced = st.recursive(
    st.text(alphabet='ab1+ ', max_size=5),
    lambda inner: st.lists(st.one_of(inner, inner.map('{{{}}}'.format)), max_size=4).map(''.join),
)


@given(balanced, balanced, st.text(alphabet='ab }', max_size=10))
def test_any_balanced_content_comes_out_whole(before, content, after):
    assert last_box(f'{before}.\\boxed{{{content}}}.{after}') == (content.strip() or None)
    assert last_box(f'{before}.\\boxed{{{{{content}}}.') is None


# ---- what an answer is as text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('text', 'number'),
    [
        ('7', Number(Fraction(7), None, '')),
        ('2.50', Number(Fraction(5, 2), 2, '')),  # the decimals written down count
        ('1.5e3', Number(Fraction(1500), 0, '')),
        ('-3/6', Number(Fraction(-1, 2), None, '')),
        (r'5\text{ cm}', Number(Fraction(5), None, 'cm')),
        ('3 apples', Number(Fraction(3), None, 'apple')),
        ('1/0', None),
        ('x', None),
        ('9' * 401, None),
    ],
)
def test_a_plain_number_has_a_value_places_and_a_unit(text, number):
    assert parse_number(text) == number


def test_a_decimal_of_four_places_or_more_may_be_rounded_and_units_must_agree():
    third = Number(Fraction(1, 3), None, '')
    assert same_number(parse_number('0.3333'), third) and same_number(third, parse_number('0.3333'))
    assert not same_number(parse_number('0.333'), third) and not same_number(parse_number('0.3334'), third)
    meters, feet, bare = map(parse_number, ('5 meters', '5 feet', '5'))
    assert same_number(meters, bare) and not same_number(meters, feet)


def test_a_list_is_split_outside_brackets_and_its_elements_have_no_order():
    assert split('(1,2), 3', ',') == ['(1,2)', '3']
    assert elements('3, 1 and 2') == elements(r'\{1, 2, 3\}') == ['1', '2', '3']
    assert elements('f(x)=2, f(x)=1') == ['1', '2']
    assert elements('7') == []


def test_a_numeral_has_a_base():
    assert parse_numeral('(01011)_{2}') == ('1011', 2)
    assert parse_numeral('1011') is None


# ---- units, elisions and periods --------------------------------------------------------------------------------------


def test_units_of_one_kind_have_a_ratio_both_ways_and_others_have_none():
    kinds = [('m', 'cm', 'in', 'mi'), ('s', 'min', 'h', 'day', 'week'), ('l', 'cm3', 'gal'), ('dollar', 'cent'), ('km/h', 'm/s')]
    for kind in kinds:
        for one, other in itertools.permutations(kind, 2):
            assert ratio(one, other) * ratio(other, one) == 1
        assert all(ratio(kind[0], others[0]) is None for others in kinds if others != kind)
    assert (ratio('cent', 'dollar'), ratio('m2', 'cm2'), ratio('euro', 'dollar'), ratio('apple', 'pear')) == (
        Fraction(1, 100), 10_000, None, None,
    )  # fmt: skip
    assert quantity('3 dollars and 50 cents') == Quantity('\\frac{7}{2}', 'dollar', 1)


@given(st.integers(-50, 50), st.integers(-9, 9).filter(bool), st.integers(4, 60))
def test_a_list_with_dots_is_written_out_where_a_step_leads_to_its_end(first, step, count):
    members = [str(first + step * k) for k in range(count)]
    assert written_out(f'{members[0]},{members[1]},\\ldots,{members[-1]}') == ','.join(members)
    missed = f'{members[0]},{members[1]},\\ldots,{int(members[-1]) - 2 * step * count}'  # the other way
    assert written_out(missed) == missed


@given(st.fractions(0, 99, max_denominator=99).filter(lambda value: 10**6 % value.denominator))
def test_a_repeating_decimal_is_its_fraction_however_the_period_is_marked(value):
    whole, rest = divmod(value.numerator, value.denominator)
    seen, digits = {}, ''
    while rest not in seen:
        seen[rest] = len(digits)
        digits += str(rest * 10 // value.denominator)
        rest = rest * 10 % value.denominator
    fixed, period = digits[: seen[rest]], digits[seen[rest] :]
    dotted = f'\\dot{{{period}}}' if len(period) == 1 else f'\\dot{{{period[0]}}}{period[1:-1]}\\dot{{{period[-1]}}}'
    for marked in (f'\\overline{{{period}}}', f'\\bar{{{period}}}', dotted):
        assert parse_number(without_periods(f'{whole}.{fixed}{marked}')).value == value
