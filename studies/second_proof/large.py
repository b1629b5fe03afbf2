"""Parts 5 and 6 (plan_5.md, plan_6.md): which runs are wanted next, and the tables: python -m
studies.second_proof.large

Tells of a part nothing while fewer than three of its seeds have all four arms; refuses where that is so of
both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from studies.lib.contrasts import Contrast, holm, mean_interval, paired
from studies.lib.rows import Job, Row, job_of, markdown_table
from studies.second_proof.analysis import ALPHA, KS, interval, mean_of, scores, trained
from studies.second_proof.arms import (
    CONTRASTS,
    LARGE_RATES,
    LARGE_SCAN_SEED,
    LARGE_SEEDS,
    OWN_RATES,
    OWN_SEEDS,
)
from studies.second_proof.rows import accuracy, best_rate, of_part, of_today, passed, read_rows, scanned

SCAN, FINAL, HALF, BASE = 'large_scan', 'large', 'large_half', 'large_base'
OWN_SCAN, OWN = 'large_own_scan', 'large_own'  # part 6
SEEDS = {FINAL: LARGE_SEEDS, OWN: OWN_SEEDS}
RATIO = {'G': 2, 'P': 2, 'R': 1, 'RX': 2}  # of an arm's frozen rate in part 1 to R's
LEAST = 3  # seeds that have to be there


def wanted_large(rows: Sequence[Row]) -> list[Job]:
    """The runs that are missing, given those of today: R's scan and the base, then seed after seed all four
    arms.
    """
    have = set(map(job_of, rows))
    scan = [
        *(Job(SCAN, HALF, rate, LARGE_SCAN_SEED) for rate in LARGE_RATES),
        Job(FINAL, BASE, 0.0, LARGE_SCAN_SEED),
    ]
    if missing := [job for job in scan if job not in have]:
        return missing
    rate = best_rate(rows, HALF, SCAN)
    finals = [
        Job(FINAL, f'large_{arm}', times * rate, seed) for seed in LARGE_SEEDS for arm, times in RATIO.items()
    ]
    return [job for job in finals if job not in have]


def wanted_own(rows: Sequence[Row]) -> list[Job]:
    """The same for part 6: the scan of every arm, then seed after seed all four at their best rates."""
    have = set(map(job_of, rows))
    scan = [Job(OWN_SCAN, f'large_{arm}', rate, LARGE_SCAN_SEED) for arm in RATIO for rate in OWN_RATES]
    if missing := [job for job in scan if job not in have]:
        return missing
    rates = {f'large_{arm}': best_rate(rows, f'large_{arm}', OWN_SCAN) for arm in RATIO}
    finals = [Job(OWN, arm, rate, seed) for seed in OWN_SEEDS for arm, rate in rates.items()]
    return [job for job in finals if job not in have]


def seeds(rows: Sequence[Row], part: str = FINAL) -> list[int]:
    """The seeds of which every arm is there, from one base: made again on a GPU it may differ."""
    of = {
        seed: [row['base'] for row in rows if row['part'] == part and row['seed'] == seed]
        for seed in SEEDS[part]
    }
    return [seed for seed, bases in of.items() if len(bases) == len(RATIO) and len(set(bases)) == 1]


def of_arm(rows: Sequence[Row], arm: str, part: str = FINAL) -> list[Row]:
    """The arm's runs of those seeds, in their order."""
    whole = seeds(rows, part)
    return [row for row in of_part(rows, part, f'large_{arm}') if row['seed'] in whole]


def difference(
    rows: Sequence[Row], a: str, b: str, score: Callable[[Row], float], part: str = FINAL
) -> Contrast:
    """a - b, paired by seed."""
    return paired(
        f'{a} - {b}',
        [score(x) - score(y) for x, y in zip(of_arm(rows, a, part), of_arm(rows, b, part), strict=True)],
    )


def contrasts_table(rows: Sequence[Row], part: str = FINAL) -> str:
    """The contrasts of part 1, in mean@32 and pass@32; Holm over the three for mean@32."""
    means = [difference(rows, a, b, accuracy, part) for a, b in CONTRASTS]
    solved = [difference(rows, a, b, lambda row: passed(row, 32), part) for a, b in CONTRASTS]
    survives = holm([c.p for c in means], ALPHA)
    lines = [
        [
            c.name, f'{c.mean:.2f} ({interval(c.interval95)})', f'{c.p:.4f}' if c.p >= 1e-4 else '< 0.0001',
            'yes' if holds else 'no', f'{s.mean:.2f} ({interval(s.interval95)})',
        ]
        for c, s, holds in zip(means, solved, survives, strict=True)
    ]  # fmt: skip
    return markdown_table(
        [
            f'{len(seeds(rows, part))} seeds',
            'mean@32',
            'p',
            f'survives Holm over {len(CONTRASTS)}',
            'pass@32',
        ],
        lines,
    )


def arms_table(rows: Sequence[Row], part: str = FINAL) -> str:
    """Every arm's scores and what they cost: means over the seeds. The base is that of the first seeds of
    part 5.
    """
    base = of_part(rows, FINAL, BASE)
    lines = [['the base', '', f'{accuracy(base[0]):.1f}', *scores(base), '', '', '', '']]
    for arm in RATIO:
        of = of_arm(rows, arm, part)
        lines.append([
            arm, f'{of[0]["rate"]:g}', mean_interval([accuracy(row) for row in of]), *scores(of), *mean_of(of, 'responses'),
            *mean_of(of, 'updates'), trained(of), *mean_of(of, 'seconds'),
        ])  # fmt: skip
    costs = ['responses', 'updates', '10⁶ tokens trained', 'seconds']
    return markdown_table(['arm', 'rate', 'mean@32', *(f'pass@{k}' for k in KS[1:]), *costs], lines)


def scan_table(rows: Sequence[Row]) -> str:
    """R after half of its steps, by rate."""
    lines = [[f'{rate:g}', f'{accuracy(row):.1f}'] for rate, [row] in scanned(rows, HALF, SCAN).items()]
    return markdown_table(['rate', 'mean@8 of R at half its steps'], lines)


def own_scan_table(rows: Sequence[Row]) -> str:
    """Every arm after all its steps, by rate; bold is the best, starred where it is at an edge."""
    lines = []
    for arm in RATIO:
        best = best_rate(rows, f'large_{arm}', OWN_SCAN)
        star = '*' if best in (OWN_RATES[0], OWN_RATES[-1]) else ''
        means = {
            rate: f'{accuracy(row):.1f}' for rate, [row] in scanned(rows, f'large_{arm}', OWN_SCAN).items()
        }
        lines.append([arm, *(f'**{mean}**{star}' if rate == best else mean for rate, mean in means.items())])
    return markdown_table(['mean@8', *(f'{rate:g}' for rate in OWN_RATES)], lines)


TABLES: dict[str, tuple[Callable[[Sequence[Row]], str], ...]] = {
    FINAL: (contrasts_table, arms_table, scan_table),
    OWN: (partial(contrasts_table, part=OWN), partial(arms_table, part=OWN), own_scan_table),
}


def main() -> None:
    rows = of_today(read_rows())
    there = [part for part in TABLES if len(seeds(rows, part)) >= LEAST]
    if not there:
        sys.exit(
            f'error: fewer than {LEAST} seeds have all four arms; python -m studies.second_proof.run --part=5'
        )
    for part in there:
        for table in TABLES[part]:
            print(table(rows), end='\n\n')


if __name__ == '__main__':
    main()
