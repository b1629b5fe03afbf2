"""Numbers and tables of the section "The decision": every choice of bapo_tuned, and what it was chosen over."""

from __future__ import annotations

from typing import NamedTuple

from studies.first_proof.rows import Rows, accuracies, held_out, less, of, percent, spread
from studies.lib.rows import markdown_table


class Choice(NamedTuple):
    """A row with the default, and rows that differ from it in that field (an X3 of other groups counts as one
    field).
    """

    fields: str
    base: str
    row: str
    others: tuple[str, ...]


CHOICES = (
    Choice('rollout.sync_every = 1', 'weak', 'centre', ('v2_behaviour_lr2e-4', 'v5_behaviour_lr2e-4')),
    Choice("replay.fresh_filter = 'range'", 'weak', 'centre', ('gaussian', 'uniform', 'unfiltered')),
    Choice('replay.use_x2 = False', 'weak', 'wide_no_x2', ('wide',)),
    Choice('replay.use_x2 = False', 'quickstart', 'wide_no_x2', ('wide',)),
    Choice('replay.use_x3 = True', 'weak', 'wide', ('no_x3',)),
    Choice('replay.use_x3 = True', 'quickstart', 'wide', ('no_x3',)),
    Choice('replay.c2, c3: any mixed group', 'weak', 'wide', ('centre',)),
    Choice('replay.c2, c3: any mixed group', 'quickstart', 'wide', ('centre',)),
    Choice("replay.thresholds = 'easy_to_hard' (bapo)", 'weak', 'centre', ('half', 'literal')),
    Choice('replay.high_recent_steps = 3', 'weak', 'wide', ('wide_recent_1', 'wide_recent_10')),
    Choice('replay.x3_untrained = False', 'weak', 'wide_gaussian', ('wide_gaussian_untrained',)),
    Choice("learner.anchor = 'behaviour'", 'weak', 'centre', ('v1_proximal_lr2e-4', 'v1_decoupled_lr2e-4')),
    Choice("learner.kl_target = 'behaviour'", 'weak', 'centre', ('kl_reference', 'kl_none')),
    Choice("learner.aggregation = 'token_mean'", 'weak', 'centre', ('sequence_mean',)),
    Choice('learner.learning_rate = 5e-5', 'quickstart', 'centre', ('centre_lr2e-4', 'centre_lr2e-5')),
)


def decision_facts(rows: Rows) -> dict[str, str]:
    """What the section's {placeholders} name."""
    weak, quickstart = ([row for row in rows if row['base'] == base] for base in ('weak', 'quickstart'))

    def passed(name: str) -> str:
        """pass@32 on cd34, in percent."""
        return percent((accuracies(quickstart, name, ('cd34',)) > 0).mean()) if of(quickstart, name) else '-'

    return {
        'choice_table': choice_table(rows),
        'anchor_table': anchor_table(weak),
        'centre_pass': passed('centre'),
        'centre_lr2e-4_pass': passed('centre_lr2e-4'),
    }


def choice_table(rows: Rows) -> str:
    """One line for each row that a default was chosen over."""
    lines = []
    for choice in CHOICES:
        mine = [row for row in rows if row['base'] == choice.base]
        for other in choice.others:
            seeds = {row['seed'] for row in of(mine, choice.row)} & {row['seed'] for row in of(mine, other)}
            if seeds:
                gains = (spread(*less(mine, choice.row, other, at)) for at in ('steps', 'responses'))
                lines.append([f'`{choice.fields}`', choice.base, choice.row, other, str(len(seeds)), *gains])
    return markdown_table(
        ['default', 'from', 'row', 'in place of', 'seeds', 'gains at equal steps', 'at equal responses'],
        lines,
    )


def anchor_table(rows: Rows) -> str:
    """One line for each anchor, one column for each delay v; each at the best of its rates."""

    def cell(anchor: str, v: int) -> str:
        rates = {rate: f'v{v}_{anchor}_lr{rate}' for rate in ('5e-5', '2e-4', '4e-4')}
        if (v, anchor) == (1, 'behaviour'):
            rates = {'5e-5': 'centre_lr5e-5', '2e-4': 'centre', '4e-4': 'centre_lr4e-4'}
        of_rate = {
            rate: accuracies(rows, name, held_out(rows)).mean()
            for rate, name in rates.items()
            if of(rows, name)
        }
        if not of_rate or not of(rows, 'grpo'):
            return '-'
        rate = max(of_rate, key=of_rate.__getitem__)
        return f'{spread(*less(rows, rates[rate], "grpo"))} at {rate}'

    delays = (1, 2, 5)
    lines = [
        [anchor, *(cell(anchor, v) for v in delays)] for anchor in ('behaviour', 'proximal', 'decoupled')
    ]
    return markdown_table(['anchor', *(f'v = {v}' for v in delays)], lines)
