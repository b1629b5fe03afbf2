"""What rows.jsonl says: scores, curves at any point, differences of settings, each with its interval; and how
they are written.

Intervals are of 95 %, by bootstrap over problems and seeds together. Settings are compared problem by problem
and seed by seed: a seed gives every setting the same order of prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from studies.first_proof.grid import HELD_OUT

RESAMPLES = 4_000
Rows = list[dict[str, Any]]


def accuracies(rows: Rows, name: str, benchmarks: Sequence[str]) -> np.ndarray:
    """[seeds, problems] shares of right responses of one setting after training, in the order of the seeds."""
    return np.array([of_final(row, benchmarks) for row in of(rows, name)])


def of_final(row: dict[str, Any], benchmarks: Sequence[str]) -> np.ndarray:
    return np.concatenate(
        [np.array(row['final'][b]['correct']) / row['final'][b]['samples'] for b in benchmarks]
    )


def spread_of(accuracy_SxP: np.ndarray) -> tuple[float, float, float]:
    """(mean, low, high) of an accuracy, or of a difference of two."""
    seeds_RxS, problems_RxP = (resamples(n) for n in accuracy_SxP.shape)
    means = np.einsum('rs,sp,rp->r', seeds_RxS, accuracy_SxP, problems_RxP, optimize=True)
    return float(accuracy_SxP.mean()), *(float(x) for x in np.quantile(means, (0.025, 0.975)))


@functools.cache
def resamples(n: int) -> np.ndarray:
    """[R, n] shares of each of n items among n draws from them with replacement."""
    return np.random.default_rng(n).multinomial(n, np.full(n, 1 / n), RESAMPLES) / n


def less(
    rows: Rows, name: str, reference: str, at: str | int = 'steps', kind: Sequence[str] = ()
) -> tuple[float, float, float]:
    """(mean, low, high) of the accuracy of `name` minus that of `reference`, seed by seed, over the bases in
    `rows` together.

    at    equal 'steps', 'responses' or 'seconds', or a step. The last two are read where the thriftier of the
    two settings ended.
    kind  benchmarks; (): those of the kind of problems that a base trains on.
    """
    parts = [
        [row for row in rows if row['base'] == base] for base in dict.fromkeys(row['base'] for row in rows)
    ]
    return spread_of(
        np.concatenate([difference(part, name, reference, at, kind or held_out(part)) for part in parts])
    )


def difference(rows: Rows, name: str, reference: str, at: str | int, kind: Sequence[str]) -> np.ndarray:
    """[seeds, problems] what `less` averages, for the rows of one base and the seeds that both settings have."""
    seeds = {row['seed'] for row in of(rows, name)} & {row['seed'] for row in of(rows, reference)}
    rows = [row for row in rows if row['seed'] in seeds]
    if at == 'steps':
        return accuracies(rows, name, kind) - accuracies(rows, reference, kind)
    axis, x = (
        ('step', at) if isinstance(at, int) else (at, min(spent(rows, n, at) for n in (name, reference)))
    )
    return read_off(rows, name, axis, x, kind) - read_off(rows, reference, axis, x, kind)


def spent(rows: Rows, name: str, what: str) -> float:
    """'responses': a setting's mean over seeds. 'seconds': its fastest seed's, since other work on a machine
    only adds to them.
    """
    return float(
        {'responses': np.mean, 'seconds': np.min}[what]([row['curve'][-1][what] for row in of(rows, name)])
    )


def evaluated_at(rows: Rows, name: str, axis: str) -> np.ndarray:
    """[seeds, evaluations] 'step', 'responses' or 'seconds' of each evaluation; seconds are scaled to the
    fastest seed's.
    """
    xs = np.array([[point[axis] for point in row['curve']] for row in of(rows, name)], float)
    return xs * (spent(rows, name, axis) / xs[:, -1:]) if axis == 'seconds' else xs


def read_off(rows: Rows, name: str, axis: str, x: float, benchmarks: Sequence[str]) -> np.ndarray:
    """[seeds, problems] shares of right responses at x of 'step', 'responses' or 'seconds', interpolated
    between evaluations.

    The last evaluation is the one with 32 samples. A run that ended before x counts as it ended.
    """
    shares = []
    for row, xs in zip(of(rows, name), evaluated_at(rows, name, axis), strict=True):
        ys = np.array([
            np.concatenate([np.array(point[f'{b}/correct']) / point[f'{b}/samples'] for b in benchmarks]) for point in row['curve']
        ])  # fmt: skip
        ys[-1] = of_final(row, benchmarks)
        shares.append([np.interp(x, xs, of_problem) for of_problem in ys.T])
    return np.array(shares)


def of(rows: Rows, name: str) -> Rows:
    """The rows of a setting, in the order of their seeds."""
    return sorted((row for row in rows if row['name'] == name), key=lambda row: row['seed'])


def best(rows: Rows, method: str, axes: Sequence[str]) -> str:
    """The method's setting along these axes with the highest mean. Only those with the most seeds count:
    fewer may be lucky.
    """
    names = sorted({row['name'] for row in rows if row['method'] == method and row['axis'] in axes})
    seeds = max(len(of(rows, name)) for name in names)
    return max(
        (name for name in names if len(of(rows, name)) == seeds),
        key=lambda name: accuracies(rows, name, held_out(rows)).mean(),
    )


def held_out(rows: Rows) -> tuple[str, ...]:
    """Benchmarks of the kind of problems that these rows, of one base, train on."""
    return HELD_OUT[rows[0]['base']]


def less_as_text(rows: Rows, name: str, other: str, at: str = 'steps', kind: Sequence[str] = ()) -> str:
    """`less` as points with its interval, or '-' where a base in `rows` lacks one of the settings."""
    have = {(row['base'], row['name']) for row in rows}
    complete = bool(rows) and all((row['base'], setting) in have for row in rows for setting in (name, other))
    return spread(*less(rows, name, other, at, kind)) if complete else '-'


def percent(x: float) -> str:
    """A share in percent. Two machines sum in different orders, so the last bits go first: a tie rounds alike."""
    return f'{round(100 * x, 6) + 0.0:.1f}'


def spread(mean: float, low: float, high: float) -> str:
    return f'{percent(mean)} ({percent(low)} to {percent(high)})'
