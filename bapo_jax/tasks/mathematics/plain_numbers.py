"""Plain numbers, with or without a unit: parsed exactly, and compared with regard to rounding and units."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from bapo_jax.tasks.mathematics.conversion import ratio
from bapo_jax.tasks.mathematics.numerals import MAX_EXACT_DIGITS
from bapo_jax.tasks.mathematics.units import quantity

ROUNDED_PLACES = 4  # a value rounded to at least this many decimal places counts as exact


class Number(NamedTuple):
    value: Fraction
    places: int | None  # digits after the decimal point; None for an exact value
    unit: str  # unit of measurement, as named by `units`, or ''


_PLAIN = r'(?:(?:\d{1,3}(?:[, ]\d{3})+|\d+)(?:\.\d*)?|\.\d+)'
_DECIMAL = re.compile(
    rf'([+-]?) ?(?:({_PLAIN}) ?(?:[eE]|\\(?:times|cdot) ?10 ?\^ ?)|10 ?\^ '
    rf'?)(\{{?)([+-]?\d{{1,3}})(?(3)\}}?)|([+-]?) ?({_PLAIN})'
)
_FRACTION = re.compile(
    r'([+-]?) ?(?:\\frac ?(?:\{ ?(-?\d+) ?\} ?\{ ?(-?\d+) ?\}|(\d) ?(\d))|(\d+) ?/ ?(-?\d+))'
)


def parse_number(text: str) -> Number | None:
    r"""Parses a plain number with or without a unit; returns None for any other text.

    Plain numbers are 25, 1,000, -0.5, 1.5e3, 1.5\times 10^{3}, 3/7, \frac{3}{7}.
    """
    if len(text) > MAX_EXACT_DIGITS:
        return None
    text, unit, times = quantity(text)
    if match := _FRACTION.fullmatch(text):
        sign, *groups = match.groups()
        above, below = (int(g) for g in groups if g is not None)
        return (
            Number(Fraction(-above if sign == '-' else above, below) * times, None, unit) if below else None
        )
    if not (match := _DECIMAL.fullmatch(text)):
        return None
    sign, mantissa, _, exponent, plain_sign, plain = match.groups()
    digits = re.sub('[, ]', '', plain or mantissa or '1')
    value = Fraction(digits.removesuffix('.')) * Fraction(10) ** int(exponent or 0)
    places = max(len(digits.partition('.')[2]) - int(exponent or 0), 0) if '.' in digits else None
    return Number(
        value * (-times if '-' in (sign, plain_sign) else times), places if times == 1 else None, unit
    )


def same_number(a: Number, b: Number) -> bool:
    """Returns whether two numbers are equal, or one is a correct rounding of the other.

    A rounding needs at least `ROUNDED_PLACES` decimal places and significant digits. Units count if both
    numbers have one: 500 cents are 5 dollars, 5 cents are not.
    """
    if a.unit and b.unit and a.unit != b.unit:
        times = ratio(a.unit, b.unit)
        return times is not None and a.value * times == b.value
    if a.value == b.value:
        return True
    if b.places is not None:
        a, b = b, a
    # Two different decimals, or two different exact values.
    if a.places is None or b.places is not None or b.value.denominator == 1:
        return False
    unit = Fraction(1, 10**a.places)
    return (
        a.places >= ROUNDED_PLACES
        and abs(a.value) >= unit * 10 ** (ROUNDED_PLACES - 1)
        and abs(a.value - b.value) <= unit / 2
    )
