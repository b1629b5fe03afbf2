r"""Equations that give the value on their last side, because they name it or all sides are equal to it.

'x=5', 'f(2)=5', 'A=\pi r^2=9\pi', '2+3=5'       give 5, 5, 9\pi and 5
'x^2+y^2=4', '|x|=5', '2x=6', 'x+y=7', '7=5'     are relations, or false
"""

from __future__ import annotations

import re

import sympy

from bapo_jax.tasks.mathematics.forms import is_label
from bapo_jax.tasks.mathematics.readings import readings
from bapo_jax.tasks.mathematics.text import split
from bapo_jax.tasks.mathematics.units import quantity
from bapo_jax.tasks.mathematics.values import are_far, same_values

# Names that can be evaluated themselves.
_WORKED_OUT = re.compile(r'\\(?:gcd|lcm|det|max|min|lim|sum|prod|i*int)(?![a-z])')


def value_given(equation: str, *, trusted: bool = False) -> str | None:
    """Returns the value that an equation gives; None if it is a relation, or if its sides differ.

    If the equation is `trusted`, a name is enough.
    """
    sides = split(equation, '=')
    if not all(sides):
        return None
    if trusted and any(map(is_label, sides[:-1])):
        return sides[-1]
    if not is_label(sides[0]) and is_label(sides[-1]):
        sides.reverse()  # 5 = x
    named, value = is_label(sides[0]), quantity(sides[-1])
    last = _expression(value.value)
    for side in sides[1 if named and not _WORKED_OUT.match(sides[0]) else 0 : -1]:
        other = quantity(side)
        expression = _expression(other.value)
        if expression is None or (other.unit, other.times) != (value.unit, value.times):
            if not named:
                return None
            continue
        if expression.free_symbols and named:
            continue  # A = \pi r^2 = 9\pi
        if last is None or _differ(last, expression):
            return None
    return sides[-1]


def _expression(text: str) -> sympy.Expr | None:
    found = readings(text)
    return found[0] if found and isinstance(found[0], sympy.Expr) else None


def _differ(last: sympy.Expr, expression: sympy.Expr) -> bool:
    # A greatest common divisor is read as an UnevaluatedExpr.
    expression = expression.args[0] if isinstance(expression, sympy.UnevaluatedExpr) else expression
    same = same_values(last, expression)
    if expression.free_symbols or last.free_symbols:
        return not same and last != expression
    return same is False or are_far(last, expression)
