r"""The forms of mathematical answers: what surrounds a value, and how several values are combined.

    qualified   'n\pi, n \in \mathbb{Z}', 'f(x)=2x \text{ for all } x',   claim, bound letters, condition
                '\{x \mid x > 3\}'
    labelled    'x=1, y=2', '(x,y)=(1,2)', 'a_{\max}=5'                   named values
    listed      '1, 2 \text{ and } 3', '\{1, 2\}', '1 \pm \sqrt{2}'       unordered members
    tuple       '(1, 2)', '[0, 1)', '\langle 1, 2\rangle', a column       ordered parts
    rounded     '\frac{22}{7}, \text{ about } 3.14',                      a value, its rounding
                '\sqrt{2} \approx 1.41'

Works on tidied text and takes linear time. `compare` compares the parts.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from bapo_jax.tasks.mathematics.plain_numbers import parse_number
from bapo_jax.tasks.mathematics.text import split, tidy

# ---- qualifiers --------------------------------------------------------------------------------------------


class Claim(NamedTuple):
    text: str  # what is claimed
    bound: tuple[str, ...]  # the letters that the qualifier names
    condition: str  # the qualifier if it contains a relation, else ''


_FIELD = r'\\(?:mathbb|mathbf|Bbb) ?\{? ?[RZNQC] ?\}?(?:[_^]\{? ?[+*>0-9]+ ?\}?)*'
_MEMBER = rf'[A-Za-z](?: ?, ?[A-Za-z])* ?\\in ?{_FIELD}'
_QUALIFIER = re.compile(
    rf'[,;]? ?(?:\\text\w* ?\{{ ?|\\mbox ?\{{ ?|\( ?)*(?:\bwhere\b|\bfor\b|\bwith\b|\\forall(?![a-z])).*$'
    rf'|(?:[,;]|(?<= )\(|\\text\w* ?\{{ ?\(? ?\}}?) ?{_MEMBER} ?(?:\)|\\text ?\{{ ?\) ?\}})?$'
    r'|[,;(] ?(?P<letter>[A-Za-z]) ?(?:\\(?:ge|le|geq|leq|ne|neq|geqslant|leqslant)(?![a-z])|[<>]=?) ?-?\d+ '
    r'?\)?$'
)
_LEADING = re.compile(rf'{_MEMBER} ?[,;:] ?')
_PROSE = re.compile(r'(?<![\\A-Za-z{_])[A-Za-z]{3,}(?![A-Za-z]*[({=])')
_RELATION = re.compile(r'[<>=]|\\(?:[lg]eq?|[lg]eqslant|neq?|[lg]t)(?![a-z])')
_SUBJECT = re.compile(
    r'(?<![A-Za-z\\])([A-Za-z])(?: ?, ?([A-Za-z]))? '
    r'?(?:\\in(?![a-z])|\\[lg]eq?|\\[lg]eqslant|\\neq?|[<>=]|\b(?:is|are)\b)'
    r'|(?:all|any|every|each|some)(?: [a-z-]{3,})* ([A-Za-z])(?![A-Za-z])|\\forall ?([A-Za-z])(?![A-Za-z])'
)
_BUILDER = re.compile(
    rf'\\?\{{ ?([A-Za-z](?: ?\\in ?{_FIELD})?|[^|:{{}}]*?) ?'
    r'(?:\\mid(?![a-z])|\\vert(?![a-z])|\||:) ?(.+?) ?\\?\}'
)
_VARIABLE = re.compile(rf'[A-Za-z](?: ?\\in ?{_FIELD})?|\([a-z](?: ?, ?[a-z])+\)')


def claim_of(text: str) -> Claim:
    """Returns a text without its qualifier; {x | condition} claims its condition, {2k | k in Z} claims 2k."""
    if builder := _BUILDER.fullmatch(text):
        head, rest = builder.groups()
        if _VARIABLE.fullmatch(head):
            inner = claim_of(rest)
            return Claim(inner.text, tuple(dict.fromkeys((head[0], *inner.bound))), inner.condition)
        return Claim(head, _subjects(rest), rest if _RELATION.search(rest) else '')
    if leading := _LEADING.match(text):
        text = text[leading.end() :]
    match = _QUALIFIER.search(text)
    before = text[: match.start()].strip(' ,;') if match else ''
    if not before or _PROSE.search(before) or (match['letter'] and not _letter(match['letter'], before)):
        return Claim(text, (), '')
    if match['letter'] and _RELATION.search(before):
        return Claim(text, (), '')
    words = re.sub(r'(?:\\text\w*|\\mbox|[{}$ ])+', ' ', match[0])
    return Claim(before, _subjects(words), words.strip(' ,;()') if _RELATION.search(words) else '')


def _subjects(words: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(letter for found in _SUBJECT.findall(words) for letter in found if letter))


def _letter(letter: str, text: str) -> bool:
    return re.search(rf'(?<![A-Za-z\\]){letter}|{letter}(?![A-Za-z])', text) is not None


# ---- labels ------------------------------------------------------------------------------------------------

_GREEK = (
    r'\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|phi|varphi|rho|sigma|tau|omega'
    r'|angle ?[A-Z]{1,3}|Delta|ell)(?![a-z])'
)
_INDEX = r"'*(?:_(?:\{(?:[^{}]|\{[^{}]*\})*\}|[0-9A-Za-z]|\\[a-z]+)|\^(?:\\prime|\{\\prime\}|\*|\{\*\})|')*"
_NAME = (
    rf'(?:[A-Za-z]|{_GREEK}|\\(?:text\w*|mathrm|mathbf|operatorname|overline|vec|hat|bar|mathcal) '
    rf'?\{{[^{{}}]*\}}'
    rf'|[A-Z]{{2,4}}){_INDEX}'
)
_ANGLE = rf'(?:{_GREEK}|[A-Z]|\\angle ?[A-Z]{{1,3}})'
# Expressions that name a quantity: f(2), \cos\theta, |AB|, \lim a_n. But |x|=5, \sqrt{x}=3 and x(x+1)=6 are
# relations.
_LABEL = re.compile(
    rf'(?:\\# ?)?{_NAME}|(?:[f-hFGHPE]|\\(?:var)?[pP][hs]i|\\(?:mathrm|operatorname|text) '
    rf'?\{{[^{{}}]*\}}){_INDEX}'
    r' ?\((?:[^()=]|\([^()=]*\))*\)|(?:P|\\Pr) ?\([^()]*\)'
    rf'|(?P<of>[A-Za-z]){_INDEX}\((?!(?P=of))(?:\d+(?:, ?\d+)*|[a-z](?: ?, ?[a-z])*|[A-Z](?: ?, ?[A-Z])*)\)'
    r'|[PE]\[[^\[\]=]*\]|\[[A-Z]{3,6}\]'
    r'|m ?\\angle ?[A-Z]{1,3}|\\frac\{ ?d ?[A-Za-z] ?\}\{ ?d ?[a-z] ?\}'
    r'|\| ?(?:[A-Z]{1,3}|[zw]|\\(?:vec|overline|mathbf)\{[^{}]*\}) ?\|'
    rf'|\\(?:sin|cos|tan|cot|sec|csc)(?:\^ ?\{{?\d\}}?)? ?\(?(?:\d? '
    rf'?{_ANGLE}|\\frac\{{{_ANGLE}\}}\{{\d\}})\)?'
    r'|\\triangle|\\(?:gcd|lcm|det|dim|max|min|lim|sum|prod|i*int)(?![a-z])[^=<>]*|[A-Za-z][a-z]{2,}(?: '
    r'[A-Za-z]+){0,5}'
)
# Expressions used only for named things, such as lengths: AB \cdot CD, \frac{S_1}{S_2}, \angle A + \angle B.
_OF_NAMES = re.compile(
    r'(?:(?<![A-Za-z])[A-Z]{2,3}(?![A-Za-z])|(?<![A-Za-z])[A-Z]_(?:\w|\{\w+\})|\[[A-Z]{3,6}\]'
    r'|\\(?:angle|triangle) ?[A-Z]{1,3}'
    r'|\\(?:overline|overrightarrow|vec|mathbf) ?\{[^{}]*\}|(?<![\d}])(?<![\d}] )\\text\w* ?\{[^{}]*\})'
    r'(?:\^ ?\d)?'
)
_LETTERS = 'abcdefghijklmnopqrstuvwxyz'


def is_label(text: str) -> bool:
    """Returns whether a text names a quantity, so that an equation with it gives that quantity's value."""
    if _LABEL.fullmatch(text):
        return text not in _LETTERS or len(text) < 3  # xyz is a product
    if ':' in text and len(sides := split(text, ':')) > 1 and all(map(_LABEL.fullmatch, sides)):
        return True
    left, names = _OF_NAMES.subn('', text)
    return (
        names > 0
        and re.fullmatch(r'(?:\\(?:cdot|times|frac|sqrt)(?![a-z])|[-+*/:{}()|\d ])*', left) is not None
    )


