"""The numbers and verdicts of plan.md, from rows.jsonl: python -m studies.second_proof.analysis

Refuses while a run is missing, so that nobody sees an outcome before the last run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from studies.lib.contrasts import Contrast, holm, mean_interval, paired
from studies.lib.rows import Row, markdown_table
from studies.second_proof.arms import CEILING_SEEDS, CONTRASTS, DECISIVE, SEEDS
from studies.second_proof.rows import (
    SCANNED,
    accuracy,
    best_rate,
    of_today,
    passed,
    read_rows,
    scanned,
    wanted,
)

GUARDED = (('R', 'P'), ('R', 'G'))
ALPHA, RELEVANT, GUARD = 0.05, 1.0, -2.0  # points
KS = (1, 2, 4, 8, 16, 32)  # of pass@k
EDGES = (
    0,
    1,
    3,
    7,
    16,
    26,
    33,
)  # right answers of 32 from the base: 0, to 5 %, to 20 %, to 50 %, to 80 %, above
HISTORY = {  # what is known of a prompt: responses asked for and right ones, from … to
    'nothing': (0, 0, 0), '0 of 8': (8, 0, 0), '1 of 8': (8, 1, 1), '2 to 5 of 8': (8, 2, 5), '6 to 8 of 8': (8, 6, 8),
    '0 of 16': (16, 0, 0), '1 of 16': (16, 1, 1),
}  # fmt: skip


def verdict(contrast: Contrast, rejected: bool) -> str:
    """In the words of the plan."""
    if rejected and abs(contrast.mean) >= RELEVANT:
        return 'helps' if contrast.mean > 0 else 'harms'
    if -RELEVANT <= contrast.interval90[0] and contrast.interval90[1] <= RELEVANT:
        return 'no relevant effect, though not 0' if rejected else 'no relevant effect'
    return 'open'


def of_arm(rows: Sequence[Row], arm: str, seeds: Sequence[int] = SEEDS) -> list[Row]:
    """The arm's runs of the twelve seeds, or C's, in the order of the seeds."""
    of = {row['seed']: row for row in rows if row['part'] in ('final', 'ceiling') and row['arm'] == arm}
    return [of[seed] for seed in seeds]


def difference(
    rows: Sequence[Row],
    a: str,
    b: str,
    score: Callable[[Row], float] = accuracy,
    seeds: Sequence[int] = SEEDS,
) -> Contrast:
    """a - b, paired by seed."""
    pairs = zip(of_arm(rows, a, seeds), of_arm(rows, b, seeds), strict=True)
    return paired(f'{a} - {b}', [score(x) - score(y) for x, y in pairs])


def at_equal_seconds(rows: Sequence[Row], a: str, b: str) -> tuple[str, Contrast]:
    """a - b where the slower arm has taken the seconds that the other took in all; which arm that is, and at
    which step.
    """
    slower, other = next(
        ((x, y) for x, y in ((a, b), (b, a)) if y in of_arm(rows, x)[0]['earlier']), ('', '')
    )

    def score(row: Row) -> float:
        return accuracy(row['earlier'][other] if row['arm'] == slower else row)

    note = (
        f'{slower} at step {of_arm(rows, slower)[0]["earlier"][other]["step"]}'
        if slower
        else 'both at their last steps'
    )
    return note, difference(rows, a, b, score)


def rates_table(rows: Sequence[Row], arms: Sequence[str] = SCANNED, part: str = 'scan') -> str:
    """mean@8 of every run of a scan, seed after seed, by arm and rate. The best rate of an arm is in bold."""
    scans = {arm: scanned(rows, arm, part) for arm in arms}
    rates = sorted({rate for scan in scans.values() for rate in scan})
    lines = []
    for arm, scan in scans.items():
        cells = [', '.join(f'{accuracy(row):.1f}' for row in scan.get(rate, ())) or '-' for rate in rates]
        best = rates.index(best_rate(rows, arm, part))
        lines.append([arm, *(f'**{cell}**' if i == best else cell for i, cell in enumerate(cells))])
    return markdown_table(['mean@8 at rate', *(f'{rate:g}' for rate in rates)], lines)


def primary_table(rows: Sequence[Row]) -> str:
    contrasts = [difference(rows, a, b) for a, b in CONTRASTS]
    rejected = holm([c.p for c in contrasts], ALPHA)
    lines = [
        [c.name, f'{c.mean:.2f}', interval(c.interval95), interval(c.interval90), f'{c.p:.5f}', verdict(c, r)]
        for c, r in zip(contrasts, rejected, strict=True)
    ]
    return markdown_table(['mean@32', 'points', '95 % interval', '90 % interval', 'p', 'verdict'], lines)


def guard_table(rows: Sequence[Row]) -> str:
    contrasts = [difference(rows, a, b, lambda row: passed(row, 32)) for a, b in GUARDED]
    lines = [
        [c.name, f'{c.mean:.2f}', interval(c.interval95), 'holds' if c.mean > GUARD else 'does not hold']
        for c in contrasts
    ]
    return markdown_table(['pass@32', 'points', '95 % interval', f'the guard (above {GUARD:g})'], lines)


def arms_table(rows: Sequence[Row]) -> str:
    """Every arm's scores and what they cost: means over its seeds."""
    base = [row for row in rows if row['part'] == 'base']
    lines = [
        ['the base', '', f'{np.mean([accuracy(r) for r in base]):.1f}', *scores(base), '', '', '', '', '']
    ]
    for arm in DECISIVE:
        if arm != 'base':
            of = of_arm(rows, arm, CEILING_SEEDS if arm == 'C' else SEEDS)
            start, end = np.mean([row['entropy'] for row in of], axis=0)
            lines.append([
                arm, f'{of[0]["rate"]:g}', mean_interval([accuracy(r) for r in of]), *scores(of), *mean_of(of, 'responses'),
                *mean_of(of, 'updates'), trained(of), *mean_of(of, 'seconds'), f'{start:.3f} → {end:.3f}',
            ])  # fmt: skip
    costs = ['responses', 'updates', '10⁶ tokens trained', 'seconds', 'entropy']
    head = ['arm', 'rate', 'mean@32', *(f'pass@{k}' for k in KS[1:]), *costs]
    return markdown_table(head, lines)


