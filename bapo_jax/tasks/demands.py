r"""The answer form that a prompt demands, and the answer in that form in a response.

    line      `Answer: 5`, if the prompt has Answer: in quotation marks or after the word 'form' or 'format'
    hashes    `#### 5`, if it has #### in the same way
    block     `<answer>5</answer>`, if it has <answer>
    box       `\boxed{5}`, if it has \boxed

The first of these that the prompt has is the form that is judged. If it has none, the task says what counts.
A box within a line or a block is unwrapped. If a response has several answers in the form, the last one
counts.
"""

from __future__ import annotations

import re

from bapo_jax.tasks.mathematics.text import last_box

_BEHIND = r'(?:["“\'‘`]|\b(?:form|format)\W{1,3})'
_DEMANDS = {
    'line': re.compile(_BEHIND + r'(?:final )?answer:', re.IGNORECASE),
    'hashes': re.compile(_BEHIND + '####', re.IGNORECASE),
    'block': re.compile('<answer>'),
    'box': re.compile(r'\\boxed'),
}
FORMS = tuple(_DEMANDS)
_LINE = re.compile(r'\banswer\b[ *]{0,5}:[ *]{0,5}\s{0,20}([^\n]+)', re.IGNORECASE)


def demanded(prompt: str) -> str:
    """Returns the form that a prompt demands, one of FORMS; '' if it demands none."""
    return next((form for form, demand in _DEMANDS.items() if demand.search(prompt)), '')


def stated(text: str, form: str) -> str | None:
    """Returns the last answer in this form in a response without its thinking, or None. Takes linear time."""
    if form == 'box':
        return last_box(text)
    if form == 'line':
        found = _LINE.findall(text)
        answer = found[-1].strip(' \t*') if found else ''
    elif form == 'hashes':
        answer = text.rpartition('####')[2].strip().partition('\n')[0].strip(' \t*') if '####' in text else ''
    else:
        answer = (last_block(text) or '').strip()
    return last_box(answer) or answer or None


def last_block(text: str) -> str | None:
    """Returns the text of the last closed <answer>...</answer>, without surrounding blanks and tabs.

    A tag opened inside another is part of the outer one's text, as with the regex <answer>(.*?)</answer> of
    the public code. Unlike that regex, this takes time linear in the text.
    """
    answer, position = None, 0
    while (start := text.find('<answer>', position)) >= 0:
        start += len('<answer>')
        end = text.find('</answer>', start)
        if end < 0:  # no later opening tag can be closed either
            break
        answer, position = text[start:end].strip(' \t'), end + len('</answer>')
    return answer