_NAMES = re.compile(r'\(([A-Za-z](?:_\w)?(?: ?, ?[A-Za-z](?:_\w)?)+)\)')


def is_equation(text: str) -> bool:
    """Returns whether a text has several sides; an index such as k=0 below a sum does not count."""
    return '=' in text and len(split(text, '=')) > 1


def labelled(text: str) -> tuple[str, str]:
    """Returns the name that a text gives its value, and the value; ('', text) if there is no name."""
    sides = split(text, '=')
    if len(sides) == 2 and not is_label(sides[0]):
        sides.reverse()  # 5 = x
    return (
        (sides[0].replace(' ', ''), sides[1])
        if len(sides) == 2 and sides[1] and is_label(sides[0])
        else ('', text)
    )


def in_words(label: str) -> bool:
    """Returns whether a name is a descriptive word, such as Area, which may stand for any letter."""
    return re.fullmatch(r'\\text\w*\{[^{}]{3,}\}|[A-Za-z][a-z]{2,}', label) is not None


def last_value(text: str) -> tuple[str, str]:
    """Like `labelled`, but several equations may follow the name: x and 11 for x=5+6=11."""
    sides = split(text, '=')
    return (sides[0].replace(' ', ''), sides[-1]) if len(sides) > 2 and is_label(sides[0]) else labelled(text)


