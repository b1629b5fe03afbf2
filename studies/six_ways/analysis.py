"""Six ways: the tables of plan.md, from rows.jsonl: python -m studies.six_ways.analysis

Opens no answers while a run is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bapo_jax.report.contrast import p_of_mean, t_interval
from bapo_jax.scores import pass_at_k
from studies.lib.contrasts import holm
from studies.lib.rows import Row, markdown_table, opened, rows_in
from studies.six_ways.run import FILE
from studies.six_ways.ways import CELLS, COMMON, EVALUATED, OWN, SAMPLES, SEEDS, STEPS, best_rate, wanted

COSTS = ('responses', 'tokens', 'seconds')  # seconds are divided by those of a step of G
AIMED = 80  # G's steps whose score is s
DRAWS, ALPHA = 2_000, 0.05
PREDICTED = {  # by the plan: ratios to G of responses, tokens and seconds; points of pass@16 where the mean is s
    'fifo': ('.85', '1.7', '1.4', '−1'),
    'freshper': ('.85', '1.7', '1.4', '−1'),
    'repo': ('.95', '1.4', '1.3', '0'),
    'exgrpo': ('1.1', '1.6', '1.9', '−2'),
    'x3': ('.85', '.85', '.9', '−1'),
    'x2_x3': ('.95', '.85', '.95', '−1'),
    'mixed': ('.65', '.65', '.7', '−2'),
}


class Run(NamedTuple):
    """A run's curves, from the base on: costs [evaluations], and right answers [evaluations, problems]."""

    costs: dict[str, np.ndarray]
    correct: np.ndarray
    updates: int = 0  # optimizer steps
    old: float = 0.0  # share of its batches that was not fresh, from the second evaluation on

    def mean(self, problems: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Percent right after each evaluation."""
        return 100 * self.correct[:, problems].mean(axis=1) / SAMPLES

    def passed(self, k: int = SAMPLES) -> np.ndarray:
        """pass@k in percent after each evaluation."""
        return np.array(
            [100 * pass_at_k(np.full(len(counts), SAMPLES), counts, k).mean() for counts in self.correct]
        )


def run_of(row: Row, base: Row) -> Run:
    row = opened(row)
    steps = range(EVALUATED, STEPS + 1, EVALUATED)
    correct = [base['correct']['0'], *(row['correct'][str(step)] for step in steps)]
    costs = {name: np.array([0, *row[name]], float) for name in COSTS}
    costs['seconds'] /= row['a_step']  # sessions had machines of one name and different speeds
    groups = row['groups']
    old = 1 - groups['x1'] / max(1e-9, sum(groups.values()))
    return Run(costs, np.array(correct), row['updates'], old)


def crossing(costs: np.ndarray, scores: np.ndarray, s: float) -> tuple[float, bool]:
    """The cost at which the scores first reach s, linear between them; without, the whole cost and False."""
    for i in range(1, len(scores)):
        if scores[i] >= s:
            share = (s - scores[i - 1]) / (scores[i] - scores[i - 1]) if scores[i - 1] < s else 0.0
            return float(costs[i - 1] + share * (costs[i] - costs[i - 1])), True
    return float(costs[-1]), False


class Contrast(NamedTuple):
    """Of a cell less G: the log ratio of costs, of each seed, and its interval over problems."""

    cell: str
    cost: str
    logs: np.ndarray
    reached: int  # runs of the cell that reach s
    reached_g: int
    by_problems: tuple[float, float]

    @property
    def p(self) -> float:
        return p_of_mean(self.logs)


def aim(runs_of_g: Sequence[Run], problems: np.ndarray | slice = slice(None)) -> float:
    """s: the mean over seeds of G's mean@16 after 80 steps."""
    return float(np.mean([run.mean(problems)[AIMED // EVALUATED] for run in runs_of_g]))


def contrasts(runs: dict[str, list[Run]], rng: np.random.Generator | None = None) -> list[Contrast]:
    """Each cell against G, for each cost; runs are in the order of the seeds."""
    rng = rng or np.random.default_rng(0)
    problems = runs['G'][0].correct.shape[1]
    draws = [slice(None), *rng.integers(0, problems, (DRAWS, problems))]
    logs: dict[tuple[str, str], list[np.ndarray]] = {}
    reached: dict[str, int] = {}
    for draw in draws:
        s = aim(runs['G'], draw)
        found: dict[tuple[str, str], list[float]] = {}
        for cell, of in runs.items():
            scores = [run.mean(draw) for run in of]
            for cost in COSTS:
                crossed = [crossing(run.costs[cost], score, s) for run, score in zip(of, scores, strict=True)]
                found[cell, cost] = [np.log(x) for x, _ in crossed]
                reached.setdefault(
                    cell, sum(there for _, there in crossed)
                )  # of the first draw, all problems
        for cell, cost in found:
            if cell != 'G':
                logs.setdefault((cell, cost), []).append(np.subtract(found[cell, cost], found['G', cost]))
    return [
        Contrast(
            cell,
            cost,
            of[0],
            reached[cell],
            reached['G'],
            tuple(np.percentile([d.mean() for d in of[1:]], (2.5, 97.5))),
        )  # fmt: skip
        for (cell, cost), of in logs.items()
    ]


def verdict(contrast: Contrast, rejected: bool) -> str:
    """In the plan's words. A cost without a crossing is a lower bound, which can show one of them only."""
    low, high = contrast.by_problems
    if not rejected or low <= 0 <= high:
        return 'open'
    cheaper = contrast.logs.mean() < 0
    bounded = (contrast.reached if cheaper else contrast.reached_g) < len(contrast.logs)
    return 'open' if bounded else 'cheaper' if cheaper else 'dearer'


def name_of(cell: str) -> str:
    """A way's own cell by the way."""
    return CELLS[cell].way if cell in OWN else cell


def contrasts_table(found: Sequence[Contrast], seeds: int = len(SEEDS)) -> str:
    rejected = holm([c.p for c in found], ALPHA)
    lines = []
    for c, holds in zip(found, rejected, strict=True):
        of_seeds, of_problems = (
            ' to '.join(f'{np.exp(x):.2f}' for x in ends) for ends in (t_interval(c.logs), c.by_problems)
        )
        lines.append([
            name_of(c.cell), c.cost, f'{np.exp(c.logs.mean()):.2f}', of_seeds, of_problems,
            f'{c.reached} of {seeds}', f'{c.reached_g} of {seeds}', verdict(c, holds),
        ])  # fmt: skip
    return markdown_table(
        ['way', 'cost', 'of G', '95 %, seeds', '95 %, problems', 'reach s', 'of G', 'verdict'], lines
    )


def at_aim(runs: dict[str, list[Run]]) -> dict[str, np.ndarray]:
    """pass@16 of each run where its mean is s; nan where it does not reach s."""
    s = aim(runs['G'])

    def passed(run: Run) -> float:
        at, there = crossing(run.costs['responses'], run.mean(), s)
        return float(np.interp(at, run.costs['responses'], run.passed())) if there else np.nan

    return {cell: np.array([passed(run) for run in each]) for cell, each in runs.items()}


def at_aim_table(runs: dict[str, list[Run]]) -> str:
    """pass@16 where the mean is s, less G's: of the runs that reach it."""
    of, lines = at_aim(runs), []
    for cell, values in of.items():
        d = values - of['G']
        d = d[np.isfinite(d)]
        there = values[np.isfinite(values)]
        mean = f'{there.mean():.1f}' if len(there) else ''
        of_seeds = ' to '.join(f'{x:.1f}' for x in t_interval(d)) if cell != 'G' and len(d) > 1 else ''
        lines.append([name_of(cell), mean, f'{d.mean():.1f}' if of_seeds else '', of_seeds])
    return markdown_table(['way', f'pass@{SAMPLES} at s', 'less G', '95 %, seeds'], lines)


def summary_table(found: Sequence[Contrast], runs: dict[str, list[Run]]) -> str:
    """A line a way: each cost over G's with its interval by seeds, what was predicted, and what Holm leaves."""
    words = [verdict(c, holds) for c, holds in zip(found, holm([c.p for c in found], ALPHA), strict=True)]
    told = {}
    for c, word in zip(found, words, strict=True):
        low, high = np.exp(t_interval(c.logs))
        more = ''.join(
            f', {n} of {len(c.logs)} {of}reach s'
            for n, of in ((c.reached, ''), (c.reached_g, 'of G '))
            if n < len(c.logs)
        )
        told[c.cell, c.cost] = f'{np.exp(c.logs.mean()):.2f} ({low:.2f} to {high:.2f}), {word}{more}'
    passed, lines = at_aim(runs), []
    for cell, predicted in PREDICTED.items():
        d = passed[cell] - passed['G']
        d = d[np.isfinite(d)]
        low, high = t_interval(d) if len(d) > 1 else (np.nan, np.nan)
        at_s = f'{d.mean():.1f} ({low:.1f} to {high:.1f})' if len(d) > 1 else ''
        values = [*(told[cell, cost] for cost in COSTS), at_s]
        lines.append([CELLS[cell].way, *(x for pair in zip(values, predicted, strict=True) for x in pair)])
    titles = ['responses', 'tokens trained', 'seconds', f'pass@{SAMPLES} at s']
    return markdown_table(['way', *(x for title in titles for x in (title, 'predicted'))], lines)


def ends_table(runs: dict[str, list[Run]]) -> str:
    """Every cell at its end: scores and costs, means over its seeds."""
    lines = [
        [
            cell, f'{np.mean([run.mean()[-1] for run in of]):.1f}', f'{np.mean([run.passed()[-1] for run in of]):.1f}',
            *(f'{np.mean([run.costs[cost][-1] for run in of]):,.0f}' for cost in COSTS),
            f'{np.mean([run.updates for run in of]):,.0f}', f'{np.mean([run.old for run in of]):.2f}',
        ]
        for cell, of in runs.items()
    ]  # fmt: skip
    titles = [f'mean@{SAMPLES}', f'pass@{SAMPLES}', *COSTS, 'updates', 'old groups']
    return markdown_table(['cell', *titles], lines)


def runs_at(rows: Sequence[Row], rates: dict[str, float]) -> dict[str, list[Run]]:
    """The runs of each cell at its rate, in the order of the seeds."""
    [base] = [row for row in rows if row['part'] == 'base']
    by = {(row['arm'], row['rate'], row['seed']): row for row in rows if row['part'] in ('common', 'best')}
    return {cell: [run_of(by[cell, rate, seed], base) for seed in SEEDS] for cell, rate in rates.items()}


def main() -> None:
    rows = rows_in(FILE)
    if missing := wanted(rows):
        sys.exit(f'error: {len(missing)} runs are missing; run python -m studies.six_ways.run')
    best = runs_at(rows, {cell: best_rate(rows, cell) for cell in OWN})
    common = runs_at(rows, dict.fromkeys(CELLS, COMMON))
    print(f's is {aim(best["G"]):.2f}, at the common rate {aim(common["G"]):.2f}\n')
    for table in (
        contrasts_table(contrasts(best)), at_aim_table(best), ends_table(best),
        contrasts_table(contrasts(common)), at_aim_table(common), ends_table(common),
    ):  # fmt: skip
        print(table, end='\n\n')


if __name__ == '__main__':
    main()
