"""Generated problems whose numbers are only in a figure: one number is missing, and one rule gives it.

    angles     the angles of a triangle sum to 180
    right      the square of the hypotenuse is the sum of the legs' squares; all sides are integers
    similar    the sides of similar triangles have one ratio, here 2 to 5

A problem is {'answer': int, 'images': [reference]}, with a figure as described in pictures.py, and '?' in
place of the answer. The three kinds are equally frequent. Answers are drawn first and evenly, so guessing
without the picture hardly works (docs/reference/tasks.md).

2,419 pairs of angles, 300 pairs of a right triangle's sides and 8,362 triples of similar triangles' sides can
be asked, each in a hundred thousand placements or more. The numbers of the held-out angles and similar
triangles are never trained on. There are too few right triangles for that: their held-out pictures are new,
but the numbers are not.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Sequence
from random import Random

from bapo_jax.tasks.diagrams.pictures import SIDE, Diagram, figure_image

BENCHMARKS = {
    'diagrams': '200 generated problems whose numbers are in a picture',
    'diagrams_blanked': 'the same problems with white pictures',
}
SOURCES = ('generated', 'blanked')
DIAGRAM_KINDS = ('angles', 'right', 'similar')
ASKED = '?'

TEST_ROWS = 200
MOST_ALIKE = 4  # test problems with the same answer: a constant answer is right in 2 % at most
ANGLES = (20, 99)  # degrees, inclusive: two digits
LONGEST = 99
RATIOS = (2, 3, 4, 5)
SHORTEST = 2

Problem = dict  # {'answer': int, 'images': [reference]}


def numbers_in(figure: Diagram) -> list[int | None]:
    """Returns a figure's numbers in the order of its labels, with None for '?'."""
    return [None if label == ASKED else int(label) for label in figure['labels']]


def missing_number(figure: Diagram) -> int:
    """Returns the number that belongs in place of '?' by the rule of the figure's kind."""
    numbers = numbers_in(figure)
    asked = numbers.index(None)
    if figure['kind'] == 'angles':
        return 180 - sum(n for n in numbers if n is not None)
    if figure['kind'] == 'right':
        leg, hypotenuse, other = numbers
        if asked == 1:
            return math.isqrt(leg**2 + other**2)
        return math.isqrt(hypotenuse**2 - (leg if other is None else other) ** 2)
    ratio = similar_ratio(numbers)
    partner = numbers[(asked + 2) % 4]
    return partner * ratio if asked >= 2 else partner // ratio


def similar_ratio(numbers: Sequence[int | None]) -> int:
    """Returns the ratio of large side to small side, from the pair of sides that both have numbers."""
    small, large = next((s, b) for s, b in zip(numbers[:2], numbers[2:]) if s is not None and b is not None)
    return large // small


def problem_key(figure: Diagram) -> tuple:
    """Returns a key. A training problem with the key of a test problem would give it away: see above."""
    if figure['kind'] == 'angles':
        return 'angles', *sorted(figure['labels'])
    if figure['kind'] == 'right':
        return 'right', *figure['labels'], *map(tuple, figure['corners'])
    small, other, large, other_large = figure['labels']
    return 'similar', *sorted([(small, large), (other, other_large)])


def generate(count: int, *, seed: int, exclude: frozenset = frozenset()) -> list[Diagram]:
    """Returns `count` figures, kinds in turn, without keys in `exclude`; equal for equal arguments."""
    random, figures = Random(seed), []
    while len(figures) < count:
        kind = DIAGRAM_KINDS[len(figures) % len(DIAGRAM_KINDS)]
        figure = {'kind': kind, 'corners': _corners(kind, random), 'labels': _labels(kind, random)}
        if problem_key(figure) not in exclude:
            figures.append(figure)
    return figures


# ---- numbers -----------------------------------------------------------------------------------------------


def _draw(random: Random, first: int, last: int) -> int:
    """Draws an integer with random(), the only method that Python keeps equal for a seed in every version."""
    return first + int(random.random() * (last - first + 1))


def _choose(random: Random, choices: Sequence):
    return choices[_draw(random, 0, len(choices) - 1)]


def _labels(kind: str, random: Random) -> list[str]:
    numbers, asked = {'angles': _angles, 'right': _right_sides, 'similar': _similar_sides}[kind](random)
    return [ASKED if i == asked else str(n) for i, n in enumerate(numbers)]


def _angles(random: Random) -> tuple[list[int], int]:
    least, most = ANGLES
    answer = _draw(random, least, most)
    one = _draw(random, max(least, 180 - most - answer), min(most, 180 - least - answer))
    asked = _draw(random, 0, 2)
    others = [one, 180 - answer - one]
    return [*others[:asked], answer, *others[asked:]], asked


