r"""Notations of a number: mixed numbers, repeating decimals, and numerals in another base.

    improper           '3\frac{1}{2}', '3 1/2' become '\frac{7}{2}'
    without_periods    '0.1\overline{6}', '0.1\dot6', '0.1666\ldots' become '\frac{1}{6}'
    parse_numeral      '1011_2', '1011_{two}', '1011 (base 2)' give digits and base

Works on tidied text and takes linear time.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_EXACT_DIGITS = 400  # most digits of a plain number that is compared exactly

# ---- mixed numbers -----------------------------------------------------------------------------------------

# Before a letter, a root or a bracket, '3\frac{1}{2}' may be a product.
_MIXED = re.compile(
    r'(?<![\d.^_}A-Za-z\\)])(\d{1,9})(?: ?\\frac\{ ?(\d{1,9}) ?\}\{ ?(\d{1,9}) ?\}| (\d{1,2}) ?/ '
    r'?(\d{1,9})(?![\d.]))'
    r'(?! ?(?:[A-Za-z](?![A-Za-z])|[({/!]|\^(?! ?\{? '
    r'?\\circ)|\\(?!text|mbox|math|approx|[lg]eq?(?![a-z])|c[au]p|quad)[A-Za-z]))'
)


def improper(text: str) -> str:
    """Converts the mixed numbers in a text to fractions."""
    return _MIXED.sub(_improper, text) if '\\frac' in text or '/' in text else text


def _improper(match: re.Match) -> str:
    whole, above, below = (int(group) for group in match.groups() if group is not None)
    return f'\\frac{{{whole * below + above}}}{{{below}}}' if 0 < above < below and whole else match[0]


# ---- periods -----------------------------------------------------------------------------------------------

_BARRED = re.compile(
    r'(?<![\d.])(\d{0,99})\.(?:(\d{0,99})\\(?:overline|bar)(?![A-Za-z]) ?(?:\{ ?(\d{1,99}) '
    r'?\}|(\d))|()\((\d{1,99})\))'
)
_DOTTED = re.compile(
    r'(?<![\d.])(\d{0,99})\.(\d{0,99})\\dot ?(?:\{ ?(\d) ?\}|(\d))(?:(\d{0,99})\\dot ?(?:\{ ?(\d) '
    r'?\}|(\d)))?(?!\d)'
)
_GOES_ON = re.compile(r'(?<![\d.])(\d{0,99})\.(\d{2,99}) ?\\ldots(?![A-Za-z]) ?')
_PERIOD = re.compile(r'(\d*?)(?:(\d)\2\2+|(\d\d+?)\3+)')


def without_periods(text: str) -> str:
    r"""Converts repeating decimals in a text to fractions: '0.1212\ldots' repeats, '1.414\ldots' may not."""
    if '.' not in text or not ('\\' in text or '(' in text):
        return text
    text = _BARRED.sub(lambda m: _fraction(m[1], m[2] or '', m[3] or m[4] or m[6]), text)
    text = _DOTTED.sub(
        lambda m: _fraction(m[1], m[2], ''.join(m[group] or '' for group in range(3, 8))), text
    )
    return _GOES_ON.sub(_repeated, text)


def _repeated(match: re.Match) -> str:
    digits = match[2]
    if len(set(digits)) == 1:  # 0.33...
        return _fraction(match[1], '', digits[0])
    period = _PERIOD.fullmatch(digits)
    return _fraction(match[1], period[1], period[2] or period[3]) if period else match[0]


def _fraction(whole: str, fixed: str, period: str) -> str:
    value = (int(whole + fixed or '0') + Fraction(int(period), 10 ** len(period) - 1)) / 10 ** len(fixed)
    return str(value) if value.denominator == 1 else f'\\frac{{{value.numerator}}}{{{value.denominator}}}'


# ---- numerals in a base ------------------------------------------------------------------------------------

_BASES = 'two three four five six seven eight nine ten eleven twelve'.split()
_BASE = rf'(\d{{1,2}}|{"|".join(_BASES)})'
_NUMERAL = re.compile(
    r'(-?)(?:\\text\{|\()?([0-9A-Fa-f]+)[})]?'
    rf'(?:_\{{? ?(?:\\text ?\{{ ?)?(?:base ?\}}? ?|\()?{_BASE}\)?[}} ]*| ?(?:\\text '
    rf'?\{{ ?)?\(?(?:in )?base ?\}}? ?{_BASE}[)}}]*)'
)


def parse_numeral(text: str) -> tuple[str, int] | None:
    """Returns the digits and base of a numeral such as 1011_2, (1011)_{2}, 1011_{two} or 1011 (base 2)."""
    if not (match := _NUMERAL.fullmatch(text)):
        return None
    base = match[3] or match[4]
    return match[1] + (match[2].upper().lstrip('0') or '0'), int(base) if base.isdecimal() else _BASES.index(
        base
    ) + 2


def numeral_value(numeral: tuple[str, int]) -> int | None:
    digits, base = numeral
    plain = digits.removeprefix('-')
    known = 2 <= base <= 36 and all(int(d, 36) < base for d in plain) and len(plain) <= MAX_EXACT_DIGITS
    return int(digits, base) if known else None


def is_numeral(text: str) -> bool:
    """Returns whether a text is a numeral in a base, and not a name such as A_{12}."""
    numeral = parse_numeral(text)
    return numeral is not None and bool(
        re.search(r'\d', numeral[0]) or (numeral[1] == 16 and len(numeral[0]) > 1)
    )
