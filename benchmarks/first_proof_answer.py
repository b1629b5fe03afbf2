"""The straight answer of docs/first_proof.md: prose by hand, every number read off the rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from first_proof_rows import Rows, accuracies, held_out, less, of, percent, spent, spread, spread_of

TRAINED_ON = {  # base -> what its runs train on
    'weak_four': '4 numbers',
    'four_numbers': '4 numbers',
    'weak_g4': '3 or 4, groups of 4',
    'weak': '3 or 4',
    'quickstart': '3 or 4',
    'three_numbers': '3 numbers',
}
TOGETHER = ('weak_g4', 'weak', 'quickstart')  # with X2 and X3 each off, trained and scored on the same kind of problems


def less_as_text(rows: Rows, name: str, other: str, at: str = 'steps', kind: Sequence[str] = ()) -> str:
    """`less`, or '-' where a setting is missing."""
    return spread(*less(rows, name, other, at, kind)) if of(rows, name) and of(rows, other) else '-'


def mean_of(rows: Rows, name: str, diagnostic: str) -> float:
    """Over steps and seeds."""
    return float(np.mean([row['diagnostics'][diagnostic] for row in of(rows, name)]))


def mixed(rows: Rows, name: str = 'wide') -> float:
    """Share of fresh groups with right and wrong responses, under the range filter."""
    return mean_of(rows, name, 'bapo/x1_groups') / of(rows, name)[0]['changes'].get('learner.batch_groups', 64)


def improved(rows: Rows, name: str = 'wide') -> float:
    """Share of the hard prompts asked again that gave a group of X2."""
    return mean_of(rows, name, 'bapo/improved') / mean_of(rows, name, 'bapo/reevaluated')


def answer_table(rows: Rows) -> list[str]:
    """A line for every base, those with the fewest mixed groups first, and one for those of TOGETHER."""
    titles = [
        'from',
        'problems of',
        'scored on',
        'before',
        'GRPO',
        'fresh groups mixed, %',
        'hard ones asked again that are, %',
        'seeds',
    ]
    titles += [
        '`wide` less GRPO: equal steps',
        'equal responses',
        'equal seconds',
        '`wide_no_x2` less GRPO: equal steps and responses',
    ]
    titles += ['X3 adds', 'X2 adds: equal steps', 'equal responses']
    lines = ['| ' + ' | '.join(titles) + ' |', '|---' * len(titles) + '|']

    def compared(mine: Rows) -> list[str]:
        cells = [less_as_text(mine, 'wide', 'grpo', at) for at in ('steps', 'responses', 'seconds')]
        cells += [less_as_text(mine, 'wide_no_x2', 'grpo'), less_as_text(mine, 'wide', 'no_x3')]
        return cells + [less_as_text(mine, 'wide', 'wide_no_x2', at) for at in ('steps', 'responses')]

    bases = {
        base: mine for base in TRAINED_ON if of(mine := [row for row in rows if row['base'] == base], 'wide') and of(mine, 'grpo')
    }
    for base, mine in sorted(bases.items(), key=lambda item: mixed(item[1])):
        kind = held_out(mine)
        before = np.mean([row['curve'][0][f'{b}/mean'] for row in mine for b in kind])
        cells = [base, TRAINED_ON[base], ' + '.join(Path(b).stem for b in kind), percent(before)]
        cells += [
            spread(*spread_of(accuracies(mine, 'grpo', kind))),
            percent(mixed(mine)),
            percent(improved(mine)),
            str(len(of(mine, 'wide'))),
        ]
        lines.append('| ' + ' | '.join(cells + compared(mine)) + ' |')
    together = [row for row in rows if row['base'] in TOGETHER]
    cells = [', '.join(TOGETHER), '', 'cd34', '', '', '', '', str(len(of(together, 'wide')))]
    return [*lines, '| ' + ' | '.join(cells + compared(together)) + ' |']


def answer(rows: Rows) -> str:
    """The section that says what was found and why."""
    of_base = {base: [row for row in rows if row['base'] == base] for base in TRAINED_ON}
    weak, four, g4, quickstart, three = (
        partial(less_as_text, of_base[base]) for base in ('weak', 'weak_four', 'weak_g4', 'quickstart', 'three_numbers')
    )
    together = partial(less_as_text, [row for row in rows if row['base'] in TOGETHER])
    later = partial(less_as_text, [row for row in of_base['weak_four'] if row['seed'] > 1])
    needed = {(base, name) for base in (*TOGETHER, 'weak_four') for name in ('grpo', 'wide')} | {('weak', 'grpo_same_passes')}
    if needed - {(row['base'], row['name']) for row in rows}:
        return '## The answer\n\nToo few rows yet.\n'

    def lag(name: str, steps: int) -> str:
        return f'{100 * mean_of(of_base["weak"], name, f"actor/pg_clipfrac/x1/lag{steps}"):.1f}'

    def fewer(diagnostic: str) -> float:
        """Percent that the Gaussian filter takes from the centre."""
        return 100 * (1 - mean_of(of_base['weak'], 'gaussian', diagnostic) / mean_of(of_base['weak'], 'centre', diagnostic))

    grpo, same_passes = (spent(of_base['weak'], name, 'seconds') / 30 for name in ('grpo', 'grpo_same_passes'))
    table = '\n'.join(answer_table(rows))
    return f"""## The answer

