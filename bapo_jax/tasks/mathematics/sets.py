r"""Converts sets of numbers in an answer, however they are written, to LaTeX that math-verify can read.

    a relation    'x < 1 \text{ or } x > 3', '-1 < t \le 3', 'x \in (0, 1]', 'x \ne 2'
    a name        '\mathbb{R}^+', '\mathbb{Z}_{\ge 0}', '\mathbb{R}\setminus\{0\}'
    words         'all real numbers', 'all positive integers', 'all real numbers except 2'

Works on tidied text and takes linear time.
"""

from __future__ import annotations

import re

from bapo_jax.tasks.mathematics.forms import both_signs, labelled
from bapo_jax.tasks.mathematics.text import split

# ---- sets with a name --------------------------------------------------------------------------------------

_MARK = r'(?:[_^] ?(?:\{ ?[^{}]{1,20} ?\}|[+*0-]|\\(?:ast|times)(?![A-Za-z])))'
_NAMED = re.compile(
    rf'\\(?:mathbb|mathbf|Bbb|mathds) '
    rf'?\{{? ?([RZNQC]) ?\}}?({_MARK}{{0,2}})|\\([RZNQC])(?![A-Za-z])({_MARK}{{0,2}})'
)
_SIGNS_OF = {
    '': '', '+': '>', '>0': '>', '++': '>', '-': '<', '<0': '<', '>=0': '>=', '+0': '>=', '0+': '>=',
    '0': '>=', '<=0': '<=', '-0': '<=', '0-': '<=', '*': '!=', '!=0': '!=', '*+': '>', '+*': '>', '*-': '<',
    '-*': '<', '>=1': '>',
}  # fmt: skip
_REALS = {
    '': r'\mathbb{R}', '>': r'(0,\infty)', '>=': r'[0,\infty)', '<': r'(-\infty,0)', '<=': r'(-\infty,0]',
    '!=': r'(-\infty,0)\cup(0,\infty)',
}  # fmt: skip
_INTEGERS = {
    '': r'\mathbb{Z}',
    '>': r'\mathbb{N}',
    '>=': r'\mathbb{N}\cup\{0\}',
    '!=': r'\mathbb{Z}\setminus\{0\}',
}
_NATURALS = {'': r'\mathbb{N}', '>': r'\mathbb{N}', '!=': r'\mathbb{N}', '>=': r'\mathbb{N}\cup\{0\}'}


def _named(match: re.Match) -> str:
    letter, mark = match[1] or match[3], match[2] or match[4] or ''
    mark = re.sub(r'\\geq?(?:slant)?(?![a-z])', '>=', re.sub(r'\\leq?(?:slant)?(?![a-z])', '<=', mark))
    mark = re.sub(r'\\(?:neq?)(?![a-z])', '!=', mark.replace('\\gt', '>').replace('\\lt', '<'))
    sign = _SIGNS_OF.get(re.sub(r'[_^{} ]', '', re.sub(r'\\(?:ast|times)', '*', mark)))
    if sign is None or (letter != 'N' and mark in ('_0', '_{0}')):
        return match[0]
    return {'R': _REALS, 'Z': _INTEGERS, 'N': _NATURALS}.get(letter, {'': f'\\mathbb{{{letter}}}'}).get(
        sign, match[0]
    )


_KINDS = {'real': 'R', 'integer': 'Z', 'rational': 'Q', 'complex': 'C', 'natural': 'N', 'whole': 'Z>='}
_IN_WORDS = re.compile(
    r'(?:the )?(?:set of )?(?:all )?(?:the )?(positive |negative |nonnegative |non-negative |nonzero '
    r'|non-zero )?'
    r'(real|integer|rational|complex|natural|whole)s?(?: ?(?:numbers?|values?))?(?: ?(?:except|but|other '
    r'than)(?: for)? ?(.+))?'
)
_SIGN_IN_WORDS = {
    'positive ': '>', 'negative ': '<', 'nonnegative ': '>=', 'non-negative ': '>=', 'nonzero ': '!=',
    'non-zero ': '!=',
}  # fmt: skip
_NONE = ('no solution', 'no solutions', 'no real solution', 'no real solutions', 'empty set', 'the empty set')


