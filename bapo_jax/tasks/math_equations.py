r"""When an equation gives the value on its last side: it names that value, or every side has it.

    'x=5', 'f(2)=5', 'A=\pi r^2=9\pi', '2+3=5'       give 5, 5, 9\pi and 5
    'x^2+y^2=4', '|x|=5', '2x=6', 'x+y=7', '7=5'     are relations, or false
"""

from __future__ import annotations

import re

import sympy

from bapo_jax.tasks.math_forms import is_label
from bapo_jax.tasks.math_readings import readings
from bapo_jax.tasks.math_text import split
from bapo_jax.tasks.math_units import quantity
from bapo_jax.tasks.math_values import are_far, same_values

_WORKED_OUT = re.compile(r'\\(?:gcd|lcm|det|max|min|lim|sum|prod|i*int)(?![a-z])')  # a name that has a value of its own


def value_given(equation: str, *, trusted: bool = False) -> str | None:
    """The value that an equation gives; None where it is a relation, or sides differ. Of a `trusted` one a name is enough."""
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
    expression = expression.args[0] if isinstance(expression, sympy.UnevaluatedExpr) else expression  # a greatest common divisor
    same = same_values(last, expression)
    if expression.free_symbols or last.free_symbols:
        return not same and last != expression
    return same is False or are_far(last, expression)
