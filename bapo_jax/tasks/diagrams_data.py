"""Generated problems whose numbers stand in a figure alone: one number is missing, and one rule gives it.

    angles     the angles of a triangle sum to 180
    right      the square of the hypotenuse is the sum of the legs' squares; all sides are whole
    similar    sides of similar triangles have one ratio, here 2 to 5

A problem is {'answer': int, 'images': [reference]}, with a figure as figures.py describes it, '?' where the answer belongs. The
three kinds come equally often. Answers are drawn first and evenly, so one who does not see can hardly guess (docs/diagrams.md).

2,419 pairs of angles can be asked, 300 pairs of a right triangle's sides and 8,362 triples of similar ones', in a hundred
thousand places or more each. The numbers of the held-out angles and similar triangles are never trained on. Of right triangles
there are too few for that: the held-out pictures are new, and the numbers in them are not.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Sequence
from random import Random

from bapo_jax.tasks.figures import SIDE, Figure, figure_image

BENCHMARKS = {
    'diagrams': '200 generated problems, their numbers in a picture',
    'diagrams_blanked': 'the same problems with white pictures',
}
SOURCES = ('generated', 'blanked')
KINDS = ('angles', 'right', 'similar')
ASKED = '?'

TEST_ROWS = 200
MOST_ALIKE = 4  # test problems with one answer: who always gives the same is right in 2 % at most
ANGLES = (20, 99)  # degrees, inclusive: two digits
LONGEST = 99
RATIOS = (2, 3, 4, 5)
SHORTEST = 2

Problem = dict  # {'answer': int, 'images': [reference]}


def numbers_of(figure: Figure) -> list[int | None]:
    """A figure's numbers in the order of its labels, None where it asks."""
    return [None if label == ASKED else int(label) for label in figure['labels']]


def missing_number(figure: Figure) -> int:
    """The number that the rule of the figure's kind puts in the place of '?'."""
    numbers = numbers_of(figure)
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
    """Large side by small side, of the pair of sides that both have numbers."""
    small, large = next((s, b) for s, b in zip(numbers[:2], numbers[2:]) if s is not None and b is not None)
    return large // small


def problem_key(figure: Figure) -> tuple:
    """Equal where a training problem would give a test problem away: see above."""
    if figure['kind'] == 'angles':
        return 'angles', *sorted(figure['labels'])
    if figure['kind'] == 'right':
        return 'right', *figure['labels'], *map(tuple, figure['corners'])
    small, other, large, other_large = figure['labels']
    return 'similar', *sorted([(small, large), (other, other_large)])


def generate(count: int, *, seed: int, exclude: frozenset = frozenset()) -> list[Figure]:
    """`count` figures with none of the keys in `exclude`, kinds in turn. Equal arguments give equal figures."""
    random, figures = Random(seed), []
    while len(figures) < count:
        kind = KINDS[len(figures) % len(KINDS)]
        figure = {'kind': kind, 'corners': _corners(kind, random), 'labels': _labels(kind, random)}
        if problem_key(figure) not in exclude:
            figures.append(figure)
    return figures


# ---- numbers ----------------------------------------------------------------------------------------------------------


def _draw(random: Random, first: int, last: int) -> int:
    """Python promises equal random() for a seed in every version, and of its generators no other."""
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
    """By answer: the sides of a right triangle (leg, hypotenuse, leg), and which is asked."""
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
    if asked < 2:  # of the small triangle
        answer = _draw(random, SHORTEST, LONGEST // RATIOS[0])
        ratio = _choose(random, [r for r in RATIOS if answer * r <= LONGEST])
        small = answer
    else:
        answer = _choose(random, [n for n in range(LONGEST + 1) if any(n % r == 0 and n // r >= SHORTEST for r in RATIOS)])
        ratio = _choose(random, [r for r in RATIOS if answer % r == 0 and answer // r >= SHORTEST])
        small = answer // ratio
    other = _draw(random, SHORTEST, LONGEST // ratio)
    smalls = [small, other] if asked % 2 == 0 else [other, small]
    return [*smalls, *(ratio * s for s in smalls)], asked


# ---- places -----------------------------------------------------------------------------------------------------------

# Corners in pixels, and how far each may stand from there. Labels need room: a label is some 20 × 12 pixels.
_ANCHORS = {
    'angles': ((7, 87), (88, 87), (48, 7)),
    'right': ((30, 72), (86, 72), (30, 16)),
    'similar': ((24, 26), (50, 26), (36, 6), (42, 76), (88, 76), (64, 44)),
}
_JITTER = {'angles': 4, 'right': 6, 'similar': 3}


def _corners(kind: str, random: Random) -> list[list[int]]:
    """Corners near the anchors, mirrored by chance; a right angle stays one."""
    jitter = _JITTER[kind]
    moved = [[c + _draw(random, -jitter, jitter) for c in corner] for corner in _ANCHORS[kind]]
    if kind == 'right':  # one leg level, the other upright
        moved[1][1], moved[2][0] = moved[0][1], moved[0][0]
    if random.random() < 0.5:
        moved = [[SIDE - 1 - x, y] for x, y in moved]
    if kind != 'similar' and random.random() < 0.5:
        moved = [[x, SIDE - 1 - y] for x, y in moved]
    return moved


# ---- problems ---------------------------------------------------------------------------------------------------------


def _problem(figure: Figure, blanked: bool) -> Problem:
    shown = {'kind': 'blank', 'corners': [], 'labels': []} if blanked else figure
    return {'answer': missing_number(figure), 'images': [figure_image(shown)]}


@functools.cache
def _test_figures() -> list[Figure]:
    """Figures with different keys, kinds in turn, and no answer more than MOST_ALIKE times."""
    figures, answers, keys = [], collections.Counter(), set()
    for figure in generate(5 * TEST_ROWS, seed=1001):
        answer, key = missing_number(figure), problem_key(figure)
        in_turn = figure['kind'] == KINDS[len(figures) % len(KINDS)]
        if len(figures) < TEST_ROWS and in_turn and key not in keys and answers[answer] < MOST_ALIKE:
            figures.append(figure)
            answers[answer] += 1
            keys.add(key)
    return figures


@functools.cache
def _test_keys() -> frozenset:
    return frozenset(map(problem_key, _test_figures()))


def training_problems(source: str, *, limit: int, seed: int) -> list[Problem]:
    """`limit` problems drawn with `seed`, none of them a test problem; their pictures are white where `source` is 'blanked'.

    Draws each picture once: some 3,000 a second. Raises ValueError on another source, or a limit below 1.
    """
    if source not in SOURCES:
        raise ValueError(f"task.train is {source!r}; the task diagrams has 'generated' and, without pictures, 'blanked'")
    if limit <= 0:
        raise ValueError(f'task.limit is {limit}; task.train={source!r} needs it to be 1 or more')
    return [_problem(figure, source == 'blanked') for figure in generate(limit, seed=seed, exclude=_test_keys())]


def benchmark(name: str) -> list[Problem]:
    """The 200 test problems, always the same; of 'diagrams_blanked' with white pictures. ValueError on another name."""
    if name not in BENCHMARKS:
        raise ValueError(f'unknown benchmark {name!r} of the task diagrams; known: {", ".join(BENCHMARKS)}')
    return [_problem(figure, name == 'diagrams_blanked') for figure in _test_figures()]
