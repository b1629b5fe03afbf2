r"""Mathematical answers as text: where a response states its answer, and what can be compared without computer algebra.

Everything takes time linear in the text. `math_worker` compares what two answers mean.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from bapo_jax.tasks.math_conversion import ratio
from bapo_jax.tasks.math_notation import in_degrees, usual
from bapo_jax.tasks.math_numerals import MAX_DIGITS, improper, without_periods
from bapo_jax.tasks.math_statement import is_withheld_at
from bapo_jax.tasks.math_units import quantity

ROUNDED_PLACES = 4  # a value rounded to this many decimals or more counts as the exact one


# ---- where the answer is ----------------------------------------------------------------------------------------------


def after_thinking(response: str, *, opened: bool = False) -> str | None:
    """The text after the last </think>: all of it where there is no thinking, None where the thinking does not end.

    `opened` says that the prompt ended in <think>, so the response begins inside the thinking.
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
    r'|(?!.*\b(?:is|so|thus|then|hence|therefore|answer|final|wait|no)\b)[^.!?\n]{0,30}\b(?:and|or)\b[^.!?\n]{0,30}'
)


def last_box(text: str, *, stated: bool = False) -> str | None:
    r"""The content of the last balanced \boxed{} or \fbox{}, None where there is none or it is empty. Linear in the text.

    Of nested boxes the innermost counts. Boxes that only a comma, or a few words with 'and' or 'or', separates form one list. An
    unterminated box is no box, and an escaped brace is no brace. With `stated`, 'final answer is $...$' is a box
    too, but not where the text takes it back.
    """
    closed: list[tuple[int, int, int, int]] = []  # of each box: where it begins and ends, where its content begins and ends
    opened: list[tuple[int, int] | None] = []  # of each open brace: where its box and its content begin; None for another brace
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
    closed.sort(reverse=True)  # the last to open first
    if closed and text[closed[0][0]] != '\\' and is_withheld_at(text, *closed[0][2:]):
        return None
    contents: list[str] = []
    after = None  # where the box that follows begins
    for start, end, content_start, content_end in closed:
        if after is not None and (end > after or not _LIST_JOINT.fullmatch(text, end, after)):
            break
        contents.insert(0, text[content_start:content_end])
        after = start
    return ', '.join(contents).strip() or None


# ---- what an answer is as text ----------------------------------------------------------------------------------------

