"""Makes page.md and its figure of rows.jsonl: the prose of argument.md and the numbers it names. Prints what is
too long for a page: every setting of every base, its curve, and what was logged along the way.

    python -m studies.first_proof.page
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from studies.first_proof.answer import answer_facts, enough
from studies.first_proof.argument import fill, row_sets, sections
from studies.first_proof.decision import decision_facts
from studies.first_proof.restated import all_rows
from studies.first_proof.rows import (
    Rows,
    accuracies,
    best,
    evaluated_at,
    held_out,
    less,
    of,
    percent,
    spent,
    spread,
    spread_of,
)
from studies.lib.rows import markdown_table

# The axes along which each method is at its own best.
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


def write_page(rows: Rows, folder: Path, weak_base: str) -> None:
    """Writes folder/page.md and folder/page.png. `weak_base` is the command that makes that base."""
    if parts := bases_compared(rows):
        draw(parts, folder / 'page.png')
    (folder / 'page.md').write_text(page_text(rows, folder / 'x2.json', weak_base), 'utf-8')


def page_text(rows: Rows, x2_answers: Path, weak_base: str) -> str:
    """The text of page.md; its last section needs the file that x2.py writes."""
    head, answer, decision, x2 = sections()
    sets = row_sets(rows)
    page = [
        fill(head, sets, head_facts(rows, weak_base)),
        fill(answer, sets, answer_facts(rows))
        if enough(rows)
        else f'{answer.splitlines()[0]}\n\nToo few rows yet.\n',
        fill(decision, sets, decision_facts(rows)),
    ]
    if x2_answers.is_file():
        page.append(fill(x2, sets, {'x2_table': x2_table(json.loads(x2_answers.read_text('utf-8')))}))
    return '\n'.join(page)


def bases_compared(rows: Rows) -> dict[str, Rows]:
    """The rows by base, of those bases that have both methods and a section of their own among the tables."""
    parts = {
        base: [row for row in rows if row['base'] == base]
        for base in ('weak', 'weak_g4', 'weak_four', 'quickstart')
    }
    return {base: mine for base, mine in parts.items() if {'grpo', 'bapo'} <= {row['method'] for row in mine}}


def every_table(rows: Rows) -> str:
    """What `python -m studies.first_proof.page` prints, as Markdown."""
    parts, text = bases_compared(rows), []
    for base, mine in parts.items():
        grpo, bapo = (best(mine, method, AXES_OF_METHODS) for method in ('grpo', 'bapo'))
        start, end = mine[0]['curve'][0], mine[0]['curve'][-1]
        text += [
            f'## From the {base} base',
            f'{percent(start["cd34/mean"])} % before, {end["step"]} steps. {verdict(mine, bapo, grpo)}.',
            setting_table(mine, grpo),
            curve_table(mine, grpo),
        ]
    text += [
        '## Diagnostics',
        'Means over steps and seeds. TV is of π_θ from the policy that answered; earlier uses are of X3 '
        'groups, as X1 or X3.',
    ]
    for base, mine in parts.items():
        text += [f'From the {base} base:', diagnostics_table(mine)]
    text += ['X1 by lag, the steps since the sync, from the weak base:', lag_table(parts.get('weak', []))]
    return '\n\n'.join(text) + '\n'


def head_facts(rows: Rows, weak_base: str) -> dict[str, str]:
    days = [row['date'] for row in rows]
    seconds: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        seconds.setdefault((row['base'], row['name']), []).append(row['seconds'])
    return {
        'rows': str(len(rows)),
        'core_hours': f'{sum(row["seconds"] for row in rows) / 3600:.1f}',
        'cpus': ', '.join(sorted({row['cpu'] for row in rows})),
        'jax': ', '.join(sorted({row['jax'] for row in rows})),
        'first_day': min(days),
        'last_day': max(days),
        'slowest_seed': f'{max(max(of_setting) / min(of_setting) for of_setting in seconds.values()):.1f}',
        'weak_base_command': weak_base,
    }


def verdict(rows: Rows, bapo: str, grpo: str) -> str:
    """The best setting of either method, compared at equal steps and responses on problems of the kind
    trained on.
    """
    kind, found = held_out(rows), []
    for what in ('steps', 'responses'):
        mean, low, high = less(rows, bapo, grpo, what)
        where = 'beyond' if low > 0 else 'within' if high > 0 else 'below GRPO, beyond'
        found.append(f'{spread(mean, low, high)} at equal {what}, {where} the interval')
    return f'Best BAPO `{bapo}`, best GRPO `{grpo}`, on {joined(kind)} mean@32: {"; ".join(found)}'


def joined(kind: tuple[str, ...]) -> str:
    """Benchmarks as a title; of a file of problems its stem."""
    return ' + '.join(Path(benchmark).stem for benchmark in kind)


def setting_table(rows: Rows, reference: str) -> str:
    """One line a setting, by axis and then by score. Differences are to `reference`, at equal steps,
    responses and seconds.
    """
    names = {row['name']: row['axis'] for row in rows}
    kinds = dict.fromkeys(
        [('cd34',), held_out(rows)]
    )  # CD-34, and where they differ those of the kind trained on
    titles = ['axis', 'setting', 'seeds']
    for kind in kinds:
        titles += [
            f'{joined(kind)} mean@32',
            f'less {reference}: equal steps',
            'equal responses',
            'equal seconds',
        ]
    titles += [
        'cd34 pass@32',
        'cd4 mean@32',
        'cd4 pass@32',
        'base-0/8 prompts solved later, %',
        'responses',
        'core s',
    ]
    lines = []
    for name, axis in sorted(
        names.items(), key=lambda item: (item[1], -accuracies(rows, item[0], held_out(rows)).mean())
    ):
        mine = of(rows, name)
        solved = sum(r['tracked']['solved_later'] for r in mine) / max(
            1, sum(r['tracked']['unsolved_at_base'] for r in mine)
        )
        cells = [axis, name, str(len(mine))]
        for kind in kinds:
            cells.append(spread(*spread_of(accuracies(rows, name, kind))))
            cells += [
                spread(*less(rows, name, reference, at, kind)) for at in ('steps', 'responses', 'seconds')
            ]
        cd34, cd4 = (accuracies(rows, name, (benchmark,)) for benchmark in ('cd34', 'cd4'))
        cells += [spread(*spread_of(share)) for share in (cd34 > 0, cd4, cd4 > 0)]
        lines.append(
            [
                *cells,
                percent(solved),
                *(f'{spent(rows, name, what):,.0f}' for what in ('responses', 'seconds')),
            ]
        )
    return markdown_table(titles, lines)


def curve_table(rows: Rows, reference: str) -> str:
    """The settings with three or more seeds, less `reference`, at every evaluation along the way and at the
    end.
    """
    steps = [point['step'] for point in rows[0]['curve'] if point['step']]
    lines = [
        [name, *(spread(*less(rows, name, reference, step)) for step in steps)]
        for name in dict.fromkeys(row['name'] for row in rows)
        if name != reference and len(of(rows, name)) >= 3
    ]
    return markdown_table(
        [f'less {reference}, {joined(held_out(rows))}', *(f'step {step}' for step in steps)], lines
    )


def diagnostics_table(rows: Rows) -> str:
    """One line a setting: means over steps and seeds."""
    lines = []
    for name in dict.fromkeys(row['name'] for row in rows):
        cells = [name]
        for title, keys in DIAGNOSTICS:
            values = [
                [r['diagnostics'][key] for r in of(rows, name) if key in r['diagnostics']] for key in keys
            ]
            scale = 100 if '%' in title else 1
            cells.append(' / '.join(f'{scale * np.mean(v):.3g}' if v else '-' for v in values))
        lines.append(cells)
    return markdown_table(['setting', *(title for title, _ in DIAGNOSTICS)], lines)


def lag_table(rows: Rows) -> str:
    """X1 by the steps since the sync, of the settings with a delay."""
    lines = []
    for name in dict.fromkeys(row['name'] for row in rows):
        for lag in range(5):
            keys = [
                f'{k}/x1/lag{lag}'
                for k in ('actor/pg_clipfrac', 'staleness/tv', 'staleness/ess', 'staleness/ratio')
            ]
            values = [
                [r['diagnostics'][key] for r in of(rows, name) if key in r['diagnostics']] for key in keys
            ]
            if (
                lag == 0
                and not any('staleness/tv/x1/lag1' in r['diagnostics'] for r in of(rows, name))
                or not values[1]
            ):
                continue
            *percents, ratio = (np.mean(v) for v in values)
            lines.append([name, str(lag), *(f'{100 * p:.3g}' for p in percents), f'{ratio:.4f}'])
    return markdown_table(['setting', 'lag', 'clipped %', 'TV %', 'effective sample %', 'mean ratio'], lines)


def x2_table(answers: dict[str, Any]) -> str:
    """What x2.py found, by base."""
    columns = ('k/G', 'p then', 'p now', "k'/G", 'luck of X2', 'progress', 'bad luck')
    lines = [
        [base, title, str(found[use]['groups']), *(str(found[use][column]) for column in columns)]
        for base, found in answers.items()
        for use, title in (('x2', 'X2'), ('left_out', 'not improved'))
    ]
    return markdown_table(['base', 're-evaluated groups', 'number', *columns], lines)


def draw(parts: dict[str, Rows], path: Path) -> None:
    """mean@8 by step, responses and seconds, one line of panels for each base. A band spans the seeds."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    figure, lines = plt.subplots(
        len(parts), 3, figsize=(15, 4 * len(parts)), constrained_layout=True, squeeze=False
    )
    for axes, (base, rows) in zip(lines, parts.items(), strict=True):
        kind = held_out(rows)
        for axis, x in zip(axes, ('step', 'responses', 'seconds'), strict=True):
            for color, name in enumerate(('grpo', 'wide', 'wide_no_x2', 'no_x3', 'x1_only', 'paper_lr4e-4')):
                if of(rows, name):
                    curves = np.array(
                        [
                            [100 * np.mean([p[f'{b}/mean'] for b in kind]) for p in r['curve']]
                            for r in of(rows, name)
                        ]
                    )
                    xs = evaluated_at(rows, name, x).mean(axis=0)
                    axis.plot(
                        xs, curves.mean(axis=0), color=f'C{color}', label=f'{name} ({len(curves)} seeds)'
                    )
                    axis.fill_between(
                        xs, curves.min(axis=0), curves.max(axis=0), color=f'C{color}', alpha=0.15
                    )
            axis.set(xlabel=x, ylabel=f'{joined(kind)} mean@8, %', title=f'{base} base')
        axes[0].legend()
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == '__main__':
    print(every_table(all_rows()), end='')
