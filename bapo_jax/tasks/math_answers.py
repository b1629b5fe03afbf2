r"""One answer against the accepted ones: where it is in a response, and when two answers are the same.

Equality is math-verify's, with what it gets wrong decided before it is asked: the same text is equal, plain numbers are compared
exactly and numerals by their base; code and hedged answers ('2 (or perhaps 3)') are no answers; expressions are compared by their
values at a few points, which is quicker than simplifying. Two conventions on which graders differ are ours: a decimal of four
places or more is accepted where the exact value rounds to it (2.6667 for 8/3), and a relation may stand for its interval.

Nothing here keeps time or bounds memory: some answers (power towers, iterated factorials) never end, which is `verifier_pool`'s to
stop. Everything up to `quick_verdict` takes linear time, and sympy is imported by what only the worker calls.
"""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from bapo_jax.groups import Verdict

MAX_LENGTH = 4000  # characters of an answer that is parsed; a longer one can only match as text
MAX_DEPTH = 40  # nested brackets of an answer that is parsed
MAX_DIGITS = 400  # of a plain number that is compared exactly
ROUNDED_PLACES = 4  # decimals from which a rounded value is as good as the exact one


# ---- where the answer is ----------------------------------------------------------------------------------------------


def after_thinking(response: str, *, opened: bool = False) -> str | None:
    """What follows the last </think>: all of it where nothing was thought, None where the thinking has no end.

    `opened`: the prompt itself ended in <think>, so the response begins inside the thinking.
    """
    _, closed, answer = response.rpartition('</think>')
    return None if '<think>' in answer or (opened and not closed) else answer


_BRACE = re.compile(
    r'\\{1,2}(?:boxed|fbox)\s*(?P<box>\{)|\\boxed\s*(?P<bare>[0-9A-Za-z])(?![0-9A-Za-z])|\\.|[{}]'
    r'|[Ff]inal answer is:? {0,3}\$(?P<stated>(?![^$\n]{0,200}\\boxed)[^$\n]{1,200})\$',
    re.DOTALL,
)
_LIST_JOINT = re.compile(
    r'(?:\W|\\q?quad){0,20}'
    r'|(?!.*\b(?:is|so|thus|then|hence|therefore|answer|final|wait|no)\b)[^.!?\n]{0,30}\b(?:and|or)\b[^.!?\n]{0,30}'
)


def last_box(text: str, *, stated: bool = False) -> str | None:
    r"""What the last balanced \boxed{} or \fbox{} holds, None where there is none or it is empty. Linear in the text.

    Of nested boxes the innermost counts. Boxes with no more than a comma, or a few words with 'and' or 'or', between them are one
    list. A box that is not terminated is no box, and an escaped brace is no brace. `stated`: 'final answer is $...$' is a box too.
    """
    closed: list[tuple[int, int, int, int]] = []  # of each box: where it begins and ends, where its content begins and ends
    opened: list[tuple[int, int] | None] = []  # of each open brace: where its box and its content begin; None for another brace
    for token in _BRACE.finditer(text):
        if token['box']:
            opened.append(token.span())
        elif token['bare']:
            closed.append((*token.span(), *token.span('bare')))
        elif token['stated']:
            if stated:
                closed.append((*token.span(), *token.span('stated')))
        elif token[0] == '{':
            opened.append(None)
        elif token[0] == '}' and opened and (box := opened.pop()):
            closed.append((box[0], token.end(), box[1], token.start()))
    closed.sort(reverse=True)  # the last to open first
    contents: list[str] = []
    after = None  # where the box that follows begins
    for start, end, content_start, content_end in closed:
        if after is not None and (end > after or not _LIST_JOINT.fullmatch(text, end, after)):
            break
        contents.insert(0, text[content_start:content_end])
        after = start
    return ', '.join(contents).strip() or None


# ---- what an answer is as text ----------------------------------------------------------------------------------------

