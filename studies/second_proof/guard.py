"""Parts 4 and 7 (plan_4.md, plan_7.md): which runs are wanted next, and the guard's figures.

    python -m studies.second_proof.guard

Refuses while a run of part 4 is missing; part 7 is told once it is whole.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from bapo_jax.tasks.countdown.problems import TEST_ROWS
from studies.lib.contrasts import Contrast, mean_interval, paired
from studies.lib.rows import Job, Row, job_of, markdown_table
from studies.second_proof.arms import GUARD, GUARD_RATE, GUARD_SCAN_SEED, GUARD_SEEDS, GUARD_STEPS
from studies.second_proof.rows import accuracy, of_today, passed, read_rows

SCAN, FINAL, BASE, AS_IS = 'guard_scan', 'guard', 'guard_base', 'guard_as_is'
MARGIN, RISE, FALL = (
    9.0,
    8.0,
    2.0,
)  # points of the mean that qualify and that the guard asks for, and of pass@8 that may be lost
SETTINGS = [arm for arm in GUARD if GUARD[arm].steps]
CD34, CD4 = slice(0, TEST_ROWS), slice(TEST_ROWS, 2 * TEST_ROWS)  # of a row's problems
KS = (8, 16, 32)  # of pass@k beside the guard, which is of pass@8 alone
NAMES = ('mean@32', *(f'pass@{k}' for k in KS))
SECOND = 2  # settings that are scanned at half the rate
ALPHA = 0.05
STAYS = 'stays as it is'  # what becomes of the quickstart, in words


class Point(NamedTuple):
    """A setting after so many steps."""

    arm: str
    rate: float
    step: int


def at(row: Row, step: int) -> Row:
    """The row's answers after that step."""
    return row if step == GUARD[row['arm']].steps else row['earlier'][str(step)]


def scores(row: Row) -> tuple[float, ...]:
    """mean@32 and pass@k of KS, in percent."""
    return accuracy(row), *(passed(row, k) for k in KS)


def base_of(rows: Sequence[Row], part: str) -> Row:
    return next(row for row in rows if row['part'] == part and row['arm'] == BASE)


def points(rows: Sequence[Row]) -> dict[Point, tuple[float, ...]]:
    """The scores of every run of the scan after each step."""
    runs = [row for row in rows if row['part'] == SCAN and row['arm'] != BASE]
    return {
        Point(row['arm'], row['rate'], step): scores(at(row, step))[:2]
        for row in runs
        for step in GUARD_STEPS
    }


def best(
    rows: Sequence[Row],
    among: Sequence[str] = SETTINGS,
    rates: Sequence[float] = (GUARD_RATE, GUARD_RATE / 2),
) -> Point:
    """The qualifying point of highest pass@8; where none qualifies, that of the highest mean."""
    least = accuracy(base_of(rows, SCAN)) + MARGIN

    def worth(of_point: tuple[float, float]) -> tuple[bool, float]:
        mean, solved = of_point
        return (True, solved) if mean >= least else (False, mean)

    there = {point: of for point, of in points(rows).items() if point.arm in among and point.rate in rates}
    return max(there, key=lambda point: worth(there[point]))


def best_settings(rows: Sequence[Row]) -> list[str]:
    """The settings that are scanned at half the rate, the best first."""
    chosen = []
    while len(chosen) < SECOND:
        left = [arm for arm in SETTINGS if arm not in chosen]
        chosen.append(best(rows, left, [GUARD_RATE]).arm)
    return chosen


def wanted_guard(rows: Sequence[Row]) -> list[Job]:
    """The runs that are missing, given those of today: two scans, then five seeds of the best setting and of
    the one as is.
    """
    have = set(map(job_of, rows))
    scan = [Job(SCAN, arm, GUARD_RATE if GUARD[arm].steps else 0.0, GUARD_SCAN_SEED) for arm in GUARD]
    if missing := [job for job in scan if job not in have]:
        return missing
    scan = [Job(SCAN, arm, GUARD_RATE / 2, GUARD_SCAN_SEED) for arm in best_settings(rows)]
    if missing := [job for job in scan if job not in have]:
        return missing
    arms = dict.fromkeys(
        [best(rows)[:2], (AS_IS, GUARD_RATE)]
    )  # once where the best is the quickstart as it is
    finals = [Job(FINAL, arm, rate, seed) for seed in GUARD_SEEDS for arm, rate in arms]
    return [job for job in [*finals, Job(FINAL, BASE, 0.0, GUARD_SEEDS[0])] if job not in have]


def again(rows: Sequence[Row]) -> Point:
    """Part 7's point (plan_7.md): the highest mean among those of the scan that keep the base's pass@8."""
    least = scores(base_of(rows, SCAN))[1]
    there = points(rows)
    return max((point for point in there if there[point][1] >= least), key=lambda point: there[point][0])


def wanted_again(rows: Sequence[Row]) -> list[Job]:
    """The runs of part 7 that are missing, given those of today; part 4's first."""
    if missing := wanted_guard(rows):
        return missing
    have, point = set(map(job_of, rows)), again(rows)
    return [job for seed in GUARD_SEEDS if (job := Job(FINAL, point.arm, point.rate, seed)) not in have]


def on(row: Row, problems: slice) -> Row:
    """The row with these problems alone."""
    return {**row, 'correct': row['correct'][problems]}


def of_point(rows: Sequence[Row], point: Point, problems: slice = CD34) -> list[Row]:
    """The five seeds of a point."""
    runs = {
        row['seed']: row for row in rows if row['part'] == FINAL and (row['arm'], row['rate']) == point[:2]
    }
    return [on(at(runs[seed], point.step), problems) for seed in GUARD_SEEDS]


