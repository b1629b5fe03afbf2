r"""Compares answers that are a choice, such as '(B)', 'B. 12' or '\textbf{(B)}\ 12': a letter and a value."""

from __future__ import annotations

import re

from bapo_jax.groups import Verdict
from bapo_jax.tasks.mathematics.compare import compare, unequal
from bapo_jax.tasks.mathematics.text import text_key

_AS_TEXT = re.compile(r'\\(?:text\w*|mathrm|mathbf|mbox) ?\{([^{}]*)\}')
_CHOICE = re.compile(
    r'(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer):? ?(?P<named>\([A-Z]\)|[A-Z](?![A-Za-z]))|\((?P<round>[A-Z])\)'
    r'|(?P<bare>[A-J])(?:\)|[.:](?= |\\|$)))'
    r'(?:[.:](?= )| )*(?P<value>.*)'
)
_MORE = re.compile(  # '(B) or (C)', 'A. 5 B. 6'
    r'^(?:,|(?:\\text ?\{ '
    r'?)?(?:or|and)\b|[A-Z](?![A-Za-z]))|(?<![A-Za-z])\([A-Z]\)|(?<![A-Za-z\\])[A-Z][).:](?: |$)'
    r'|\\text\w* ?\{\(?[A-Z]\)?\}'
)


def choice(text: str) -> tuple[str, str] | None:
    """Returns the letter of a choice and its value (may be ''); None for any other text or two choices."""
    match = _CHOICE.fullmatch(_AS_TEXT.sub(r'\1 ', text, count=1) if text.startswith('\\') else text)
    if not match or _MORE.search(match['value']):
        return None
    return (match['named'] or match['round'] or match['bare']).strip('()'), match['value'].strip()


def compare_choices(answer: str, gold: str) -> Verdict | None:
    """Returns the verdict if either answer is a choice, such as '(B) 12'; None if neither is."""
    one, other = choice(answer), choice(gold)
    if not one and not other:
        return None
    letter, value = one or _letter_or_value(answer)
    gold_letter, gold_value = other or _letter_or_value(gold)
    if letter and gold_letter and letter != gold_letter:
        return unequal(gold)
    if value and gold_value:
        return compare(value, gold_value)
    return Verdict.CORRECT if letter and letter == gold_letter else compare(answer, gold)


def _letter_or_value(text: str) -> tuple[str, str]:
    key = text_key(text)
    return (key, '') if re.fullmatch('[A-Z]', key) else ('', text)
