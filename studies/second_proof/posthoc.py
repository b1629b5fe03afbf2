"""What the rows were asked after every outcome was known: python -m studies.second_proof.posthoc

No plan has these numbers, and nothing corrects for how many were looked at: they say what a planned contrast
may have measured, and carry no verdict. Refuses while a run of part 1 is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import comb

from studies.first_proof.grid import BASES, RATE
from studies.first_proof.restated import all_rows, contrast_of
from studies.lib.contrasts import Contrast, paired
from studies.lib.rows import Row, markdown_table
from studies.second_proof import analysis, large
from studies.second_proof.arms import ARMS, CEILING_SEEDS, PROMPTS, RESPONSES, SEEDS
from studies.second_proof.rows import accuracy, of_part, of_today, passed, read_rows, wanted

EQUAL_RATES = (('RX', 'G'), ('RX', 'P'))  # G, P and RX ran at one rate, R at half of it
FIRST = (('weak_four', 'problems of 4 numbers'), ('weak', 'problems of 3 or 4'))
POLICIES = ('0.8M', '12.7M')
WORTH = (0, 1, 5, 10)  # fresh mixed groups that one group of X2 may be worth
SHOWN = ('G', 'P', 'R', 'RX')


def solved(row: Row) -> float:
    return passed(row, 32)


def of_arm(rows: Sequence[Row], policy: str, arm: str) -> list[Row]:
    """The arm's runs with the smaller policy, part 1, or with the larger one, part 5."""
    return analysis.of_arm(rows, arm) if policy == '0.8M' else large.of_arm(rows, arm)


def bases(rows: Sequence[Row], policy: str) -> list[Row]:
    return (
        [row for row in rows if row['part'] == 'base']
        if policy == '0.8M'
        else of_part(rows, large.FINAL, large.BASE)
    )


def one_rate(rows: Sequence[Row]) -> float:
    """The learning rate of all these runs. Raises ValueError where they have several."""
    [rate] = {float(row['rate']) for row in rows}
    return rate


def told(c: Contrast, digits: int = 2) -> str:
    return f'{c.mean:.{digits}f} ({c.interval95[0]:.{digits}f} to {c.interval95[1]:.{digits}f})'


def equal_rates_table(rows: Sequence[Row]) -> str:
    """Replay beside GRPO and beside P at one learning rate; and with as many updates, from the first study."""
    lines = []
    for policy in POLICIES:
        for a, b in EQUAL_RATES:
            x, y = of_arm(rows, policy, a), of_arm(rows, policy, b)
            cells = [
                told(paired('', [score(i) - score(j) for i, j in zip(x, y, strict=True)]))
                for score in (accuracy, solved)
            ]
            lines.append([f'{a} - {b}, {policy} parameters', f'{one_rate([*x, *y]):g}', str(len(x)), *cells])
    for base, words in FIRST:
        mean, most, seeds = contrast_of(all_rows(), base, 'wide', 'x1_only_four_updates')
        name = f'first study, `wide` - `x1_only_four_updates`, {words}'
        lines.append([name, f'{float(BASES[base][RATE]):g}', str(seeds), told(mean), told(most)])
    return markdown_table(['post hoc, both at one rate', 'rate', 'seeds', 'mean@32', 'pass@32'], lines)


def percent_table(rows: Sequence[Row]) -> str:
    """Contrasts in percent of the second arm's mean@32, as the paper states its own. R ran at half the rate
    of the others.
    """
    lines = []
    for a, b, paper in (
        ('R', 'G', '+12.5, BAPO over GRPO'),
        ('RX', 'G', '+12.5, BAPO over GRPO'),
        ('R', 'RX', '-21, without X2'),
    ):
        shares = []
        for policy in POLICIES:
            pairs = zip(of_arm(rows, policy, a), of_arm(rows, policy, b), strict=True)
            shares.append(told(paired('', [100 * (accuracy(x) / accuracy(y) - 1) for x, y in pairs]), 1))
        lines.append([f'{a} / {b} - 1, %', *shares, paper])
    return markdown_table(
        ['post hoc, mean@32', *POLICIES, 'the paper, averages over other tasks and policies'], lines
    )


def dose_table(rows: Sequence[Row]) -> str:
    """How much of RX is X2, and for what share of its responses."""
    lines = {'of the groups trained on, X2, %': [], 'of the responses, asked of hard prompts, %': []}
    groups, responses = lines.values()
    for policy in POLICIES:
        of = of_arm(rows, policy, 'RX')
        groups.append(f'{100 * sum(r["x2"] for r in of) / sum(r["x1"] + r["x2"] + r["x3"] for r in of):.2f}')
        responses.append(f'{np.mean([100 * RESPONSES * r["reevaluated"] / r["responses"] for r in of]):.1f}')
    hard = hard_a_step(rows)
    lines['hard prompts a step'] = [f'{hard:.1f}', '-']
    lines[f'steps of them that the {PROMPTS} places of B_bad hold'] = [f'{PROMPTS / hard:.1f}', '-']
    return markdown_table(['of RX', *POLICIES], [[name, *cells] for name, cells in lines.items()])


