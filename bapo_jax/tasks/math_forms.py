r"""The form of a mathematical answer: what is around a value, and how values are put together.

    qualified    'n\pi, n \in \mathbb{Z}', 'f(x)=2x \text{ for all } x', '\{x \mid x > 3\}'    claim, bound letters, condition
    labelled     'x=1, y=2', '(x,y)=(1,2)', 'a_{\max}=5'                                      values by name
    listed       '1, 2 \text{ and } 3', '\{1, 2\}', '1 \pm \sqrt{2}'                           members without order
    a tuple      '(1, 2)', '[0, 1)'                                                            parts in order
    a domain     'x < 1 \text{ or } x > 3', 'x \in (0, 1]', 'x \ne 2'                          a set in LaTeX

Works on tidied text and takes time linear in it. `math_worker` compares the parts.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

from bapo_jax.tasks.math_text import split

# ---- qualifiers -------------------------------------------------------------------------------------------------------


class Claim(NamedTuple):
    text: str  # what is claimed
    bound: tuple[str, ...]  # the letters that the qualifier names
    condition: str  # the qualifier where it holds a relation, else ''


_FIELD = r'\\(?:mathbb|mathbf|Bbb) ?\{? ?[RZNQC] ?\}?(?:[_^]\{? ?[+*>0-9]+ ?\}?)*'
_MEMBER = rf'[A-Za-z](?: ?, ?[A-Za-z])* ?\\in ?{_FIELD}'
_QUALIFIER = re.compile(
    rf'[,;]? ?(?:\\text\w* ?\{{ ?|\\mbox ?\{{ ?|\( ?)*(?:\bwhere\b|\bfor\b|\bwith\b|\\forall(?![a-z])).*$'
    rf'|(?:[,;]|(?<= )\(|\\text\w* ?\{{ ?\(? ?\}}?) ?{_MEMBER} ?(?:\)|\\text ?\{{ ?\) ?\}})?$'
    r'|[,;(] ?(?P<letter>[A-Za-z]) ?(?:\\(?:ge|le|geq|leq|ne|neq|geqslant|leqslant)(?![a-z])|[<>]=?) ?-?\d+ ?\)?$'
)
_LEADING = re.compile(rf'{_MEMBER} ?[,;:] ?')
_PROSE = re.compile(r'(?<![\\A-Za-z{_])[A-Za-z]{3,}(?![A-Za-z]*[({=])')
_RELATION = re.compile(r'[<>=]|\\(?:[lg]eq?|[lg]eqslant|neq?|[lg]t)(?![a-z])')
_SUBJECT = re.compile(
    r'(?<![A-Za-z\\])([A-Za-z])(?: ?, ?([A-Za-z]))? ?(?:\\in(?![a-z])|\\[lg]eq?|\\[lg]eqslant|\\neq?|[<>=]|\b(?:is|are)\b)'
    r'|(?:all|any|every|each|some)(?: [a-z-]{3,})* ([A-Za-z])(?![A-Za-z])|\\forall ?([A-Za-z])(?![A-Za-z])'
)
_BUILDER = re.compile(
    rf'\\?\{{ ?([A-Za-z](?: ?\\in ?{_FIELD})?|[^|:{{}}]*?) ?(?:\\mid(?![a-z])|\\vert(?![a-z])|\||:) ?(.+?) ?\\?\}}'
)
_VARIABLE = re.compile(rf'[A-Za-z](?: ?\\in ?{_FIELD})?|\([a-z](?: ?, ?[a-z])+\)')


def claim(text: str) -> Claim:
    """A text without its qualifier. A set {x | condition} claims its condition, and {2k | k in Z} claims 2k."""
    if builder := _BUILDER.fullmatch(text):
        head, rest = builder.groups()
        if _VARIABLE.fullmatch(head):
            inner = claim(rest)
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


# ---- labels -----------------------------------------------------------------------------------------------------------

_GREEK = r'\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|phi|varphi|rho|sigma|tau|omega|angle ?[A-Z]{1,3}|Delta|ell)(?![a-z])'
_INDEX = r"'*(?:_(?:\{(?:[^{}]|\{[^{}]*\})*\}|[0-9A-Za-z]|\\[a-z]+)|\^(?:\\prime|\{\\prime\}|\*|\{\*\})|')*"
_LABEL = re.compile(
    rf'(?:[A-Za-z]|{_GREEK}|\\(?:text|mathrm|mathbf|operatorname|overline|vec|hat|bar|mathcal) ?\{{[^{{}}]*\}}|[A-Z]{{2,4}}){_INDEX}'
    r'(?:\([^()=]*\))?|m ?\\angle ?[A-Z]{1,3}|\\frac\{ ?d ?[A-Za-z] ?\}\{ ?d ?[a-z] ?\}|\| ?[A-Za-z]{1,3} ?\||[A-Za-z][a-z]{2,}'
)
_NAMES = re.compile(r'\(([A-Za-z](?:_\w)?(?: ?, ?[A-Za-z](?:_\w)?)+)\)')


def labelled(text: str) -> tuple[str, str]:
    """The name that a text gives its value, and the value; ('', text) where there is none."""
    sides = split(text, '=')
    if len(sides) == 2 and not _LABEL.fullmatch(sides[0]):
        sides.reverse()  # 5 = x
    return (sides[0].replace(' ', ''), sides[1]) if len(sides) == 2 and sides[1] and _LABEL.fullmatch(sides[0]) else ('', text)


def bound_argument(label: str) -> str:
    """x for the label f(x), '' for any other."""
    match = re.fullmatch(r'[A-Za-z](?:_\w)?\(([A-Za-z])\)', label)
    return match[1] if match else ''


def assignment(text: str) -> dict[str, str] | None:
    """The values that a text gives to two names or more, in order; None where it does not."""
    names = _NAMES.match(text)
    if names and (rest := text[names.end() :].lstrip()).startswith('='):
        values = parts(rest[1:].strip())
        letters = [name.strip() for name in names[1].split(',')]
        return dict(zip(letters, values.inner)) if values and len(values.inner) == len(letters) else None
    pairs = [labelled(member) for member in listed(text)]
    named = dict(pairs)
    return named if len(named) == len(pairs) > 1 and '' not in named else None


# ---- lists and tuples -------------------------------------------------------------------------------------------------

_AND = re.compile(r',? ?(?:\\text\w* ?\{ ?,? ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:vee|lor)(?![a-z])) ?')
_IN_TEXT = re.compile(r'\\text\w* ?\{([^{}]*[A-Za-z]) (?:and|or)(?![A-Za-z])([^{}]*)\}')


def listed(text: str) -> list[str]:
    r"""The members of a list without brackets, or of a set in braces; [text] for any other text.

    A list in semicolons may have members with commas. 'x=1, x=2' gives the values.
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
    """Members without their labels, where all labels are one: x=2, x=3, or a=4, -8, -10."""
    pairs = [labelled(member) for member in members]
    names = {name for name, _ in pairs if name}
    return [value for _, value in pairs] if len(names) == 1 and (pairs[0][0] or len(pairs) == 1) else members


