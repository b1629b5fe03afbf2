r"""Compares one answer with the accepted ones.

Equality is math-verify's. What it gets wrong is decided before it is called:

    equal texts are equal; plain numbers are compared exactly, numerals by their base
    code and hedged answers ('2 (or perhaps 3)') are no answers
    expressions are compared by their values at a few points, which is faster than simplifying

Two conventions on which graders differ are ours. A decimal of four places or more is accepted where the exact value rounds to it
(2.6667 for 8/3). A relation may stand for its interval.

Nothing here keeps time or bounds memory, and some answers (power towers, iterated factorials) never end: `verifier_pool` stops
them. `quick_verdict` takes linear time. Only functions that the worker calls import sympy.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from typing import Any

from bapo_jax.groups import Verdict
from bapo_jax.tasks.math_text import (
    DECIMAL_COMMA, MATH_MARKS, ROUNDED_PLACES, elements, is_words, last_box, numeral_value, parse_number, parse_numeral,
    same_number, split, text_key, tidy, without_unit,
)  # fmt: skip

MAX_LENGTH = 4000  # characters of an answer that is parsed; a longer one can only match as text
MAX_DEPTH = 40  # nested brackets of an answer that is parsed


# An answer with one of these is prose, code or a hedge, of which math-verify would read a part, or an unintended power tower.
_NO_ANSWER = re.compile(
    r'__|\blambda\b|\bimport\b|\b(?:if|else|perhaps|maybe|possibly|probably|either|unless|otherwise|alternatively|guess)\b'
    r'|\((?: |\\text ?\{)*(?:or|and|not)\b|\b(?:exec|eval|open)\('
    r'|\d ?(?:\^|\*\*) ?\{?\d+ ?(?:\^|\*\*) ?\{?\d+ ?(?:\^|\*\*)|!\)*!\)*!',
    re.IGNORECASE,
)
# These restate the question, unless an accepted answer has them too.
_UNEVALUATED = re.compile(r'\\(?:sum|prod|i*int|oint|lim)(?![a-zA-Z])')


def _unfit(text: str) -> bool:
    """Whether a text must not be parsed: prose, code or a hedge, too long, or nested too deep."""
    if len(text) > MAX_LENGTH or _NO_ANSWER.search(text) or not text.isprintable():
        return True
    depth = 0
    for c in text:
        depth += (c in '({[') - (c in ')}]')
        if depth > MAX_DEPTH:
            return True
    return False


def quick_verdict(answer: str, accepted: Sequence[str]) -> Verdict | None:
    """The verdict where text and plain numbers decide it, else None: then `slow_verdict` must.

    Takes linear time; no text makes it raise.
    """
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
    if text_key(answer) == text_key(gold):
        return True
    if max(len(answer), len(gold)) > MAX_LENGTH:
        return None
    number, gold_number = parse_number(answer), parse_number(gold)
    if number and gold_number and not (',' in answer or ',' in gold):  # 100,200 may be two numbers
        return same_number(number, gold_number)
    if number and gold_number and same_number(number, gold_number):
        return True
    for one, other in ((answer, gold), (gold, answer)):
        if DECIMAL_COMMA.fullmatch(one) and one.replace(',', '.') == other:
            return True
    numeral, gold_numeral = parse_numeral(answer), parse_numeral(gold)
    if numeral and gold_numeral:
        return numeral == gold_numeral or numeral_value(numeral) == numeral_value(gold_numeral) is not None
    parts = elements(answer)
    return True if parts and parts == elements(gold) else None


@functools.lru_cache(maxsize=4096)  # one question's accepted answers are needed once a response
def _tidy_gold(gold: str) -> str:
    return tidy(last_box(gold) or re.sub(r'\\{1,2}boxed\s*\{', '', gold))


# ---- what an answer means: the worker's part --------------------------------------------------------------------------


def slow_verdict(answer: str, accepted: Sequence[str], *, boxed: bool) -> tuple[Verdict, str | None]:
    """math-verify's verdict, and the answer that it judged. May never end, and may exhaust memory.

    CORRECT: the answer equals an accepted one. WRONG: it was read and equals none. UNPARSEABLE: it cannot be read. INFRA_ERROR: no
    accepted answer can be read either. With `boxed` false, `answer` is the end of a response: what it states last is judged.
    """
    stated: tuple[Any, ...] = ()
    if not boxed:
        stated = _read(answer, anywhere=True)
        answer = next((x for x in stated if isinstance(x, str)), None)
        if answer is None:
            return Verdict.UNPARSEABLE, None
        answer = answer.strip().removesuffix('.')
        if (verdict := quick_verdict(answer, accepted)) is not None:
            return verdict, answer
    golds = [_tidy_gold(gold) for gold in accepted]
    tidied = tidy(answer)
    restated = _UNEVALUATED.search(split(tidied, '=')[-1]) and not any(map(_UNEVALUATED.search, golds))
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

    With `anywhere` the text is prose, and the last answer stated in it is read. Prose in a box is read likewise.
    """
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    # math-verify's rule for units takes the t of \\frac{1}{m}t for tons
    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed='all')
    latex = LatexExtractionConfig(boxed_match_priority=0, normalization_config=rules)
    if anywhere or (_PROSE.match(text) and not is_words(text)):
        # among formulas, a bare number is an answer only if it is announced as one
        number = ExprExtractionConfig(try_extract_without_anchor=anywhere or not _FORMULA.search(text))
        return tuple(parse(text, [latex, number], parsing_timeout=None))
    text = without_unit(MATH_MARKS.sub('', text.replace('\\$', '').replace('$', '')).strip())[0]
    text = '\\boxed{' + text + '}'
    return tuple(parse(text, [latex], parsing_timeout=None))