def as_is() -> Point:
    return Point(AS_IS, GUARD_RATE, GUARD_STEPS[-1])


def scan_table(rows: Sequence[Row]) -> str:
    """mean@32 and pass@8 of every run of the scan after each step; the best of all is in bold."""
    there, chosen, lines = points(rows), best(rows), []
    mean, solved, *_ = scores(base_of(rows, SCAN))
    for arm, rate in dict.fromkeys(point[:2] for point in there):
        cells = []
        for step in GUARD_STEPS:
            cell = '{:.1f} / {:.1f}'.format(*there[Point(arm, rate, step)])
            cells.append(f'**{cell}**' if Point(arm, rate, step) == chosen else cell)
        lines.append([arm.removeprefix('guard_'), f'{rate:g}', *cells])
    head = [
        f'mean@32 / pass@8; the base {mean:.1f} / {solved:.1f}',
        'rate',
        *(f'step {step}' for step in GUARD_STEPS),
    ]
    return markdown_table(head, lines)


def five_seeds_table(rows: Sequence[Row]) -> str:
    """CD-34 and CD-4, means over five seeds: part 7's point once it is whole, the best setting, and the
    quickstart as it is.
    """
    base = base_of(rows, FINAL)
    lines = [
        [
            'base',
            '',
            '',
            *(f'{score:.1f}' for problems in (CD34, CD4) for score in scores(on(base, problems))),
        ]
    ]
    for arm, rate in dict.fromkeys(
        [*([] if wanted_again(rows) else [again(rows)[:2]]), best(rows)[:2], as_is()[:2]]
    ):
        for step in GUARD_STEPS:
            of = [of_point(rows, Point(arm, rate, step), problems) for problems in (CD34, CD4)]
            cells = [
                mean_interval([scores(row)[i] for row in runs]) for runs in of for i in range(1 + len(KS))
            ]
            lines.append([arm.removeprefix('guard_'), f'{rate:g}', str(step), *cells])
    head = ['setting', 'rate', 'steps', *(f'{b} {score}' for b in ('CD-34', 'CD-4') for score in NAMES)]
    return markdown_table(head, lines)


def less(rows: Sequence[Row], point: Point) -> list[Contrast]:
    """The point less the base on CD-34, five seeds: mean@32, and pass@k of KS, of which pass@8 is the
    guard's.
    """
    base = scores(on(base_of(rows, FINAL), CD34))
    runs = [scores(row) for row in of_point(rows, point)]
    return [paired(name, [run[i] - base[i] for run in runs]) for i, name in enumerate(NAMES)]


def rises(rows: Sequence[Row], point: Point) -> bool:
    return less(rows, point)[0].mean >= RISE


def holds(rows: Sequence[Row], point: Point) -> bool:
    """Whether the guard does."""
    return rises(rows, point) and less(rows, point)[1].mean >= -FALL


def outcome(rows: Sequence[Row]) -> str:
    """What plan_4.md decides: whether the guard holds, and whether the quickstart changes."""
    return told(rows, best(rows), rises(rows, best(rows)), ALPHA)


def outcome_again(rows: Sequence[Row]) -> str:
    """What plan_7.md decides: the same of one more point, at half the level. Part 4's stands beside it."""
    return told(rows, again(rows), holds(rows, again(rows)), ALPHA / 2, beside=[best(rows)])


def told(rows: Sequence[Row], point: Point, enough: bool, level: float, beside: Sequence[Point] = ()) -> str:
    """The guard's figures of the point, of those beside it and of the quickstart as it is, and what becomes
    of the quickstart; `enough` is one condition for a change, more pass@8 at the level the other.
    """
    lines = []
    for p in dict.fromkeys([point, *beside, as_is()]):
        cells = [f'{c.mean:.2f} ({c.interval95[0]:.2f} to {c.interval95[1]:.2f})' for c in less(rows, p)]
        lines.append([called(p), *cells, 'holds' if holds(rows, p) else 'does not hold'])
    table = markdown_table(['difference from the base on CD-34', *NAMES, 'guard'], lines)
    if point == as_is():
        return f'{table}\n\nThe quickstart stays as it is: it is the best of those tried.'
    pairs = zip(of_point(rows, point), of_point(rows, as_is()), strict=True)
    more = paired('', [scores(x)[1] - scores(y)[1] for x, y in pairs])
    decided = f'becomes {called(point)}' if enough and more.mean > 0 and more.p < level else STAYS
    low, high = more.interval95
    kept = less(rows, point)[1].interval95[0]
    excluded = 'excludes' if kept >= -FALL else 'does not exclude'
    setting = 'That setting' if decided != STAYS else called(point)
    return (
        f'{table}\n\nThe quickstart {decided}. {setting}, one of {len(points(rows))} tried, has '
        f'{more.mean:.2f} points ({low:.2f} to {high:.2f}) more pass@8 than `as_is`.\nIts mean@32 rises by '
        f'{less(rows, point)[0].mean:.2f}; {RISE:g} are required. The interval of its pass@8 {excluded} a '
        f'loss of more than {FALL:g} points.'
    )


def called(point: Point) -> str:
    return f'`{point.arm.removeprefix("guard_")}` at {point.rate:g}, {point.step} steps'


def main() -> None:
    rows = of_today(read_rows())
    if missing := wanted_guard(rows):
        sys.exit(
            f'error: {len(missing)} runs are missing; python -m studies.second_proof.run --part=4 goes on '
            'with them'
        )
    more = [] if wanted_again(rows) else [outcome_again(rows)]
    print(scan_table(rows), five_seeds_table(rows), outcome(rows), *more, sep='\n\n')


if __name__ == '__main__':
    main()
