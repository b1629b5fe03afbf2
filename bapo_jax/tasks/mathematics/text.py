r"""Mathematical answers as text: finds the answer in a response, puts it in plain LaTeX, and gives its key.

Everything takes time linear in the length of the text. `worker` compares the meaning of two answers.
"""

from __future__ import annotations

import re
import unicodedata

from bapo_jax.tasks.mathematics.notation import in_degrees, usual
from bapo_jax.tasks.mathematics.numerals import improper, without_periods
from bapo_jax.tasks.mathematics.statement import is_withheld_at

# ---- where the answer is -----------------------------------------------------------------------------------


def after_thinking(response: str, *, opened: bool = False) -> str | None:
    """Returns the text after the last </think>: all of it without thinking, None if the thinking never ends.

    `opened` means that the prompt ended in <think>, so the response begins inside the thinking.
    """
    _, closed, answer = response.rpartition('</think>')
    return None if '<think>' in answer or (opened and not closed) else answer


_BRACE = re.compile(
    r'\\{1,2}(?:boxed|fbox)\s*(?P<box>\{)|\\boxed\s*(?P<bare>[0-9A-Za-z])(?![0-9A-Za-z])|\\.|[{}]'
    r'|[Ff]inal answer is:? {0,3}\$(?P<stated>(?![^$\n]{0,200}\\boxed)[^$\n]{1,200})\$',
    re.DOTALL,
)
_LIST_JOINT = re.compile(
    r'(?:\W|\\q?quad){0,20}'
    r'|(?!.*\b(?:is|so|thus|then|hence|therefore|answer|final|wait|no)\b)'
    r'[^.!?\n]{0,30}\b(?:and|or)\b[^.!?\n]{0,30}'
)


def last_box(text: str, *, stated: bool = False) -> str | None:
    r"""Returns the content of the last balanced \boxed{} or \fbox{}; None if there is no box or it is empty.

    Takes linear time. The innermost of nested boxes counts. Boxes separated only by a comma, or by a few
    words with 'and' or 'or', form one list. Unterminated boxes and escaped braces are ignored. With `stated`,
    'final answer is $...$' also counts as a box, unless the text takes it back.
    """
    # For each box: the start and end of the box, and the start and end of its content.
    closed: list[tuple[int, int, int, int]] = []
    # For each open brace: the start of its box and of its content; None if it does not open a box.
    opened: list[tuple[int, int] | None] = []
    for token in _BRACE.finditer(text):
        if token['box']:
            opened.append(token.span())
        elif token['bare']:
            closed.append((*token.span(), *token.span('bare')))
        elif token['stated']:
            if stated:
                closed.append((*token.span(), *token.span('stated')))
        elif token[0] == '{':
            opened.append(None)
        elif token[0] == '}' and opened and (box := opened.pop()):
            closed.append((box[0], token.end(), box[1], token.start()))
    closed.sort(reverse=True)  # the box that opened last comes first
    if closed and text[closed[0][0]] != '\\' and is_withheld_at(text, *closed[0][2:]):
        return None
    contents: list[str] = []
    after = None  # start of the box that follows
    for start, end, content_start, content_end in closed:
        if after is not None and (end > after or not _LIST_JOINT.fullmatch(text, end, after)):
            break
        contents.insert(0, text[content_start:content_end])
        after = start
    return ', '.join(contents).strip() or None


# ---- what an answer is as text -----------------------------------------------------------------------------

