r"""Mathematical answers by a grammar: sound ones, odd ones, half-finished ones; and numbers in several styles."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from random import Random

_LETTERS = ('x', 'y', 'a', 'n', 'k', 'e', 'i', 'A', '\\pi', '\\theta', '\\alpha', 'x_1', 'a_{n+1}', "f'", '\\infty')
_SIGNS = ('+', '-', '*', '\\cdot ', '\\times ', '/', '\\div ', '\\pm ', ' ', '')
_RELATIONS = ('=', '<', '>', '\\le ', '\\geq ', '\\ne ', '\\approx ', '\\equiv ', '\\in ', '≤')
_FUNCTIONS = ('\\sin', '\\cos ', '\\tan', '\\ln', '\\log', '\\log_2', '\\exp', '\\arcsin', 'f', '\\det', '\\gcd', '\\max')
_UNITS = (
    'cm', '\\text{ cm}', '^\\circ', '\\%', ' km/h', '\\text{ dollars}', ' million', '\\mathrm{m}^2', ' p.m.', ' or more',
    '°', '\\text{ m}', ' minutes', '\\text{ hours }30\\text{ minutes}', '\\text{ cents}', '€', '¢', '_2', '\\text{ (base 3)}',
)  # fmt: skip
_WORDS = ('\\text{even}', '\\text{no solution}', 'None', 'yes', '\\text{(B)}', 'for all real x', 'undefined', 'Evelyn')
_PIECES = (
    '{', '}', '\\frac', '\\frac{', '\\sqrt[', '\\left(', '\\right]', '^', '_', '^{', '\\', '\\\\', '$', '$$', '\\text{',
    '\\begin{pmatrix}', '\\boxed{', '&', '%', '#', '\\!', '\\,', '\\quad', '|', '\\|', '!', '!!', '\\limits', '\\not', '\\over',
    '\\mathbb', '\\binom{5}', '\u200b', '\u202e', '\u0661\u0662', '𝟙', '½', '²', '√', '∞', 'é', '日本', '\ud800', '\0', '\n', '\t',
    '‘', '\\hline', '\\frac12', '__import__', 'lambda', ' or ', '\\sum_{n=1}^{\\infty}', '\\int_0^1', '\\lim_{x\\to0}', '\\prod',
    "'", '"', ';', ':', '\\ldots', '…',
)  # fmt: skip


def answer(rng: Random) -> str:
    """Any answer; one in ten is damaged."""
    text = rng.choice(_ANSWERS)(rng) if (kind := rng.random()) < 0.98 else _deep(rng) if kind < 0.999 else _absurd(rng)
    for _ in range(rng.randint(1, 3) if rng.random() < 0.1 else 0):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(_PIECES) + text[min(len(text), at + rng.choice((0, 0, 1, 5))) :]
    return text


def response(rng: Random, text: str) -> str:
    """What a model writes around an answer."""
    return rng.choice((
        '\\boxed{%s}', '\\boxed{%s}', 'So \\boxed{%s}.', '$\\boxed{%s}$', '<think>\\boxed{7}</think> It is $$\\boxed{%s}$$',
        '\\fbox{%s}', '\\boxed{%s} or \\boxed{3}', 'Final Answer: The final answer is $%s$. I hope it is correct.',
        'The answer is %s', 'the answer is $%s$.', '\\[ %s \\]', '\\boxed{%s', '<think> %s', '%s', '\\boxed %s',
        '\\boxed{\\boxed{%s}}', '**%s**',
    )).replace('%s', text)  # fmt: skip


def number(rng: Random) -> str:
    if rng.random() < 0.6:
        return str(rng.randint(0, 30))
    return rng.choice((
        lambda: str(rng.randint(-9, 30)), lambda: str(rng.randint(0, 10**6)),
        lambda: f'{rng.uniform(-50, 50):.{rng.randint(1, 6)}f}', lambda: f'{rng.randint(1, 999)},{rng.randint(0, 999):03d}',
        lambda: f'.{rng.randint(0, 99)}', lambda: f'{rng.randint(1, 9)}.',
        lambda: ''.join(rng.choices('0123456789', k=rng.choice((20, 60, 350, 450)))),
        lambda: f'0.\\overline{{{rng.randint(1, 99)}}}', lambda: f'{rng.randint(1, 99)}e{rng.randint(-400, 999)}',
        lambda: f'{rng.randint(1, 9)} \\times 10^{{{rng.randint(-30, 99)}}}', lambda: f'{rng.randint(0, 10**5):b}_2',
        lambda: f'{rng.randint(1, 12)}:{rng.randint(0, 59):02d}', lambda: '0' * rng.randint(1, 5),
    ))()  # fmt: skip


def expression(rng: Random, depth: int = 2) -> str:
    if depth <= 0 or rng.random() < 0.25:
        return number(rng) if rng.random() < 0.7 else rng.choice(_LETTERS)
    inner = [expression(rng, depth - rng.randint(1, 2)) for _ in range(2)]
    a, b = inner
    return rng.choice((
        f'\\frac{{{a}}}{{{b}}}', f'\\dfrac{{{a}}}{{{b}}}', f'\\frac{a[0]}{b[0]}', f'{a}/{b}', f'\\sqrt{{{a}}}',
        f'\\sqrt[{a[:3]}]{{{b}}}', f'\\sqrt{a}', f'{a}{rng.choice(_SIGNS)}{b}', f'{a}{rng.choice(_SIGNS)}{b}', f'{a}+{b}',
        f'{a}-{b}', f'({a})', f'\\left({a}\\right)', f'{a}^{{{rng.choice("23nx")}}}', f'{a}^{rng.randint(0, 9)}', f'-{a}', f'|{a}|',
        f'{rng.randint(0, 9)}!', f'\\binom{{{a}}}{{{b}}}', f'{rng.choice(_FUNCTIONS)}({a})', f'{rng.choice(_FUNCTIONS)}{{{a}}}',
        f'\\lfloor {a} \\rfloor', f'\\overline{{{a}}}', f'{a}\\{b}',
    ))  # fmt: skip


def _many(rng: Random, depth: int = 1) -> list[str]:
    return [expression(rng, depth) for _ in range(rng.choice((1, 2, 2, 3)))]


def _list(rng: Random) -> str:
    joint = rng.choice((', ', ',', ' and ', ' or ', '\\text{ and }', '; ', ' \\text{ or } ', ', \\ldots, ', ',...,', '+\\cdots+'))
    return joint.join(_many(rng))


def _bracketed(rng: Random) -> str:
    escaped = ('\\{', '\\}'), ('\\left\\{', '\\right\\}'), ('\\langle', '\\rangle')
    opening, closing = rng.choice(('()', '[]', '(]', '[)', '<>', '{}', *escaped))
    return opening + ', '.join(_many(rng)) + closing


def _sets(rng: Random) -> str:
    joint = rng.choice(('\\cup ', '\\cap ', ' \\setminus ', '∪', '\\times ', ' or '))
    return joint.join(_bracketed(rng) for _ in range(rng.randint(1, 3)))


def _relation(rng: Random) -> str:
    return ''.join(expression(rng, 1) + rng.choice(_RELATIONS) for _ in range(rng.randint(1, 2))) + expression(rng, 1)


def _matrix(rng: Random) -> str:
    kind, rows, columns = rng.choice(('pmatrix', 'bmatrix', 'vmatrix', 'array', 'cases')), rng.randint(1, 3), rng.randint(1, 3)
    body = ' \\\\ '.join(' & '.join(expression(rng, 1) for _ in range(columns)) for _ in range(rows))
    return f'\\begin{{{kind}}} {body} \\end{{{kind}}}'


def _builder(rng: Random) -> str:
    bar = rng.choice((':', '|', '\\mid '))
    return f'\\{{x {bar} {_relation(rng)}\\}}'


def _beside(rng: Random) -> str:
    """A value with its rounding, its choice's letter, or a function set as text."""
    value, decimal = expression(rng, 1), f'{rng.uniform(0, 9):.{rng.randint(0, 3)}f}'
    return rng.choice((
        f'{value} \\approx {decimal}', f'${value}$, about {decimal}', f'{value}\\text{{ (or about }}{decimal})', f'B. {value}',
        f'(C)\\ {value}', f'\\textbf{{(D) }}{value}', f'\\text{{sin}} {value}', f'\\mathrm{{ln}}({value})', f'\\sqrt{{-{value}}}',
        f'\\mathbb{{R}}_{{>{value}}}', f'\\mathbb{{{rng.choice("RZNQC")}}}^+', f'all real numbers except {value}',
        f'-1 < {value} \\le t', f'\\$ {value}', f'{decimal}\\dot{{3}}', f'0.\\overline{{{value}}}', f'{decimal}\\ldots',
    ))  # fmt: skip


