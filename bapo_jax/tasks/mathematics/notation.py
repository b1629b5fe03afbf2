r"""Converts different notations of the same thing to the usual one.

    appearance    '\boldsymbol{42}', '\textcolor{red}{42}', '\underline{42}',    '42'
                  '\large 42'
    letters       '2\mathbf i + 3\hat\jmath'                                     '2\mathbf{i} + 3\hat{j}'
    logarithms    '\lg 2', '\log_e 2'                                            '\log_{10} 2', '\ln 2'
    binomials     '{10 \choose 3}', 'C_{10}^3'                                   '\binom{10}{3}'
    degrees       "1^\circ 30'"                                                  '\frac{90}{60}^\circ'

Takes time linear in the length of the text.
"""

from __future__ import annotations

import re

# Most answers contain none of these, and one search is faster than all the substitutions.
_UNUSUAL = re.compile(
    r'\\(?:bm|bold|underline|(?:text)?color|tiny|footnote|script|small|normalsize|[lL]arge|LARGE|[hH]uge'
    r'|lg|log ?_|choose|(?:math|text)(?:sf|tt)'
    r'|(?:mathbf|mathrm|mathit|hat|vec|bar|overline)(?: |\\| ?\{ ?\\))|C_'
)
_FONT = re.compile(r'\\(?:math|text)(?:sf|tt)(?![A-Za-z]) ?(?=\{)')
_LOOK = re.compile(
    r'\\(?:boldsymbol|bm|underline)(?![A-Za-z]) ?(?=\{)|\\(?:text)?color ?\{[^{}]{0,99}\} ?'
    r'|\\(?:tiny|(?:footnote|script)size|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z]) ?'
)
_LETTER = re.compile(
    r'\\(?P<mark>mathbf|mathrm|mathit|hat|vec|bar|overline) ?'
    r'(?:(?P<bare>[A-Za-z])(?![A-Za-z])|(?:(?P<brace>\{) ?)?\\(?P<dotless>[ij])math(?![A-Za-z])(?(brace) '
    r'?\}))'
)
_LG, _LOG_E = re.compile(r'\\lg(?![A-Za-z])'), re.compile(r'\\log ?_ ?(?:e(?![A-Za-z])|\{ ?e ?\})')
_CHOOSE = re.compile(r'\{ ?([^{}]{1,99}?) ?\\choose(?![A-Za-z]) ?([^{}]{1,99}?) ?\}')
_COMBINATIONS = re.compile(r'(?<![A-Za-z])C_(?:\{ ?(\d{1,3}) ?\}|(\d)) ?\^ ?(?:\{ ?(\d{1,3}) ?\}|(\d))(?!\d)')
_MINUTES = re.compile(
    r"(\d{1,6}) ?\^ ?(?:\\circ|\{ ?\\circ ?\}) ?([0-5]?\d) ?(?:'|\^ ?\\prime|\^ ?\{ ?\\prime ?\})"
)


def usual(text: str) -> str:
    """Returns a text in the usual notation, except for degrees."""
    if not _UNUSUAL.search(text):
        return text
    text = _LOOK.sub('', _FONT.sub(r'\\mathrm', text))
    text = _LETTER.sub(lambda m: f'\\{m["mark"]}{{{m["bare"] or m["dotless"]}}}', text)
    text = _LOG_E.sub(r'\\ln ', _LG.sub(r'\\log_{10}', text))
    text = _CHOOSE.sub(r'\\binom{\1}{\2}', text)
    return _COMBINATIONS.sub(_binomial, text)


def _binomial(match: re.Match) -> str:
    above, below = (int(group) for group in match.groups() if group is not None)
    if below > above or above <= 2:
        return match[0]  # C_1^2 is the square of a constant
    return f'\\binom{{{above}}}{{{below}}}'


def in_degrees(text: str) -> str:
    """Converts degrees and minutes to degrees; returns any other text unchanged."""
    match = _MINUTES.fullmatch(text) if '\\circ' in text else None
    return f'\\frac{{{60 * int(match[1]) + int(match[2])}}}{{60}}^\\circ' if match else text
