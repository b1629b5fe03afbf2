r"""Elided lists, which leave members out: '1, 2, \ldots, 10', '\{2, 4, 8, \ldots\}', '1, 2, \ldots, n'.

    written_out    the whole list if its rule and its end are known; a named set for all integers of a kind
    same_rule      whether two lists that cannot be written out continue in the same way

A rule is a common difference, or else a common ratio. Works on tidied text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from bapo_jax.tasks.mathematics.forms import labelled
from bapo_jax.tasks.mathematics.plain_numbers import parse_number
from bapo_jax.tasks.mathematics.text import split

DOTS = '\\ldots'
_MOST = 200  # most members that are filled in
_BRACKETS = (('\\{', '\\}'), ('{', '}'), ('(', ')'), ('[', ']'), ('', ''))
_INDEXED = re.compile(r'([A-Za-z]|\\[a-z]+)_(?:\{([^{}]+)\}|(\w))')
_WHOLE = {(0, 1): r'\mathbb{N}\cup\{0\}', (1, 1): r'\mathbb{N}'}


class Elided(NamedTuple):
    label: str  # 'n=' in 'n=1,2,...'
    opening: str
    head: list[str]
    tail: list[str]  # after the dots
    closing: str


def written_out(text: str) -> str:
    r"""Returns a list without its dots, and any other text unchanged.

    For example, '1,2,\ldots,4' gives '1,2,3,4', and '\{1,2,\ldots\}' gives '\mathbb{N}'.
    """
    if DOTS not in text or not (found := _elided(text)):
        return text
    if not found.head:  # \ldots, -1, 0, 1, \ldots
        inner = [parse_number(member) for member in found.tail[:-1]]
        ends = found.tail[-1:] == [DOTS] and None not in inner and len(inner) > 1
        return f'{found.label}\\mathbb{{Z}}' if ends and _steps([n.value for n in inner]) == {1} else text
    head, tail = ([parse_number(member) for member in members] for members in (found.head, found.tail))
    if None in head or None in tail:
        return text
    values, last = [n.value for n in head], [n.value for n in tail]
    if not last:
        start = values[0], min(_steps(values), default=None)
        whole = len(_steps(values)) == 1 and start in _WHOLE and found.opening in ('\\{', '')
        return found.label + _WHOLE[start] if whole else text
    members = _filled(values, last)
    if not members:
        return text
    return found.label + found.opening + ','.join(map(str, members)) + found.closing


def same_rule(one: str, other: str, same: Callable[[str, str], bool]) -> bool:
    """Returns whether two lists or sums with dots are the same; `same` compares two members."""
    first, second = _elided(one), _elided(other)
    if not first or not second:
        return re.sub(r'[ {}]|\\(?:cdot|times)(?![a-z])', '', one) == re.sub(
            r'[ {}]|\\(?:cdot|times)(?![a-z])', '', other
        )
    if first.opening in '([' != second.opening or second.opening in '([' != first.opening:
        if (first.opening, first.closing) != (second.opening, second.closing) and '' not in (
            first.opening,
            second.opening,
        ):
            return False
    ends = _name(first.tail), _name(second.tail)
    rules, prefixes = zip(_rule(first.head), _rule(second.head))
    if prefixes[0] != prefixes[1] or ends[0][0] != ends[1][0] or len(ends[0][1]) != len(ends[1][1]):
        return False
    if rules[0] is None or rules[1] is None:
        alike = len(first.head) == len(second.head) and all(map(same, first.head, second.head))
    else:
        alike = rules[0] == rules[1]
    return alike and all(map(same, ends[0][1], ends[1][1]))


def pieces(text: str) -> list[str]:
    """Returns the members that a list with dots shows."""
    found = _elided(text)
    return [member for member in found.head + found.tail if member != DOTS] if found else []


def _elided(text: str) -> Elided | None:
    label = ''
    for opening, closing in _BRACKETS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing):
            members = split(text[len(opening) : len(text) - len(closing)], ',')
            break
    members = [member for member in members if member]
    if DOTS not in members or len(members) < 2:
        return None
    name, first = labelled(members[0])
    if name:
        label, members[0] = f'{name}=', first
    at = members.index(DOTS)
    return Elided(label, opening, members[:at], members[at + 1 :], closing)


def _steps(values: list[Fraction]) -> set[Fraction]:
    return {b - a for a, b in zip(values, values[1:])}


def _rule(head: list[str]) -> tuple[tuple | None, str]:
    """Returns the first member with the common difference or ratio (else None), and the common name."""
    name, indices = _name(head)
    numbers = [parse_number(index) for index in indices]
    if None in numbers or not numbers:
        return None, name
    values = [n.value for n in numbers]
    if len(values) == 1:
        return (values[0], 'difference', 1), name
    if len(_steps(values)) == 1:
        return (values[0], 'difference', values[1] - values[0]), name
    ratios = {b / a for a, b in zip(values, values[1:])} if 0 not in values else set()
    return (values[0], 'ratio', ratios.pop()) if len(ratios) == 1 else None, name


def _name(members: list[str]) -> tuple[str, list[str]]:
    """Returns the common name of indexed members and their indices: 'x', ['1', 'n'] for x_1 and x_n."""
    found = [_INDEXED.fullmatch(member) for member in members]
    if members and None not in found and len({match[1] for match in found}) == 1:
        return found[0][1], [match[2] or match[3] for match in found]
    return '', members


def _filled(head: list[Fraction], tail: list[Fraction]) -> list[Fraction]:
    """Returns all members from a head to a tail; [] if no rule leads from one to the other."""
    steps = _steps(head) or {Fraction(1 if tail[0] > head[0] else -1)}
    ratios = {b / a for a, b in zip(head, head[1:])} if 0 not in head else set()
    if len(steps) == 1 and (step := steps.pop()):
        count = (tail[0] - head[-1]) / step
        middle = (
            [head[-1] + step * k for k in range(1, int(count))]
            if count.denominator == 1 and 0 < count <= _MOST
            else None
        )
    elif len(ratios) == 1 and abs(ratio := ratios.pop()) not in (0, 1):
        middle = []
        while (
            len(middle) < _MOST
            and (following := (middle or head)[-1] * ratio) != tail[0]
            and abs(following) < abs(tail[0])
        ):
            middle.append(following)
        middle = middle if following == tail[0] else None
    else:
        middle = None
    return [*head, *middle, *tail] if middle is not None else []
