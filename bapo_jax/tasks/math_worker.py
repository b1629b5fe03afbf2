r"""Compares one answer with the accepted ones by their meaning: what runs in a worker of the verifier's pool.

Equality is math-verify's. What it gets wrong is decided before it is called:

    equal texts are equal; plain numbers are compared exactly, numerals by their base, times of day by the clock (`math_answers`)
    code and hedged answers ('2 (or perhaps 3)') are no answers
    lists, tuples, labelled values and sets are taken apart (`math_forms`), and compared part by part
    units count where both have one, and words such as 'million' or 'or more' always do (`math_units`)
    expressions are compared by their values (`math_values`), to the last digit

Two conventions on which graders differ are ours. A decimal of four places or more is accepted where the exact value rounds to it
(2.6667 for 8/3). A relation may stand for its interval.

Nothing here keeps time or bounds memory, and some answers (power towers, iterated factorials) never end: `verifier_pool` stops
them.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig

from bapo_jax.groups import Verdict
from bapo_jax.tasks import math_forms as forms
from bapo_jax.tasks.math_answers import MAX_LENGTH, quick_verdict, same_at_a_glance, tidy_gold
from bapo_jax.tasks.math_text import MATH_MARKS, ROUNDED_PLACES, is_words, parse_number, parse_numeral, split, text_key, tidy
from bapo_jax.tasks.math_units import Quantity, bound, clock, quantity
from bapo_jax.tasks.math_values import are_far, are_other_equations, same_values
from bapo_jax.tasks.verifier_pool import OVERRAN, serve

MAX_DEPTH = 40  # nested brackets of an answer that is parsed


# An answer with one of these is prose, code or a hedge, of which math-verify would read a part, or an unintended power tower.
_NO_ANSWER = re.compile(
    r'^not [\d$\\-]|__|\blambda\b|\bimport\b'
    r'|\b(?:if|else|perhaps|maybe|possibly|probably|either|unless|otherwise|alternatively|guess)\b'
    r'|\((?: |\\text ?\{)*(?:or|and|not)\b|\b(?:exec|eval|open)\('
    r'|\d ?(?:\^|\*\*) ?\{?\d+ ?(?:\^|\*\*) ?\{?\d+ ?(?:\^|\*\*)|!\)*!\)*!',
    re.IGNORECASE,
)
# '\textbf{(D)}\ 12': a choice by its letter and its value, either of which may be the accepted answer.
_CHOICE = re.compile(r'\\(?:text\w*|mathrm|mathbf) ?\{ ?\(([A-Z])\) ?\}(?:\\[ ,;]|~| )*(\S.*)')
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
    golds = [tidy_gold(gold) for gold in accepted]
    tidied = tidy(answer)
    restated = _UNEVALUATED.search(split(tidied, '=')[-1]) and not any(map(_UNEVALUATED.search, golds))
    if _unfit(tidied) or restated:
        return (Verdict.UNPARSEABLE if any(map(_is_readable, golds)) else Verdict.INFRA_ERROR), answer
    verdict = min(_compare(answer if _is_prose(answer) else tidied, gold) for gold in golds)
    if verdict == Verdict.UNPARSEABLE and stated:
        verdict = min(verdict, *(_compare_readings(stated, _readings(gold)) for gold in golds))
    if choice := _CHOICE.fullmatch(answer.strip()):
        verdict = min(verdict, *(_compare(tidy(part), gold) for part in choice.groups() for gold in golds))
    if verdict == Verdict.INFRA_ERROR:  # a gold may be read in parts, or as a domain, where this comparison could not
        verdict = min(map(_unequal, golds))
    return verdict, answer


def _compare(answer: str, gold: str, renamed: tuple[tuple[str, str], ...] = ()) -> Verdict:
    """The verdict on one answer. `renamed` pairs letters of the answer with those that mean the same in the accepted one."""
    if _is_prose(answer):
        return _compare_readings(_readings(answer), _readings(quantity(gold).value))
    answer, gold = _unmarked(answer), _unmarked(gold)
    if (same := same_at_a_glance(answer, gold)) is not None and not renamed:
        return Verdict.CORRECT if same else _unequal(gold)
    claim, gold_claim = forms.claim(answer), forms.claim(gold)
    if (claim.text, gold_claim.text) != (answer, gold):
        pairs = _pairs(claim, gold_claim)
        if claim.condition and gold_claim.condition and _condition(claim) != _condition(gold_claim):
            return _unequal(gold)
        return _compare(claim.text, gold_claim.text, renamed + pairs)
    if (in_order := _in_order(answer, gold)) is not None:
        return _all(in_order, gold, renamed)
    domain, gold_domain = forms.domain(answer), forms.domain(gold)
    if domain or gold_domain:
        return _compare_values(domain or answer, gold_domain or gold, renamed)
    members, gold_members = _members(answer), _members(gold)
    if len(members) > 1 and len(gold_members) > 1:
        if forms.is_set(answer) or forms.is_set(gold) or all(map(forms.parts, members + gold_members)):  # a root may be double
            members, gold_members = (list({text_key(m): m for m in ms}.values()) for ms in (members, gold_members))
        return _any_order(members, gold_members, gold, renamed)
    if len(gold_members) > 1 and parse_number(answer) and not parse_number(gold):
        return _unequal(gold)
    label, value = forms.labelled(answer)
    gold_label, gold_value = forms.labelled(gold)
    if _same_label(label, gold_label) if '=' in answer and '=' in gold else label or gold_label:
        arguments = forms.bound_argument(label), forms.bound_argument(gold_label)
        if all(arguments) and arguments[0] != arguments[1]:
            renamed += (arguments,)
        return _compare(value, gold_value, renamed)
    verdict = _compare_values(answer, gold, renamed)
    return _unequal(gold) if verdict == Verdict.INFRA_ERROR else verdict  # the parts of a list may be read where the whole is not


def _in_order(answer: str, gold: str) -> list[tuple[str, str]] | None:
    """Parts to compare in order: values by name, and the parts of two tuples; None where order does not decide."""
    named, gold_named = forms.assignment(answer), forms.assignment(gold)
    if named and gold_named and named.keys() == gold_named.keys():
        return [(named[name], gold_named[name]) for name in gold_named]
    parts, gold_parts = forms.parts(answer), forms.parts(gold)
    if named or gold_named:
        values, gold_values = (
            list(names.values()) if names else inner.inner if inner else forms.listed(text)
            for names, inner, text in ((named, parts, answer), (gold_named, gold_parts, gold))
        )
        return list(zip(values, gold_values)) if len(values) == len(gold_values) else None
    if parts and gold_parts and len(parts.inner) == len(gold_parts.inner) and forms.both_signs(answer + gold) == [answer + gold]:
        if (parts.opening, parts.closing) == (gold_parts.opening, gold_parts.closing):
            return list(zip(parts.inner, gold_parts.inner))
    return None


def _all(pairs: Sequence[tuple[str, str]], gold: str, renamed: tuple) -> Verdict:
    for answer, other in pairs:
        if (verdict := _compare(answer, other, renamed)) != Verdict.CORRECT:
            return verdict if verdict == Verdict.UNPARSEABLE else _unequal(gold)
    return Verdict.CORRECT


def _any_order(members: list[str], gold_members: list[str], gold: str, renamed: tuple) -> Verdict:
    """CORRECT where each member equals another one of the accepted answer's."""
    if len(members) != len(gold_members):
        return _unequal(gold)
    verdicts = []
    for other in gold_members:
        for member in sorted(members, key=lambda m: text_key(m) != text_key(other)):
            verdicts.append(_compare(member, other, renamed))
            if verdicts[-1] == Verdict.CORRECT:
                members.remove(member)
                break
        else:
            return Verdict.UNPARSEABLE if set(verdicts) == {Verdict.UNPARSEABLE} else _unequal(gold)
    return Verdict.CORRECT