def _labelled(rng: Random) -> str:
    return rng.choice(('x', 'f(x)', '(a, b)', 'P(A)', 'S', 'm\\angle ABC', 'x_1', '|AB|')) + ' = ' + answer(rng)


def _deep(rng: Random) -> str:
    opening, closing = rng.choice(('()', '{}', '[]', ('\\frac{1}{1+', '}'), ('\\sqrt{', '}'), ('\\text{', '}'), ('-', '')))
    depth = rng.choice((5, 5, 5, 12, 12, 39, 41, 3000))
    return opening * depth + number(rng) + closing * (depth - rng.randint(0, 1))


def _absurd(rng: Random) -> str:
    """What may take for ever."""
    a = rng.randint(2, 99)
    return rng.choice((
        f'{a}^{{{a}^{{{a}}}}}', f'({a}!)!', f'{a}^{{{10 ** rng.randint(3, 12)}}}', f'\\binom{{{10**9}}}{{{10**8}}}', f'{10**7}!',
        f'\\frac{{1}}{{{a}^{{{a}^{a}}}}}', f'\\sum_{{k=1}}^{{{10**9}}} k', f'e^{{e^{{e^{{{a}}}}}}}', f'{a}^{a}^{a}',
        f'\\sin({10**300})', '+'.join(f'x^{{{k}}}' for k in range(300)), f'(x+1)^{{{10**4}}}', f'\\sqrt[{10**9}]{{{a}}}',
        f'{10**400} \\bmod {a}',
    ))  # fmt: skip


