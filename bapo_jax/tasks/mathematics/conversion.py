"""Conversion between units of the same kind: 50 cm are 0.5 m, but 5 cents are not 5 dollars.

'cm', 'm'          1/100
'km/h', 'm/s'      5/18
'l', 'cm3'         1000
'dollar', 'euro'   None: different kinds
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

# What units measure, and their names and sizes: 'length 3' is a volume. A month has no fixed number of days.
_SIZES = {
    'length 1': 'm 1, in 0.0254, ft 0.3048, yd 0.9144, mi 1609.344',
    'length 2': 'ha 10000, hectare 10000, acre 4046.8564224',
    'length 3': 'l 0.001, L 0.001, gal 0.003785411784, quart 0.000946352946, '
    'pint 0.000473176473, cup 0.0002365882365',
    'time 1': 's 1, min 60, h 3600, day 86400, week 604800',
    'months 1': 'month 1, year 12, decade 120, century 1200',
    'mass 1': 'g 1, lb 453.59237, oz 28.349523125, tonne 1000000',
    'dollars 1': 'dollar 1, cent 0.01',
    'sterling 1': 'sterling 1, pence 0.01',
    'euros 1': 'euro 1',
    'yen 1': 'yen 1',
    'rupees 1': 'rupee 1',
    'energy 1': 'J 1',
    'force 1': 'N 1',
    'power 1': 'W 1',
    'tension 1': 'V 1',
    'frequency 1': 'Hz 1',
    'pressure 1': 'Pa 1',
}
_SCALES = {
    'n': '1e-9',
    'µ': '1e-6',
    'm': '0.001',
    'c': '0.01',
    'd': '0.1',
    'k': '1000',
    'M': '1000000',
    'G': '1e9',
}
_WITH_SCALE = ('m', 's', 'g', 'l', 'L', 'J', 'N', 'W', 'V', 'Hz', 'Pa')
_FACTOR = re.compile(r'([A-Za-zµ]+)([1-9]?)')


def _table() -> dict[str, tuple[str, int, Fraction]]:
    table = {}
    for what, units in _SIZES.items():
        kind, power = what.split()
        for unit in units.split(', '):
            name, size = unit.split()
            table[name] = kind, int(power), Fraction(size)
    for name in _WITH_SCALE:
        kind, power, size = table[name]
        table |= {
            prefix + name: (kind, power, size * Fraction(scale)) for prefix, scale in _SCALES.items()
        } | {name: table[name]}
    return table


_UNITS = _table() | {'min': ('time', 1, Fraction(60))}
_MONEY = {
    name for name, (kind, _, _) in _UNITS.items() if kind in ('dollars', 'sterling', 'euros', 'yen', 'rupees')
}
# 'pounds' and '^\\circ' may mean either.
_ALIKE = ({'lb', 'sterling'}, {'degree', 'celsius'}, {'degree', 'fahrenheit'})


@functools.lru_cache(maxsize=4096)
def ratio(one: str, other: str) -> Fraction | None:
    """Returns the size of the unit `one` in units of `other`.

    Returns None for units of different kinds, and for unknown units with different names.
    """
    if one == other or {one, other} in _ALIKE:
        return Fraction(1)
    for money, rate in ((one, other), (other, one)):
        if money in _MONEY and '/' in rate and rate.partition('/')[0] in ('', money):
            return Fraction(1)  # $15 for 15 dollars an hour
    sizes = _size(one), _size(other)
    if None in sizes or sizes[0][1] != sizes[1][1]:
        return None
    return sizes[0][0] / sizes[1][0]


def is_known(unit: str) -> bool:
    return unit != '' and _size(unit) is not None


def _size(unit: str) -> tuple[Fraction, dict[str, int]] | None:
    """Returns the size of a unit such as 'km/h', and the power of each kind that it measures."""
    size, kinds = Fraction(1), {}
    for place, name in enumerate(unit.split('/')):
        match = _FACTOR.fullmatch(name)
        if not match or match[1] not in _UNITS:
            return None
        kind, power, factor = _UNITS[match[1]]
        times = int(match[2] or 1) * (-1 if place else 1)
        size *= factor**times
        kinds[kind] = kinds.get(kind, 0) + power * times
    return size, {kind: power for kind, power in kinds.items() if power}