def _in_words(text: str) -> str | None:
    plain = re.sub(r'\\(?:text\w*|mbox) ?|[{}]', '', text).strip()
    if plain.lower() in _NONE:
        return r'\emptyset'
    match = _IN_WORDS.fullmatch(plain[:1].lower() + plain[1:])
    if not match or not re.search('numbers|values|integers|reals|rationals', plain):
        return None
    sign, letter = _SIGN_IN_WORDS.get(match[1] or '', ''), _KINDS[match[2]]
    described = {'R': _REALS, 'Z': _INTEGERS, 'N': _NATURALS, 'Z>=': {'': _INTEGERS['>=']}}.get(
        letter, {'': f'\\mathbb{{{letter}}}'}
    ).get(sign)
    if described and match[3]:
        return f'{described}\\setminus\\{{{_BOTH.sub(",", match[3].strip())}\\}}'
    return described


# ---- relations ---------------------------------------------------------------------------------------------

_OPERATOR = re.compile(r' ?(\\(?:[lg]eqslant|[lg]eq?|[lg]t|neq?)(?![a-z])|[<>]=|!=|<|>) ?')
_GREEK = (
    r'\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|rho|sigma|tau'
    r'|(?:var)?phi|chi|psi|omega|ell)'
)
_UNKNOWN = re.compile(
    rf"(?:[A-Za-z]|{_GREEK}(?![a-z]))(?:_\w|_\{{\w+\}}|')?(?:\([a-z]\))?"
    rf'|\\(?:sin|cos|tan|log|ln)(?![a-z]) ?\(?(?:[a-z]|{_GREEK})\)?|\\frac\{{[a-z]\}}\{{[a-z]\}}|\\angle '
    rf'?[A-Z]{{1,3}}'
)
_IN = re.compile(r'(.+?) ?\\in(?![a-z]) ?(.+)')
_OR = re.compile(
    r',? ?(?:\\text\w* ?\{ ?,? ?or ?\}|(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:vee|lor|cup)(?![a-z])) ?'
)
_BOTH = re.compile(
    r',? ?(?:\\text\w* ?\{ ?,? ?and ?\}|(?<![A-Za-z\\])and(?![A-Za-z])|\\(?:wedge|land)(?![a-z])) ?'
)
_BUT = re.compile(r', ?(?=[A-Za-z] ?\\neq?(?![a-z]))')  # '0<x<2, x \\ne 1'
_ONLY_SETS = re.compile(
    r'(?:\\(?:mathbb\{[RZNQC]\}|infty|c[au]p|setminus|frac|sqrt|pi)(?![a-z])|\\?[{}]|[-+\d\[\](), ./])+'
)
_INTERVAL = re.compile(r'\\?\{[^|:]*\}|[(\[].*[)\]]')


def domain(text: str) -> str | None:
    r"""Returns the set, in LaTeX, that relations in one unknown, intervals, names or words give, or None."""
    if words := _in_words(text):
        return words
    text = _BUT.sub(r' \\land ', text)
    said, text = text, _NAMED.sub(_named, text)
    pieces = _OR.split(text)
    if len(pieces) == 1 and len(intervals := _BOTH.split(text)) > 1 and all(map(_is_interval, intervals)):
        pieces = intervals  # '(0,1) and (2,3)'
    sets, unknowns = [], set()
    for piece in pieces:
        if len(pieces) > 1 and _is_interval(piece):
            sets.append(piece)
            continue
        parts = _BOTH.split(piece)
        relations = [_relation(part, alone=len(parts) == 1) for part in parts]
        if None in relations:
            return text if text != said and _ONLY_SETS.fullmatch(text) else None
        unknowns |= {unknown for unknown, _ in relations}
        sets.append('\\cap'.join(described for _, described in relations))
    if len(unknowns) > 1:
        return None
    # '(1,2) or (2,1)' may be points.
    if not unknowns and '\\cup' not in text and not any('\\infty' in s or '[' in s for s in sets):
        return None
    return (
        '\\cup'.join(sets)
        if _OPERATOR.search(text) or re.search(r'\\in(?![a-z])', text) or len(sets) > 1
        else None
    )