def bound_argument(label: str) -> str:
    """Returns x for the label f(x), and '' for any other label."""
    match = re.fullmatch(r'[A-Za-z](?:_\w)?\(([A-Za-z])\)', label)
    return match[1] if match else ''


def assignment(text: str) -> dict[str, str] | None:
    """Returns the values that a text gives to two or more names, in order; None for any other text."""
    names = _NAMES.match(text)
    if names and (rest := text[names.end() :].lstrip()).startswith('='):
        values = parts(rest[1:].strip())
        letters = [name.strip() for name in names[1].split(',')]
        return dict(zip(letters, values.inner)) if values and len(values.inner) == len(letters) else None
    pairs = [labelled(member) for member in listed(text)]
    named = dict(pairs)
    return named if len(named) == len(pairs) > 1 and '' not in named else None


# ---- lists and tuples --------------------------------------------------------------------------------------

_AND = re.compile(
    r',? ?(?:\\text\w* ?\{ ?,? ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:vee|lor)(?![a-z])) '
    r'?'
)
_IN_TEXT = re.compile(r'\\text\w* ?\{([^{}]*[A-Za-z]) (?:and|or)(?![A-Za-z])([^{}]*)\}')


def listed(text: str) -> list[str]:
    r"""Returns the members of a list without brackets, or of a set in braces; [text] for any other text.

    Members separated by semicolons may contain commas. Labels, as in 'x=1, x=2', stay (see `values_of`).
    """
    if text.startswith('\\{') and text.endswith('\\}') and '\\{' not in text[2:]:
        text = text[2:-2].strip()
    elif text.startswith('{') and text.endswith('}') and '{' not in text[1:]:
        text = text[1:-1].strip()
    text = _AND.sub(',', _IN_TEXT.sub(r'\\text{\1}, \2', text))
    members = split(text, ';')
    if len(members) == 1:
        members = split(text, ',')
    return [m for m in members if m] or [text]


def is_set(text: str) -> bool:
    return text.startswith(('\\{', '{')) and text.endswith('}')


def values_of(members: list[str]) -> list[str]:
    """Returns members without their labels, if all labels are the same: x=2, x=3, or a=4, -8, -10."""
    pairs = [labelled(member) for member in members]
    names = {name for name, _ in pairs if name}
    return [value for _, value in pairs] if len(names) == 1 and (pairs[0][0] or len(pairs) == 1) else members


class Parts(NamedTuple):
    opening: str
    inner: list[str]
    closing: str


def parts(text: str) -> Parts | None:
    """Parses a tuple or an interval; returns None for any other text."""
    if len(text) < 2 or text[0] not in '([' or text[-1] not in ')]':
        return None
    depth = 0
    for i, c in enumerate(text):
        depth += (c in '({[') - (c in ')}]')
        if not depth and i + 1 < len(text):  # '(1,2),(3,4)'
            return None
    inner = split(text[1:-1], ',')
    return Parts(text[0], inner, text[-1]) if len(inner) > 1 and all(inner) else None


