r"""Converts answers of geometry problems to the text that the judge of mathematics reads.

    quantity    '$m\angle A = 30^\circ$', '2√221 cm'    without name, degrees and unit: '30', '2\sqrt{221}'
    statement   '\overline{AD} and \overline{BE}'       names and relation, compared here: it has no value

No value is rounded here. Of Geometry3K's 601 test answers 123 are decimals, and 70 of those problems say how
to round. An answer with other digits is then wrong, as in MathRuler, by which the paper judges.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from bapo_jax.tasks.mathematics.text import tidy

MAX_LENGTH = 400  # characters; a longer answer is left unchanged


class StatedQuantity(NamedTuple):
    value: str
    unit: str  # '' if none is named; degrees are not a unit


# '√(221)', 'sqrt{221}', '\sqrt(221)'
_ROOT = re.compile(r'(?:\\?√|\\?(?<![A-Za-z])sqrt) ?(?:\(([^()]*)\)|\{([^{}]*)\})')
# not LaTeX's \sqrt221, which is \sqrt{2}21
_BARE_ROOT = re.compile(r'(?:√|(?<![A-Za-z\\])sqrt) ?(\d+(?:\.\d+)?|[a-z])')
_PI = re.compile(r'(?<![A-Za-z\\])pi(?![A-Za-z])')
_SIGNS = {
    '∠': r'\angle ',
    '△': r'\triangle ',
    '≈': r'\approx ',
    '≅': r'\cong ',
    '∼': r'\sim ',
    '∥': r'\parallel ',
    '⊥': r'\perp ',
}

_WRAPPED = re.compile(r'\\(?:text|textbf|mathrm|mathbf|mbox) ?\{([^{}]*)\}')
_EQUALS = re.compile(r'(?<![<>:!])=|\\approx(?![a-z])')
_COMMAND = (
    r'\\(?:text|mathrm|overline|widehat|overset|arc|measuredangle|angle|triangle|odot|sin|cos|tan)(?![a-z])'
)
# 'm\angle A', not '2x'
_NAME = re.compile(rf"(?=.*[A-Za-z])(?:{_COMMAND}|[A-Za-z]|_?\{{|\}}|[()\[\]| .']|_?\d(?![A-Za-z]))*+")
# '2x', 'AB + BC'
_UNKNOWN = re.compile(r'(?<![A-Za-z\\])(?:[a-z](?![A-Za-z])|[A-Za-z]+.*[+-]|(?<=[+-])[A-Za-z])')
_NEXT_NAME = re.compile(r'\d[})]*(?: |\\q?quad|\\[ ,;])+[A-Za-z] ?$')  # '30 y'

_DEGREES = re.compile(
    r' ?(?:\^ ?(?:\\circ|\{ ?\\circ ?\})|\^? ?\\degree|\\(?:text|mathrm) ?\{ ?deg(?:rees?)?\.? '
    r'?\}|(?<![A-Za-z{])deg(?:rees?)?\.?)$'
)
_MEASURE = (
    r'(?P<square{0}>square |sq\.? ?)?'
    r'(?P<unit{0}>units?|mm|cm|km|m|in(?:ch(?:es)?)?|f(?:t|oot|eet)|yd|yards?|mi|miles?'
    r'|(?:milli|centi|kilo)?met(?:er|re)s?)\.?'
    r'(?: ?\^ ?\{{? ?(?P<power{0}>[23]) ?\}}?)?'
)
_UNIT = re.compile(
    rf'(?<=[\d}})i.]) ?(?:\\(?:text|mathrm|textrm|mbox) ?\{{ ?{_MEASURE.format(1)} ?\}}(?: ?\^ ?\{{? '
    rf'?(?P<outer>[23]) ?\}}?)?'
    rf'|{_MEASURE.format(2)})$'
)  # after a digit, a bracket or \pi
_SHORT = {
    'inch': 'in',
    'inches': 'in',
    'foot': 'ft',
    'feet': 'ft',
    'yard': 'yd',
    'mile': 'mi',
    'meter': 'm',
    'metre': 'm',
}
_PREFIXES = {'milli': 'm', 'centi': 'c', 'kilo': 'k'}


def stated_quantity(text: str, *, named: bool = True) -> StatedQuantity:
    r"""Returns the value that an answer states, and its unit.

    A text without a name, degrees, unit or unusual roots is unchanged. If `named` is false, a name stays. An
    equation in an unknown, such as '2x = 30', stays whole: its right side is not the answer.
    """
    if len(text) > MAX_LENGTH:
        return StatedQuantity(text, '')
    tidied = tidy(text)
    value = _rewritten(text)
    if wrapped := _WRAPPED.fullmatch(value):
        value = wrapped[1].strip()
    sides = _EQUALS.split(value)
    if named and len(sides) == 2 and (not sides[0].strip() or _NAME.fullmatch(sides[0])):
        value = sides[1].strip()
    value, degrees = _DEGREES.subn('', value)
    unit = None if degrees else _UNIT.search(value)
    if not unit or not value[: unit.start()].strip():
        return StatedQuantity(text if value == tidied else value, '')
    power = (
        '2' if unit['square1'] or unit['square2'] else unit['power1'] or unit['power2'] or unit['outer'] or ''
    )
    return StatedQuantity(value[: unit.start()].strip(), _short(unit['unit1'] or unit['unit2']) + power)


def is_no_value(text: str) -> bool:
    """Whether a judge would wrongly read a text's end as its value, as in '2x = 30' or 'x = 30 y = 150'."""
    sides = _EQUALS.split(text)
    if len(text) > MAX_LENGTH or ',' in text or len(sides) < 2:  # '(x, y) = (2, 3)' is a value
        return False
    return any(map(_NEXT_NAME.search, sides[1:-1])) or (
        len(sides) == 2 and _UNKNOWN.search(sides[0]) is not None
    )


