r"""Decides whether prose states a value, or denies, doubts or retracts it; for answers outside a box.

    denied         'the answer is not 42', '42 is wrong', 'neither 42 nor 43'
    alternatives   'either 42 or 17', '$x=41$ or $x=42$', '42 or more'; but '1/2 or 0.5' is one value
    asked          'is it 42?'
    taken back     'The answer is 42. Wait, no.'
    a reference    'page 42', 'by Step 3'

Takes time linear in the length of the text.
"""

from __future__ import annotations

import re
from fractions import Fraction

VALUE = re.compile(
    r'\$\$[^$]{1,400}\$\$|\$[^$\n]{1,400}\$|\\\((?:(?!\\\)).){1,400}\\\)|\\\[(?:(?!\\\]).){1,400}\\\]'
    r'|-?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:/\d+)?%?',
    re.DOTALL,
)
_NEAR = 120  # characters searched on each side of a value
_MARK = r'[\s$\\()\[\]*"\'_:=~]*'

# Only words that lead to the value may follow a denial: 'the balls that are not red are 42' denies nothing.
_DENIED = re.compile(
    r'(?:\b(?:not|never|cannot|neither|nor|rather than|instead of|other than)|n[\'’]t)'
    r'(?: '
    r'+(?:be|been|equal|equals|to|the|a|an|exactly|just|simply|only|necessarily|actually|really|possibly|ever'
    rf'|always|correct|right|final|answer|value|number|of|it|[a-z] ?=)){{0,5}}{_MARK}(?:[A-Za-z] ?=)?{_MARK}$'
    rf'|(?:!=|≠|\\neq?){_MARK}$'
    r'|\b(?:either|perhaps|maybe|possibly)\b[^.!?;,\n]{0,40}$|\b(?:might|may|could) be' + _MARK + '$'
    r'|\b(?:false|wrong|incorrect|untrue) (?:that|to (?:say|think|claim))\b[^.!?;\n]{0,60}$'
    r'|\b(?:false|wrong|incorrect) answer\b[^.!?;\n]{0,20}$|\bdoubt\b[^.!?;\n]{0,40}$',
    re.IGNORECASE,
)
_WRONG = (
    r'(?:wrong|incorrect|false|impossible|too (?:big|large|small|high|low|much|many|few)|ruled '
    r'out|excluded|a mistake'
    r'|not (?:the (?:right|correct|final|answer)|an? '
    r'(?:valid|solution|answer)|right|correct|true|valid|possible|it)\b)'
)
_DENIED_BEHIND = re.compile(
    rf'{_MARK}(?:, ?(?:which|and) )?(?:is|was|are|seems|looks|must be|would be|has to be)'
    rf'(?: (?:clearly|obviously|certainly|definitely|also|just|simply|however|of course))? {_WRONG}'
    rf"|{_MARK}(?:(?:is|was|are|does|do|can|could|would)n['’]t|(?:cannot|can not|could not) be|fails"
    r'|does not (?:work|fit|satisfy|hold))\b',
    re.IGNORECASE,
)
_ASKED = re.compile(_MARK + r'\?')
_OR_BEHIND = re.compile(
    rf'{_MARK},? ?\(?or (?:else |maybe |perhaps |possibly |rather |it is |is it )?'
    rf'(?:(?P<bound>more|less|fewer|greater|so)\b|(?P<other>{VALUE.pattern}))',
    re.DOTALL,
)
_OR_BEFORE = re.compile(rf'({VALUE.pattern})\s*,? ?\(?(?:or|nor)\s+$', re.DOTALL)
_TAKEN_BACK = re.compile(
    r'(?:^|[.!?,;:\n…—])[\s*$)\]]{0,9}(?:but |oh,? |and )?(?:no\b[,.!:;]|no$|wait\b|oops\b|correction\b'
    r'|scratch that|sorry\b|actually,|hmm+\b|on second thought|I (?:was|am) (?:wrong|mistaken)|I take it back'
    r'|I made an? (?:mistake|error)'
    r"|(?:that|this|which|it)(?:'s| is| was) (?:wrong|incorrect|false|not (?:right|correct|true|the "
    r'answer)))',
    re.IGNORECASE,
)
_REFERENCE = re.compile(
    r'\b(?:page|step|problem|question|exercise|chapter|section|equation|eq\.|figure|fig\.|table|line|case'
    r'|example|theorem|lemma)s? ?[(*$]*$',
    re.IGNORECASE,
)


def is_withheld(text: str, answer: str) -> bool:
    """Returns whether a text does not stand by a value read in it.

    Checks the last occurrence of the value, and the last one after the word 'answer'. A list of several
    formulas, which the reader joins with 'and', has no alternatives.
    """
    found = list(VALUE.finditer(text))
    places = [m for m in found if _plain(m[0]) == _plain(answer)] or found
    announced = [
        m for m in places if re.search('answer', text[max(m.start() - _NEAR, 0) : m.start()], re.IGNORECASE)
    ]
    return any(
        is_withheld_at(text, *m.span(), listed=' and ' in answer) for m in {*places[-1:], *announced[-1:]}
    )


def is_withheld_at(text: str, start: int, end: int, *, listed: bool = False) -> bool:
    """Returns whether a text does not stand by the value between `start` and `end`."""
    before, behind = text[max(start - _NEAR, 0) : start], text[end : end + _NEAR]
    if (
        _DENIED.search(before)
        or _REFERENCE.search(before)
        or _DENIED_BEHIND.match(behind)
        or _ASKED.match(behind)
    ):
        return True
    if _TAKEN_BACK.search(text, end):
        return True
    if listed:
        return False
    other = _OR_BEHIND.match(behind)
    if other and (other['bound'] or not _same(text[start:end], other['other'])):
        return True
    other = _OR_BEFORE.search(before)
    return other is not None and not _same(text[start:end], other[1])


def _plain(value: str) -> str:
    return re.sub(r'[\s$,{}]|\\[()\[\]]|\\(?:left|right)\b', '', value).rstrip('.%').replace('dfrac', 'frac')


def _same(one: str, other: str) -> bool:
    values = [
        _number(_plain(re.sub(r'\\[dt]?frac ?\{(\d+)\} ?\{(\d+)\}', r'\1/\2', value)))
        for value in (one, other)
    ]
    return values[0] is not None and values[0] == values[1]


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
