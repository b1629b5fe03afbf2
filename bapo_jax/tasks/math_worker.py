r"""Compares one answer with the accepted ones by their meaning: what runs in a worker of the verifier's pool.

Equality is math-verify's. What it gets wrong is decided before it is called:

    equal texts are equal; plain numbers are compared exactly, numerals by their base, times of day by the clock (`math_answers`)
    code and hedged answers ('2 (or perhaps 3)') are no answers; nor is what prose denies or takes back (`math_statement`)
    lists, tuples, labelled values and sets are taken apart (`math_forms`), and compared part by part (`math_compare`)
    units count where both have one, and words such as 'million' or 'or more' always do (`math_units`)
    expressions are compared by their values (`math_values`), to the last digit

Two conventions on which graders differ are ours. A decimal of four places or more is accepted where the exact value rounds to it
(2.6667 for 8/3). A relation may stand for its interval.

Nothing here keeps time or bounds memory, and some answers (power towers, iterated factorials) never end: `verifier_pool` stops
them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from bapo_jax.groups import Verdict
from bapo_jax.tasks.math_answers import MAX_LENGTH, quick_verdict, tidy_gold
from bapo_jax.tasks.math_compare import compare, compare_choices, compare_readings, is_readable, unequal
from bapo_jax.tasks.math_forms import rounded
from bapo_jax.tasks.math_readings import is_prose, read, readings
from bapo_jax.tasks.math_statement import is_withheld
from bapo_jax.tasks.math_text import split, tidy
from bapo_jax.tasks.verifier_pool import OVERRAN, serve

MAX_DEPTH = 40  # nested brackets of an answer that is parsed


# An answer with one of these is prose, code or a hedge, of which math-verify would read a part, or an unintended power tower.
_NO_ANSWER = re.compile(
    r'^not [\d$\\-]|__|(?<!\\)\blambda\b|\bimport\b'
    r'|\b(?:if|else|perhaps|maybe|possibly|probably|either|unless|otherwise|alternatively|guess)\b'
    r'|\((?: |\\text ?\{)*(?:or|and|not)\b|\b(?:exec|eval|open)\('
    r'|\d ?(?:\^|\*\*) ?\{?\d+ ?(?:\^|\*\*) ?\{?\d+ ?(?:\^|\*\*)|!\)*!\)*!',
    re.IGNORECASE,
)
# These restate the question, unless an accepted answer has them too.
_UNEVALUATED = re.compile(r'\\(?:sum|prod|i*int|oint|lim)(?![a-zA-Z])')


def _unfit(text: str) -> bool:
    """Whether a text must not be parsed: prose, code or a hedge, too long, or nested too deep."""
    if len(text) > MAX_LENGTH or _NO_ANSWER.search(text) or not text.isprintable():
        return True
    depth = 0
    for c in text:
        depth += (c in '({[') - (c in ')}]')
        if depth > MAX_DEPTH:
            return True
    return False


def slow_verdict(answer: str, accepted: Sequence[str], *, boxed: bool) -> tuple[Verdict, str | None]:
    """math-verify's verdict, and the answer that it judged. May never end, and may exhaust memory.

    CORRECT: the answer equals an accepted one. WRONG: it was read and equals none. UNPARSEABLE: it cannot be read. INFRA_ERROR: no
    accepted answer can be read either. With `boxed` false, `answer` is the end of a response: what it states last is judged.
    """
    stated: tuple[Any, ...] = ()
    if not boxed:
        text, stated = answer, read(answer, anywhere=True)
        answer = next((x for x in stated if isinstance(x, str)), None)
        if answer is None or is_withheld(text, answer):
            return Verdict.UNPARSEABLE, None
        answer = answer.strip().removesuffix('.')
        if (verdict := quick_verdict(answer, accepted)) is not None:
            return verdict, answer
    golds = [tidy_gold(gold) for gold in accepted]
    tidied = tidy(answer)
    restated = _UNEVALUATED.search(split(tidied, '=')[-1]) and not any(map(_UNEVALUATED.search, golds))
    if _unfit((rounded(tidied) or (tidied,))[0]) or restated:
        return (Verdict.UNPARSEABLE if any(map(is_readable, golds)) else Verdict.INFRA_ERROR), answer
    verdict = min(_verdict(answer if is_prose(answer) and is_prose(tidied) else tidied, gold) for gold in golds)
    if verdict == Verdict.UNPARSEABLE and stated:
        verdict = min(verdict, *(compare_readings(stated, readings(gold)) for gold in golds))
    if verdict == Verdict.INFRA_ERROR:  # a gold may be read in parts, or as a domain, where this comparison could not
        verdict = min(map(unequal, golds))
    return verdict, answer


def _verdict(answer: str, gold: str) -> Verdict:
    chosen = compare_choices(answer, gold)
    return compare(answer, gold) if chosen is None else chosen


def _answer(request: dict) -> Any:
    try:
        if 'gold' in request:
            return is_readable(tidy_gold(request['gold']))
        return slow_verdict(request['answer'], request['accepted'], boxed=request['boxed'])
    except (MemoryError, RecursionError):
        return OVERRAN
    except Exception:  # sympy and math-verify raise anything where an expression is none that they expect
        return False if 'gold' in request else OVERRAN


if __name__ == '__main__':
    logging.disable(logging.CRITICAL)  # math-verify warns of every answer it cannot read, and of the time limits we switch off
    read('1')  # imports math-verify and sympy and builds their tables before the first deadline starts
    serve(_answer)