def hard_a_step(rows: Sequence[Row]) -> float:
    """Fresh groups of RX with no more than one right response, c1 = 1/8, a step: those enter B_bad."""
    fresh = [move for row in analysis.of_arm(rows, 'RX') for move in row.get('moves', ()) if not move[2]]
    return PROMPTS * sum(m[4] for m in fresh if m[3] <= 1) / sum(m[4] for m in fresh)


def allowed_table(rows: Sequence[Row]) -> str:
    """RX - R as the ceiling would have it, by what a group of X2 is worth: (C - R) / log(fresh mixed groups
    of C over R's) is the slope, and RX has the fresh mixed groups of its 218 steps and those of X2.
    """
    ceiling = analysis.difference(rows, 'C', 'R', seeds=CEILING_SEEDS)
    slope = np.array([ceiling.mean, *ceiling.interval95]) / np.log(
        mixed_groups(rows, 'C') / mixed_groups(rows, 'R', CEILING_SEEDS)
    )
    lines = []
    for worth in WORTH:
        has = mixed_groups(rows, 'RX') + worth * ARMS['RX'].steps * np.mean(
            [r['x2'] for r in analysis.of_arm(rows, 'RX')]
        )
        mean, *ends = slope * np.log(has / mixed_groups(rows, 'R'))
        lines.append([str(worth), f'{mean:.2f} ({min(ends):.2f} to {max(ends):.2f})'])
    return markdown_table(
        ['a group of X2 is worth so many fresh mixed ones', 'RX - R by the slope of C - R'], lines
    )


def mixed_groups(rows: Sequence[Row], arm: str, seeds: Sequence[int] = ()) -> float:
    """Fresh mixed groups of a run of the arm."""
    of = analysis.of_arm(rows, arm, seeds or (CEILING_SEEDS if arm == 'C' else SEEDS))
    return ARMS[arm].steps * float(np.mean([row['x1'] for row in of]))


def all_alike(right: Sequence[int], samples: int, wrong: bool) -> np.ndarray:
    """P(a group drawn without replacement from these answers is all wrong, or all right), a problem."""
    c = np.asarray(right)
    return comb(samples - c if wrong else c, RESPONSES) / comb(samples, RESPONSES)


def failed_first(rows: Sequence[Row], policy: str, arm: str) -> tuple[float, float]:
    """P(a group is mixed) after the whole run: of a problem whose group at the base was all wrong, and of any
    problem.

    Unbiased numerators and denominators, from 32 answers each, which are independent.
    """
    weights = np.mean(
        [all_alike(row['correct'], row['samples'], wrong=True) for row in bases(rows, policy)], axis=0
    )
    runs = of_arm(rows, policy, arm)
    mixed = 1 - np.mean(
        [sum(all_alike(r['correct'], r['samples'], w) for w in (True, False)) for r in runs], axis=0
    )
    return float(weights @ mixed / weights.sum()), float(mixed.mean())


def failed_table(rows: Sequence[Row]) -> str:
    lines = []
    for policy in POLICIES:
        for i, words in enumerate(('failed 8 of 8 at the base', 'any')):
            lines.append([policy, words, *(f'{failed_first(rows, policy, arm)[i]:.2f}' for arm in SHOWN)])
    return markdown_table(['P(mixed) after the whole run', 'test problem', *SHOWN], lines)


def price_table(_: Sequence[Row] = ()) -> str:
    """What X3 adds in the quickstart's setting, 100 steps of the first study, with X2 and without."""
    lines = []
    for a, b in (('wide_no_x2', 'x1_only'), ('wide', 'no_x3')):
        for benchmark, words in (('cd34', 'CD-34'), ('cd4', 'CD-4')):
            mean, most, seeds = contrast_of(all_rows(), 'quickstart', a, b, benchmark)
            lines.append([f'`{a}` - `{b}`', words, str(seeds), told(mean), told(most)])
    return markdown_table(
        ["post hoc, from the quickstart's base", 'on', 'seeds', 'mean@32', 'pass@32'], lines
    )


TABLES: dict[str, tuple[Callable[[Sequence[Row]], str], ...]] = {
    'Post hoc: replay at one learning rate': (equal_rates_table,),
    'Post hoc: what RX - R could show of X2': (dose_table, allowed_table, failed_table),
    "Post hoc: beside the paper's percent": (percent_table,),
    'Post hoc: what X3 costs in the quickstart': (price_table,),
}


def main() -> None:
    rows = of_today(read_rows())
    if missing := wanted(rows):
        sys.exit(
            f'error: {len(missing)} runs are missing; python -m studies.second_proof.run goes on with them'
        )
    for tables in TABLES.values():
        for table in tables:
            print(table(rows), end='\n\n')


if __name__ == '__main__':
    main()
