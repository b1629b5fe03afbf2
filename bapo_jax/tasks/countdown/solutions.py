"""Worked solutions of Countdown problems, for small policies to learn (sft.py) and for the task to write."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bapo_jax.tasks.countdown.problems import solvable

_TRIES = 100


class Attempt(NamedTuple):
    """Numbers combined until one is left; with aim, until no step keeps the target reachable."""

    steps: str  # '30-24=6 6*6=36 59+36=95'
    left: list[int]  # values of the remaining terms
    expression: str  # of the last term

    def reaches(self, target: int) -> bool:
        return self.left == [target]


def worked_solution(ground_truth: dict, rng: np.random.Generator, aim: bool = True) -> str:
    """Returns a correct response in compact style: '30-24=6 6*6=36 59+36=95<answer>59+6*(30-24)</answer>'.

    The steps come first. Each is drawn at random among those that keep the target reachable, sums more often
    than products. Every step gives a non-negative integer, and the answer has no needless parentheses. Raises
    ValueError if there is no such solution. Without `aim` each step is drawn among all possible ones: the
    arithmetic is correct but seldom reaches the target.
    """
    attempt = _attempt(ground_truth, rng, aim)
    if aim and not attempt.reaches(ground_truth['target']):
        raise ValueError(f'{ground_truth} has no solution in non-negative integers')
    return f'{attempt.steps}<answer>{attempt.expression}</answer>'


def calling_solution(ground_truth: dict, rng: np.random.Generator, aim: bool = True) -> str:
    """`worked_solution` as calls of the calculator, and what it shows:

    '<calc>30-24</calc>6\\n<calc>6*6</calc>36\\n<calc>59+36</calc>95\\n<answer>59+6*(30-24)</answer>'
    """
    steps, _, answer = worked_solution(ground_truth, rng, aim).partition('<answer>')
    calls = (step.partition('=') for step in steps.split())
    return ''.join(f'<calc>{call}</calc>{value}\n' for call, _, value in calls) + f'<answer>{answer}'


def searched_solution(
    ground_truth: dict, rng: np.random.Generator, most: int = 4, give_up: float = 0.3
) -> str:
    """Checked attempts in turn: '30+24=54 54-6=48 59+48=107 no 30-24=6 6*6=36 59+36=95<answer>…</answer>'.

    A uniformly drawn number of attempts, at most `most` - 1, are without aim and miss the target. A worked
    solution follows. In a fraction `give_up` of responses, another attempt that misses is the answer instead.
    Raises ValueError if there is no solution, or if no attempt misses.
    """
    missed = [_missed(ground_truth, rng) for _ in range(rng.integers(most))]
    gives_up = rng.random() < give_up
    last = _missed(ground_truth, rng) if gives_up else _attempt(ground_truth, rng, aim=True)
    if not gives_up and not last.reaches(ground_truth['target']):
        raise ValueError(f'{ground_truth} has no solution in non-negative integers')
    return ' no '.join(attempt.steps for attempt in [*missed, last]) + f'<answer>{last.expression}</answer>'


def _missed(ground_truth: dict, rng: np.random.Generator) -> Attempt:
    """Returns an attempt without aim that does not reach the target."""
    for _ in range(_TRIES):
        attempt = _attempt(ground_truth, rng, aim=False)
        if not attempt.reaches(ground_truth['target']):
            return attempt
    raise ValueError(f'{ground_truth}: all {_TRIES} random attempts reached the target')


def _attempt(ground_truth: dict, rng: np.random.Generator, aim: bool) -> Attempt:
    target = ground_truth['target']
    terms = [(n, str(n), 'number') for n in ground_truth['numbers']]  # value, expression, last operator
    steps = []
    while len(terms) > 1:
        nexts = [
            move for move in _moves(terms) if not aim or solvable([value for value, _, _ in move[1]], target)
        ]
        if not nexts:
            break
        weights = np.array([_STEP_WEIGHTS[after[-1][2]] for _, after in nexts])
        step, terms = nexts[rng.choice(len(nexts), p=weights / weights.sum())]
        steps.append(step)
    return Attempt(' '.join(steps), [value for value, _, _ in terms], terms[-1][1])


# A small policy learns sums long before products, so it is shown products only if they are needed.
_STEP_WEIGHTS = {'+': 1.0, '-': 1.0, '*': 0.05, '/': 0.05}


def _moves(terms: list[tuple[int, str, str]]) -> list[tuple[str, list[tuple[int, str, str]]]]:
    """Returns all ways to combine two terms: (step, such as '30-24=6'; terms after it, the new one last)."""
    moves = []
    for i in range(len(terms)):
        for j in range(i + 1, len(terms)):
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            a, b = terms[i], terms[j]
            large, small = (a, b) if a[0] >= b[0] else (b, a)
            choices = [
                (a, '+', b, a[0] + b[0]),
                (a, '*', b, a[0] * b[0]),
                (large, '-', small, large[0] - small[0]),
            ]
            if small[0] > 0 and large[0] % small[0] == 0:
                choices.append((large, '/', small, large[0] // small[0]))
            for left, operator, right, value in choices:
                term = (value, _joined(left, operator, right), operator)
                moves.append((f'{left[0]}{operator}{right[0]}={value}', [*rest, term]))
    return moves


def _joined(left: tuple[int, str, str], operator: str, right: tuple[int, str, str]) -> str:
    """Joins two terms without needless parentheses: a+(b-c) becomes a+b-c, and a*(b/c) becomes a*b/c."""
    wrap_left = operator in '*/' and left[2] in '+-'
    wrap_right = right[2] in {'+': '', '-': '+-', '*': '+-', '/': '+-*/'}[operator]
    return (
        (f'({left[1]})' if wrap_left else left[1]) + operator + (f'({right[1]})' if wrap_right else right[1])
    )