_SYMBOLS = {
    '−': '-', '–': '-', '‐': '-', '×': r'\times ', '·': r'\cdot ', '⋅': r'\cdot ', '÷': '/', '⁄': '/', 'π': r'\pi ', '∞': r'\infty ',
    '∅': r'\emptyset ', '≤': r'\le ', '≥': r'\ge ', '≠': r'\ne ', '∪': r'\cup ', '∩': r'\cap ', '∈': r'\in ', '±': r'\pm ',
    '°': r'^\circ ', '√': r'\sqrt ', 'ℝ': r'\mathbb{R}', '′': "'",
}  # fmt: skip
_SUPERSCRIPT = re.compile('[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+')
_SUPERSCRIPTS = str.maketrans('⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻', '0123456789+-')
_LATEX_SPACE = re.compile(r'(?<!\\)\\[,;:! ]|\\q?quad\b|~|\\displaystyle\b')
_LETTER_COMMAND = re.compile(r'\\(?:mathrm|text|mathit|rm) ?\{ ?([a-zA-Z]) ?\}(?=[})^_+*/-]|$)')  # e and i among them
_ESCAPED_TWICE = re.compile(r'\\\\(?=(?:text|frac|[dt]frac|left|right|sqrt|pi|cdot|times|leq?|geq?)(?![a-zA-Z]))')
_MATH_MARKS = re.compile(r'\\[\[\]()]')


def tidy(text: str) -> str:
    r"""The same answer in plain ASCII LaTeX: no invisible characters, no \left, \dfrac or thin space, no $ or full stop around it."""
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda m: '^{' + m[0].translate(_SUPERSCRIPTS) + '}', text)
        text = ''.join(_SYMBOLS.get(c) or _plain(c) for c in text)
    text = _ESCAPED_TWICE.sub(r'\\', re.sub(r'\{,\}|,\\! ?', ',', text))
    text = text.replace('\\dfrac', '\\frac').replace('\\tfrac', '\\frac')
    text = re.sub(r'\\(?:left|right)(?=[^a-zA-Z])', '', text)
    text = _LETTER_COMMAND.sub(r'\1', _LATEX_SPACE.sub(' ', text))
    text = re.sub(r'(?<=\d)(?:and|or)(?=[A-Za-z(\d-])', ', ', text)  # '1orx=2'
    text = re.sub(r'\s+', ' ', text).strip().removesuffix('.').rstrip()
    for start, end in (('$$', '$$'), ('$', '$'), (r'\(', r'\)'), (r'\[', r'\]')):
        inner = text[len(start) : -len(end)]
        if text.startswith(start) and text.endswith(end) and len(text) > len(start) + len(end) and not ('$' in inner or '\\(' in inner):
            text = inner.strip().removesuffix('.').rstrip()
    return text


def _plain(character: str) -> str:
    """A character without its compatibility forms: full-width and other digits as ASCII, format characters as nothing."""
    if unicodedata.category(character) == 'Cf':
        return ''
    digit = unicodedata.decimal(character, None)
    return str(digit) if digit is not None else unicodedata.normalize('NFKC', character)


_TEXT_COMMAND = re.compile(r'\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}')


def _key(text: str) -> str:
    """What two answers share that are the same text: no font commands, no needless braces or blanks, words in lower case."""
    text = _TEXT_COMMAND.sub(r'\1', text)
    text = re.sub(r'(?<=[\^_])\{(\w)\}', r'\1', text)
    text = re.sub(r'(?<!\d) | (?!\d)', '', text)  # '3 1/2' is not '31/2'
    if letter := re.fullmatch(r'\(([A-Z])\)', text):  # a choice
        return letter[1].lower()
    return text.lower() if is_words(text) else text


def is_words(text: str) -> bool:
    """Whether an answer is words, such as a name, rather than a formula."""
    plain = _TEXT_COMMAND.sub(r'\1', text)
    return re.fullmatch(r"[A-Za-z' .,-]*", plain) is not None and re.search('[A-Za-z]{2}', plain) is not None


class Number(NamedTuple):
    value: Fraction
    places: int | None  # of a decimal, how many digits it gives after the point; None for an exact value
    unit: str  # a word after it


_PLAIN = r'(?:(?:\d{1,3}(?:[, ]\d{3})+|\d+)(?:\.\d*)?|\.\d+)'
_DECIMAL = re.compile(
    rf'([+-]?) ?(?:({_PLAIN}) ?(?:[eE]|\\(?:times|cdot) ?10 ?\^ ?)|10 ?\^ ?)(\{{?)([+-]?\d{{1,3}})(?(3)\}}?)|([+-]?) ?({_PLAIN})'
)
_DECIMAL_COMMA = re.compile(r'[+-]?\d+,(?:\d\d?|\d{4,})')
_REPEATING = re.compile(r'([+-]?)(\d*)\.(\d*)\\overline ?\{?(\d+)\}?')
_FRACTION = re.compile(r'([+-]?) ?(?:\\frac ?(?:\{ ?(-?\d+) ?\} ?\{ ?(-?\d+) ?\}|(\d) ?(\d))|(\d+) ?/ ?(-?\d+))')
_UNIT = re.compile(r'(?<=[\d}])(?: ?\\(?:text|textnormal|mathrm|mbox) ?\{([A-Za-z. ]+)\}| ([a-z]{3,}))\.?$')