@functools.cache
def _right_questions() -> dict[int, list[tuple[list[int], int]]]:
    """Returns, by answer, the sides of right triangles (leg, hypotenuse, leg) and which side is asked."""
    questions: dict[int, list[tuple[list[int], int]]] = {}
    for leg in range(1, LONGEST):
        for other in range(1, LONGEST):
            hypotenuse = math.isqrt(leg**2 + other**2)
            if hypotenuse <= LONGEST and hypotenuse**2 == leg**2 + other**2:
                for asked, side in enumerate((leg, hypotenuse, other)):
                    questions.setdefault(side, []).append(([leg, hypotenuse, other], asked))
    return questions


def _right_sides(random: Random) -> tuple[list[int], int]:
    questions = _right_questions()
    return _choose(random, questions[_choose(random, sorted(questions))])


def _similar_sides(random: Random) -> tuple[list[int], int]:
    asked = _draw(random, 0, 3)
    if asked < 2:  # a side of the small triangle
        answer = _draw(random, SHORTEST, LONGEST // RATIOS[0])
        ratio = _choose(random, [r for r in RATIOS if answer * r <= LONGEST])
        small = answer
    else:
        answer = _choose(
            random, [n for n in range(LONGEST + 1) if any(n % r == 0 and n // r >= SHORTEST for r in RATIOS)]
        )
        ratio = _choose(random, [r for r in RATIOS if answer % r == 0 and answer // r >= SHORTEST])
        small = answer // ratio
    other = _draw(random, SHORTEST, LONGEST // ratio)
    smalls = [small, other] if asked % 2 == 0 else [other, small]
    return [*smalls, *(ratio * s for s in smalls)], asked


# ---- places ------------------------------------------------------------------------------------------------

# Corners in pixels, and how far each may move. A label needs a space of about 20 × 12 pixels.
_ANCHORS = {
    'angles': ((7, 87), (88, 87), (48, 7)),
    'right': ((30, 72), (86, 72), (30, 16)),
    'similar': ((24, 26), (50, 26), (36, 6), (42, 76), (88, 76), (64, 44)),
}
_JITTER = {'angles': 4, 'right': 6, 'similar': 3}


def _corners(kind: str, random: Random) -> list[list[int]]:
    """Returns corners near the anchors, mirrored at random; a right angle stays one."""
    jitter = _JITTER[kind]
    moved = [[c + _draw(random, -jitter, jitter) for c in corner] for corner in _ANCHORS[kind]]
    if kind == 'right':  # one leg horizontal, the other vertical
        moved[1][1], moved[2][0] = moved[0][1], moved[0][0]
    if random.random() < 0.5:
        moved = [[SIDE - 1 - x, y] for x, y in moved]
    if kind != 'similar' and random.random() < 0.5:
        moved = [[x, SIDE - 1 - y] for x, y in moved]
    return moved


# ---- problems ----------------------------------------------------------------------------------------------


def _problem(figure: Diagram, blanked: bool) -> Problem:
    shown = {'kind': 'blank', 'corners': [], 'labels': []} if blanked else figure
    return {'answer': missing_number(figure), 'images': [figure_image(shown)]}


@functools.cache
def _test_figures() -> list[Diagram]:
    """Returns figures, kinds in turn, with different keys and no answer more than MOST_ALIKE times."""
    figures, answers, keys = [], collections.Counter(), set()
    for figure in generate(5 * TEST_ROWS, seed=1001):
        answer, key = missing_number(figure), problem_key(figure)
        in_turn = figure['kind'] == DIAGRAM_KINDS[len(figures) % len(DIAGRAM_KINDS)]
        if len(figures) < TEST_ROWS and in_turn and key not in keys and answers[answer] < MOST_ALIKE:
            figures.append(figure)
            answers[answer] += 1
            keys.add(key)
    return figures


@functools.cache
def _test_keys() -> frozenset:
    return frozenset(map(problem_key, _test_figures()))


def training_problems(source: str, *, limit: int, seed: int) -> list[Problem]:
    """Returns `limit` problems, drawn with `seed`, none of them a test problem.

    Their pictures are white if `source` is 'blanked'. Draws each picture once, about 3,000 per second. Raises
    ValueError if `source` is unknown or `limit` is below 1.
    """
    if source not in SOURCES:
        raise ValueError(f"task.train is {source!r}; choose 'generated', or 'blanked' for white pictures")
    if limit <= 0:
        raise ValueError(f'task.limit is {limit}; set it to 1 or more for task.train={source!r}')
    return [
        _problem(figure, source == 'blanked') for figure in generate(limit, seed=seed, exclude=_test_keys())
    ]


def benchmark(name: str) -> list[Problem]:
    """Returns the 200 test problems, always the same; with white pictures for 'diagrams_blanked'.

    Raises ValueError if the name is unknown.
    """
    if name not in BENCHMARKS:
        raise ValueError(f'unknown diagrams benchmark {name!r}; choose one of {", ".join(BENCHMARKS)}')
    return [_problem(figure, name == 'diagrams_blanked') for figure in _test_figures()]
