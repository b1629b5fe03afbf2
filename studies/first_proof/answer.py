"""Numbers and table of the section "The answer": each base's comparisons in one line, and the facts that its
prose names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from studies.first_proof.rows import (
    Rows,
    accuracies,
    held_out,
    less_as_text,
    of,
    percent,
    spent,
    spread,
    spread_of,
)
from studies.lib.rows import markdown_table

TRAINED_ON = {  # base -> what its runs train on
    'weak_four': '4 numbers',
    'four_numbers': '4 numbers',
    'weak_g4': '3 or 4, groups of 4',
    'weak': '3 or 4',
    'quickstart': '3 or 4',
    'three_numbers': '3 numbers',
}
TOGETHER = (
    'weak_g4',
    'weak',
    'quickstart',
)  # with X2 and X3 each off, trained and scored on the same kind of problems


def mean_of(rows: Rows, name: str, diagnostic: str) -> float:
    """Mean of a diagnostic over the steps and seeds of a setting."""
    return float(np.mean([row['diagnostics'][diagnostic] for row in of(rows, name)]))


def mixed(rows: Rows, name: str = 'wide') -> float:
    """Share of the fresh groups that hold right and wrong responses, under the range filter."""
    return mean_of(rows, name, 'bapo/x1_groups') / of(rows, name)[0]['changes'].get(
        'learner.batch_groups', 64
    )


def improved(rows: Rows, name: str = 'wide') -> float:
    """Share of the re-evaluated hard prompts that gave a group of X2."""
    return mean_of(rows, name, 'bapo/improved') / mean_of(rows, name, 'bapo/reevaluated')


def answer_table(rows: Rows) -> str:
    """One line for every base, those with the fewest mixed groups first, and one for those of TOGETHER."""
    titles = [
        'from', 'problems of', 'scored on', 'before', 'GRPO', 'fresh groups mixed, %', 're-evaluated '
        'hard ones that are, %',
        'seeds', '`wide` less GRPO: equal steps', 'equal responses', 'equal seconds', '`wide_no_x2` '
        'less GRPO: equal steps and responses',
        'X3 adds', 'X2 adds: equal steps', 'equal responses',
    ]  # fmt: skip

    def compared(mine: Rows) -> list[str]:
        return [
            *(less_as_text(mine, 'wide', 'grpo', at) for at in ('steps', 'responses', 'seconds')),
            less_as_text(mine, 'wide_no_x2', 'grpo'),
            less_as_text(mine, 'wide', 'no_x3'),
            *(less_as_text(mine, 'wide', 'wide_no_x2', at) for at in ('steps', 'responses')),
        ]

    def line(base: str, mine: Rows) -> list[str]:
        kind = held_out(mine)
        before = np.mean([row['curve'][0][f'{b}/mean'] for row in mine for b in kind])
        grpo = spread(*spread_of(accuracies(mine, 'grpo', kind)))
        benchmarks, seeds = ' + '.join(Path(b).stem for b in kind), str(len(of(mine, 'wide')))
        cells = [
            base,
            TRAINED_ON[base],
            benchmarks,
            percent(before),
            grpo,
            percent(mixed(mine)),
            percent(improved(mine)),
            seeds,
        ]
        return cells + compared(mine)

    of_base = {base: [row for row in rows if row['base'] == base] for base in TRAINED_ON}
    complete = {base: mine for base, mine in of_base.items() if of(mine, 'wide') and of(mine, 'grpo')}
    lines = [line(base, mine) for base, mine in sorted(complete.items(), key=lambda item: mixed(item[1]))]
    together = [row for row in rows if row['base'] in TOGETHER]
    last = [
        ', '.join(TOGETHER),
        '',
        'cd34',
        '',
        '',
        '',
        '',
        str(len(of(together, 'wide'))),
        *compared(together),
    ]
    return markdown_table(titles, [*lines, last])


def enough(rows: Rows) -> bool:
    """Whether the rows are there without which the section says nothing."""
    needed = {(base, name) for base in (*TOGETHER, 'weak_four') for name in ('grpo', 'wide')}
    needed |= {
        ('weak', name)
        for name in ('grpo_same_passes', 'centre', 'gaussian', 'v5_behaviour_lr2e-4', 'v5_decoupled_lr2e-4')
    }
    return needed <= {(row['base'], row['name']) for row in rows}


def answer_facts(rows: Rows) -> dict[str, str]:
    """What the section's {placeholders} name; shares in percent."""
    weak, weak_four, quickstart = (
        [row for row in rows if row['base'] == base] for base in ('weak', 'weak_four', 'quickstart')
    )

    def dropped(diagnostic: str) -> str:
        """Percent of the centre's that is missing under the Gaussian filter."""
        return (
            f'{100 * (1 - mean_of(weak, "gaussian", diagnostic) / mean_of(weak, "centre", diagnostic)):.0f}'
        )

    def clipped(anchor: str, lag: int) -> str:
        return percent(mean_of(weak, f'v5_{anchor}_lr2e-4', f'actor/pg_clipfrac/x1/lag{lag}'))

    grpo, same_passes = (spent(weak, name, 'seconds') / 30 for name in ('grpo', 'grpo_same_passes'))
    return {
        'answer_table': answer_table(rows),
        'weak_mixed': f'{100 * mixed(weak):.0f}',
        'weak_four_mixed': f'{100 * mixed(weak_four):.0f}',
        'quickstart_mixed': f'{100 * mixed(quickstart):.0f}',
        'weak_improved': f'{100 * improved(weak):.0f}',
        'grpo_seconds': f'{grpo:.1f}',
        'grpo_seconds_of_other_passes': f'{grpo - same_passes:.1f}',
        'gaussian_drops_groups': dropped('bapo/x1_groups'),
        'gaussian_drops_updates': dropped('actor/updates'),
        'clipped_v5_behaviour_lag0': clipped('behaviour', 0),
        'clipped_v5_behaviour_lag4': clipped('behaviour', 4),
        'clipped_v5_decoupled_lag4': clipped('decoupled', 4),
    }