_SYMBOLS = {
    '−': '-', '–': '-', '‐': '-', '×': r'\times ', '·': r'\cdot ', '⋅': r'\cdot ', '÷': '/', '⁄': '/',
    'π': r'\pi ', '∞': r'\infty ', '∅': r'\emptyset ', '≤': r'\le ', '≥': r'\ge ', '≠': r'\ne ',
    '∪': r'\cup ', '∩': r'\cap ', '∈': r'\in ', '±': r'\pm ', '°': r'^\circ ', '√': r'\sqrt ', '′': "'",
    '…': r'\ldots ', '⋯': r'\ldots ', '≈': r'\approx ', '⟨': r'\langle ', '⟩': r'\rangle ',
    '∖': r'\setminus ', **{c: f'\\mathbb{{{plain}}}' for c, plain in zip('ℝℤℕℚℂ', 'RZNQC')},
}  # fmt: skip
_SUPERSCRIPT = re.compile('[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+')
_SUPERSCRIPTS = str.maketrans('⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻', '0123456789+-')
_LATEX_SPACE = re.compile(r'(?<!\\)\\[,;:! ]|\\q?quad|~|\\displaystyle\b')
_LETTER_COMMAND = re.compile(  # including e and i; after a number, '\text{ m}' remains a unit
    r'(?P<unit>[\d)}] ?\\(?:mathrm|text|rm) ?\{ ?[mshgLlNJWV] ?\})'
    r'|\\(?:mathrm|text|mathit|rm) ?\{ ?(?P<letter>[a-zA-Z]) ?\}(?=[})^_+*/-]|$)'
)
_FUNCTIONS = 'arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|csc|ln|log|exp|gcd|lcm'
_FUNCTION_AS_TEXT = re.compile(
    rf'\\(?:text|textrm|mathrm|mathit|operatorname\*?|rm) ?\{{ ?(?:(?P<name>{_FUNCTIONS}) ?\}}(?= '
    rf'?[A-Za-z0-9(\\{{^_|])'
    r'|(?P<unit_too>sec|min|max) ?\}(?= ?[A-Za-z(\\{]))'
    r'|(?P<kept>\\(?:text\w*|mbox|math(?:rm|bf|it)|operatorname\*?) ?\{[^{}]*\}|\\[A-Za-z]+)'
    rf'|(?<![A-Za-z\\])(?:(?P<bare>{_FUNCTIONS}|sec)(?= ?[(\\0-9_^]| '
    rf'[a-z](?![A-Za-z])|x(?![A-Za-z]))|(?P<of_two>min|max)(?=\())'
)
_ESCAPED_TWICE = re.compile(
    r'(?<!\\)\\\\(?=(?:text|frac|[dt]frac|left|right|sqrt|pi|cdot|times|leq?|geq?)(?![a-zA-Z]))'
)
_LEADING = re.compile(
    r'^(?:=|\\approx(?![a-z])|(?:\\text\w* ?\{ ?)?(?:about|approximately|approx\.?|roughly)(?:\b|(?<=\.)) '
    r'?\}?'
    r'(?= ?[\d\\$.-])|\\text\w* ?\{ ?(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is|:| is:) ?\}(?= ?[\w\\$.(-])) ?'
)
_DOTS = re.compile(r'\.\.\.|\\(?:[lc]?dots|dots[bcmo])(?![A-Za-z])')
_SIZE = re.compile(r'\\(?:left|right|[bB]igg?[lmr]?)(?=[^a-zA-Z])')
_TEXT_INDEX = re.compile(
    r'_\{? ?\\(?:text|mathrm|textrm|operatorname|mathit|rm) ?\{ ?([A-Za-z0-9]+) ?\} ?\}?'
)
_SIGN_INDEX = re.compile(r'_(?:\{ ?\\([a-z]+) ?\}|\\([a-z]+)(?![a-z{]))')
# Separators of thousands, and \phantom, which is not displayed.
_GROUPED = re.compile(r'(?<=\d)(?:\{,\}|,\\! ?)(?=\d{3}(?!\d))|\\phantom ?(?:\{[^{}]*\}|[^{}])')
MATH_MARKS = re.compile(r'\\[\[\]()]')


