"""docs/first_proof.md and its figure, from the rows of first_proof.py: the answer, then the tables behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from first_proof_answer import answer
from first_proof_decision import decision
from first_proof_rows import Rows, accuracies, best, evaluated_at, held_out, less, of, percent, spent, spread, spread_of


def short(benchmark: str) -> str:
    return Path(benchmark).stem


def setting_table(rows: Rows, reference: str) -> list[str]:
    """One line a setting, by axis and then by score; differences are to `reference`, at equal steps, responses and seconds."""
    names = {row['name']: row['axis'] for row in rows}
    kinds = dict.fromkeys([('cd34',), held_out(rows)])  # one, or CD-34 and those of the kind trained on
    titles = ['axis', 'setting', 'seeds']
    for kind in kinds:
        titles += [f'{" + ".join(map(short, kind))} mean@32', f'less {reference}: equal steps', 'equal responses', 'equal seconds']
    titles += ['cd34 pass@32', 'cd4 mean@32', 'cd4 pass@32', 'base-0/8 prompts solved later, %', 'responses', 'core s']
    lines = ['| ' + ' | '.join(titles) + ' |', '|---' * len(titles) + '|']
    for name, axis in sorted(names.items(), key=lambda item: (item[1], -accuracies(rows, item[0], held_out(rows)).mean())):
        mine = of(rows, name)
        solved = sum(r['tracked']['solved_later'] for r in mine) / max(1, sum(r['tracked']['unsolved_at_base'] for r in mine))
        cells = [axis, name, len(mine)]
        for kind in kinds:
            cells.append(spread(*spread_of(accuracies(rows, name, kind))))
            cells += [spread(*less(rows, name, reference, at, kind)) for at in ('steps', 'responses', 'seconds')]
        cd34, cd4 = (accuracies(rows, name, (benchmark,)) for benchmark in ('cd34', 'cd4'))
        cells += [spread(*spread_of(share)) for share in (cd34 > 0, cd4, cd4 > 0)]
        cells += [percent(solved), *(f'{spent(rows, name, what):,.0f}' for what in ('responses', 'seconds'))]
        lines.append('| ' + ' | '.join(map(str, cells)) + ' |')
    return lines


def curve_table(rows: Rows, reference: str) -> list[str]:
    """The settings with three seeds and more, less `reference`, at every evaluation along the way and at the end."""
    steps = [point['step'] for point in rows[0]['curve'] if point['step']]
    titles = [f'less {reference}, {" + ".join(map(short, held_out(rows)))}', *(f'step {step}' for step in steps)]
    lines = ['| ' + ' | '.join(titles) + ' |', '|---' * len(titles) + '|']
    for name in dict.fromkeys(row['name'] for row in rows):
        if name != reference and len(of(rows, name)) >= 3:
            lines.append(f'| {name} | ' + ' | '.join(spread(*less(rows, name, reference, step)) for step in steps) + ' |')
    return lines


# Along which each method is at its own best.
AXES_OF_METHODS = ('filter', 'learning rate', 'sources', 'reuse', 'updates', 'anchor', 'paper')

DIAGNOSTICS = (
    ('updates', ('actor/updates',)),
    ('groups X1 / X2 / X3', ('bapo/x1_groups', 'bapo/x2_groups', 'bapo/x3_groups')),
    ('clipped %, X1 / X2 / X3', tuple(f'actor/pg_clipfrac/x{i}' for i in (1, 2, 3))),
    ('mean ratio, X1 / X2 / X3', tuple(f'staleness/ratio/x{i}' for i in (1, 2, 3))),
    ('effective sample %, X1 / X2 / X3', tuple(f'staleness/ess/x{i}' for i in (1, 2, 3))),
    ('TV from who answered %, X1 / X2 / X3', tuple(f'staleness/tv/x{i}' for i in (1, 2, 3))),
    ('gradient norm', ('actor/grad_norm',)),
    ('entropy', ('actor/entropy',)),
    ('X3: age, reward, earlier uses', ('bapo/x3/age', 'bapo/x3/mean_reward', 'bapo/x3/uses')),
)


def diagnostics_table(rows: Rows) -> list[str]:
    """Means over steps and seeds, one line a setting."""
    lines = ['| setting | ' + ' | '.join(title for title, _ in DIAGNOSTICS) + ' |', '|---' * (1 + len(DIAGNOSTICS)) + '|']
    for name in dict.fromkeys(row['name'] for row in rows):
        cells = []
        for title, keys in DIAGNOSTICS:
            values = [[r['diagnostics'][key] for r in of(rows, name) if key in r['diagnostics']] for key in keys]
            scale = 100 if '%' in title else 1
            cells.append(' / '.join(f'{scale * np.mean(v):.3g}' if v else '-' for v in values))
        lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
    return lines


def lag_table(rows: Rows) -> list[str]:
    """X1 by steps since the sync, of the settings with a delay."""
    lines = ['| setting | lag | clipped % | TV % | effective sample % | mean ratio |', '|---' * 6 + '|']
    for name in dict.fromkeys(row['name'] for row in rows):
        for lag in range(5):
            keys = [f'{k}/x1/lag{lag}' for k in ('actor/pg_clipfrac', 'staleness/tv', 'staleness/ess', 'staleness/ratio')]
            values = [[r['diagnostics'][key] for r in of(rows, name) if key in r['diagnostics']] for key in keys]
            if lag == 0 and not any('staleness/tv/x1/lag1' in r['diagnostics'] for r in of(rows, name)) or not values[1]:
                continue
            *percents, ratio = (np.mean(v) for v in values)
            lines.append(f'| {name} | {lag} | ' + ' | '.join(f'{100 * p:.3g}' for p in percents) + f' | {ratio:.4f} |')
    return lines


def x2_table(answers: dict[str, Any]) -> list[str]:
    """What first_proof_x2.py found, by base."""
    columns = ('k/G', 'p then', 'p now', "k'/G", 'luck of X2', 'progress', 'bad luck')
    lines = ['| base | re-evaluated groups | number | ' + ' | '.join(columns) + ' |', '|---' * (3 + len(columns)) + '|']
    for base, found in answers.items():
        for use, title in (('x2', 'X2'), ('not_improved', 'not improved')):
            numbers = ' | '.join(str(found[use][column]) for column in columns)
            lines.append(f'| {base} | {title} | {found[use]["groups"]} | {numbers} |')
    return lines


def draw(parts: dict[str, Rows], path: Path) -> None:
    """mean@8 by step, responses and seconds; a band from the lowest to the highest seed. A line of panels for each base."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    figure, lines = plt.subplots(len(parts), 3, figsize=(15, 4 * len(parts)), constrained_layout=True, squeeze=False)
    for axes, (base, rows) in zip(lines, parts.items(), strict=True):
        kind = held_out(rows)
        for axis, x in zip(axes, ('step', 'responses', 'seconds'), strict=True):
            for color, name in enumerate(('grpo', 'wide', 'wide_no_x2', 'no_x3', 'x1_only', 'paper_lr4e-4')):
                if of(rows, name):
                    curves = np.array([[100 * np.mean([p[f'{b}/mean'] for b in kind]) for p in r['curve']] for r in of(rows, name)])
                    xs = evaluated_at(rows, name, x).mean(axis=0)
                    axis.plot(xs, curves.mean(axis=0), color=f'C{color}', label=f'{name} ({len(curves)} seeds)')
                    axis.fill_between(xs, curves.min(axis=0), curves.max(axis=0), color=f'C{color}', alpha=0.15)
            axis.set(xlabel=x, ylabel=f'{" + ".join(map(short, kind))} mean@8, %', title=f'{base} base')
        axes[0].legend()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def verdict(rows: Rows, bapo: str, grpo: str) -> str:
    """How the best of both compare at equal steps and at equal responses, on problems of the kind trained on."""
    kind, found = held_out(rows), []
    for what in ('steps', 'responses'):
        mean, low, high = less(rows, bapo, grpo, what)
        where = 'beyond' if low > 0 else 'within' if high > 0 else 'below GRPO, beyond'
        found.append(f'{spread(mean, low, high)} at equal {what}, {where} the interval')
    return f'Best BAPO `{bapo}`, best GRPO `{grpo}`, on {" + ".join(map(short, kind))} mean@32: {"; ".join(found)}'