def chain(text: str) -> tuple[list[str], list[str]] | None:
    """Returns the sides of a chain of inequalities, smallest first, and its signs; None for other texts."""
    pieces = _OPERATOR.split(text)
    sides, signs = [piece.strip() for piece in pieces[::2]], [_kind(sign) for sign in pieces[1::2]]
    if len(sides) < 3 or not all(sides) or len({sign[0] for sign in signs}) > 1 or signs[0] == '!=':
        return None
    if signs[0].startswith('>'):
        return sides[::-1], [sign.replace('>', '<') for sign in signs[::-1]]
    return sides, signs


def _is_interval(text: str) -> bool:
    return _INTERVAL.fullmatch(text.strip()) is not None


def _relation(text: str, *, alone: bool) -> tuple[str, str] | None:
    r"""Returns the unknown of a relation and the set of its values; None for any other text.

    Unless the relation stands `alone`, the set contains no union, since \cap binds first.
    """
    name, value = labelled(text)
    if _UNKNOWN.fullmatch(name):
        return name, f'\\{{{value}\\}}'
    if (member := _IN.fullmatch(text)) and _UNKNOWN.fullmatch(member[1]):
        return member[1], member[2]
    pieces = _OPERATOR.split(text)
    sides, operators = [p.strip() for p in pieces[::2]], [_kind(o) for o in pieces[1::2]]
    if len(sides) == 2 and _UNKNOWN.fullmatch(sides[1]) and not _UNKNOWN.fullmatch(sides[0]):
        sides, operators = sides[::-1], [operators[0].translate(str.maketrans('<>', '><'))]
    if len(sides) == 3 and operators[0][0] == operators[1][0] == '>':
        sides, operators = sides[::-1], [o.replace('>', '<') for o in operators[::-1]]
    if len(sides) == 2 and _UNKNOWN.fullmatch(sides[0]) and sides[1]:
        unknown, end = sides
        closed = operators[0].endswith('=')
        ends = [value for part in split(end, ',') for value in both_signs(part)]
        if operators[0] == '!=' and (len(ends) > 1 or not alone):
            return unknown, f'\\mathbb{{R}}\\setminus\\{{{",".join(ends)}\\}}'
        if operators[0] == '!=':
            return unknown, f'(-\\infty,{end})\\cup({end},\\infty)'
        if operators[0].startswith('<'):
            return unknown, f'(-\\infty,{end}{"]" if closed else ")"}'
        return unknown, f'{"[" if closed else "("}{end},\\infty)'
    if (
        len(sides) == 3
        and _UNKNOWN.fullmatch(sides[1])
        and operators[0][0] == operators[1][0] == '<'
        and sides[0]
        and sides[2]
    ):
        left, right = '[' if operators[0].endswith('=') else '(', ']' if operators[1].endswith('=') else ')'
        return sides[1], f'{left}{sides[0]},{sides[2]}{right}'
    return None


def _kind(operator: str) -> str:
    r"""Returns '<', '<=', '>', '>=' or '!=' for an operator such as \leqslant."""
    if operator in ('\\lt', '\\gt'):
        return '<' if operator == '\\lt' else '>'
    if operator.startswith('\\'):
        return {'l': '<=', 'g': '>=', 'n': '!='}[operator[1]]
    return operator
