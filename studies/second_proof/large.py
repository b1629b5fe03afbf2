"""Part 5 (plan_5.md): which runs are wanted next, and the tables, from rows.jsonl: python -m studies.second_proof.large

Refuses while fewer than three seeds have all four arms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from studies.contrasts import Contrast, holm, mean_interval, paired
from studies.first_proof.rows import markdown_table
from studies.second_proof.analysis import ALPHA, KS, interval, mean_of, scores, trained
from studies.second_proof.arms import CONTRASTS, LARGE_RATES, LARGE_SCAN_SEED, LARGE_SEEDS, Job
from studies.second_proof.rows import Row, accuracy, best_rate, job_of, of_part, of_today, passed, read_rows, scanned

SCAN, FINAL, HALF, BASE = 'large_scan', 'large', 'large_half', 'large_base'
RATIO = {'G': 2, 'P': 2, 'R': 1, 'RX': 2}  # of an arm's frozen rate in part 1 to R's
LEAST = 3  # seeds that have to be there


def wanted_large(rows: Sequence[Row]) -> list[Job]:
    """The runs that are missing, given those of today: R's scan and the base, then seed after seed all four arms."""
    have = set(map(job_of, rows))
    scan = [*(Job(SCAN, HALF, rate, LARGE_SCAN_SEED) for rate in LARGE_RATES), Job(FINAL, BASE, 0.0, LARGE_SCAN_SEED)]
    if missing := [job for job in scan if job not in have]:
        return missing
    rate = best_rate(rows, HALF, SCAN)
    finals = [Job(FINAL, f'large_{arm}', times * rate, seed) for seed in LARGE_SEEDS for arm, times in RATIO.items()]
    return [job for job in finals if job not in have]


def seeds(rows: Sequence[Row]) -> list[int]:
    """The seeds of which every arm is there, from one base: made again on a GPU it may differ."""
    of = {seed: [row['base'] for row in rows if row['part'] == FINAL and row['seed'] == seed] for seed in LARGE_SEEDS}
    return [seed for seed, bases in of.items() if len(bases) == len(RATIO) and len(set(bases)) == 1]


def of_arm(rows: Sequence[Row], arm: str) -> list[Row]:
    """The arm's runs of those seeds, in their order."""
    whole = seeds(rows)
    return [row for row in of_part(rows, FINAL, f'large_{arm}') if row['seed'] in whole]


def difference(rows: Sequence[Row], a: str, b: str, score: Callable[[Row], float]) -> Contrast:
    """a - b, paired by seed."""
    return paired(f'{a} - {b}', [score(x) - score(y) for x, y in zip(of_arm(rows, a), of_arm(rows, b), strict=True)])


def contrasts_table(rows: Sequence[Row]) -> str:
    """The contrasts of part 1, in mean@32 and pass@32; Holm over the three for mean@32."""
    means = [difference(rows, a, b, accuracy) for a, b in CONTRASTS]
    solved = [difference(rows, a, b, lambda row: passed(row, 32)) for a, b in CONTRASTS]
    survives = holm([c.p for c in means], ALPHA)
    lines = [
        [
            c.name, f'{c.mean:.2f} ({interval(c.interval95)})', f'{c.p:.4f}', 'yes' if holds else 'no',
            f'{s.mean:.2f} ({interval(s.interval95)})',
        ]
        for c, s, holds in zip(means, solved, survives, strict=True)
    ]  # fmt: skip
    return markdown_table([f'{len(seeds(rows))} seeds', 'mean@32', 'p', f'survives Holm over {len(CONTRASTS)}', 'pass@32'], lines)


def arms_table(rows: Sequence[Row]) -> str:
    """Every arm's scores and what they cost: means over the seeds."""
    base = of_part(rows, FINAL, BASE)
    lines = [['the base', '', f'{accuracy(base[0]):.1f}', *scores(base), '', '', '', '']]
    for arm in RATIO:
        of = of_arm(rows, arm)
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


def main() -> None:
    rows = of_today(read_rows())
    if len(there := seeds(rows)) < LEAST:
        sys.exit(f'error: {len(there)} seeds have all four arms, {LEAST} are needed; python -m studies.second_proof.run --part=5')
    for table in (scan_table, contrasts_table, arms_table):
        print(table(rows), end='\n\n')


if __name__ == '__main__':
    main()