def parse_number(text: str) -> Number | None:
    r"""A plain number: 25, 1,000, -0.5, 1.5e3, 1.5\times 10^{3}, 3/7, \frac{3}{7}, 0.\overline{3}; with a unit in words or degrees."""
    if len(text) > MAX_DIGITS:
        return None
    unit = _UNIT.search(text)
    text = text[: unit.start()] if unit else text
    word = (unit[1] or unit[2]).strip().removesuffix('s') if unit else ''
    text = re.sub(r'\^ ?(?:\\circ|\{ ?\\circ ?\})$', '', text.removeprefix('\\$').strip()).rstrip()
    if match := _FRACTION.fullmatch(text):
        sign, *groups = match.groups()
        above, below = (int(g) for g in groups if g is not None)
        return Number(Fraction(-above if sign == '-' else above, below), None, word) if below else None
    if match := _REPEATING.fullmatch(text):
        sign, whole, fixed, period = match.groups()
        value = Fraction(int(whole + fixed or '0')) + Fraction(int(period), 10 ** len(period) - 1)
        return Number(value / 10 ** len(fixed) * (-1 if sign == '-' else 1), None, word)
    if not (match := _DECIMAL.fullmatch(text)):
        return None
    sign, mantissa, _, exponent, plain_sign, plain = match.groups()
    digits = re.sub('[, ]', '', plain or mantissa or '1')
    value = Fraction(digits.removesuffix('.')) * Fraction(10) ** int(exponent or 0)
    places = max(len(digits.partition('.')[2]) - int(exponent or 0), 0) if '.' in digits else None
    return Number(-value if '-' in (sign, plain_sign) else value, places, word)


def _same_number(a: Number, b: Number) -> bool:
    """Equal, or one is the other's value correctly rounded to `ROUNDED_PLACES` places or more (and as many digits)."""
    if a.unit and b.unit and a.unit != b.unit:
        return False
    if a.value == b.value:
        return True
    if b.places is not None:
        a, b = b, a
    if a.places is None or b.places is not None or b.value.denominator == 1:  # two decimals, or two exact values, that differ
        return False
    unit = Fraction(1, 10**a.places)
    return a.places >= ROUNDED_PLACES and abs(a.value) >= unit * 10 ** (ROUNDED_PLACES - 1) and abs(a.value - b.value) <= unit / 2


_NUMERAL = re.compile(r'(?:\\text\{|\()?([0-9A-Fa-f]+)[})]?_(?:\{ ?(?:\\text\{)?)?(\d{1,2})[} ]*')


def _numeral(text: str) -> tuple[str, int] | None:
    """The digits and the base of a numeral such as 1011_2 or (1011)_{2}."""
    match = _NUMERAL.fullmatch(text)
    return (match[1].upper().lstrip('0') or '0', int(match[2])) if match else None


# An answer with one of these is prose, code or a hedge, of which math-verify reads a part, or a tower that no one means.
_NO_ANSWER = re.compile(
    r'__|\blambda\b|\bimport\b|\b(?:if|else|perhaps|maybe|possibly|probably|either|unless|otherwise|alternatively|guess)\b'
    r'|\((?: |\\text ?\{)*(?:or|and|not)\b|\b(?:exec|eval|open)\(|\d ?(?:\^|\*\*) ?\{?\d+ ?(?:\^|\*\*) ?\{?\d+ ?(?:\^|\*\*)|!\)*!\)*!',
    re.IGNORECASE,
)
_UNEVALUATED = re.compile(r'\\(?:sum|prod|i*int|oint|lim)(?![a-zA-Z])')  # restates the question, where it is not the answer's form


def _unfit(text: str) -> bool:
    """Whether a text is not to be parsed: prose, code or hedged, too long, or nested too deep."""
    if len(text) > MAX_LENGTH or _NO_ANSWER.search(text) or not text.isprintable():
        return True
    depth = 0
    for c in text:
        depth += (c in '({[') - (c in ')}]')
        if depth > MAX_DEPTH:
            return True
    return False


def quick_verdict(answer: str, accepted: Sequence[str]) -> Verdict | None:
    """The verdict where text and plain numbers decide it, None where it takes `slow_verdict`. Linear time; raises on no text."""
    answer = tidy(answer)
    undecided = False
    for gold in map(_tidy_gold, accepted):
        same = _same_at_a_glance(answer, gold)
        if same:
            return Verdict.CORRECT
        undecided |= same is None
    return None if undecided else Verdict.WRONG


