"""When two answers are the same, and what must never pass for one."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from bapo_jax.groups import Verdict
from bapo_jax.tasks.mathematics.answers import quick_verdict
from bapo_jax.tasks.mathematics.plain_numbers import parse_number
from bapo_jax.tasks.mathematics.text import last_box, tidy
from bapo_jax.tasks.mathematics.worker import slow_verdict

CORRECT, WRONG, UNPARSEABLE = Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE


def judge(answer, *accepted):
    """As the task judges a boxed answer, but in this process and without a deadline."""
    verdict = quick_verdict(answer, accepted)
    return slow_verdict(answer, accepted, boxed=True)[0] if verdict is None else verdict


# ---- hostile text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    'text',
    [r'\boxed{' * 200_000, r'\boxed{' * 200_000 + '}' * 200_000, '{' * 500_000, '}' * 500_000, r'\boxed' + ' ' * 500_000,
     r'\boxed{1} and ' * 50_000, '\\' * 500_000, r'\text{' * 100_000, 'a' * 300_000 + '!', '$' * 200_000, '1 ' * 200_000,
     '(' * 300_000,
     'final answer is $' * 50_000, '<think>' * 100_000, '1,' * 200_000, '^{' * 200_000, r'\frac' * 100_000, '٣' * 200_000],
)  # fmt: skip
def test_hostile_text_is_looked_through_at_once(text):
    started = time.perf_counter()
    for answer in (text, last_box(text, stated=True), last_box(f'\\boxed{{{text}}}')):
        if answer is not None:
            assert quick_verdict(answer, ['7', 'x+1', r'\frac{1}{2}']) != CORRECT
    assert time.perf_counter() - started < 20  # a quadratic scan of half a million characters takes hours


# ---- plain numbers and text, decided at a glance ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ('answer', 'gold'),
    [
        ('25', '025'), ('142', '142.0'), ('1000', '1,000'), ('1000', '1{,}000'), (r'11,\! 111', '11111'), ('1 000', '1000'),
        ('.5', '0.5'), ('+5', '5'), ('-5', '−5'), ('1/2', '0.5'), (r'\frac12', r'\dfrac{1}{2}'),
        (r'\frac{-3}{7}', r'-\frac{3}{7}'), ('2/4', '1/2'), ('1.5e3', r'1.5\times 10^{3}'), ('10^{-3}', '0.001'), ('1e-5',
        '0.00001'),
        (r'\$10', '10'), (r'90^\circ', '90'), ('90°', r'90^{\circ}'), ('$5$', '5'), (r'\(5\)', '5'), ('5.', '5'),
        (r'5\text{ cm}', '5'),
        ('100 dollars', '100'), ('４', '4'), ('١٢', '12'), ('1\u200b', '1'), (r'0.\overline{3}', '1/3'), ('2.6667', '8/3'),
        (r'\text{Evelyn}', 'evelyn'), (r'\text{(C)}', 'C'), ('E_1, E_2', 'E_{1},E_{2}'), (r'\left(1, 2\right)', '(1,2)'),
        (r'\{3,2\}', r'\{2,3\}'), ('3, 1, 2', '1,2,3'), ('2 or 1', '1,2'), ('1011_2', '1011_{2}'), ('1011_2', '13_8'),
        ('x²', 'x^2'), ('100,200', '200,100'), ('10^{10^{10}}', '10^{10^{10}}'), ('007', '7'),
    ],
)  # fmt: skip
def test_equal_at_a_glance(answer, gold):
    assert quick_verdict(answer, [gold]) == CORRECT
    assert quick_verdict(gold, [answer]) == CORRECT
    assert quick_verdict(answer, [f'So it is $\\boxed{{{gold}}}$.']) == CORRECT
    assert quick_verdict(answer, ['no', gold, '-1']) == CORRECT  # any of those accepted will do


@pytest.mark.parametrize(
    ('answer', 'gold'),
    [
        ('25', '26'), ('5', '-5'), ('5.001', '5'), ('1.9999', '2'), ('2.67', '8/3'), ('2.6666', '8/3'), ('0.0001', '1/7000'),
        ('0.00000011', '0.00000022'), ('3.3e-10', r'5 \times 10^{-10}'), ('1/3', '1/4'), ('1011_2', '1011_3'), ('1112122_3',
        '1112112_3'),
        ('10^{400}', '1'), ('10^{-400}', '0'), (r'5\text{ cm}', r'5\text{ km}'), ('3:30', '4'), ('31/2', '3 1/2'),
        ('1000,99', '1000.99'), ('2,3', '2.3'),
    ],
)  # fmt: skip
def test_not_equal(answer, gold):
    assert judge(answer, gold) in (WRONG, UNPARSEABLE)
    assert quick_verdict(answer, [gold]) in (WRONG, None)


@st.composite
def spelled_numbers(draw):
    """A rational number and one way to write it."""
    value = Fraction(draw(st.integers(-(10**9), 10**9)), draw(st.sampled_from([1, 1, 2, 3, 7, 8, 100])))
    ways = [f'{value}', f'\\frac{{{value.numerator}}}{{{value.denominator}}}', f' ${value}$ ', f'{value}.']
    if value.denominator == 1:
        ways += [
            f'{value}.0',
            f'{int(value):,}',
            f'00{value}' if value >= 0 else f'-00{-value}',
            f'{value}^\\circ',  # the only unit: two units that differ are not equal
        ]
    if 1000 % value.denominator == 0:
        ways += [f'{int(value * 1000)}e-3', f'{int(value * 1000)}\\times 10^{{-3}}', f'{int(value * 1000)} \\cdot 10^{{-3}}']
    return value, draw(st.sampled_from(ways))


@given(spelled_numbers(), spelled_numbers())
def test_numbers_are_compared_by_value_however_spelled(one, other):
    (a, text), (b, other_text) = one, other
    assert parse_number(tidy(text)).value == a
    assert quick_verdict(text, [str(a)]) == CORRECT
    assert (judge(text, other_text) == CORRECT) == (a == b)


@settings(max_examples=300)
@given(st.text(), st.text(max_size=20))
def test_no_text_raises(text, gold):
    assert quick_verdict(text, [gold]) in (None, CORRECT, WRONG)
    assert quick_verdict(last_box(text) or text, [f'${gold}$', '7']) in (None, CORRECT, WRONG)


# ---- what math-verify decides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('answer', 'gold'),
    [
        (r'\frac{x}{7}+\frac{2}{7}', r'\frac{x+2}{7}'), (r'\frac{n(n-1)}{2}', r'\binom{n}{2}'), ('n(n-1)!', 'n!'), ('cba', 'abc'),
        (r'\sin^2 x + \cos^2 x', '1'), ('10^{10^{10}} - 10^{10^{10}}', '0'), (r'\sqrt{8}', r'2\sqrt{2}'), ('5', 'x=5'),
        ('x=5', '5'),
        (r'(2,3)\cup(0,1)', r'(0,1)\cup(2,3)'), (r'\{\}', r'\emptyset'), ('y=-x/2+3/4', '2x+4y-3=0'), ('-2, 2', r'\pm 2'),
        (r'\begin{bmatrix}1&2\\3&4\end{bmatrix}', r'\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}'), ('1+2i', 'i(2-i)'),
        (r'(3, \pi/2)', r'\left(3,\frac{\pi}{2}\right)'), ('0.5x', r'\frac{x}{2}'), (r'-2 \le x \le 7', r'x \in [-2,7]'),
        ('1024', '2^{10}'),
        ('20%', r'20\%'), (r'\frac{t}{m}', r'\frac{1}{m}t'),
    ],
)  # fmt: skip
def test_equal_by_meaning(answer, gold):
    assert judge(answer, gold) == CORRECT
    assert judge(answer, 'w^7', gold) == CORRECT


@pytest.mark.parametrize(
    ('answer', 'gold'),
    [
        ('x^2-1', 'x^2+1'), ('a-b', 'a+b'), (r'\frac{b}{a}', r'\frac{a}{b}'), ('2x', '2'), ('[0,1]', '[0,1)'), ('(1,3,2)',
        '(1,2,3)'),
        (r'\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}', r'\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}'), ('y=3x+2', 'y=2x+3'),
        (r'2 \text{ or } 3', '2'), ('2, 3', '2'), ('Carla', r'\text{Evelyn}'), ('1.5', r'3\frac{1}{2}'),
        (r'1 + \frac{1}{\mathrm{e}}', r'1-\frac1e'),
        (r'|x-100|', '100-x'), (r'\sqrt{x^2}', 'x'), (r'\lfloor n/2 \rfloor', r'\lfloor (n+1)/2 \rfloor'), ('f(y)', 'f(x)'),
        ('6', '6m'), (r'\frac{1}{m}', r'\frac{t}{m}'),
    ],
)  # fmt: skip
def test_not_equal_by_meaning(answer, gold):
    assert judge(answer, gold) == WRONG


@pytest.mark.parametrize(
    'answer',
    [
        '1 if __import__("time") else 1', '1 if True else 2', 'exec("1")', '(lambda:1)()', r'x = 1 \text{ (or perhaps } 3)',
        '1 (or 2)',
        'x = 1 (or perhaps 3)', '1, maybe 2', 'either 1', '1 unless x=2', r'1 \text{ possibly } 2', '9^{9^{9^{9}}}', '9**9**9**9',
        '((((10!)!)!)!)', '{' * 3000 + '1' + '}' * 3000, '(' * 41 + '1' + ')' * 41, '1' + '+0' * 3000, r'\frac{1}{', '^2',
        '&', '_', r'\sqrt',
        r'\sum_{k=1}^{10^{12}} \frac{1}{k}', r'\prod_{k=1}^{10^{9}} k', r'\int_0^1 2x dx', r'\lim_{n\to\infty} 1', '1\x00',
        '1\ud800',
        r'\def\x{\x\x}\x', "'; DROP TABLE rewards;--",
    ],
)  # fmt: skip
def test_what_is_no_answer_is_never_correct(answer):
    started = time.perf_counter()
    assert judge(answer, '1') in (WRONG, UNPARSEABLE)
    assert time.perf_counter() - started < 20  # in this process, without a deadline: each must end by itself


def test_an_unevaluated_form_counts_where_the_answer_has_it_or_is_worked_out():
    assert judge(r'\sum_{k=1}^{n} k', r'\sum_{j=1}^{n} j') == CORRECT
    assert judge(r'\int_0^1 2x dx = 1', '1') == CORRECT


def test_a_gold_that_cannot_be_read_is_nobodys_wrong_answer():
    for gold in ('', ' ', r'\frac{', '}{'):
        assert judge('x+1', gold) == Verdict.INFRA_ERROR
    assert judge('x+1', r'\frac{', 'x+2') == WRONG  # the other can be read
    assert judge('x+1', r'\frac{', 'x+1') == CORRECT
    assert judge(r'\frac{', r'\frac{') == CORRECT  # as text


@pytest.mark.parametrize(
    ('text', 'gold', 'answer'),
    [
        ('so the number is 10 which is 1,000.99m²', '1000.99', '1000.99'),
        ('Therefore, the probability that Alice wins is 2/3.', '$2/3$', '2/3'),
        (r'The answer is $\frac{10}{27}$. I hope it is correct.', r'\frac{10}{27}', r'\frac{10}{27}'),
    ],
)
def test_without_a_box_the_last_statement_counts(text, gold, answer):
    assert slow_verdict(text, [gold], boxed=False) == (CORRECT, answer)
    assert slow_verdict(text, ['77'], boxed=False) == (WRONG, answer)


def test_where_nothing_is_stated_there_is_no_answer():
    assert slow_verdict('I have no idea', ['42'], boxed=False) == (UNPARSEABLE, None)
