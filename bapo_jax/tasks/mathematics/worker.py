r"""Compares the meaning of one answer with the accepted ones, in a worker of the verifier's pool.

math-verify decides equality. Cases that it gets wrong are decided before it is called:

    equal texts are equal; plain numbers are compared exactly, numerals by base, and times of day by the
        clock (`answers`)
    code and hedges ('2 (or perhaps 3)') are not answers, nor is what prose denies or takes back (`statement`)
    lists, tuples, labelled values and sets are split (`forms`) and compared part by part (`compare`)
    units count if both have one, and words such as 'million' or 'or more' always count (`units`)
    expressions are compared by value, to the last digit (`values`)

Graders differ on two conventions. Here, a decimal with at least four places is accepted if the exact value
rounds to it (2.6667 for 8/3), and a relation may stand for its interval.

Nothing here limits time or memory, and some answers (power towers, iterated factorials) never end:
`verifier_pool` stops them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from bapo_jax.groups import Verdict
from bapo_jax.tasks.mathematics.answers import MAX_LENGTH, quick_verdict, tidy_gold
from bapo_jax.tasks.mathematics.choices import compare_choices
from bapo_jax.tasks.mathematics.compare import compare, compare_readings, is_readable, unequal
from bapo_jax.tasks.mathematics.forms import rounded
from bapo_jax.tasks.mathematics.readings import is_prose, read, readings
from bapo_jax.tasks.mathematics.statement import is_withheld
from bapo_jax.tasks.mathematics.text import split, tidy
from bapo_jax.tasks.verifier_pool import OVERRAN
from bapo_jax.tasks.worker_process import serve

MAX_BRACKETS = 40  # deepest nesting of brackets in an answer that is parsed


# An answer with one of these is prose, code or a hedge, of which math-verify would read only a part, or an
# unintended power tower.
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
    """Returns whether a text must not be parsed: prose, code or a hedge, too long, or nested too deeply."""
    if len(text) > MAX_LENGTH or _NO_ANSWER.search(text) or not text.isprintable():
        return True
    depth = 0
    for c in text:
        depth += (c in '({[') - (c in ')}]')
        if depth > MAX_BRACKETS:
            return True
    return False


def slow_verdict(answer: str, accepted: Sequence[str], *, boxed: bool) -> tuple[Verdict, str | None]:
    """Returns math-verify's verdict and the answer that it judged. May never end, and may exhaust memory.

    CORRECT: the answer equals an accepted one. WRONG: it was read, but equals no accepted one. UNPARSEABLE:
    it cannot be read. INFRA_ERROR: no accepted answer can be read either. If `boxed` is false, `answer` is
    the end of a response, and the last answer stated there is judged.
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
    verdict = min(
        _verdict(answer if is_prose(answer) and is_prose(tidied) else tidied, gold) for gold in golds
    )
    if verdict == Verdict.UNPARSEABLE and stated:
        verdict = min(verdict, *(compare_readings(stated, readings(gold)) for gold in golds))
    # An accepted answer may be readable in parts, or as a domain, even if this comparison could not read it.
    if verdict == Verdict.INFRA_ERROR:
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
    except Exception:  # sympy and math-verify raise all kinds of errors on unexpected expressions
        return False if 'gold' in request else OVERRAN


if __name__ == '__main__':
    # math-verify warns about every answer that it cannot read, and about its timeouts, which are disabled.
    logging.disable(logging.CRITICAL)
    read('1')  # imports math-verify and sympy and builds their tables before the first deadline starts
    serve(_answer)