def _same_at_a_glance(answer: str, gold: str) -> bool | None:
    if not gold:
        return None
    if _key(answer) == _key(gold):
        return True
    number, gold_number = parse_number(answer), parse_number(gold)
    if number and gold_number and not (',' in answer or ',' in gold):  # 100,200 may be two numbers
        return _same_number(number, gold_number)
    if number and gold_number and _same_number(number, gold_number):
        return True
    for one, other in ((answer, gold), (gold, answer)):
        if _DECIMAL_COMMA.fullmatch(one) and one.replace(',', '.') == other:
            return True
    numeral, gold_numeral = _numeral(answer), _numeral(gold)
    if numeral and gold_numeral:
        return numeral == gold_numeral or _value(numeral) == _value(gold_numeral) is not None
    elements, gold_elements = _elements(answer), _elements(gold)
    return True if elements and elements == gold_elements else None


_AND = re.compile(r',? ?(?:\\text ?\{ ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])) ?')


def _elements(text: str) -> list[str]:
    r"""The elements, as keys in order, of a set in braces or a list without brackets; none where it is neither.

    Of 'f(x)=1, f(x)=2' they are the values.
    """
    text = _AND.sub(',', re.sub(r'^\\?\{(.*?)\\?\}$', r'\1', text))
    depth, start, elements = 0, 0, []
    for i, c in enumerate(text + ','):
        depth += (c in '({[') - (c in ')}]')
        if c == ',' and not depth:
            elements.append(text[start:i].strip())
            start = i + 1
    if depth or len(elements) < 2:
        return []
    if len({left for left, equals, _ in (e.partition('=') for e in elements) if re.fullmatch(r'[A-Za-z]\([a-z]\) ?', left)}) == 1:
        elements = [e.partition('=')[2].strip() for e in elements]
    return sorted(map(_key, elements))


def _value(numeral: tuple[str, int]) -> int | None:
    digits, base = numeral
    return int(digits, base) if 2 <= base <= 36 and all(int(d, 36) < base for d in digits) and len(digits) <= MAX_DIGITS else None


@functools.lru_cache(maxsize=4096)  # one question's answers are asked for once a response
def _tidy_gold(gold: str) -> str:
    return tidy(last_box(gold) or re.sub(r'\\{1,2}boxed\s*\{', '', gold))


# ---- what an answer means: the worker's part --------------------------------------------------------------------------


def slow_verdict(answer: str, accepted: Sequence[str], *, boxed: bool) -> tuple[Verdict, str | None]:
    """The verdict by math-verify, and the answer it was given for. May take for ever, and all memory.

    CORRECT: the answer equals one of those accepted. WRONG: it was read, and does not. UNPARSEABLE: it cannot be read. INFRA_ERROR:
    nor can any accepted answer. With `boxed` false, `answer` is the end of a response, and what it states last is the answer.
    """
    stated: tuple[Any, ...] = ()
    if not boxed:
        stated = _read(answer, anywhere=True)
        answer = next((x for x in stated if isinstance(x, str)), None)
        if answer is None:
            return Verdict.UNPARSEABLE, None
        if (verdict := quick_verdict(answer, accepted)) is not None:
            return verdict, answer
    golds = [_tidy_gold(gold) for gold in accepted]
    tidied = tidy(answer)
    restated = _UNEVALUATED.search(tidied.rpartition('=')[2]) and not any(map(_UNEVALUATED.search, golds))
    if _unfit(tidied) or restated:
        readings = ()
    else:
        readings = stated or _read(answer if _PROSE.match(answer) else tidied)
    return min(_compare(readings, gold) for gold in golds), answer


def _compare(readings: Sequence[Any], gold: str) -> Verdict:
    import math_verify
    import sympy

    gold_readings = _read_gold(gold)
    kinds = (sympy.Basic, sympy.MatrixBase)
    if not any(isinstance(g, kinds) for g in gold_readings) and not is_words(gold):
        return Verdict.INFRA_ERROR
    if not any(isinstance(r, kinds) for r in readings):
        return Verdict.UNPARSEABLE
    same = _same_values(gold_readings[0], readings[0])
    if same is None:
        same = math_verify.verify(
            list(gold_readings), list(readings), float_rounding=ROUNDED_PLACES, allow_set_relation_comp=True, timeout_seconds=None
        )
    return Verdict.CORRECT if same else Verdict.WRONG


