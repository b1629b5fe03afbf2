r"""Compares the meaning of an answer with that of an accepted answer, part by part.

roundings, vectors, elisions, numerals   converted to a plain form first (`forms`, `elisions`, `numerals`)
named values, lists, tuples, sets        compared member by member (`forms`, `sets`)
equations                                reduced to their value, or compared as equations (`equations`)
quantities                               converted to the same unit (`units`, `conversion`)
expressions                              compared by value to the last digit (`values`) or by math-verify
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from numbers import Rational
from typing import Any

import math_verify
import sympy

from bapo_jax.groups import Verdict
from bapo_jax.tasks.mathematics import forms
from bapo_jax.tasks.mathematics.answers import same_at_a_glance
from bapo_jax.tasks.mathematics.conversion import is_known, ratio
from bapo_jax.tasks.mathematics.elisions import DOTS, pieces, same_rule, written_out
from bapo_jax.tasks.mathematics.equations import value_given
from bapo_jax.tasks.mathematics.numerals import is_numeral, numeral_value, parse_numeral
from bapo_jax.tasks.mathematics.plain_numbers import ROUNDED_PLACES, parse_number
from bapo_jax.tasks.mathematics.readings import is_meaning, is_prose, readings, simpler, unmarked
from bapo_jax.tasks.mathematics.sets import chain, domain
from bapo_jax.tasks.mathematics.text import is_words, split, text_key, tidy
from bapo_jax.tasks.mathematics.units import Quantity, bound, clock, quantity
from bapo_jax.tasks.mathematics.values import are_other_equations, same_values


def compare(answer: str, gold: str, renamed: tuple[tuple[str, str], ...] = ()) -> Verdict:
    """Returns the verdict on one answer.

    `renamed` pairs letters of the answer with the letters of the accepted answer that have the same meaning.
    """
    if (verdict := _beside_roundings(answer, gold, renamed)) is not None:
        return verdict
    if is_prose(answer):
        return compare_readings(readings(answer), readings(quantity(gold).value))
    answer, gold = _in_plain_form(answer), _in_plain_form(gold)
    if (same := same_at_a_glance(answer, gold)) is not None and not renamed:
        return Verdict.CORRECT if same else unequal(gold)
    if DOTS in answer or DOTS in gold:
        alike = (
            DOTS in answer
            and DOTS in gold
            and same_rule(answer, gold, lambda a, g: compare(a, g, renamed) == Verdict.CORRECT)
        )
        return Verdict.CORRECT if alike else unequal(gold)
    if is_numeral(answer) != is_numeral(gold) and '=' not in answer + gold:
        return _compare_numerals(answer, gold, renamed)
    if (located := forms.same_point(answer, gold)) is not None:
        return compare(*located, renamed)
    claim, gold_claim = forms.claim_of(answer), forms.claim_of(gold)
    if (claim.text, gold_claim.text) != (answer, gold):
        pairs = _pairs(claim, gold_claim)
        if claim.condition and gold_claim.condition and _condition(claim) != _condition(gold_claim):
            return unequal(gold)
        return compare(claim.text, gold_claim.text, renamed + pairs)
    if (in_order := _in_order(answer, gold)) is not None:
        return _all(in_order, gold, renamed)
    said, gold_said = domain(answer), domain(gold)
    if said or gold_said:
        return _compare_values(said or answer, gold_said or gold, renamed)
    if (ordered := chain(answer)) and (gold_ordered := chain(gold)):
        if ordered[1] != gold_ordered[1] or len(ordered[0]) != len(gold_ordered[0]):
            return unequal(gold)
        return _all(list(zip(ordered[0], gold_ordered[0])), gold, renamed)
    if any(
        one.startswith('\\{') and forms.is_set(one) and forms.parts(other)
        for one, other in ((answer, gold), (gold, answer))
    ):
        return unequal(gold)  # the order matters in a tuple, but not in a set
    members, gold_members = _members(answer), _members(gold)
    if len(members) > 1 and len(gold_members) > 1:
        # Other lists keep their repeats: a root may be double.
        if forms.is_set(answer) or forms.is_set(gold) or all(map(forms.parts, members + gold_members)):
            members, gold_members = (
                list({text_key(m): m for m in ms}.values()) for ms in (members, gold_members)
            )
        return _any_order(members, gold_members, gold, renamed)
    if len(members) != len(gold_members) and not _NO_LIST.search(answer + gold):
        single, among = (answer, gold) if len(members) == 1 else (gold, answer)
        sets = forms.is_set(single) and forms.is_set(among)  # repeats do not count in a set
        if not (sets or forms.is_equation(single) or forms.parts(single) or is_prose(among)):  # S = \{1,2\}
            return unequal(gold)  # math-verify reads '7, 7' as the set {7}
    equation, gold_equation = forms.is_equation(answer), forms.is_equation(gold) and not is_prose(gold)
    if equation and gold_equation:
        return _compare_equations(answer, gold, renamed)
    if equation and (value := value_given(answer)) is None:
        return unequal(gold) if any(map(is_meaning, readings(answer))) else Verdict.UNPARSEABLE
    if gold_equation:
        gold_value = value_given(gold, trusted=True)
        return compare(answer, gold_value, renamed) if gold_value else unequal(gold)
    if equation:
        return compare(value, gold, renamed)
    verdict = _compare_values(answer, gold, renamed)
    # The members of a list may be readable even if the whole list is not.
    return unequal(gold) if verdict == Verdict.INFRA_ERROR else verdict


_NO_LIST = re.compile(r'\d,\d{3}(?!\d)|\\langle')  # commas between thousands or vector components


def _in_plain_form(text: str) -> str:
    """Returns a text without math delimiters, with elided lists written out and vectors as tuples."""
    return forms.as_tuple(written_out(unmarked(text)))


def _compare_numerals(answer: str, gold: str, renamed: tuple[tuple[str, str], ...]) -> Verdict:
    """Returns the verdict if exactly one text is a numeral in a base.

    An accepted numeral stands for its value, an answer's numeral only if its base is 10.
    """
    if is_numeral(gold):
        value = numeral_value(parse_numeral(gold))
        return Verdict.WRONG if value is None else compare(answer, str(value), renamed)
    digits, base = parse_numeral(answer)
    return compare(digits, gold, renamed) if base == 10 else unequal(gold)


def _compare_equations(answer: str, gold: str, renamed: tuple[tuple[str, str], ...]) -> Verdict:
    (label, value), (gold_label, gold_value) = forms.last_value(answer), forms.last_value(gold)
    if _same_label(label, gold_label):
        arguments = forms.bound_argument(label), forms.bound_argument(gold_label)
        if all(arguments) and arguments[0] != arguments[1]:
            renamed += (arguments,)
        return compare(value, gold_value, renamed)
    given, gold_given = value_given(answer), value_given(gold, trusted=True)
    if answer.count('=') > 1 and given is None:  # math-verify would accept any one of its equations
        return unequal(gold)
    if given and gold_given and not (label and gold_label):  # 2+3=5 for x=5
        return compare(given, gold_given, renamed)
    if given and gold_given and _is_number(gold_given):  # different names: x=5 for y=5
        return compare(given, gold_given, renamed) if forms.in_words(label) else unequal(gold)
    verdict = _compare_values(answer, gold, renamed)
    return unequal(gold) if verdict == Verdict.INFRA_ERROR else verdict


def _is_number(text: str) -> bool:
    found = readings(quantity(text).value)
    return bool(found) and isinstance(found[0], sympy.Expr) and not found[0].free_symbols


def _beside_roundings(answer: str, gold: str, renamed: tuple[tuple[str, str], ...]) -> Verdict | None:
    """Returns the verdict if a text gives a value and its rounding, as in '\\sqrt{2}, about 1.41'; else None.

    The rounding itself counts if it is correct and the other answer is a decimal. A wrong rounding in words
    makes the answer wrong; after \\approx it does not, as in other graders.
    """
    rounded, gold_rounded = forms.rounded(answer), forms.rounded(gold)
    if not rounded and not gold_rounded:
        return None
    (exact, decimal), (gold_exact, gold_decimal) = rounded or (answer, answer), gold_rounded or (gold, gold)
    sound = not rounded or _is_rounding(*rounded)
    if not sound and '\\approx' not in answer:
        return unequal(gold)
    verdict = compare(exact, gold_exact, renamed)
    if verdict != Verdict.CORRECT and sound and _is_decimal(decimal) and _is_decimal(gold_decimal):
        verdict = min(verdict, compare(decimal, gold_decimal, renamed))
    return verdict


def _is_decimal(text: str) -> bool:
    number = parse_number(tidy(text))
    return number is not None and bool(number.places)


def _is_rounding(exact: str, decimal: str) -> bool:
    """Returns whether `decimal` differs from `exact` by less than one unit of its last decimal place."""
    number, one = parse_number(tidy(decimal)), quantity(split(exact, '=')[-1])
    found = readings(one.value)
    if not found or not isinstance(found[0], sympy.Expr) or found[0].free_symbols:
        return False
    distance = abs(found[0] * one.times - sympy.Rational(number.value)).evalf(20)
    return bool(distance.is_Number and distance < sympy.Rational(10) ** -(number.places or 0))


def _in_order(answer: str, gold: str) -> list[tuple[str, str]] | None:
    """Returns the pairs of named values or tuple parts to compare; None if order cannot pair them."""
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
    if (
        parts
        and gold_parts
        and len(parts.inner) == len(gold_parts.inner)
        and forms.both_signs(answer + gold) == [answer + gold]
    ):
        if (parts.opening, parts.closing) == (gold_parts.opening, gold_parts.closing):
            return list(zip(parts.inner, gold_parts.inner))
    return None


def _all(pairs: Sequence[tuple[str, str]], gold: str, renamed: tuple) -> Verdict:
    for answer, other in pairs:
        if (verdict := compare(answer, other, renamed)) != Verdict.CORRECT:
            return verdict if verdict == Verdict.UNPARSEABLE else unequal(gold)
    return Verdict.CORRECT


def _any_order(members: list[str], gold_members: list[str], gold: str, renamed: tuple) -> Verdict:
    """Returns CORRECT if the members match those of the accepted answer one to one, in any order."""
    if len(members) != len(gold_members):
        return unequal(gold)
    verdicts = []
    for other in gold_members:
        for member in sorted(members, key=lambda m: text_key(m) != text_key(other)):
            verdicts.append(compare(member, other, renamed))
            if verdicts[-1] == Verdict.CORRECT:
                members.remove(member)
                break
        else:
            return Verdict.UNPARSEABLE if set(verdicts) == {Verdict.UNPARSEABLE} else unequal(gold)
    return Verdict.CORRECT


def _members(text: str) -> list[str]:
    return [value for member in forms.values_of(forms.listed(text)) for value in forms.both_signs(member)]


def _same_label(one: str, other: str) -> bool:
    """Returns whether two labels name the same thing: equal text, or one function of different arguments."""
    one, other = (re.sub(r'[\\{}]|\(.\)$', '', label) for label in (one, other))
    return one == other != ''


# A letter that may stand for any number, so neither e nor i.
_LETTER = re.compile(r'(?<![A-Za-z\\])[a-df-hj-zA-Z](?![A-Za-z])')


def _pairs(claim: forms.Claim, gold: forms.Claim) -> tuple[tuple[str, str], ...]:
    """Pairs the bound letters of an answer with those of the accepted answer.

    Either both have the same number, or only one has a bound letter. That letter is then paired with the only
    letter in the other text that its own text does not contain.
    """
    one, other = claim.bound, gold.bound
    if len(one) + len(other) == 1:
        free, taken = (claim.text, gold.text) if other else (gold.text, claim.text)
        new = tuple(set(_LETTER.findall(free)) - set(_LETTER.findall(taken)))
        one, other = (one or new, other or new) if len(new) == 1 else ((), ())
    return tuple(zip(one, other)) if len(one) == len(other) else ()


def _condition(claim: forms.Claim) -> str:
    text = re.sub(
        r'\b(?:for|where|with|and|all|any|every|each|some|real|numbers?|integers?|positive)\b',
        '',
        claim.condition,
    )
    for i, letter in enumerate(claim.bound):
        text = re.sub(rf'(?<![A-Za-z\\]){letter}(?![A-Za-z])', f'#{i}', text)
    return text_key(text.replace('\\geq', '\\ge').replace('\\leq', '\\le')).replace(' ', '')


@functools.lru_cache(maxsize=1024)
def unequal(gold: str) -> Verdict:
    """Returns the verdict on an unequal answer: WRONG, or INFRA_ERROR if `gold` itself cannot be read."""
    return Verdict.WRONG if is_readable(gold) else Verdict.INFRA_ERROR


def is_readable(gold: str) -> bool:
    """Returns whether an accepted answer can be compared by its meaning."""
    gold = _in_plain_form((forms.rounded(gold) or (gold,))[0])
    if DOTS in gold:
        return all(map(is_readable, pieces(gold))) and gold.count('{') == gold.count('}')
    gold = forms.claim_of(gold).text
    gold = domain(gold) or forms.labelled(gold)[1]
    tuple_ = forms.parts(gold)
    members = tuple_.inner if tuple_ else _members(gold)
    if len(members) > 1:
        return all(map(is_readable, members))
    if is_words(gold) or clock(gold) or parse_numeral(gold) or parse_number(gold):
        return True
    return any(is_meaning(reading) for reading in readings(gold))


# ---- values ------------------------------------------------------------------------------------------------


def _compare_values(answer: str, gold: str, renamed: tuple[tuple[str, str], ...]) -> Verdict:
    """Returns the verdict on indivisible answers: quantities, expressions, equations, sets and matrices."""
    one, other = quantity(answer), quantity(gold)
    if bool(one.unit) != bool(other.unit):
        one, other = quantity(answer, beside=other.unit), quantity(gold, beside=one.unit)
    degrees = _degrees(one, other), _degrees(other, one)
    times = ratio(one.unit, other.unit) if one.unit and other.unit and not any(degrees) else 1
    percent = any(is_known(a.unit) and b.value.endswith('%') for a, b in ((one, other), (other, one)))
    if bound(answer) != bound(gold) or times is None or percent:
        return unequal(gold)
    if is_words(gold) and not any(map(is_meaning, readings(gold))):
        return Verdict.WRONG  # different words
    found = _changed(readings(one.value), one.times * times, renamed, degrees[0])
    return compare_readings(found, _changed(readings(other.value), other.times, (), degrees[1]))


def compare_readings(found: tuple[Any, ...], gold_found: tuple[Any, ...]) -> Verdict:
    if not any(map(is_meaning, gold_found)):
        return Verdict.INFRA_ERROR
    if not any(map(is_meaning, found)):
        return Verdict.UNPARSEABLE
    found, gold_found = (tuple(map(simpler, side)) for side in (found, gold_found))
    same = same_values(gold_found[0], found[0])
    if same is None:
        same = math_verify.verify(
            list(gold_found),
            list(found),
            float_rounding=ROUNDED_PLACES,
            allow_set_relation_comp=True,
            timeout_seconds=None,
        ) and not are_other_equations(gold_found[0], found[0])
    return Verdict.CORRECT if same else Verdict.WRONG


def _degrees(one: Quantity, other: Quantity) -> bool:
    """Returns whether `one` is in degrees and `other` in radians."""
    return one.unit == 'degree' != other.unit and ('\\pi' in other.value or other.unit in ('radian', 'rad'))


def _changed(
    found: tuple[Any, ...], times: Rational, renamed: tuple[tuple[str, str], ...], degrees: bool
) -> tuple[Any, ...]:
    """Renames letters in readings, multiplies them by `times`, and converts them to radians if `degrees`."""
    if times == 1 and not renamed and not degrees:
        return found
    factor = sympy.Rational(times.numerator, times.denominator) * (sympy.pi / 180 if degrees else 1)
    changed = []
    for reading in filter(is_meaning, found):
        # A letter that already has one of the new names is a different variable, so it gets a prime.
        names = {other: other + "'" for _, other in renamed} | dict(renamed)
        letters = [s for s in reading.free_symbols if s.name in names]
        reading = reading.xreplace({s: sympy.Symbol(names[s.name], real=s.is_real) for s in letters})
        changed.append(reading * factor if isinstance(reading, sympy.Expr) else reading)
    return tuple(changed)
