"""Sound JSON messages and files with a few places that are other ones, as a stranger or a fault might write them."""

import copy
import functools
import json
import operator
import random
from collections.abc import Iterator
from typing import Any

VALUES = (
    None, True, 0, -1, 3, 7, 0.0, -0.5, -1e30, 1e300, 2**31, 10**12, 10**400, '', '7', 'stop', '..', '/', 'x' * 5000, '\ud800',
    [], [None], [0], [[3]], [10**12] * 9, {}, {'0': 0}, {'version': '7', 'start': 0, 'end': 3}, {'logprob': 'no'},
)  # fmt: skip
PIECES = (
    b'', b'\0', b'\xff', b'\xef\xbb\xbf', b'\xc3\xa9', b'\n', b'\n\n', b'null', b'NaN', b'-Infinity', b'1e999', b'9' * 5000, b'"',
    b'{', b'}', b',', b'{"a":' * 900 + b'0' + b'}' * 900, b'[' * 900 + b']' * 900, b'[' * 20_000, b'"\\ud800"', b'\\u0000', b'true',
    b'-0',
)  # fmt: skip


def mutants(sound: Any, count: int) -> Iterator[tuple[int, Any]]:
    """(seed, `mutant` of `sound`); a seed's is always the same."""
    for seed in range(count):
        yield seed, mutant(sound, random.Random(seed))


def mutant(sound: Any, rng: random.Random) -> Any:
    """`sound` with up to three fields dropped, doubled, nested, swapped or replaced."""
    said = copy.deepcopy(sound)
    for _ in range(rng.randint(1, 3)):
        if all_places := list(_places(said)):
            _mutate(said, rng.choice(all_places), rng)
    return said


def other_text(sound: Any, rng: random.Random) -> str:
    """JSON of a mutant, or damaged JSON of `sound`; one character a byte."""
    if rng.random() < 0.6:
        return json.dumps(mutant(sound, rng), ensure_ascii=rng.random() < 0.5).encode('utf-8', 'surrogatepass').decode('latin-1')
    return damaged(json.dumps(sound), rng)


def damaged(text: str, rng: random.Random) -> str:
    """A text of one character a byte, cut, with flipped bits, other pieces or doubled lines."""
    data = text.encode('latin-1')
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((0, 1, 2, 4, 9, 40)))
        change = rng.choice(('cut', 'flip', 'piece', 'piece', 'double', 'lines'))
        if change == 'cut':
            data = data[:start]
        elif change == 'flip' and start < len(data):
            data = data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :]
        elif change == 'piece':
            data = data[:start] + rng.choice(PIECES) + data[end:]
        elif change == 'double':
            data = data[:end] + data[start:]
        elif lines := data.splitlines(keepends=True):
            line = rng.randrange(len(lines))
            data = b''.join(lines[:line] + lines[line : line + 1] * rng.randint(0, 3) + lines[line + 1 :])
    return data.decode('latin-1')


def _mutate(said: Any, path: tuple, rng: random.Random) -> None:
    *outside, key = path
    inside = functools.reduce(operator.getitem, outside, said)
    change = rng.choice(('drop', 'double', 'nest', 'swap', 'replace', 'replace'))
    if change == 'drop':
        del inside[key]
    elif change == 'double' and isinstance(inside, list):
        inside.insert(key, inside[key])
    elif change == 'double':
        inside[rng.choice(('..', '', 'other', '\ud800'))] = inside[key]
    elif change == 'nest':
        inside[key] = [inside[key]]
    elif change == 'swap':
        other = rng.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
        inside[key], inside[other] = inside[other], inside[key]
    else:
        inside[key] = copy.deepcopy(rng.choice(VALUES))


def _places(said: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every field and member within a JSON value."""
    for key, value in said.items() if isinstance(said, dict) else enumerate(said) if isinstance(said, list) else ():
        yield (*path, key)
        yield from _places(value, (*path, key))