def _rewritten(text: str) -> str:
    text = _BARE_ROOT.sub(r'\\sqrt{\1}', _ROOT.sub(lambda m: f'\\sqrt{{{m[1] or m[2]}}}', text))
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    return _PI.sub(r'\\pi', tidy(text))


def _short(unit: str) -> str:
    for prefix, letter in _PREFIXES.items():
        if unit.startswith(prefix):
            return letter + 'm'
    unit = unit if unit in _SHORT else unit.removesuffix('s')
    return '' if unit == 'unit' else _SHORT.get(unit, unit)


# ---- statements --------------------------------------------------------------------------------------------

_RELATION = re.compile(r'\\(cong|parallel|perp|sim)(?![a-z])')
_KIND = re.compile(
    r'\\(?:overline|overleftrightarrow|overrightarrow|widehat|text(?:bf|it|rm)?|math(?:rm|bf|it)'
    r'|triangle|angle|odot)(?![a-z])'
    r'|[{}$]'
)
_WORD = re.compile(r'\b(?:angles?|segments?|lines?|arcs?|triangles?)\b')
_JOINT = re.compile(r',|(?<![A-Za-z])and(?![A-Za-z])')
_PART = re.compile(r"(?:[A-Z]{1,4}|[a-z]|\d{1,2})'?")


class Statement(NamedTuple):
    relation: str  # 'cong', 'parallel', 'perp', 'sim', or '' for a list
    names: frozenset[str]


def statement(text: str) -> Statement | None:
    """Returns the names in an answer, in any order, and their relation; None if it has anything else."""
    if len(text) > MAX_LENGTH:
        return None
    text = _rewritten(text)
    relations = set(_RELATION.findall(text))
    plain = _WORD.sub('', _KIND.sub(' ', _RELATION.sub(',', text)))
    names = [part.replace(' ', '') for part in _JOINT.split(plain)]
    names = [name for name in names if name]  # 'a, and b' has two separators
    if not names or len(relations) > 1 or not all(_PART.fullmatch(name) for name in names):
        return None
    return Statement(relations.pop() if relations else '', frozenset(names))


def accepted_statement(answer: str) -> Statement | None:
    """Returns an accepted answer's statement; None for values, which mathematics' judge compares."""
    stated = statement(answer)
    if stated is None or (not stated.relation and not re.search('[A-Z]|angles|segments|lines|arcs', answer)):
        return None
    return stated