{table}

**X1 and X3 beat GRPO, by a little; X2 does not help.** `wide` is ahead at equal steps from every base. The three that train on
problems of 3 or 4 numbers are scored on held-out CD-34; taken together, after the fact, `wide` leads there by
{together('wide', 'grpo')} at equal steps, and without X2 by {together('wide_no_x2', 'grpo')} at equal steps and equal
responses. X2 asks for a tenth more responses, and with it the lead at equal responses is {together('wide', 'grpo', 'responses')}.
Without X3 BAPO is behind GRPO: {together('no_x3', 'grpo')}. None of the three is beyond its interval alone: 200 problems and five
seeds tell apart a point and a half. On problems of 3 numbers alone, three seeds, it leads by {three('wide', 'grpo')} at equal
steps and {three('wide', 'grpo', 'responses')} at equal responses.

**X3 helps the more, the fewer fresh groups are mixed**: it adds {four('wide', 'no_x3')} where
{100 * mixed(of_base['weak_four']):.0f} % are, {quickstart('wide', 'no_x3')} where
{100 * mixed(of_base['quickstart']):.0f} % are. With problems of 4 numbers alone BAPO leads on 400 held-out problems of that kind
by {four('wide', 'grpo')} at equal steps and {four('wide', 'grpo', 'responses')} at equal responses;
by {later('wide', 'grpo')} and {later('wide', 'grpo', 'responses')} on seeds 2 to 5 alone, since the setting was chosen
by looking at seed 1. (On CD-34 these runs differ by {four('wide', 'grpo', kind=('cd34',))}: 45 % of its problems have
3 numbers, which they never train on and of which one seed forgot a part.) Groups of 4, fewer of which are mixed, were run because
of that, with five seeds and the rate fixed beforehand: {g4('wide', 'grpo')} and {g4('wide', 'grpo', 'responses')}, X3 adds
{g4('wide', 'no_x3')}.

**At equal seconds BAPO leads everywhere**, from the weak base by {weak('wide', 'grpo', 'seconds')}: of its {grpo:.1f} s a step GRPO
spends {grpo - same_passes:.1f} on passes of its anchor and its reference policy, which BAPO with KL to the behaviour policy does
without.