_SYMBOLS = {
    '−': '-', '–': '-', '‐': '-', '×': r'\times ', '·': r'\cdot ', '⋅': r'\cdot ', '÷': '/', '⁄': '/', 'π': r'\pi ',
    '∞': r'\infty ', '∅': r'\emptyset ', '≤': r'\le ', '≥': r'\ge ', '≠': r'\ne ', '∪': r'\cup ', '∩': r'\cap ', '∈': r'\in ',
    '±': r'\pm ', '°': r'^\circ ', '√': r'\sqrt ', '′': "'", '…': r'\ldots ', '⋯': r'\ldots ', '≈': r'\approx ',
    '⟨': r'\langle ', '⟩': r'\rangle ', '∖': r'\setminus ', **{c: f'\\mathbb{{{plain}}}' for c, plain in zip('ℝℤℕℚℂ', 'RZNQC')},
}  # fmt: skip
_SUPERSCRIPT = re.compile('[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+')
_SUPERSCRIPTS = str.maketrans('⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻', '0123456789+-')
_LATEX_SPACE = re.compile(r'(?<!\\)\\[,;:! ]|\\q?quad|~|\\displaystyle\b')
_LETTER_COMMAND = re.compile(  # e and i among them; behind a number, '\text{ m}' stays a unit
    r'(?P<unit>[\d)}] ?\\(?:mathrm|text|rm) ?\{ ?[mshgLlNJWV] ?\})'
    r'|\\(?:mathrm|text|mathit|rm) ?\{ ?(?P<letter>[a-zA-Z]) ?\}(?=[})^_+*/-]|$)'
)
_FUNCTIONS = 'arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|csc|ln|log|exp|gcd|lcm'
_FUNCTION_AS_TEXT = re.compile(
    rf'\\(?:text|textrm|mathrm|mathit|operatorname\*?|rm) ?\{{ ?(?:(?P<name>{_FUNCTIONS}) ?\}}(?= ?[A-Za-z0-9(\\{{^_|])'
    r'|(?P<unit_too>sec|min|max) ?\}(?= ?[A-Za-z(\\{]))'
    r'|(?P<kept>\\(?:text\w*|mbox|math(?:rm|bf|it)|operatorname\*?) ?\{[^{}]*\}|\\[A-Za-z]+)'
    rf'|(?<![A-Za-z\\])(?:(?P<bare>{_FUNCTIONS}|sec)(?= ?[(\\0-9_^]| [a-z](?![A-Za-z])|x(?![A-Za-z]))|(?P<of_two>min|max)(?=\())'
)
_ESCAPED_TWICE = re.compile(r'(?<!\\)\\\\(?=(?:text|frac|[dt]frac|left|right|sqrt|pi|cdot|times|leq?|geq?)(?![a-zA-Z]))')
_LEADING = re.compile(
    r'^(?:=|\\approx(?![a-z])|(?:\\text\w* ?\{ ?)?(?:about|approximately|approx\.?|roughly)(?:\b|(?<=\.)) ?\}?'
    r'(?= ?[\d\\$.-])|\\text\w* ?\{ ?(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is|:| is:) ?\}(?= ?[\w\\$.(-])) ?'
)
_DOTS = re.compile(r'\.\.\.|\\(?:[lc]?dots|dots[bcmo])(?![A-Za-z])')
_SIZE = re.compile(r'\\(?:left|right|[bB]igg?[lmr]?)(?=[^a-zA-Z])')
_TEXT_INDEX = re.compile(r'_\{? ?\\(?:text|mathrm|textrm|operatorname|mathit|rm) ?\{ ?([A-Za-z0-9]+) ?\} ?\}?')
_SIGN_INDEX = re.compile(r'_(?:\{ ?\\([a-z]+) ?\}|\\([a-z]+)(?![a-z{]))')
_GROUPED = re.compile(r'(?<=\d)(?:\{,\}|,\\! ?)(?=\d{3}(?!\d))|\\phantom ?(?:\{[^{}]*\}|[^{}])')  # thousands; and what is not shown
MATH_MARKS = re.compile(r'\\[\[\]()]')


def tidy(text: str) -> str:
    r"""The answer in plain LaTeX: without invisible characters, \left, \dfrac, thin spaces, and any $ or full stop around it."""
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
    unit = match['unit_too'] and match.string[max(match.start() - 2, 0) : match.start()].rstrip()[-1:].isdigit()
    if match['kept'] or unit:
        return match[0]
    return f'\\{name} ' if match.string[match.end()].isalnum() else f'\\{name}'


_OF_AN_ANGLE = re.compile(r'\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])')
_ANGLE = re.compile(r'(\d+(?:\.\d+)?) ?(?:\^ ?\{ ?\\circ ?\}|\^ ?\\circ)')


def _unwrapped(text: str) -> str:
    """A text without braces around the whole of it. '{1, 2}' may be a set, and keeps them."""
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
_ROOT_OF = re.compile(r'\\sqrt ?(\[\w+\])? ?([0-9A-Za-z]|\\(?!frac|text|math|sqrt)[A-Za-z]+|\\frac\{[^{}]*\}\{[^{}]*\})')


def _braced(text: str) -> str:
    r"""The text with braces around every argument of a fraction, binomial or root: \frac{2}{\pi} for \frac2\pi."""
    if '\\frac' in text or '\\binom' in text:
        written, wanted = [], [0]  # what is written; how many arguments are still to come, within each open brace
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
    """A character in its plain form: full-width and other digits become ASCII, format characters vanish."""
    if unicodedata.category(character) == 'Cf':
        return ''
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    plain = unicodedata.normalize('NFKC', character)
    above, slash, below = plain.partition('⁄')
    return f'\\frac{{{above}}}{{{below}}}' if slash and below else plain  # ½


_TEXT_COMMAND = re.compile(r'\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}')


_ARTICLE = re.compile(r' ?(?:[Aa]n?|[Tt]he) (?=[A-Za-z]{2})')


def text_key(text: str) -> str:
    """Equal for answers of equal text: without font commands, needless braces and blanks; words in lower case."""
    text = _TEXT_COMMAND.sub(r'\1', text)
    if choice := re.fullmatch(r'\(([A-Z])\)', text):
        return choice[1]
    if (article := _ARTICLE.match(text)) and is_words(text):
        text = text[article.end() :]
    text = re.sub(r'(?<=[\^_])\{(\w)\}', r'\1', text)
    text = re.sub(r'(?<!\d) | (?!\d)', '', text)  # '3 1/2' is not '31/2'
    return text.lower() if is_words(text) else text


