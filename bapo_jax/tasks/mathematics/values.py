"""Compares two sympy expressions numerically, which is faster than simplifying and never hides a difference.

Expressions whose values differ at a few points are unequal. If the values agree, they are compared once more:
an exact difference decides, or else the difference is evaluated with increasing precision. 100! and 100! - 1
agree in 157 digits, 1 - 2^-100 and 1 in 30.

Runs in the verifier's workers, because it may never end.
"""

from __future__ import annotations

from typing import Any

import sympy

from bapo_jax.tasks.mathematics.plain_numbers import ROUNDED_PLACES

_DIGITS = 25  # digits of the values at the points
_CLOSE = sympy.Float('1e-15')  # relative tolerance; values that differ by more are unequal
_FINE_DIGITS = 1500  # digits to which a difference is evaluated before it counts as zero; e^-3000 takes 1,303
_FINE_DIGITS_SLOW = 200  # the same for gamma and similar functions, which take seconds beyond this
_MOST_DIGITS = 20_000  # most digits of an integer that is compared to its last digit

# Step functions may agree at every point tried. The others have no value, cost too much, or are not numbers.
_UNSUITED = (
    sympy.Abs, sympy.floor, sympy.ceiling, sympy.Mod, sympy.Piecewise, sympy.Max, sympy.Min, sympy.sign,
    sympy.Heaviside, sympy.DiracDelta, sympy.UnevaluatedExpr, sympy.core.function.AppliedUndef,
    sympy.Derivative, sympy.Integral, sympy.Limit, sympy.Sum, sympy.Product, sympy.zoo, sympy.nan, sympy.oo,
    sympy.MatrixExpr,
)  # fmt: skip
_WITH_INDEX = (sympy.Sum, sympy.Product, sympy.Integral)
_ELEMENTARY = (
    sympy.exp, sympy.log, sympy.functions.elementary.trigonometric.TrigonometricFunction,
    sympy.functions.elementary.trigonometric.InverseTrigonometricFunction,
    sympy.functions.elementary.hyperbolic.HyperbolicFunction, sympy.re, sympy.im, sympy.conjugate,
)  # fmt: skip
_WHOLE = (sympy.factorial, sympy.binomial)  # fast only for integers


def same_values(gold: Any, answer: Any) -> bool | None:
    """Returns whether two expressions have equal values at a few points; None if that cannot tell.

    Unknowns with the same name get the same number. Points where both values are real decide. If there are no
    such points, positive points decide, since complex branches differ by the sign of a root.
    """
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return None
    gold, answer = _with_unit(gold, answer), _with_unit(answer, gold)
    if gold.is_Symbol or answer.is_Symbol:
        return None
    if gold.has(*_WITH_INDEX) and _plain_indices(gold) == _plain_indices(answer):
        return True
    if gold.has(*_UNSUITED) or answer.has(*_UNSUITED):
        return None
    decimals = [any(map(_may_be_rounded, e.atoms(sympy.Float))) for e in (gold, answer)]
    gold, answer = (
        e.xreplace({f: sympy.Rational(str(f)) for f in e.atoms(sympy.Float)}) for e in (gold, answer)
    )
    if gold - answer == 0:
        return True
    real, complex_ = [], []
    for values, positive in _points(gold, answer):
        a, b = (e.evalf(_DIGITS, subs=values, maxn=100) for e in (gold, answer))
        if not _is_known(a) or not _is_known(b):
            return None
        same = bool(abs(a - b) <= (abs(a) + abs(b)) * _CLOSE)
        if same and not (real or complex_):  # once is enough: an identity holds everywhere
            same = not _differs(gold, answer, values, a)
            if not same and all(decimals):
                return False
        if a.is_real and b.is_real:
            real.append(same)
        elif positive:
            complex_.append(same)
    same = all(real) if real else all(complex_)
    return None if any(decimals) and not same else same  # then math-verify's rounding decides


def _with_unit(one: Any, other: Any) -> Any:
    """Returns `one` with i as the imaginary unit, if i is an index in neither or the only letter in both."""
    letters = one.free_symbols | other.free_symbols
    if any(s.name == 'i' and s.is_real is False for s in letters) or {s.name for s in letters} == {'i'}:
        return one.xreplace({s: sympy.I for s in one.free_symbols if s.name == 'i'})
    return one


def are_other_equations(gold: Any, answer: Any) -> bool:
    """Returns whether both are polynomial equations over Q, and neither is a multiple of the other."""
    if not (isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq)):
        return False
    sides = [equation.lhs - equation.rhs for equation in (gold, answer)]
    unknowns = sorted(sides[0].free_symbols | sides[1].free_symbols, key=str)
    if not unknowns or not all(side.is_polynomial(*unknowns) and not side.has(sympy.Float) for side in sides):
        return False
    one, other = (sympy.Poly(side, *unknowns) for side in sides)
    return {one.domain, other.domain} <= {sympy.ZZ, sympy.QQ} and one.monic() != other.monic()


def _plain_indices(expression: Any) -> Any:
    """Returns an expression with canonical names for the indices of its sums, products and integrals."""
    expression = expression.as_dummy()
    return expression.xreplace({s: sympy.Symbol(s.name) for s in expression.atoms(sympy.Symbol)})


def are_far(one: Any, other: Any) -> bool:
    """Returns whether two numbers differ by more than rounding explains, i.e. by more than a hundredth."""
    distance, size = abs(one - other).evalf(15), abs(one).evalf(15)
    return bool(distance.is_Number and size.is_Number and distance * 100 > size)


def _may_be_rounded(decimal: Any) -> bool:
    return 10 ** (ROUNDED_PLACES - 1) % sympy.Rational(str(decimal)).q != 0


def _points(gold: Any, answer: Any) -> list[tuple[dict, bool]]:
    """Returns, for each point, the values of the unknowns and whether all are positive.

    Returns a single point if there are no unknowns.
    """
    symbols = gold.free_symbols | answer.free_symbols
    names = sorted({s.name for s in symbols})
    points = []
    for scale, sign in ((1, 1), (64, 1), (3, -1), (5, 0))[: 4 if names else 1]:
        numbers = {
            n: sympy.Rational(137 + 58 * k, 100) * scale * (1 if sign > 0 or (sign < 0 and k % 2) else -1)
            for k, n in enumerate(names)
        }
        points.append(({s: numbers[s.name] for s in symbols}, sign > 0))
    return points


def _differs(gold: Any, answer: Any, values: dict, size: Any) -> bool:
    """Returns whether two values that agree in 15 digits differ after all; `size` is roughly their size."""
    difference = gold - answer
    if difference.is_Rational:
        return True  # not 0, or they would have been found equal before
    kinds = gold.atoms(sympy.Function) | answer.atoms(sympy.Function)
    quick = all(isinstance(f, _ELEMENTARY) or (isinstance(f, _WHOLE) and not f.free_symbols) for f in kinds)
    digits = _FINE_DIGITS if quick else _FINE_DIGITS_SLOW
    whole = sympy.log(abs(size), 10).evalf(15) if size else 0
    if digits < whole < _MOST_DIGITS:
        digits = int(whole) + 50
    fine = difference.evalf(15, subs=values, maxn=digits)
    return _is_known(fine) and fine != 0


def _is_known(value: Any) -> bool:
    """Returns whether a numerical value exists, and cancellation left it some digits."""
    parts = value.as_real_imag()
    return all(part.is_Number and part.is_finite and (part.is_Rational or part._prec > 1) for part in parts)
