"""Judges answers by text and plain numbers, in linear time and without computer algebra.

This part runs in the trainer; the rest goes to `worker`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from bapo_jax.groups import Verdict
from bapo_jax.tasks.mathematics.numerals import is_numeral, numeral_value, parse_numeral
from bapo_jax.tasks.mathematics.plain_numbers import parse_number, same_number
from bapo_jax.tasks.mathematics.text import elements, is_words, last_box, text_key, tidy
from bapo_jax.tasks.mathematics.units import clock, quantity, same_clock

MAX_LENGTH = 4000  # most characters of an answer that is parsed; a longer one can only match as text


def quick_verdict(answer: str, accepted: Sequence[str]) -> Verdict | None:
    """Returns the verdict if text and plain numbers decide it; else None, and the worker must decide.

    Takes linear time; no text makes it raise.
    """
    answer = tidy(answer)
    undecided = False
    for gold in map(tidy_gold, accepted):
        same = same_at_a_glance(answer, gold)
        if same:
            return Verdict.CORRECT
        undecided |= same is None
    return None if undecided else Verdict.WRONG


def same_at_a_glance(answer: str, gold: str) -> bool | None:
    if not gold:
        return None
    if text_key(answer) == text_key(gold):
        return True
    if max(len(answer), len(gold)) > MAX_LENGTH:
        return None
    number, gold_number = parse_number(answer), parse_number(gold)
    if number and gold_number and not (',' in answer or ',' in gold):  # 100,200 may be two numbers
        return same_number(number, gold_number)
    if number and gold_number and same_number(number, gold_number):
        return True
    time, gold_time = clock(answer), clock(gold)
    if time and gold_time and (time[2] or gold_time[2]):  # 3:30 may be a ratio
        return same_clock(time, gold_time)
    numeral, gold_numeral = parse_numeral(answer), parse_numeral(gold)
    if numeral and gold_numeral:
        return numeral == gold_numeral or numeral_value(numeral) == numeral_value(gold_numeral) is not None
    if number and not number.unit and is_numeral(gold):  # plain 1011 is not in base 2
        return number.value == numeral_value(gold_numeral)
    parts = elements(answer)
    return True if parts and parts == elements(gold) else None


_FACTORS = r'(?:[0-9a-df-hj-z]|\\pi(?![a-z])|\\sqrt\{\d+\}|(?<=[0-9a-z)])\^(?:\d|\{\d+\}))++'
_FLAT = rf'-?{_FACTORS}(?:[+-]{_FACTORS})*+'
_TERM = rf'(?:{_FACTORS}|\\frac\{{{_FLAT}\}}\{{{_FLAT}\}}|(?<=\d)\.\d)++'
_SUM = rf'(?:-?{_TERM}(?:[+-]{_TERM})*+)'
_SIMPLE = re.compile(rf'(?!.*(?:and|or))(?:[a-z]=)?{_SUM}(?:,{_SUM})*+|[(\[]{_SUM}(?:,{_SUM})++[)\]]')


def is_plain(gold: str) -> bool:
    """Returns whether an accepted answer can be read without the worker: words, numbers and simple sums.

    Takes linear time.
    """
    gold = tidy_gold(gold)
    return bool(
        is_words(gold)
        or re.fullmatch('[A-Za-z]', gold)
        or parse_number(gold)
        or parse_numeral(gold)
        or clock(gold)
        or _SIMPLE.fullmatch(text_key(quantity(gold).value))
    )


@functools.lru_cache(maxsize=4096)  # every response to a question needs the same accepted answers
def tidy_gold(gold: str) -> str:
    return tidy(last_box(gold) or re.sub(r'\\{1,2}boxed\s*\{', '', gold))