def is_words(text: str) -> bool:
    """Whether an answer is words, such as a name, rather than a formula."""
    plain = _TEXT_COMMAND.sub(r'\1', text)
    return re.fullmatch(r"[A-Za-z' .,-]*", plain) is not None and re.search('[A-Za-z]{2}', plain) is not None


class Number(NamedTuple):
    value: Fraction
    places: int | None  # digits after a decimal's point; None for an exact value
    unit: str  # of measurement, as `math_units` names it; or ''


_PLAIN = r'(?:(?:\d{1,3}(?:[, ]\d{3})+|\d+)(?:\.\d*)?|\.\d+)'
_DECIMAL = re.compile(
    rf'([+-]?) ?(?:({_PLAIN}) ?(?:[eE]|\\(?:times|cdot) ?10 ?\^ ?)|10 ?\^ ?)(\{{?)([+-]?\d{{1,3}})(?(3)\}}?)|([+-]?) ?({_PLAIN})'
)
_FRACTION = re.compile(r'([+-]?) ?(?:\\frac ?(?:\{ ?(-?\d+) ?\} ?\{ ?(-?\d+) ?\}|(\d) ?(\d))|(\d+) ?/ ?(-?\d+))')


def parse_number(text: str) -> Number | None:
    r"""A plain number: 25, 1,000, -0.5, 1.5e3, 1.5\times 10^{3}, 3/7, \frac{3}{7}; perhaps with a unit."""
    if len(text) > MAX_DIGITS:
        return None
    text, unit, times = quantity(text)
    if match := _FRACTION.fullmatch(text):
        sign, *groups = match.groups()
        above, below = (int(g) for g in groups if g is not None)
        return Number(Fraction(-above if sign == '-' else above, below) * times, None, unit) if below else None
    if not (match := _DECIMAL.fullmatch(text)):
        return None
    sign, mantissa, _, exponent, plain_sign, plain = match.groups()
    digits = re.sub('[, ]', '', plain or mantissa or '1')
    value = Fraction(digits.removesuffix('.')) * Fraction(10) ** int(exponent or 0)
    places = max(len(digits.partition('.')[2]) - int(exponent or 0), 0) if '.' in digits else None
    return Number(value * (-times if '-' in (sign, plain_sign) else times), places if times == 1 else None, unit)


def same_number(a: Number, b: Number) -> bool:
    """Whether two numbers are equal, or one is the other rounded correctly to `ROUNDED_PLACES` places or more (and digits).

    Units count where both have one: 500 cents are 5 dollars, 5 cents are not.
    """
    if a.unit and b.unit and a.unit != b.unit:
        times = ratio(a.unit, b.unit)
        return times is not None and a.value * times == b.value
    if a.value == b.value:
        return True
    if b.places is not None:
        a, b = b, a
    if a.places is None or b.places is not None or b.value.denominator == 1:  # two decimals, or two exact values, that differ
        return False
    unit = Fraction(1, 10**a.places)
    return a.places >= ROUNDED_PLACES and abs(a.value) >= unit * 10 ** (ROUNDED_PLACES - 1) and abs(a.value - b.value) <= unit / 2


_AND = re.compile(r',? ?(?:\\text ?\{ ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])) ?')


def elements(text: str) -> list[str]:
    r"""The sorted keys of the elements of a set in braces, or of a list without brackets; [] for any other text.

    The elements of 'f(x)=1, f(x)=2' are the values.
    """
    text = _AND.sub(',', re.sub(r'^\\?\{(.*?)\\?\}$', r'\1', text))
    elements = split(text, ',')
    if len(elements) < 2:
        return []
    if len({left for left, equals, _ in (e.partition('=') for e in elements) if re.fullmatch(r'[A-Za-z]\([a-z]\) ?', left)}) == 1:
        elements = [e.partition('=')[2].strip() for e in elements]
    return sorted(map(text_key, elements))


def split(text: str, separator: str) -> list[str]:
    """The parts of a text between separators outside all brackets."""
    depth, start, parts = 0, 0, []
    for i, c in enumerate(text):
        depth += (c in '({[') - (c in ')}]')
        if c == separator and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]