_POINT = re.compile(r'[A-Z] ?(\(.*\))')


def same_point(one: str, other: str) -> tuple[str, str] | None:
    """Returns two tuples if one text is a named point, as in A(1,2) and (1,2); None for any other texts."""
    for named, plain in ((one, other), (other, one)):
        if (match := _POINT.fullmatch(named)) and parts(match[1]) and parts(plain):
            return (match[1], plain) if named is one else (plain, match[1])
    return None


_COLUMN = re.compile(
    r'[(\[]? ?\\begin\{([pb]?matrix|array)\}(?:\{[clr|]+\})?((?:(?!\\begin|\\end|&).)*)\\end\{\1\} ?[)\]]?'
)
_TRANSPOSED = re.compile(r'([(\[].*[)\]]) ?\^ ?\{? ?(?:T|\\(?:top|intercal)|\\math(?:sf|rm) ?\{?T\}?) ?\}?')
_ANGLES = re.compile(r'\\langle(?![a-z])(.+)\\rangle|<([^<>=]*,[^<>=]*)>')


def as_tuple(text: str) -> str:
    """Returns a vector (angle brackets, column or transposed row) as a tuple, and other texts unchanged."""
    if column := _COLUMN.fullmatch(text):
        rows = [row.strip() for row in re.split(r'\\\\(?:\[[^\]]*\])?', column[2])]
        rows = rows if rows[-1] else rows[:-1]
        return f'({",".join(rows)})' if len(rows) > 1 and all(rows) else text
    if (row := _TRANSPOSED.fullmatch(text)) and (inner := parts(f'({row[1][1:-1]})')):
        return f'({",".join(inner.inner)})'
    if (angles := _ANGLES.fullmatch(text)) and '\\langle' not in (inner := angles[1] or angles[2]):
        return f'({inner.strip()})' if len(split(inner, ',')) > 1 else text
    return text


_SIGNS = re.compile(r'\\pm(?![a-z])|\\mp(?![a-z])|\+/-')
MOST_SIGNS = 4  # most \pm signs in one tuple


def both_signs(text: str) -> list[str]:
    r"""Returns the two values of a text with \pm; [text] for any other text.

    For a tuple, returns all combinations of its parts' values. Within one expression all signs change
    together, and \mp is the opposite of \pm.
    """
    if not _SIGNS.search(text):
        return [text]
    if tuple_ := parts(text):
        if len(_SIGNS.findall(text)) > MOST_SIGNS:
            return [text]
        rows = itertools.product(*map(both_signs, tuple_.inner))
        return [f'{tuple_.opening}{",".join(row)}{tuple_.closing}' for row in rows]
    upper = _SIGNS.sub(lambda m: '-' if m[0] == '\\mp' else '+', text)
    lower = _SIGNS.sub(lambda m: '+' if m[0] == '\\mp' else '-', text)
    return [re.sub(r'(^|[(=]) ?\+ ?', r'\1', upper), lower]


# ---- roundings ---------------------------------------------------------------------------------------------

_MOST_ROUNDED = 500  # characters; longer texts are not searched
_NEARLY = r'(?:about|approximately|approx\.?|roughly|around)'
_MAY_BE_ROUNDED = re.compile(rf'\\approx|\\simeq|\\ldots$|{_NEARLY}')
_ROUNDED = re.compile(
    r'(.+?)[ ,;$]*(?:\\(?:approx|simeq)(?![a-z])|=(?= ?\d+\.\d+ ?\\ldots$)'
    rf'|(?:\\text\w* ?\{{)?[ ,;]*\(?(?:\\text\w* ?\{{)?(?:or )?(?<![A-Za-z]){_NEARLY} ?\}}?)'
    r'[ $]*([+-]?(?:\\?\$)?\.?\d.*?)[ $)}]*'
)


def rounded(text: str) -> tuple[str, str] | None:
    """Returns a value and the rounding given beside it; None for any other text, such as 'x \\approx 3'."""
    if (
        len(text) > _MOST_ROUNDED
        or not _MAY_BE_ROUNDED.search(text)
        or not (match := _ROUNDED.fullmatch(text))
    ):
        return None
    exact, decimal = match[1], match[2].removesuffix('\\ldots')
    exact, decimal = (
        side + '}' * (side.count('{') - side.count('}')) for side in (exact.replace('$', '').strip(), decimal)
    )
    return None if is_label(exact) or not parse_number(tidy(decimal)) else (exact, decimal)