def _noise(rng: Random) -> str:
    return ''.join(rng.choice(_PIECES + _LETTERS + _UNITS) for _ in range(rng.randint(1, 8)))


_ANSWERS: tuple[Callable[[Random], str], ...] = (
    expression, expression, expression, lambda rng: expression(rng, 3), number, number, _list, _list, _bracketed, _bracketed, _sets,
    _relation, _matrix, _builder, _labelled, _beside, _noise, _noise, lambda rng: number(rng) + rng.choice(_UNITS),
    lambda rng: rng.choice(_WORDS), lambda rng: f'\\text{{{expression(rng)}}}',
    lambda rng: f'{rng.randint(1, 9)} \\frac{{{rng.randint(1, 9)}}}{{{rng.randint(1, 9)}}}',
)  # fmt: skip


# ---- one number in several styles -------------------------------------------------------------------------------------


def styled_pair(rng: Random) -> tuple[str, str, bool]:
    """An accepted answer, a number written otherwise, and whether they are equal."""
    most = 10 ** rng.choice((2, 6, 30))
    value = Fraction(rng.randint(-most, most), rng.choice((1, 1, 2, 7, 10, 100, 360)))
    equal = rng.random() < 0.6
    other = value if equal else value + rng.choice((1, -1, Fraction(1, value.denominator)))
    return styled(rng, value), styled(rng, other), equal


def styled(rng: Random, value: Fraction) -> str:
    sign, (above, below) = '-' if value < 0 else '', abs(value).as_integer_ratio()
    k = rng.randint(2, 9)
    styles = [f'\\frac{{{above}}}{{{below}}}', f'\\dfrac{{{above * k}}}{{{below * k}}}', f'{above}/{below}']
    if below == 1:
        grouped, full_width = f'{above:,}', str(above).translate({48 + d: 0xFF10 + d for d in range(10)})
        styles += [str(above), grouped, grouped.replace(',', '{,}'), f'{above}.0', f'\\frac{{{above * k}}}{{{k}}}', full_width]
    elif 100 % below == 0:
        styles.append(f'{above * 100 // below // 100}.{above * 100 // below % 100:02d}')
    text = sign + rng.choice(styles)
    around = ['{}', '{}.', '${}$', '\\text{{{}}}', '\\, {} ', '{}\\;']
    if ',' not in text:  # in brackets, a list of numbers
        around += ['{{{}}}', '\\left({}\\right)']
    return rng.choice(around).format(text)