def _same_values(gold: Any, answer: Any) -> bool | None:
    """Whether two expressions have equal values at a few points; None if that cannot tell. Unknowns of one name get one number.

    Points where both values are real decide. Without any, positive points do: complex branches differ by the sign of a root.
    """
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)) or gold.is_Symbol or answer.is_Symbol:
        return None
    # step functions may agree at every point tried; the others have no value, cost too much, or round by math-verify's own rule
    unsuited = (
        sympy.Abs, sympy.floor, sympy.ceiling, sympy.Mod, sympy.Piecewise, sympy.Max, sympy.Min, sympy.sign, sympy.Heaviside,
        sympy.DiracDelta, sympy.UnevaluatedExpr, sympy.core.function.AppliedUndef, sympy.Derivative, sympy.Integral,
        sympy.Limit, sympy.Sum, sympy.Product, sympy.zoo, sympy.nan, sympy.oo, sympy.MatrixExpr,
    )  # fmt: skip
    if gold.has(*unsuited) or answer.has(*unsuited):
        return None
    rounded = gold.has(sympy.Float) or answer.has(sympy.Float)  # then math-verify's rounding decides a difference
    if rounded:
        gold, answer = (e.replace(lambda x: x.is_Float, lambda x: sympy.Rational(str(x))) for e in (gold, answer))
    if gold - answer == 0:
        return True
    symbols = gold.free_symbols | answer.free_symbols
    imaginary = any(s.name == 'i' and s.is_real is False for s in symbols)  # how math-verify reads i where it is no index
    names = sorted({s.name for s in symbols})
    real, complex_ = [], []
    for scale, sign in ((1, 1), (64, 1), (3, -1), (5, 0)):
        numbers = {
            n: sympy.Rational(137 + 58 * k, 100) * scale * (1 if sign > 0 or (sign < 0 and k % 2) else -1)
            for k, n in enumerate(names)
        }
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
    """Whether a numerical value came out that cancellation left some digits."""
    parts = value.as_real_imag()
    return all(part.is_Number and part.is_finite and (part.is_Rational or part._prec > 1) for part in parts)


def _answer(request: dict) -> Any:
    try:
        return slow_verdict(request['answer'], request['accepted'], boxed=request['boxed'])
    except (MemoryError, RecursionError):
        return OVERRAN


if __name__ == '__main__':
    from bapo_jax.tasks.verifier_pool import OVERRAN, serve

    logging.disable(logging.CRITICAL)  # math-verify warns of every answer it cannot read, and of the time limits we switch off
    _read('1')  # imports math-verify and sympy and builds their tables before the first deadline starts
    serve(_answer)