class Parts(NamedTuple):
    opening: str
    inner: list[str]
    closing: str


def parts(text: str) -> Parts | None:
    """A tuple or an interval; None for any other text."""
    if len(text) < 2 or text[0] not in '([' or text[-1] not in ')]':
        return None
    depth = 0
    for i, c in enumerate(text):
        depth += (c in '({[') - (c in ')}]')
        if not depth and i + 1 < len(text):  # '(1,2),(3,4)'
            return None
    inner = split(text[1:-1], ',')
    return Parts(text[0], inner, text[-1]) if len(inner) > 1 and all(inner) else None


_SIGNS = re.compile(r'\\pm(?![a-z])|\\mp(?![a-z])|\+/-')
MOST_SIGNS = 4  # in one tuple


def both_signs(text: str) -> list[str]:
    r"""The two values of a text with \pm, or all combinations where parts of a tuple have it; [text] for any other.

    In one expression all signs change together, and \mp is the opposite.
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


# ---- domains ----------------------------------------------------------------------------------------------------------

_OPERATOR = re.compile(r' ?(\\(?:[lg]eqslant|[lg]eq?|[lg]t|neq?)(?![a-z])|[<>]=|!=|<|>) ?')
_UNKNOWN = re.compile(r"(?:[A-Za-z]|\\(?:alpha|beta|theta|lambda|mu|phi))(?:_\w|_\{\w+\}|')?(?:\([a-z]\))?")
_IN = re.compile(r'(.+?) ?\\in(?![a-z]) ?(.+)')
_OR = re.compile(r',? ?(?:\\text\w* ?\{ ?,? ?or ?\}|(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:vee|lor|cup)(?![a-z])) ?')
_BOTH = re.compile(r',? ?(?:\\text\w* ?\{ ?,? ?and ?\}|(?<![A-Za-z\\])and(?![A-Za-z])|\\(?:wedge|land)(?![a-z])) ?')
_INTERVAL = re.compile(r'\\?\{[^|:]*\}|[(\[].*[)\]]')
_SETS_IN_WORDS = {
    'all real numbers': r'\mathbb{R}', 'all reals': r'\mathbb{R}', 'no solution': r'\emptyset', 'no solutions': r'\emptyset',
    'no real solutions': r'\emptyset', 'empty set': r'\emptyset',
}  # fmt: skip


def domain(text: str) -> str | None:
    r"""The set, in LaTeX, that relations in one unknown and intervals describe; None for any other text."""
    if words := _SETS_IN_WORDS.get(re.sub(r'\\text\w*|[{}]', '', text).strip().lower()):
        return words
    pieces = _OR.split(text)
    if len(pieces) == 1 and len(intervals := _BOTH.split(text)) > 1 and all(map(_is_interval, intervals)):
        pieces = intervals  # '(0,1) and (2,3)'
    sets, unknowns = [], set()
    for piece in pieces:
        if len(pieces) > 1 and _is_interval(piece):
            sets.append(piece)
            continue
        relations = [_relation(part) for part in _BOTH.split(piece)]
        if None in relations:
            return None
        unknowns |= {unknown for unknown, _ in relations}
        sets.append('\\cap'.join(described for _, described in relations))
    if len(unknowns) > 1:
        return None
    if not unknowns and '\\cup' not in text and not any('\\infty' in s or '[' in s for s in sets):  # '(1,2) or (2,1)'
        return None
    return '\\cup'.join(sets) if _OPERATOR.search(text) or re.search(r'\\in(?![a-z])', text) or len(sets) > 1 else None


def _is_interval(text: str) -> bool:
    return _INTERVAL.fullmatch(text.strip()) is not None


def _relation(text: str) -> tuple[str, str] | None:
    """The unknown of a relation and the set of its values."""
    name, value = labelled(text)
    if _UNKNOWN.fullmatch(name):
        return name, f'\\{{{value}\\}}'
    if (member := _IN.fullmatch(text)) and _UNKNOWN.fullmatch(member[1]):
        return member[1], member[2]
    pieces = _OPERATOR.split(text)
    sides, operators = [p.strip() for p in pieces[::2]], [_kind(o) for o in pieces[1::2]]
    if len(sides) == 2 and _UNKNOWN.fullmatch(sides[1]) and not _UNKNOWN.fullmatch(sides[0]):
        sides, operators = sides[::-1], [operators[0].translate(str.maketrans('<>', '><'))]
    if len(sides) == 3 and operators[0][0] == operators[1][0] == '>':
        sides, operators = sides[::-1], [o.replace('>', '<') for o in operators[::-1]]
    if len(sides) == 2 and _UNKNOWN.fullmatch(sides[0]) and sides[1]:
        unknown, end = sides
        closed = operators[0].endswith('=')
        if operators[0] == '!=':
            return unknown, f'(-\\infty,{end})\\cup({end},\\infty)'
        if operators[0].startswith('<'):
            return unknown, f'(-\\infty,{end}{"]" if closed else ")"}'
        return unknown, f'{"[" if closed else "("}{end},\\infty)'
    if len(sides) == 3 and _UNKNOWN.fullmatch(sides[1]) and operators[0][0] == operators[1][0] == '<' and sides[0] and sides[2]:
        left, right = '[' if operators[0].endswith('=') else '(', ']' if operators[1].endswith('=') else ')'
        return sides[1], f'{left}{sides[0]},{sides[2]}{right}'
    return None


def _kind(operator: str) -> str:
    r"""'<', '<=', '>', '>=' or '!=' for an operator such as \leqslant."""
    if operator in ('\\lt', '\\gt'):
        return '<' if operator == '\\lt' else '>'
    if operator.startswith('\\'):
        return {'l': '<=', 'g': '>=', 'n': '!='}[operator[1]]
    return operator