def write_page(rows: Rows, docs: Path, weak_base: str) -> None:
    """docs/first_proof.md and docs/first_proof.png; `weak_base` is the command that makes that base."""
    parts = {base: [row for row in rows if row['base'] == base] for base in ('weak', 'weak_g4', 'weak_four', 'quickstart')}
    parts = {base: mine for base, mine in parts.items() if {'grpo', 'bapo'} <= {row['method'] for row in mine}}
    if parts:
        draw(parts, docs / 'first_proof.png')
    sections = [head(rows, weak_base), answer(rows), decision(rows)]
    sections += [base_section(base, mine) for base, mine in parts.items()]
    sections.append(diagnostics_section(parts))
    if (docs / 'first_proof_x2.json').is_file():
        sections.append(x2_section(json.loads((docs / 'first_proof_x2.json').read_text('utf-8'))))
    (docs / 'first_proof.md').write_text('\n'.join(sections), 'utf-8')


def head(rows: Rows, weak_base: str) -> str:
    hours = sum(row['seconds'] for row in rows) / 3600
    cpus, versions = (', '.join(sorted({row[what] for row in rows})) for what in ('cpu', 'jax'))
    days = [row['date'] for row in rows]
    return f"""# First proof: BAPO against GRPO in miniature

Countdown, 0.8M parameters; {len(rows)} rows, {hours:.1f} core-hours ({cpus}; jax {versions}; {min(days)} to {max(days)}). Made by
`python benchmarks/first_proof.py`, which goes on where it stopped; raw rows, each with its commands, are in `first_proof.jsonl`.
Scores are percent on 200 held-out problems a benchmark; brackets are 95 % intervals over problems and seeds, rough where there are
three seeds. Seconds are of the steps, on one core, as a setting's fastest seed took them: the machines were shared, and another
seed took up to {unsteady(rows):.1f} times as long.

- The weak base could do better than it does: the quickstart's, shown solutions that mostly aim at nothing
  (`{weak_base}`).
  `weak_four` is the same policy, trained on problems of 4 numbers alone; `weak_g4` has 128 groups of 4 a step in place of 64 of 8.
- `centre` is BAPO with v = 1, the behaviour anchor and the range filter, at a learning rate of 2e-4 from the weak base, 1e-4 on 4
  numbers and 5e-5 from the quickstart's; `wide` replays any mixed group, up to a batch of 64. The other rows differ by what their
  axis and name say.

![curves](first_proof.png)
"""


