r"""Whether an answer means what an accepted one does: taken apart by its form, and compared part by part.

    roundings, vectors, elisions, numerals    are put into a plain form first (`math_forms`, `math_elisions`, `math_numerals`)
    values by name, lists, tuples, sets       are compared member by member (`math_forms`, `math_sets`)
    equations                                 give a value, or are compared as equations (`math_equations`)
    quantities                                in one unit (`math_units`, `math_conversion`)
    expressions                               by their values (`math_values`), to the last digit; else math-verify decides
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
from bapo_jax.tasks import math_forms as forms
from bapo_jax.tasks.math_answers import same_at_a_glance
from bapo_jax.tasks.math_conversion import is_known, ratio
from bapo_jax.tasks.math_elisions import DOTS, pieces, same_rule, written_out
from bapo_jax.tasks.math_equations import value_given
from bapo_jax.tasks.math_numerals import is_numeral, numeral_value, parse_numeral
from bapo_jax.tasks.math_readings import is_meaning, is_prose, readings, simpler, unmarked
from bapo_jax.tasks.math_sets import chain, domain
from bapo_jax.tasks.math_text import ROUNDED_PLACES, is_words, parse_number, split, text_key, tidy
from bapo_jax.tasks.math_units import Quantity, bound, clock, quantity
from bapo_jax.tasks.math_values import are_other_equations, same_values


def compare(answer: str, gold: str, renamed: tuple[tuple[str, str], ...] = ()) -> Verdict:
    """The verdict on one answer. `renamed` pairs letters of the answer with those that mean the same in the accepted one."""
    if (verdict := _beside_roundings(answer, gold, renamed)) is not None:
        return verdict
    if is_prose(answer):
        return compare_readings(readings(answer), readings(quantity(gold).value))
    answer, gold = _in_plain_form(answer), _in_plain_form(gold)
    if (same := same_at_a_glance(answer, gold)) is not None and not renamed:
        return Verdict.CORRECT if same else unequal(gold)
    if DOTS in answer or DOTS in gold:
        alike = DOTS in answer and DOTS in gold and same_rule(answer, gold, lambda a, g: compare(a, g, renamed) == Verdict.CORRECT)
        return Verdict.CORRECT if alike else unequal(gold)
    if is_numeral(answer) != is_numeral(gold) and '=' not in answer + gold:
        return _compare_numerals(answer, gold, renamed)
    if (located := forms.same_point(answer, gold)) is not None:
        return compare(*located, renamed)
    claim, gold_claim = forms.claim(answer), forms.claim(gold)
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
    if any(one.startswith('\\{') and forms.is_set(one) and forms.parts(other) for one, other in ((answer, gold), (gold, answer))):
        return unequal(gold)  # a tuple has an order
    members, gold_members = _members(answer), _members(gold)
    if len(members) > 1 and len(gold_members) > 1:
        if forms.is_set(answer) or forms.is_set(gold) or all(map(forms.parts, members + gold_members)):  # a root may be double
            members, gold_members = (list({text_key(m): m for m in ms}.values()) for ms in (members, gold_members))
        return _any_order(members, gold_members, gold, renamed)
    if len(members) != len(gold_members) and not _NO_LIST.search(answer + gold):
        single, among = (answer, gold) if len(members) == 1 else (gold, answer)
        sets = forms.is_set(single) and forms.is_set(among)  # without repeats
        if not (sets or forms.is_equation(single) or forms.parts(single) or is_prose(among)):  # S = \{1,2\}
            return unequal(gold)  # math-verify takes 7, 7 for the set of 7
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
    return unequal(gold) if verdict == Verdict.INFRA_ERROR else verdict  # the parts of a list may be read where the whole is not


_NO_LIST = re.compile(r'\d,\d{3}(?!\d)|\\langle')  # commas that separate thousands, or parts of a vector


def _in_plain_form(text: str) -> str:
    """A text without marks of mathematics, with a list's members written out, and a vector as a tuple."""
    return forms.as_tuple(written_out(unmarked(text)))


def _compare_numerals(answer: str, gold: str, renamed: tuple[tuple[str, str], ...]) -> Verdict:
    """The verdict where one is a numeral in a base. The accepted one has its value; an answer has it in base 10 alone."""
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
    if answer.count('=') > 1 and given is None:  # math-verify would take any of its equations
        return unequal(gold)
    if given and gold_given and not (label and gold_label):  # 2+3=5 for x=5
        return compare(given, gold_given, renamed)
    if given and gold_given and _is_number(gold_given):  # two names: x=5 for y=5
        return compare(given, gold_given, renamed) if forms.in_words(label) else unequal(gold)
    verdict = _compare_values(answer, gold, renamed)
    return unequal(gold) if verdict == Verdict.INFRA_ERROR else verdict


def _is_number(text: str) -> bool:
    found = readings(quantity(text).value)
    return bool(found) and isinstance(found[0], sympy.Expr) and not found[0].free_symbols


