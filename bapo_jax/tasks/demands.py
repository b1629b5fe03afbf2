r"""The form of answer that a prompt demands, and the answer of that form in a response.

    line      `Answer: 5`, where the prompt has Answer: in quotation marks or behind the word 'form' or 'format'
    hashes    `#### 5`, where it has #### so
    block     `<answer>5</answer>`, where it has <answer>
    box       `\boxed{5}`, where it has \boxed

The first of them that the prompt has is the form that is judged; where it has none, the task says what counts. A box within a line
or a block is opened. Of several answers of the form the last counts.
"""

from __future__ import annotations

import re

from bapo_jax.tasks.math_text import last_box

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
    """The form that a prompt demands, one of FORMS; '' for none."""
    return next((form for form, demand in _DEMANDS.items() if demand.search(prompt)), '')


def stated(text: str, form: str) -> str | None:
    """The last answer of this form in a response without its thinking; None where there is none. Takes linear time."""
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
    """The text of the last closed <answer>...</answer>, without the blanks and tabs around it.

    A tag opened inside another is part of the outer one's text, as with the regex <answer>(.*?)</answer> of the public code. Unlike
    that regex, this is linear in the text.
    """
    answer, position = None, 0
    while (start := text.find('<answer>', position)) >= 0:
        start += len('<answer>')
        end = text.find('</answer>', start)
        if end < 0:  # no later opening tag can be closed either
            break
        answer, position = text[start:end].strip(' \t'), end + len('</answer>')
    return answer