def tidy(text: str) -> str:
    r"""Returns the answer in plain LaTeX.

    Removes invisible characters, \left, \dfrac, thin spaces, and any $ or full stop around the answer.
    """
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda m: '^{' + m[0].translate(_SUPERSCRIPTS) + '}', text)
        text = ''.join(_SYMBOLS.get(c) or _plain(c) for c in text)
    text = _DOTS.sub(r'\\ldots ', text)
    text = usual(text)
    text = _ESCAPED_TWICE.sub(r'\\', re.sub(r'\{,\}|,\\! ?', ',', _GROUPED.sub('', text))).replace('{:}', ':')
    text = re.sub(r'\\[dtc]frac(?![a-zA-Z])', r'\\frac', text)
    text = _SIZE.sub('', text).replace('\\varnothing', '\\emptyset').replace('\\degree', '^\\circ ')
    text = re.sub(r'(\\mathbb ?\{?[RZNQC]\}?) ?(?:-|/|\\backslash) ?(?=\\\{|[(\[])', r'\1\\setminus ', text)
    text = _SIGN_INDEX.sub(r'_{\1\2}', _TEXT_INDEX.sub(r'_{\1}', text))
    text = _LETTER_COMMAND.sub(lambda m: m['letter'] or m[0], _LATEX_SPACE.sub(' ', text))
    text = _FUNCTION_AS_TEXT.sub(_function, text)
    text = re.sub(r'(?<=\d)(?:and|or)(?=[A-Za-z(\d-])', ', ', text)  # '1orx=2'
    text = _unwrapped(_without_stop(re.sub(r'\s+', ' ', text).strip()))
    for start, end in (('$$', '$$'), ('$', '$'), (r'\(', r'\)'), (r'\[', r'\]')):
        inner = text[len(start) : -len(end)]
        if (
            text.startswith(start)
            and text.endswith(end)
            and len(text) > len(start) + len(end)
            and not ('$' in inner.replace('\\$', '') or '\\(' in inner)
        ):
            text = _unwrapped(_without_stop(inner.strip()))
    if text.startswith('$') and '$' not in text[1:]:  # $2.50
        text = '\\' + text
    text = _LEADING.sub('', text)
    if (wrapped := _TEXT_COMMAND.fullmatch(text)) and re.search(r'\d', wrapped[1]):
        text = wrapped[1].strip()  # \text{5 cm}
    text = in_degrees(text)
    if '\\circ' in text and _OF_AN_ANGLE.search(text):
        text = _ANGLE.sub(r'(\\frac{\1\\pi}{180})', text)
    return improper(without_periods(_braced(text)))


def _function(match: re.Match) -> str:
    name = match['name'] or match['unit_too'] or match['bare'] or match['of_two']
    unit = (
        match['unit_too'] and match.string[max(match.start() - 2, 0) : match.start()].rstrip()[-1:].isdigit()
    )
    if match['kept'] or unit:
        return match[0]
    return f'\\{name} ' if match.string[match.end()].isalnum() else f'\\{name}'


_OF_AN_ANGLE = re.compile(r'\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])')
_ANGLE = re.compile(r'(\d+(?:\.\d+)?) ?(?:\^ ?\{ ?\\circ ?\}|\^ ?\\circ)')


def _unwrapped(text: str) -> str:
    """Removes braces around the whole text, but not those of '{1, 2}', which may be a set."""
    if not (text.startswith('{') and text.endswith('}')):
        return text
    depth = 0
    for i, c in enumerate(text):
        depth += (c == '{') - (c == '}')
        if not depth and i + 1 < len(text):
            return text
    inner = text[1:-1].strip()
    return text if len(split(inner, ',')) > 1 else _without_stop(inner)


def _without_stop(text: str) -> str:
    return (text[:-1] if text.endswith(('.', ',', ';')) else text).rstrip()


_TOKEN = re.compile(r'\\[A-Za-z]+|\\.|.', re.DOTALL)
_BARE_ARGUMENT = re.compile(r'[0-9A-Za-z]|\\(?!text|math|frac|sqrt|sum|int|begin)[A-Za-z]+')
_ROOT_IN_BRACKETS = re.compile(r'(?<![A-Za-z\\])sqrt ?\(([^()]*)\)')
_ROOT_OF = re.compile(
    r'\\sqrt ?(\[\w+\])? ?([0-9A-Za-z]|\\(?!frac|text|math|sqrt)[A-Za-z]+|\\frac\{[^{}]*\}\{[^{}]*\})'
)


