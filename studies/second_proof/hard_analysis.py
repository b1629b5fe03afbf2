"""The tables of plan_2.md, from rows.jsonl: python -m studies.second_proof.hard_analysis

Refuses while a run of either part is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np

from studies.lib.contrasts import Contrast, holm, mean_interval, paired
from studies.lib.rows import Row, markdown_table
from studies.second_proof.analysis import ALPHA, KS, interval, mean_of, of_arm, scores, trained
from studies.second_proof.arms import HARD_FINAL_SEEDS, KINDS, SEARCH, SEARCH_SEEDS
from studies.second_proof.hard import SCAN, best_setting, wanted_hard
from studies.second_proof.rows import (
    accuracy,
    best_rate,
    of_part,
    of_today,
    passed,
    read_rows,
    scanned,
    wanted,
)


def chosen(rows: Sequence[Row]) -> dict[str, str]:
    """By kind, the setting that had five seeds."""
    return {kind: best_setting(rows, kind, best_rate(rows, 'R')) for kind in KINDS}


def scan_table(rows: Sequence[Row]) -> str:
    """Every setting and rate of the two scans: means over three seeds."""
    lines = []
    for kind, settings in KINDS.items():
        for setting in settings:
            for rate, of in scanned(rows, setting, SCAN).items():
                asked, improved, pooled = (
                    sum(row[name] for row in of) for name in ('reevaluated', 'improved', 'pooled')
                )
                given = [row['given_share'] for row in of if row['given_share']]
                lines.append([
                    kind, setting, f'{rate:g}', mean_interval([accuracy(row) for row in of]),
                    mean_interval([passed(row, 8) for row in of]), *mean_of(of, 'responses'), trained(of),
                    f'{improved / asked:.2f} of {asked}' if asked else '-', str(pooled) if kind == 'posterior' else '-',
                    f'{np.mean([g[0] for g in given]):.2f} → {np.mean([g[-1] for g in given]):.2f}' if given else '-',
                    f'{np.mean([row["entropy"][-1] for row in of]):.3f}',
                ])  # fmt: skip
    costs = [
        'responses',
        '10⁶ tokens trained',
        'asked again: for X2',
        'pooled',
        'given',
        'entropy at the end',
    ]
    return markdown_table(['kind', 'setting', 'rate', 'mean@8', 'pass@8', *costs], lines)


def kind_contrast(rows: Sequence[Row], setting: str, other: str, score: Callable[[Row], float]) -> Contrast:
    """The setting less an arm of part 1, paired by the five seeds."""
    pairs = zip(of_part(rows, 'hard', setting), of_arm(rows, other, HARD_FINAL_SEEDS), strict=True)
    return paired(f'{setting} - {other}', [score(x) - score(y) for x, y in pairs])


def kinds_table(rows: Sequence[Row]) -> str:
    """The best of each kind against G, P and R; Holm over the kinds for mean@32 less R."""
    best = chosen(rows)
    against_r = [kind_contrast(rows, setting, 'R', accuracy) for setting in best.values()]
    survives = dict(zip(best, holm([c.p for c in against_r], ALPHA), strict=True))
    lines = []
    for kind, setting in best.items():
        for other in ('G', 'P', 'R'):
            mean, solved = (
                kind_contrast(rows, setting, other, score)
                for score in (accuracy, lambda row: passed(row, 32))
            )
            holds = ('yes' if survives[kind] else 'no') if other == 'R' else ''
            lines.append([
                kind, mean.name, f'{mean.mean:.2f} ({interval(mean.interval95)})', f'{mean.p:.4f}', holds,
                f'{solved.mean:.2f} ({interval(solved.interval95)})',
            ])  # fmt: skip
    return markdown_table(
        ['kind', 'contrast', 'mean@32', 'p', f'survives Holm over {len(best)}', 'pass@32'], lines
    )


def costs_table(rows: Sequence[Row]) -> str:
    """Scores of the same settings, and what they cost: means over the five seeds."""
    lines = []
    for kind, setting in chosen(rows).items():
        of = of_part(rows, 'hard', setting)
        lines.append([
            kind, f'{setting}, {of[0]["rate"]:g}', mean_interval([accuracy(row) for row in of]), *scores(of),
            *mean_of(of, 'responses'), trained(of), *mean_of(of, 'seconds'),
        ])  # fmt: skip
    solved = [f'pass@{k}' for k in KS[1:]]
    return markdown_table(
        ['kind', 'setting, rate', 'mean@32', *solved, 'responses', '10⁶ tokens trained', 'seconds'], lines
    )


def search_table(rows: Sequence[Row]) -> str:
    """From the base that searches: scores, lengths, and what became of hard prompts."""
    lines = []
    for arm in SEARCH:
        of = of_part(rows, 'search', arm)
        trained = SEARCH[arm].steps > 0
        asked, improved = (
            sum(row[name] for row in of) if trained else 0 for name in ('reevaluated', 'improved')
        )
        lengths = [np.mean([row['length'][i] for row in of]) for i in (0, 1)] if trained else []
        lines.append([
            arm, mean_interval([accuracy(row) for row in of]), *scores(of), ' → '.join(f'{x:.0f}' for x in lengths),
            f'{improved / asked:.2f} of {asked}' if asked else '-', *(mean_of(of, 'responses') if trained else ['']),
        ])  # fmt: skip
    head = [
        'arm',
        'mean@32',
        *(f'pass@{k}' for k in KS[1:]),
        'tokens a response',
        'asked again: for X2',
        'responses',
    ]
    return markdown_table(head, lines)


def search_contrasts(rows: Sequence[Row]) -> str:
    lines = []
    for a, b in (('search_RX', 'search_R'), ('search_R', 'search_G')):
        for name, score in (('mean@32', accuracy), ('pass@32', lambda row: passed(row, 32))):
            c = paired(
                f'{a} - {b}',
                [score(x) - score(y) for x, y in zip(of_part(rows, 'search', a), of_part(rows, 'search', b))],
            )
            lines.append([c.name, name, f'{c.mean:.2f}', interval(c.interval95)])
    return markdown_table(
        [f'from the base that searches, {len(SEARCH_SEEDS)} seeds', 'of', 'points', '95 % interval'], lines
    )


def main() -> None:
    rows = of_today(read_rows())
    if missing := [*wanted(rows), *wanted_hard(rows)]:
        sys.exit(
            f'error: {len(missing)} runs are missing; python -m studies.second_proof.run goes on with them, '
            'or its --part=2'
        )
    for table in (scan_table, kinds_table, costs_table, search_table, search_contrasts):
        print(table(rows), end='\n\n')


if __name__ == '__main__':
    main()
