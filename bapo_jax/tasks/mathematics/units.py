"""Units of measurement in an answer: one name for all spellings of a unit, and words that multiply.

    '5 cm', '5 centimeters', '5\\text{ cm}'                 value '5', unit 'cm'
    '12 square inches', '12 sq. in', '12\\text{ in}^2'       value '12', unit 'in2'
    '3 million dollars'                                     value '3', unit 'dollar', times 1,000,000
    '\\$5', '5€', '£5'                                       value '5', unit 'dollar', 'euro', 'sterling'
    '3 or more', 'at least 3'                               not a quantity: the words change the meaning

`conversion` knows which units are of the same kind.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from bapo_jax.tasks.mathematics.conversion import ratio


class Quantity(NamedTuple):
    value: str
    unit: str  # '' if the text names no unit
    times: int  # factor by which a word like 'million' multiplies the value


_NAMES = {
    'm': 'meter metre', 's': 'second sec', 'min': 'minute', 'h': 'hour hr', 'g': 'gram', 'l': 'liter litre L',
    'in': 'inch inche', 'ft': 'foot feet', 'yd': 'yard', 'mi': 'mile', 'lb': 'pound', 'oz': 'ounce',
    'J': 'joule Joule', 'N': 'newton Newton', 'W': 'watt Watt', 'V': 'volt Volt', 'Hz': 'hertz Hertz',
    'Pa': 'pascal Pascal', '': 'unit', 'dollar': 'USD', 'cent': 'penny pennie', 'euro': 'EUR',
    'sterling': 'GBP', 'yen': 'JPY', 'rupee': 'INR', 'gal': 'gallon', 'century': 'centurie',
    'celsius': 'Celsius', 'fahrenheit': 'Fahrenheit', 'tonne': 'metricton',
}  # fmt: skip
_SHORT = {long: short for short, names in _NAMES.items() for long in names.split()}
_PREFIXES = {'kilo': 'k', 'centi': 'c', 'milli': 'm', 'micro': 'µ', 'nano': 'n', 'mega': 'M'}
_TIMES = {
    'dozen': 12,
    'hundred': 10**2,
    'thousand': 10**3,
    'million': 10**6,
    'billion': 10**9,
    'trillion': 10**12,
}
_RATES = {
    'mph': 'mi/h',
    'kph': 'km/h',
    'kmh': 'km/h',
    'fps': 'ft/s',
    'degreecelsius': 'celsius',
    'degreefahrenheit': 'fahrenheit',
}
_POWERS = {'square': '2', 'sq': '2', 'cubic': '3', 'cu': '3', 'squared': '2', 'cubed': '3'}
_CHANGING = re.compile(
    r'\b(?:or|and|than|least|most|over|under|more|less|fewer|about|around|nearly|plus|minus|times'
    r'|but|not|wrong)\b'
)

_WORD = r'(?:[a-z]{3,}|[mck]m|ft|in|yd|mi|lb|oz|kg|mg|hr|of|sq\.?|cu\.?)(?![a-z])'
_UNIT = re.compile(
    r'(?:(?<=[\d})])|(?<=\\pi))'
    r'(?: ?\\(?:text\w*|mathrm|mathbf|mbox) ?\{(?! ?[ijk] ?\})([A-Za-z./ ]+(?:\^ ?\{?-?\d\}?)?)\}'
    r'| ?([cmk]m(?:/[a-z]+)?|kg|ft|mph|Hz)(?![a-z])'
    rf'| ({_WORD}(?:[ /]{_WORD}){{0,3}}(?:/[a-z]+)?))'
    r'(?:\^ ?\{? ?(-?\d) ?\}?)?\.?$'
)
_DEGREES = re.compile(r' ?\^ ?(?:\\circ|\{ ?\\circ ?\}) ?([CF])?$')
CURRENCIES = {
    '\\$': 'dollar', '\\pounds': 'sterling', '\\euro': 'euro', '£': 'sterling', '€': 'euro', '¥': 'yen',
    '₹': 'rupee', '¢': 'cent', '\\cent': 'cent',
}  # fmt: skip
_SIGN = '|'.join(map(re.escape, CURRENCIES))
_BEFORE = re.compile(rf'(-?) ?(?:\\text ?\{{ ?)?({_SIGN})(?: ?\}})? ?(?=[\d.\\(])')
_BEHIND = re.compile(rf'(?<=[\d}}]) ?(?:\\text ?\{{ ?)?({_SIGN})(?: ?\}})?$')
# These are units only if the other answer has a unit of the same kind.
_LETTER = re.compile(r'(?<=[\d})]) ?([mshgLlNJWV]|m/s(?:\^?2)?)$')
_ORDINAL = re.compile(
    r'(?<=\d) ?(?:\^? ?\{? ?\\(?:text\w*|mathrm|mbox) ?\{ ?(?:st|nd|rd|th) ?\} ?\}?|\^ ?\{ ?(?:st|nd|rd|th) '
    r'?\}|(?:st|nd|rd|th))$'
)


_MOST_COMPOUND = 100  # characters; longer texts are not searched
_COMPOUND = re.compile(r'\d+(?:\.\d+)? ?[a-z]{1,9}(?:,? (?:and )?\d+(?:\.\d+)? ?[a-z]{1,9}){1,2}')


def _compound(text: str) -> Quantity | None:
    """Parses a quantity in several units of one kind, such as '2 hours 30 minutes'; None for other texts."""
    plain = re.sub(r' +', ' ', re.sub(r'\\(?:text\w*|mathrm|mbox) ?\{([^{}]*)\}', r' \1 ', text)).strip()
    if not _COMPOUND.fullmatch(plain):
        return None
    numbers, words = re.findall(r'\d+(?:\.\d+)?', plain), re.findall(r'(?<![a-z])(?!and )[a-z]+', plain)
    units = [unit_name(word) for word in words]
    ratios = [ratio(unit, units[0]) for unit in units]
    if len(units) != len(numbers) or None in ratios or len(set(units)) < len(units):
        return None
    total = sum(Fraction(number) * times for number, times in zip(numbers, ratios))
    return Quantity(f'\\frac{{{total.numerator}}}{{{total.denominator}}}', units[0], 1)


def quantity(text: str, beside: str = '') -> Quantity:
    """Returns a text's value and unit. The value is the whole text if it does not end in a unit.

    `beside` is the unit of the other answer. A single letter counts as a unit only if that one is of the same
    kind: the m of '5 m' if the other answer is in cm.
    """
    if (
        len(text) < _MOST_COMPOUND
        and text[:1].isdigit()
        and text[-1].isalpha() | (text[-1] == '}')
        and (whole := _compound(text))
    ):
        return whole
    unit, power, times = '', '', 1
    if (match := _UNIT.search(text)) and not _CHANGING.search(match[0]):
        text = text[: match.start()]
        words = next(filter(None, match.groups()[:3])).replace('.', ' ').split()
        while words and words[0] in _TIMES:
            times *= _TIMES[words.pop(0)]
        power = match[4] or ''
        if power.startswith('-'):  # m s^{-2}
            words.insert(-1, '/')
            power = power[1:].replace('1', '')
        unit = unit_name(' '.join(words))
    elif beside and (match := _LETTER.search(text)) and ratio(unit_name(match[1]), beside):
        text, unit = text[: match.start()], unit_name(match[1])
    text = _ORDINAL.sub('', text.strip())
    money = ''
    if match := _BEFORE.match(text):
        text, money = match[1] + text[match.end() :], match[2]
    elif match := _BEHIND.search(text):
        text, money = text[: match.start()], match[1]
    if money and (not unit or unit.startswith('/')):
        unit = CURRENCIES[money] + unit
    if degrees := _DEGREES.search(text):
        text, unit, power = (
            text[: degrees.start()],
            {'C': 'celsius', 'F': 'fahrenheit'}.get(degrees[1], 'degree'),
            '',
        )
    return Quantity(text.rstrip(), unit and unit + power, times)


def unit_name(words: str) -> str:
    """Returns one name for a unit: 'cm2' for 'square centimeters', 'mi/h' for 'miles per hour'.

    An unknown unit is put in the singular.
    """
    name, power = '', ''
    for word in re.sub(r'[{}^]', '', re.sub(r'\bper\b', '/', words)).replace('/', ' / ').split():
        if word in _POWERS:
            if word.endswith('ed'):
                name += _POWERS[word]
            power = '' if word.endswith('ed') else _POWERS[word]
        elif word == '/':
            name += '/'
        else:
            name, power = name + _short(word) + power, ''
    return _RATES.get(name, name.strip('23') and name)  # 'square units' is not a unit


def _short(word: str) -> str:
    if word in _SHORT or word in _RATES:
        return _SHORT.get(word, word)
    singular = word.removesuffix('s') if len(word) > 2 else word
    for prefix, letter in _PREFIXES.items():
        if singular.startswith(prefix) and (base := singular.removeprefix(prefix)) in _SHORT:
            return letter + _SHORT[base]
    return _SHORT.get(singular, singular)


_BOUND = re.compile(
    r'^(?:\\text ?\{ ?)?(not|at (?:least|most)|(?:no )?(?:more|less|fewer|greater) than|over|under|up '
    r'to|exceeding)\b'
    r'|\b(or (?:more|less|fewer|greater|above|below|over|under|older|later|earlier))(?: [a-z]+)?(?: ?\})?$'
)


def bound(text: str) -> str:
    """Returns the words that make a quantity a bound: 'at least', 'or more'; '' if there are none."""
    match = _BOUND.search(text)
    return next(filter(None, match.groups())) if match else ''


_CLOCK = re.compile(
    r'(\d{1,2})(?: ?: ?(\d\d))?(?: ?: ?00)?(?: ?(?:\\(?:text|mathrm|mbox) ?\{)? ?([ap])\.? ?m\.? ?\}?)?',
    re.IGNORECASE,
)


def clock(text: str) -> tuple[int, int, str] | None:
    """Returns a time of day as hour, minute, and 'a', 'p' or ''.

    Returns None if the text has neither minutes nor a.m. or p.m.
    """
    match = _CLOCK.fullmatch(text)
    if not match or not (match[2] or match[3]):
        return None
    return int(match[1]), int(match[2] or 0), (match[3] or '').lower()


def same_clock(one: tuple[int, int, str], other: tuple[int, int, str]) -> bool:
    """Returns whether two times of day are the same; a time without a.m. or p.m. matches both."""
    if other[2]:
        one, other = other, one
    if one[2] and not other[2]:
        return one[1] == other[1] and other[0] in (one[0], one[0] % 12 + 12 * (one[2] == 'p'))
    return one == other