def exploratory_table(rows: Sequence[Row]) -> str:
    ceiling = [difference(rows, 'C', other, seeds=CEILING_SEEDS) for other in ('R', 'P')]
    lines = [
        [f'at equal steps, {len(CEILING_SEEDS)} seeds', c.name, f'{c.mean:.2f}', interval(c.interval95)]
        for c in ceiling
    ]
    for a, b in CONTRASTS:
        note, c = at_equal_seconds(rows, a, b)
        lines.append([f'at equal seconds: {note}', c.name, f'{c.mean:.2f}', interval(c.interval95)])
    return markdown_table(['exploratory', 'contrast', 'points', '95 % interval'], lines)


def polarisation_table(rows: Sequence[Row]) -> str:
    """Problems sorted by the first answers of the base; its second answers, and each arm's, on the same
    problems.
    """
    by, again = (np.array(row['correct']) for row in rows if row['part'] == 'base')
    arms = {
        'the base again': again[None],
        **{a: np.array([r['correct'] for r in of_arm(rows, a)]) for a in ('G', 'P', 'R', 'RX')},
    }
    lines = []
    for low, high in zip(EDGES, EDGES[1:]):
        of_bin = (by >= low) & (by < high)
        if not of_bin.any():
            continue
        cells = [
            f'{100 * c[:, of_bin].mean() / 32:.1f} / {100 * (c[:, of_bin] == 0).mean():.0f}'
            for c in arms.values()
        ]
        lines.append([f'{low} to {high - 1} of 32', str(of_bin.sum()), *cells])
    return markdown_table(
        ['right at first', 'problems', *(f'{name}: mean % / none of 32 right, %' for name in arms)], lines
    )


def moves_table(rows: Sequence[Row]) -> str:
    """P(mixed) of a prompt's next group by what is known of it, with the number of groups, in the runs that
    kept their rollouts.
    """
    lines = []
    for known, (asked, low, high) in HISTORY.items():
        cells = []
        for arm, retried in (('G', 0), ('R', 0), ('RX', 0), ('RX', 1)):
            moves = [m for row in of_arm(rows, arm) for m in row.get('moves', ())]
            of = [m for m in moves if m[0] == asked and low <= m[1] <= high and m[2] == retried]
            total, mixed = sum(m[4] for m in of), sum(m[4] for m in of if 0 < m[3] < 8)
            cells.append(f'{mixed / total:.2f} of {total}' if total else '-')
        lines.append([known, *cells])
    return markdown_table(['right so far', 'G, fresh', 'R, fresh', 'RX, fresh', 'RX, asked again'], lines)


def scores(rows: Sequence[Row]) -> list[str]:
    return [f'{np.mean([passed(row, k) for row in rows]):.1f}' for k in KS[1:]]


def trained(rows: Sequence[Row]) -> str:
    """10⁶ tokens of prompts and responses that optimizer steps were made on, those of a further pass once
    more.
    """
    return f'{np.mean([row["tokens"] * row["changes"].get("learner.passes_per_batch", 1) for row in rows]) / 1e6:.1f}'


def mean_of(rows: Sequence[Row], name: str) -> list[str]:
    return [f'{np.mean([row[name] for row in rows]):,.0f}']


def interval(ends: tuple[float, float]) -> str:
    return f'{ends[0]:.2f} to {ends[1]:.2f}'


def main() -> None:
    rows = of_today(read_rows())
    if missing := wanted(rows):
        sys.exit(
            f'error: {len(missing)} runs are missing; python -m studies.second_proof.run goes on with them'
        )
    for table in (
        rates_table,
        primary_table,
        guard_table,
        arms_table,
        exploratory_table,
        polarisation_table,
        moves_table,
    ):
        print(table(rows), end='\n\n')


if __name__ == '__main__':
    main()