@functools.lru_cache(maxsize=256)
def _read_gold(gold: str) -> tuple[Any, ...]:
    return _read(gold)


_PROSE = re.compile(r'(?<![\\A-Za-z{])[A-Za-z]{3,}[^\\]* [^\\]*(?:\$|\\\(|\\\[|\d)')
_FORMULA = re.compile(r'\$[^$]+\$|\\\(|\\\[')


def _read(text: str, *, anywhere: bool = False) -> tuple[Any, ...]:
    """math-verify's reading of a text: nothing, a string, or an expression and its string.

    `anywhere`: the text is prose, and the answer it states last is looked for. So it is where a box holds prose.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    latex = LatexExtractionConfig(boxed_match_priority=0)
    if anywhere or (_PROSE.match(text) and not is_words(text)):
        # among formulas, a bare number is an answer only where it is announced as one
        number = ExprExtractionConfig(try_extract_without_anchor=anywhere or not _FORMULA.search(text))
        return tuple(parse(text, [latex, number], parsing_timeout=None))
    text = '\\boxed{' + _MATH_MARKS.sub('', text.replace('\\$', '').replace('$', '')) + '}'
    return tuple(parse(text, [latex], parsing_timeout=None))


def _same_values(gold: Any, answer: Any) -> bool | None:
    """Whether two expressions have the same value at a few points, unknowns of one name getting one number; None if that cannot tell.

    A point where both are real decides; where there is none such, the positive ones do (complex branches differ by sign of root).
    """
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)) or gold.is_Symbol or answer.is_Symbol:
        return None
    # steps may agree at every point looked at; the rest has no value, costs too much, or is rounded by math-verify's own rule
    unsuited = (
        sympy.Abs, sympy.floor, sympy.ceiling, sympy.Mod, sympy.Piecewise, sympy.Max, sympy.Min, sympy.sign, sympy.Heaviside,
        sympy.DiracDelta, sympy.UnevaluatedExpr, sympy.core.function.AppliedUndef, sympy.Derivative, sympy.Integral,
        sympy.Limit, sympy.Sum, sympy.Product, sympy.zoo, sympy.nan, sympy.oo, sympy.MatrixExpr,
    )  # fmt: skip
    if gold.has(*unsuited) or answer.has(*unsuited):
        return None
    rounded = gold.has(sympy.Float) or answer.has(sympy.Float)  # then only a difference is left to math-verify's rounding
    if rounded:
        gold, answer = (e.replace(lambda x: x.is_Float, lambda x: sympy.Rational(str(x))) for e in (gold, answer))
    if gold - answer == 0:
        return True
    symbols = gold.free_symbols | answer.free_symbols
    imaginary = any(s.name == 'i' and s.is_real is False for s in symbols)  # how math-verify reads i where it is no index
    names = sorted({s.name for s in symbols})
    real, complex_ = [], []
    for scale, sign in ((1, 1), (64, 1), (3, -1), (5, 0)):
        numbers = {n: sympy.Rational(137 + 58 * k, 100) * scale * (1 if sign > 0 or (sign < 0 and k % 2) else -1) for k, n in enumerate(names)}
        values = {s: sympy.I if imaginary and s.name == 'i' else numbers[s.name] for s in symbols}
        a, b = (e.evalf(25, subs=values, maxn=100) for e in (gold, answer))
        if not all(_is_known(v) for v in (a, b)):
            return None
        same = bool(abs(a - b) <= (abs(a) + abs(b)) * sympy.Float('1e-15'))
        if a.is_real and b.is_real:
            real.append(same)
        elif sign > 0:
            complex_.append(same)
    same = all(real) if real else all(complex_)
    return None if rounded and not same else same


def _is_known(value: Any) -> bool:
    """Whether a numerical value came out, and not lost all its digits in a difference."""
    parts = value.as_real_imag()
    return all(part.is_Number and part.is_finite and (part.is_Rational or part._prec > 1) for part in parts)


def _answer(request: dict) -> Any:
    try:
        return slow_verdict(request['answer'], request['accepted'], boxed=request['boxed'])
    except (MemoryError, RecursionError):
        return OVERRAN


if __name__ == '__main__':
    from bapo_jax.tasks.verifier_pool import OVERRAN, serve

    logging.disable(logging.CRITICAL)  # math-verify warns of each answer it cannot read, and of the time limits it is denied
    _read('1')  # imports math-verify and sympy, and builds their tables, before the first request's time runs
    serve(_answer)
