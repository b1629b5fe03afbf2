"""A row in the table of fields: default, check, how a run may change it, if hosts must agree, a comment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

# need(condition, message) records the message as a problem if the condition is false.
Need = Callable[[bool, str], None]


class Change(Enum):
    """How a continued run may change a field. The value is the wording in docs/reference/fields.md."""

    HELD = 'no'  # fixed: it defines the run
    # Only with the flag, from the next step on; the run is then a different one, and events.jsonl records it.
    AMEND = 'with --amend'
    # How a number is computed: the mathematics stay, but a sum over other parts may differ in its last bits.
    COMPUTED = 'yes, but rounding'
    FREE = 'yes'  # how long a run lasts, what it writes, which engine answers and where


HELD, AMEND, COMPUTED, FREE = Change


class Check(NamedTuple):
    """A condition on a field's value."""

    words: str  # the wording in docs/reference/fields.md
    holds: Callable[[Any], bool]
    wrong: str  # the message after FIELD=VALUE if it does not hold


class Field(NamedTuple):
    """One row in the table of fields."""

    default: Any
    check: Check
    change: Change
    comment: str
    alike: bool = True  # hosts must agree; else only host 0 reads it, or hosts may differ


def one_of(*choices: Any) -> Check:
    words = ', '.join(map(str, choices))
    return Check(words, lambda value: value in choices, f'is unknown; choose one of {words}')


def names(of: Iterable[str]) -> Check:
    """A check for one of these names, which another module defines."""
    return one_of(*of)


def within(words: str, holds: Callable[[float], bool], what: str = '') -> Check:
    """A check for a range, such as 'in [0, 1)'; `what` describes the value."""
    return Check(words, holds, f'must be {words}' + (f': {what}' if what else ''))


def share(what: str, words: str = 'in [0, 1)') -> Check:
    """A check for a number from 0 to 1; the brackets in `words` say which ends are included."""
    low, high = words[3] == '[', words[-1] == ']'
    return within(words, lambda x: (0 <= x if low else 0 < x) and (x <= 1 if high else x < 1), what)


ANY = Check('', lambda value: True, '')
SWITCH = Check('True or False', lambda value: isinstance(value, bool), 'must be True or False')
AT_LEAST_1 = within('at least 1', lambda x: x >= 1)
NOT_NEGATIVE = within('finite and not negative', lambda x: 0 <= x < math.inf)
POSITIVE = within('positive and finite', lambda x: 0 < x < math.inf)