def _members(text: str) -> list[str]:
    return [value for member in forms.values_of(forms.listed(text)) for value in forms.both_signs(member)]


def _same_label(one: str, other: str) -> bool:
    """Whether two labels name one thing: the same text, or a function of another argument."""
    one, other = (re.sub(r'[\\{}]|\(.\)$', '', label) for label in (one, other))
    return one == other != ''


_LETTER = re.compile(r'(?<![A-Za-z\\])[a-df-hj-zA-Z](?![A-Za-z])')  # that may stand for any number: neither e nor i


def _pairs(claim: forms.Claim, gold: forms.Claim) -> tuple[tuple[str, str], ...]:
    """The bound letters of an answer beside the accepted one's.

    Both have as many. Or only one has a qualifier, of one letter, and the other has one letter that the first has not.
    """
    one, other = claim.bound, gold.bound
    if len(one) + len(other) == 1:
        free, taken = (claim.text, gold.text) if other else (gold.text, claim.text)
        new = tuple(set(_LETTER.findall(free)) - set(_LETTER.findall(taken)))
        one, other = (one or new, other or new) if len(new) == 1 else ((), ())
    return tuple(zip(one, other)) if len(one) == len(other) else ()


def _condition(claim: forms.Claim) -> str:
    text = re.sub(r'\b(?:for|where|with|and|all|any|every|each|some|real|numbers?|integers?|positive)\b', '', claim.condition)
    for i, letter in enumerate(claim.bound):
        text = re.sub(rf'(?<![A-Za-z\\]){letter}(?![A-Za-z])', f'#{i}', text)
    return text_key(text.replace('\\geq', '\\ge').replace('\\leq', '\\le')).replace(' ', '')