def _beside_roundings(answer: str, gold: str, renamed: tuple[tuple[str, str], ...]) -> Verdict | None:
    """The verdict where a value has its rounding beside it, as in '\\sqrt{2}, about 1.41'; None where neither text has one.

    The rounding itself counts where it is one and the other answer is a decimal. A wrong one in words spoils an answer; behind
    \\approx it does not, as in other graders.
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
    """Whether a decimal is a value to the last place that it has, give or take one."""
    number, one = parse_number(tidy(decimal)), quantity(split(exact, '=')[-1])
    found = readings(one.value)
    if not found or not isinstance(found[0], sympy.Expr) or found[0].free_symbols:
        return False
    distance = abs(found[0] * one.times - sympy.Rational(number.value)).evalf(20)
    return bool(distance.is_Number and distance < sympy.Rational(10) ** -(number.places or 0))


def compare_choices(answer: str, gold: str) -> Verdict | None:
    """The verdict where an answer or the accepted one is a choice, such as '(B) 12'; None where neither is."""
    one, other = forms.choice(answer), forms.choice(gold)
    if not one and not other:
        return None
    letter, value = one or _letter_or_value(answer)
    gold_letter, gold_value = other or _letter_or_value(gold)
    if letter and gold_letter and letter != gold_letter:
        return unequal(gold)
    if value and gold_value:
        return compare(value, gold_value)
    return Verdict.CORRECT if letter and letter == gold_letter else compare(answer, gold)


def _letter_or_value(text: str) -> tuple[str, str]:
    key = text_key(text)
    return (key, '') if re.fullmatch('[A-Z]', key) else ('', text)


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
        if (verdict := compare(answer, other, renamed)) != Verdict.CORRECT:
            return verdict if verdict == Verdict.UNPARSEABLE else unequal(gold)
    return Verdict.CORRECT


def _any_order(members: list[str], gold_members: list[str], gold: str, renamed: tuple) -> Verdict:
    """CORRECT where each member equals another one of the accepted answer's."""
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
def unequal(gold: str) -> Verdict:
    """The verdict on an answer that does not equal an accepted one: WRONG, or INFRA_ERROR where nothing could equal it."""
    return Verdict.WRONG if is_readable(gold) else Verdict.INFRA_ERROR


def is_readable(gold: str) -> bool:
    """Whether an accepted answer can be compared by its meaning."""
    gold = _in_plain_form((forms.rounded(gold) or (gold,))[0])
    if DOTS in gold:
        return all(map(is_readable, pieces(gold))) and gold.count('{') == gold.count('}')
    gold = forms.claim(gold).text
    gold = domain(gold) or forms.labelled(gold)[1]
    tuple_ = forms.parts(gold)
    members = tuple_.inner if tuple_ else _members(gold)
    if len(members) > 1:
        return all(map(is_readable, members))
    if is_words(gold) or clock(gold) or parse_numeral(gold) or parse_number(gold):
        return True
    return any(is_meaning(reading) for reading in readings(gold))


# ---- values -----------------------------------------------------------------------------------------------------------


def _compare_values(answer: str, gold: str, renamed: tuple[tuple[str, str], ...]) -> Verdict:
    """The verdict on what cannot be taken apart: quantities, expressions, equations, sets and matrices."""
    one, other = quantity(answer), quantity(gold)
    if bool(one.unit) != bool(other.unit):
        one, other = quantity(answer, beside=other.unit), quantity(gold, beside=one.unit)
    degrees = _degrees(one, other), _degrees(other, one)
    times = ratio(one.unit, other.unit) if one.unit and other.unit and not any(degrees) else 1
    percent = any(is_known(a.unit) and b.value.endswith('%') for a, b in ((one, other), (other, one)))
    if bound(answer) != bound(gold) or times is None or percent:
        return unequal(gold)
    if is_words(gold) and not any(map(is_meaning, readings(gold))):
        return Verdict.WRONG  # words that differ
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
            list(gold_found), list(found), float_rounding=ROUNDED_PLACES, allow_set_relation_comp=True, timeout_seconds=None
        ) and not are_other_equations(gold_found[0], found[0])
    return Verdict.CORRECT if same else Verdict.WRONG


def _degrees(one: Quantity, other: Quantity) -> bool:
    """Whether `one` is in degrees and `other` in radians."""
    return one.unit == 'degree' != other.unit and ('\\pi' in other.value or other.unit in ('radian', 'rad'))


def _changed(found: tuple[Any, ...], times: Rational, renamed: tuple[tuple[str, str], ...], degrees: bool) -> tuple[Any, ...]:
    """Readings in the accepted answer's letters, multiplied by `times`, and from degrees to radians."""
    if times == 1 and not renamed and not degrees:
        return found
    factor = sympy.Rational(times.numerator, times.denominator) * (sympy.pi / 180 if degrees else 1)
    changed = []
    for reading in filter(is_meaning, found):
        names = {other: other + "'" for _, other in renamed} | dict(renamed)  # a letter that has the name already is another one
        letters = [s for s in reading.free_symbols if s.name in names]
        reading = reading.xreplace({s: sympy.Symbol(names[s.name], real=s.is_real) for s in letters})
        changed.append(reading * factor if isinstance(reading, sympy.Expr) else reading)
    return tuple(changed)
