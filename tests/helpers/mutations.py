"""Sound JSON messages with a few fields that are other ones, as a stranger or a fault might write them."""

import copy
import functools
import operator
import random
from collections.abc import Iterator
from typing import Any

VALUES = (
    None, True, 0, -1, 3, 7, 0.0, -0.5, -1e30, 1e300, 2**31, 10**12, 10**400, '', '7', 'stop', '..', '/', 'x' * 5000, '\ud800',
    [], [None], [0], [[3]], [10**12] * 9, {}, {'0': 0}, {'version': '7', 'start': 0, 'end': 3}, {'logprob': 'no'},
)  # fmt: skip


def mutants(sound: Any, count: int) -> Iterator[tuple[int, Any]]:
    """(seed, `sound` with up to three fields dropped, doubled, nested, swapped or replaced); a seed's is always the same."""
    for seed in range(count):
        rng, said = random.Random(seed), copy.deepcopy(sound)
        for _ in range(rng.randint(1, 3)):
            if all_places := list(_places(said)):
                _mutate(said, rng.choice(all_places), rng)
        yield seed, said


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