@functools.lru_cache(maxsize=1024)
def _unequal(gold: str) -> Verdict:
    """The verdict on an answer that does not equal an accepted one: WRONG, or INFRA_ERROR where nothing could equal it."""
    return Verdict.WRONG if _is_readable(gold) else Verdict.INFRA_ERROR


def _is_readable(gold: str) -> bool:
    gold = forms.claim(gold).text
    gold = forms.domain(gold) or forms.labelled(gold)[1]
    tuple_ = forms.parts(gold)
    members = tuple_.inner if tuple_ else _members(gold)
    if len(members) > 1:
        return all(map(_is_readable, members))
    if is_words(gold) or clock(gold) or parse_numeral(gold) or parse_number(gold):
        return True
    return any(_is_meaning(reading) for reading in _readings(gold))


# ---- values -----------------------------------------------------------------------------------------------------------


def _compare_values(answer: str, gold: str, renamed: tuple[tuple[str, str], ...]) -> Verdict:
    """The verdict on what cannot be taken apart: quantities, expressions, equations, sets and matrices."""
    one, other = quantity(answer), quantity(gold)
    units = {one.unit, other.unit} - {''}
    if bound(answer) != bound(gold) or (len(units) == 2 and 'degree' not in units):
        return _unequal(gold)
    if is_words(gold) and not any(map(_is_meaning, _readings(gold))):
        return Verdict.WRONG  # words that differ
    if '=' in answer and '=' not in gold and not _restates(answer):
        return _unequal(gold)
    readings = _changed(_readings(one.value), one.times, renamed, _degrees(one, other))
    return _compare_readings(readings, _changed(_readings(other.value), other.times, (), _degrees(other, one)))


def _compare_readings(readings: tuple[Any, ...], gold_readings: tuple[Any, ...]) -> Verdict:
    if not any(map(_is_meaning, gold_readings)):
        return Verdict.INFRA_ERROR
    if not any(map(_is_meaning, readings)):
        return Verdict.UNPARSEABLE
    readings, gold_readings = (tuple(map(_simpler, side)) for side in (readings, gold_readings))
    same = same_values(gold_readings[0], readings[0])
    if same is None:
        same = math_verify.verify(
            list(gold_readings), list(readings), float_rounding=ROUNDED_PLACES, allow_set_relation_comp=True, timeout_seconds=None
        ) and not are_other_equations(gold_readings[0], readings[0])
    return Verdict.CORRECT if same else Verdict.WRONG


def _simpler(reading: Any) -> Any:
    """A reading with intersections worked out, and derivatives as the unknowns that they are: of a symbol, they would be 0."""
    if isinstance(reading, (sympy.Intersection, sympy.Complement)):
        return reading.doit()
    if isinstance(reading, sympy.Basic) and reading.has(sympy.Derivative):
        return reading.xreplace({d: sympy.Symbol(str(d), real=True) for d in reading.atoms(sympy.Derivative)})
    return reading


def _is_meaning(reading: Any) -> bool:
    return isinstance(reading, (sympy.Basic, sympy.MatrixBase))


