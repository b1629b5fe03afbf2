"""math-verify's readings of a text: sympy expressions, or nothing. Reading may hang or exhaust memory."""

from __future__ import annotations

import functools
import re
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig

from bapo_jax.tasks.mathematics.text import MATH_MARKS, is_words

_PROSE = re.compile(r'(?<![\\A-Za-z{])[A-Za-z]{3,}[^\\]* [^\\]*(?:\$|\\\(|\\\[|\d)')
_FORMULA = re.compile(r'\$[^$]+\$|\\\(|\\\[')
# math-verify takes E_, e_ and I_ for numbers with an index, which it cannot read.
_CONSTANT = re.compile(r'(\\[A-Za-z]+)|[EeI]_')


def is_prose(text: str) -> bool:
    """Returns whether an answer is a sentence that states a value."""
    return _PROSE.match(text) is not None and not is_words(text)


def unmarked(text: str) -> str:
    return MATH_MARKS.sub('', re.sub(r'(?<!\\)\$', '', text)).strip()


@functools.lru_cache(maxsize=1024)
def readings(text: str) -> tuple[Any, ...]:
    return read(text)


def read(text: str, *, anywhere: bool = False) -> tuple[Any, ...]:
    """Returns math-verify's reading of a text: nothing, a string, or an expression and its string.

    With `anywhere`, the text is prose, and the last answer stated in it is read. So is prose in a box.
    """
    # math-verify's unit rule would read the t of \\frac{1}{m}t as tons
    rules = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed='all'
    )
    latex = math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=rules)
    if anywhere or is_prose(text):
        # among formulas, a bare number is an answer only if the text announces it as one
        number = math_verify.ExprExtractionConfig(
            try_extract_without_anchor=anywhere or not _FORMULA.search(text)
        )
        found = tuple(math_verify.parse(text, [latex, number], parsing_timeout=None))
        listed = found[-1].replace('.', ',') if found else ''  # math-verify reads '2,3' in prose as 2.3
        return read(listed) if listed and found[-1] not in text and listed in text else found
    text = _CONSTANT.sub(
        lambda m: m[1] or ('\\Upsilon_' if m[0] == 'I_' else '\\Xi_'), unmarked(text.replace('\\$', ''))
    )
    text = '\\boxed{' + text + '}'
    return tuple(math_verify.parse(text, [latex], parsing_timeout=None))


def is_meaning(reading: Any) -> bool:
    return isinstance(reading, (sympy.Basic, sympy.MatrixBase))


def simpler(reading: Any) -> Any:
    """Evaluates intersections and complements in a reading, and replaces derivatives by unknowns.

    Otherwise the derivative of a symbol would be 0.
    """
    if isinstance(reading, (sympy.Intersection, sympy.Complement)) and all(
        isinstance(part, sympy.Set) for part in reading.args
    ):
        return reading.doit()
    if isinstance(reading, sympy.Basic) and reading.has(sympy.Derivative):
        return reading.xreplace({d: sympy.Symbol(str(d), real=True) for d in reading.atoms(sympy.Derivative)})
    return reading