def unsteady(rows: Rows) -> float:
    """The most that seeds of one setting differ in seconds, as a ratio: the machines were shared."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        seconds.setdefault((row['base'], row['name']), []).append(row['seconds'])
    return max(max(of_setting) / min(of_setting) for of_setting in seconds.values())


def base_section(base: str, rows: Rows) -> str:
    grpo, bapo = (best(rows, method, AXES_OF_METHODS) for method in ('grpo', 'bapo'))
    start, end = rows[0]['curve'][0], rows[0]['curve'][-1]
    return f"""## From the {base} base

{percent(start['cd34/mean'])} % before, {end['step']} steps. {verdict(rows, bapo, grpo)}.

{lines_of(setting_table(rows, grpo))}

{lines_of(curve_table(rows, grpo))}
"""


def diagnostics_section(parts: dict[str, Rows]) -> str:
    tables = '\n'.join(f'From the {base} base:\n\n{lines_of(diagnostics_table(mine))}\n' for base, mine in parts.items())
    return f"""## Diagnostics

Means over steps and seeds. TV is of π_θ from the policy that answered; earlier uses are of X3 groups, as X1 or X3.

{tables}
X1 by lag, the steps since the sync, from the weak base:

{lines_of(lag_table(parts.get('weak', [])))}
"""


def x2_section(answers: dict[str, Any]) -> str:
    return f"""## X2: progress or regression to the mean?

A hard prompt had k of G responses right when it was fresh and k' when it was asked again. Both policies answered it 64 times more,
p of them right: k'/G - k/G = (k'/G - p now) + (p now - p then) + (p then - k/G). Percent; `python benchmarks/first_proof_x2.py`.

{lines_of(x2_table(answers))}
"""


def lines_of(table: list[str]) -> str:
    return '\n'.join(table)
