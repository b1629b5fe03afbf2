"""Worked solutions of Countdown problems, as small policies are shown them (sft.py) and as the task writes them itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bapo_jax.tasks.countdown_data import solvable

_TRIES = 100


class Attempt(NamedTuple):
    """Numbers combined until one is left; with aim, until no step is left from which the target can be reached."""

    steps: str  # '30-24=6 6*6=36 59+36=95'
    left: list[int]  # the values of the terms that are left
    expression: str  # of the last term

    def reaches(self, target: int) -> bool:
        return self.left == [target]


def worked_solution(ground_truth: dict, rng: np.random.Generator, aim: bool = True) -> str:
    """A correct response in the compact style, steps first: '30-24=6 6*6=36 59+36=95<answer>59+6*(30-24)</answer>'.

    Each step is drawn at random among those from which the target can still be reached, sums more often than products. Every step
    gives a non-negative integer, and the answer has no needless parentheses. Raises ValueError where there is no such solution.
    Without `aim` each step is drawn among all possible ones: correct arithmetic that seldom reaches the target.
    """
    attempt = _attempt(ground_truth, rng, aim)
    if aim and not attempt.reaches(ground_truth['target']):
        raise ValueError(f'{ground_truth} has no solution in non-negative integers')
    return f'{attempt.steps}<answer>{attempt.expression}</answer>'


def searched_solution(ground_truth: dict, rng: np.random.Generator, most: int = 4, give_up: float = 0.3) -> str:
    """Attempts one after another, each checked: '30+24=54 54-6=48 59+48=107 no 30-24=6 6*6=36 59+36=95<answer>…</answer>'.

    Up to `most` - 1 attempts, uniformly many, are drawn without aim and miss the target. A worked solution follows. In a share
    `give_up` of responses one more attempt that misses is the answer. Raises ValueError where there is no solution, or nothing misses.
    """
    missed = [_missed(ground_truth, rng) for _ in range(rng.integers(most))]
    gives_up = rng.random() < give_up
    last = _missed(ground_truth, rng) if gives_up else _attempt(ground_truth, rng, aim=True)
    if not gives_up and not last.reaches(ground_truth['target']):
        raise ValueError(f'{ground_truth} has no solution in non-negative integers')
    return ' no '.join(attempt.steps for attempt in [*missed, last]) + f'<answer>{last.expression}</answer>'


def _missed(ground_truth: dict, rng: np.random.Generator) -> Attempt:
    """An attempt without aim that does not reach the target."""
    for _ in range(_TRIES):
        attempt = _attempt(ground_truth, rng, aim=False)
        if not attempt.reaches(ground_truth['target']):
            return attempt
    raise ValueError(f'{ground_truth}: {_TRIES} attempts without aim have all reached the target')


def _attempt(ground_truth: dict, rng: np.random.Generator, aim: bool) -> Attempt:
    target = ground_truth['target']
    terms = [(n, str(n), 'number') for n in ground_truth['numbers']]  # value, its expression, the expression's last operator
    steps = []
    while len(terms) > 1:
        nexts = [move for move in _moves(terms) if not aim or solvable([value for value, _, _ in move[1]], target)]
        if not nexts:
            break
        weights = np.array([_STEP_WEIGHTS[after[-1][2]] for _, after in nexts])
        step, terms = nexts[rng.choice(len(nexts), p=weights / weights.sum())]
        steps.append(step)
    return Attempt(' '.join(steps), [value for value, _, _ in terms], terms[-1][1])


# A small policy learns sums long before products, so it is shown products only where they are needed.
_STEP_WEIGHTS = {'+': 1.0, '-': 1.0, '*': 0.05, '/': 0.05}


def _moves(terms: list[tuple[int, str, str]]) -> list[tuple[str, list[tuple[int, str, str]]]]:
    """Every way to combine two terms into one, as (text of the step, such as '30-24=6'; the terms after it, the new one last)."""
    moves = []
    for i in range(len(terms)):
        for j in range(i + 1, len(terms)):
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            a, b = terms[i], terms[j]
            large, small = (a, b) if a[0] >= b[0] else (b, a)
            choices = [(a, '+', b, a[0] + b[0]), (a, '*', b, a[0] * b[0]), (large, '-', small, large[0] - small[0])]
            if small[0] > 0 and large[0] % small[0] == 0:
                choices.append((large, '/', small, large[0] // small[0]))
            for left, operator, right, value in choices:
                term = (value, _joined(left, operator, right), operator)
                moves.append((f'{left[0]}{operator}{right[0]}={value}', [*rest, term]))
    return moves


def _joined(left: tuple[int, str, str], operator: str, right: tuple[int, str, str]) -> str:
    """`left operator right` without needless parentheses: a+(b-c) becomes a+b-c, and a*(b/c) becomes a*b/c."""
    wrap_left = operator in '*/' and left[2] in '+-'
    wrap_right = right[2] in {'+': '', '-': '+-', '*': '+-', '/': '+-*/'}[operator]
    return (f'({left[1]})' if wrap_left else left[1]) + operator + (f'({right[1]})' if wrap_right else right[1])