def _degrees(one: Quantity, other: Quantity) -> bool:
    """Whether `one` is in degrees and `other` in radians."""
    return one.unit == 'degree' != other.unit and ('\\pi' in other.value or other.unit in ('radian', 'rad'))


def _changed(readings: tuple[Any, ...], times: int, renamed: tuple[tuple[str, str], ...], degrees: bool) -> tuple[Any, ...]:
    """Readings in the accepted answer's letters, multiplied by `times`, and from degrees to radians."""
    if times == 1 and not renamed and not degrees:
        return readings
    factor = times * (sympy.pi / 180 if degrees else 1)
    changed = []
    for reading in filter(_is_meaning, readings):
        names = {other: other + "'" for _, other in renamed} | dict(renamed)  # a letter that has the name already is another one
        letters = [s for s in reading.free_symbols if s.name in names]
        reading = reading.xreplace({s: sympy.Symbol(names[s.name], real=s.is_real) for s in letters})
        changed.append(reading * factor if isinstance(reading, sympy.Expr) else reading)
    return tuple(changed)


def _restates(answer: str) -> bool:
    """Whether an equation gives its last side as a value: of a name, of an equal value, or of an expression in many unknowns.

    '2x=5' and '7=5' do not give 5.
    """
    sides = split(answer, '=')
    values = [_readings(side)[0] if _readings(side) else None for side in sides]
    for side, value in zip(sides[:-1], values):
        if not isinstance(value, sympy.Expr) or value.is_Symbol:
            continue
        unknowns = value.free_symbols
        if len(unknowns) == 1 and value.is_polynomial():
            return False
        if not unknowns and isinstance(values[-1], sympy.Expr) and not values[-1].free_symbols:
            if same_values(values[-1], value) is False or are_far(values[-1], value):
                return False
    return True


_PROSE = re.compile(r'(?<![\\A-Za-z{])[A-Za-z]{3,}[^\\]* [^\\]*(?:\$|\\\(|\\\[|\d)')
_FORMULA = re.compile(r'\$[^$]+\$|\\\(|\\\[')
_CONSTANT = re.compile(r'(\\[A-Za-z]+)|[EeI]_')  # which math-verify takes for a number with an index, and cannot read


def _is_prose(text: str) -> bool:
    """Whether an answer is a sentence that states one."""
    return _PROSE.match(text) is not None and not is_words(text)


def _unmarked(text: str) -> str:
    return MATH_MARKS.sub('', re.sub(r'(?<!\\)\$', '', text)).strip()


@functools.lru_cache(maxsize=1024)
def _readings(text: str) -> tuple[Any, ...]:
    return _read(text)


def _read(text: str, *, anywhere: bool = False) -> tuple[Any, ...]:
    """math-verify's reading of a text: nothing, a string, or an expression and its string.

    With `anywhere` the text is prose, and the last answer stated in it is read. Prose in a box is read likewise.
    """
    # math-verify's rule for units takes the t of \\frac{1}{m}t for tons
    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed='all')
    latex = math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=rules)
    if anywhere or _is_prose(text):
        # among formulas, a bare number is an answer only if it is announced as one
        number = math_verify.ExprExtractionConfig(try_extract_without_anchor=anywhere or not _FORMULA.search(text))
        return tuple(math_verify.parse(text, [latex, number], parsing_timeout=None))
    text = _CONSTANT.sub(lambda m: m[1] or ('\\Upsilon_' if m[0] == 'I_' else '\\Xi_'), _unmarked(text.replace('\\$', '')))
    text = '\\boxed{' + text + '}'
    return tuple(math_verify.parse(text, [latex], parsing_timeout=None))


def _answer(request: dict) -> Any:
    try:
        if 'gold' in request:
            return _is_readable(tidy_gold(request['gold']))
        return slow_verdict(request['answer'], request['accepted'], boxed=request['boxed'])
    except (MemoryError, RecursionError):
        return OVERRAN
    except Exception:  # sympy and math-verify raise anything where an expression is none that they expect
        return False if 'gold' in request else OVERRAN


if __name__ == '__main__':
    logging.disable(logging.CRITICAL)  # math-verify warns of every answer it cannot read, and of the time limits we switch off
    _read('1')  # imports math-verify and sympy and builds their tables before the first deadline starts
    serve(_answer)
