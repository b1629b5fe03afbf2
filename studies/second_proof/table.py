"""Part 3 (plan_3.md): which runs are wanted next, and the table: python -m studies.second_proof.table

Refuses while a run is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from bapo_jax.tasks.countdown.problems import TEST_ROWS
from studies.lib.contrasts import mean_interval, paired
from studies.lib.rows import Job, Row, job_of, markdown_table
from studies.second_proof.analysis import rates_table
from studies.second_proof.arms import TABLE, TABLE_RATES, TABLE_SCAN_SEEDS, TABLE_SEEDS
from studies.second_proof.rows import accuracy, best_rate, of_part, of_today, passed, read_rows, scanned

SCAN = 'table_scan'
METHODS = [arm for arm in TABLE if TABLE[arm].steps]
MARKS = "`*`: a rate at an edge of those tried. `†`: seconds of another processor than GRPO's."
BENCHMARKS = {'CD-34': slice(0, TEST_ROWS), 'CD-4': slice(TEST_ROWS, 2 * TEST_ROWS)}  # of a row's problems


def wanted_table(rows: Sequence[Row]) -> list[Job]:
    """The runs that are missing, given those of today: the scan, then every method at its best rate, and the
    base.
    """
    have = set(map(job_of, rows))
    scan = [
        Job(SCAN, arm, rate, seed) for seed in TABLE_SCAN_SEEDS for arm in METHODS for rate in TABLE_RATES
    ]
    if missing := [job for job in scan if job not in have]:
        return missing
    finals = [Job('table', arm, best_rate(rows, arm, SCAN), seed) for seed in TABLE_SEEDS for arm in METHODS]
    return [job for job in [*finals, Job('table', 'table_base', 0.0, TABLE_SEEDS[0])] if job not in have]


def on(row: Row, benchmark: str) -> Row:
    """The row with the problems of one benchmark alone."""
    return {**row, 'correct': row['correct'][BENCHMARKS[benchmark]]}


def rate_of(rows: Sequence[Row], arm: str) -> str:
    """The method's best rate; a star says that it is at an edge of those tried."""
    rate, tried = best_rate(rows, arm, SCAN), list(scanned(rows, arm, SCAN))
    return f'{rate:g}{"*" if rate in (tried[0], tried[-1]) else ""}'


def table(rows: Sequence[Row]) -> str:
    lines, grpo = [], of_part(rows, 'table', 'table_grpo')
    for arm in ('table_base', *METHODS):
        of, trained = of_part(rows, 'table', arm), TABLE[arm].steps > 0
        cells = [arm.removeprefix('table_'), rate_of(rows, arm) if trained else '']
        for benchmark in BENCHMARKS:
            cells += [
                mean_interval([score(on(row, benchmark)) for row in of])
                for score in (accuracy, lambda row: passed(row, 32))
            ]
        if trained:
            less = (
                paired('', [accuracy(x) - accuracy(y) for x, y in zip(of, grpo, strict=True)])
                if arm != 'table_grpo'
                else None
            )
            cells += [
                f'{less.mean:.1f} ({less.interval95[0]:.1f} to {less.interval95[1]:.1f})' if less else ''
            ]
            cells += [
                f'{np.mean([row[name] for row in of]) / unit:,.{digits}f}'
                for name, unit, digits in (('responses', 1, 0), ('tokens', 1e6, 1), ('seconds', 1, 0))
            ]
            cells[-1] += '' if {row['cpu'] for row in of} == {row['cpu'] for row in grpo} else '†'
        lines.append([*cells, *[''] * (10 - len(cells))])
    head = ['method', 'rate', *(f'{b} {score}' for b in BENCHMARKS for score in ('mean@32', 'pass@32')), 'mean@32 less GRPO, both',
            'responses', '10⁶ tokens in batches', 'seconds']  # fmt: skip
    return f'{markdown_table(head, lines)}\n\n{MARKS}'


def scan_table(rows: Sequence[Row]) -> str:
    """mean@8 of every run of the scan, by method and rate."""
    return rates_table(rows, METHODS, SCAN).replace('| table_', '| ')


def main() -> None:
    rows = of_today(read_rows())
    if missing := wanted_table(rows):
        sys.exit(
            f'error: {len(missing)} runs are missing; python -m studies.second_proof.run --part=3 goes on '
            'with them'
        )
    print(table(rows), scan_table(rows), sep='\n\n')


if __name__ == '__main__':
    main()