def _braced(text: str) -> str:
    r"""Puts braces around every argument of a fraction, binomial or root: \frac{2}{\pi} for \frac2\pi."""
    if '\\frac' in text or '\\binom' in text:
        # `wanted` is a stack with the number of arguments still to come within each open brace.
        written, wanted = [], [0]
        for token in _TOKEN.findall(text):
            if token == '{':
                wanted[-1] = max(wanted[-1] - 1, 0)
                wanted.append(0)
            elif token == '}' and len(wanted) > 1:
                wanted.pop()
            elif wanted[-1] and token != ' ':
                bare = _BARE_ARGUMENT.fullmatch(token)
                wanted[-1] = wanted[-1] - 1 if bare else 0
                token = f'{{{token}}}' if bare else token
            if token in ('\\frac', '\\binom'):
                wanted[-1] = 2
            written.append(token)
        text = ''.join(written)
    return _ROOT_OF.sub(r'\\sqrt\1{\2}', _ROOT_IN_BRACKETS.sub(r'\\sqrt{\1}', text))


def _plain(character: str) -> str:
    """Returns a plain form of a character: all digits become ASCII, and format characters are removed."""
    if unicodedata.category(character) == 'Cf':
        return ''
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    plain = unicodedata.normalize('NFKC', character)
    above, slash, below = plain.partition('⁄')
    return f'\\frac{{{above}}}{{{below}}}' if slash and below else plain  # ½


_TEXT_COMMAND = re.compile(
    r'\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}'
)


_ARTICLE = re.compile(r' ?(?:[Aa]n?|[Tt]he) (?=[A-Za-z]{2})')


def text_key(text: str) -> str:
    """Returns a key that ignores font commands, needless braces and spaces, and the case of words."""
    text = _TEXT_COMMAND.sub(r'\1', text)
    if choice := re.fullmatch(r'\(([A-Z])\)', text):
        return choice[1]
    if (article := _ARTICLE.match(text)) and is_words(text):
        text = text[article.end() :]
    text = re.sub(r'(?<=[\^_])\{(\w)\}', r'\1', text)
    text = re.sub(r'(?<!\d) | (?!\d)', '', text)  # '3 1/2' is not '31/2'
    return text.lower() if is_words(text) else text


def is_words(text: str) -> bool:
    """Returns whether an answer consists of words, such as a name, rather than a formula."""
    plain = _TEXT_COMMAND.sub(r'\1', text)
    return re.fullmatch(r"[A-Za-z' .,-]*", plain) is not None and re.search('[A-Za-z]{2}', plain) is not None


_AND = re.compile(r',? ?(?:\\text ?\{ ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])) ?')


def elements(text: str) -> list[str]:
    r"""Returns the sorted keys of the elements of a set in braces or of a list without brackets; else [].

    For 'f(x)=1, f(x)=2' the elements are the values.
    """
    text = _AND.sub(',', re.sub(r'^\\?\{(.*?)\\?\}$', r'\1', text))
    elements = split(text, ',')
    if len(elements) < 2:
        return []
    if (
        len(
            {
                left
                for left, equals, _ in (e.partition('=') for e in elements)
                if re.fullmatch(r'[A-Za-z]\([a-z]\) ?', left)
            }
        )
        == 1
    ):
        elements = [e.partition('=')[2].strip() for e in elements]
    return sorted(map(text_key, elements))


def split(text: str, separator: str) -> list[str]:
    """Splits a text at the separators that are outside all brackets."""
    depth, start, parts = 0, 0, []
    for i, c in enumerate(text):
        depth += (c in '({[') - (c in ')}]')
        if c == separator and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]