**The paper's settings are behind.** Method `bapo`, from the weak base at the best of three rates, less GRPO:
{weak('paper_lr4e-4', 'grpo')}. It is level with GRPO of one update a step, as the authors' script for this task has it:
{weak('paper_lr4e-4', 'grpo_one_update_lr2e-4')}. What it loses it loses to the delay (below) and to the Gaussian filter, which
alone costs {weak('centre', 'gaussian')}: it drops {fewer('bapo/x1_groups'):.0f} % of X1's groups, and with them
{fewer('actor/updates'):.0f} % of the updates.

**No setting has both ablations behind**: without X2 nothing is lost that these intervals show, anywhere.

Why, from the weak base unless it says otherwise (seeds are in the tables):

- **Zero-variance groups cost GRPO time, not learning**: AdamW's step is the same however many zeros a gradient is averaged with.
  Dropping them leaves two updates a step where GRPO makes four: `x1_only` {weak('x1_only', 'grpo')}; with four as well
  {weak('x1_only_four_updates', 'grpo')}, and on 4 numbers {four('x1_only_four_updates', 'grpo')}. What dropping them can save is
  noise, by putting something in their place: that is X3.
- **X3 is more updates, and more mixed groups to each.** `centre` against `x1_only`: {weak('centre', 'x1_only')}. GRPO with
  twice its updates: {weak('grpo_eight_updates', 'grpo')}, on 4 numbers {four('grpo_eight_updates', 'grpo')}.
- **What X3 replays matters less than that it replays.** Groups that X1 was trained on do no worse than those it was not:
  {weak('wide_gaussian', 'wide_gaussian_untrained')}, the Gaussian filter leaving enough of both; groups up to 10 steps old no worse
  than up to 3: {weak('wide_recent_10', 'wide')}, and 1 alone {weak('wide_recent_1', 'wide')}. Of levels, 1/4 does as 1/2:
  {weak('literal', 'centre')}. (Easy to hard is `half` here: below a third right, 4 of 8 alone lies between its bounds.
  On one machine the two are equal to the last bit; seed 3, of two machines, says what rounding does.)
- **A delay costs what it makes stale.** v = 5 with the behaviour anchor: {weak('v5_behaviour_lr2e-4', 'centre')}. Its trust
  region is around the policy that answered, and all updates since share it: of X1's tokens
  {lag('v5_behaviour_lr2e-4', 0)} % are clipped at lag 0, {lag('v5_behaviour_lr2e-4', 4)} % at lag 4. The decoupled anchor,
  around the step's own policy and corrected for the ratio to the older, clips {lag('v5_decoupled_lr2e-4', 4)} % there and loses
  as much: {weak('v5_decoupled_lr2e-4', 'centre')}. Uncorrected (proximal) loses most,
  {weak('v5_proximal_lr2e-4', 'centre')}, and at twice the rate all it had.
- **X2 asks the wrong prompts.** A hard prompt asked again gives a group to train on {100 * improved(of_base['weak']):.0f} % of the
  time, a fresh one {100 * mixed(of_base['weak']):.0f} %. And most that seem to have improved were never hard, but unlucky (last
  table).
- **The baseline matters more than any of this.** GRPO with one update a step, as in the authors' script for this task, is
  {weak('grpo_one_update_lr2e-4', 'grpo')} to GRPO with four; twice the rate makes it {weak('grpo_one_update_lr4e-4', 'grpo')}, four
  times {weak('grpo_one_update_lr8e-4', 'grpo')}. Against that baseline BAPO wins at equal steps and responses:
  {weak('centre', 'grpo_one_update_lr2e-4')}.
- **BAPO bears a rate that is too high better.** At 4e-4 on 4 numbers, four times the best, `wide` leads GRPO by
  {four('wide_lr4e-4', 'grpo_lr4e-4')}; from the weak base, twice the best, by {weak('wide_lr4e-4', 'grpo_lr4e-4')}.

For X2 to pay, a hard prompt asked again would have to give a mixed group more often than a fresh prompt does: a pool that is mostly
solved, or a policy that improves much within m steps. Neither is so here.
"""
