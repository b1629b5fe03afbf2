"""Writes what the simulation says into page.md and plan.md, and draws page.png.

    python -m studies.x2_map.page
    python -m studies.x2_map.page --all    # writes nothing, and prints every table
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bapo_jax.machine.files import replace_part
from bapo_jax.report.draw import COLOURS
from bapo_jax.scores import wilson_interval
from studies.lib.rows import markdown_table
from studies.x2_map.calibrate import WEAK, Fit, answers, checks, fit
from studies.x2_map.simulate import (
    FAILED,
    PAPER,
    Policy,
    Retry,
    accuracy,
    delayed,
    fifo,
    gain,
    mixed,
    with_accuracy,
)  # fmt: skip

PAGE, FIGURE, PLAN = map(Path(__file__).with_name, ('page.md', 'page.png', 'plan.md'))
SPREADS, GROWTHS, HOPELESS = (1, 2, 3), (0, 0.01, 0.03, 0.1), (0, 0.02, 0.1, 0.3, 0.57)
RIGHT = range(5, 96, 5)  # accuracy in percent
MIDDLE, MOST = range(20, 61, 5), RIGHT[-1]
MARKS = 'osD^v'  # of our policies
EDGE = 0.98  # the map ends where more of the problems that are not hopeless would be solved
RULES = {PAPER: '≤1 of 8', FAILED: '0 of 8'}
LAGS = (1.5, 5, 20, 80, 157)  # the last is an epoch of the paper
AT = ((40, 0), (80, 0), (80, 0.1))  # accuracy in percent and hopeless share, for which these lags are shown
WAYS: dict[str, Callable[[Policy], Retry]] = {
    'FIFO': fifo,
    '20 steps': lambda policy: delayed(policy, 20),
    '80 steps': lambda policy: delayed(policy, 80),
}
# What the first prediction expects, and between which ends: changes are growth and sharpening a step, up to
# those of SmolLM2-135M-Instruct when it learned arithmetic.
LATE = with_accuracy(0.8, Policy(0.0, 3, 0.02, 0.025, 0.025))
LATE_RIGHT, LATE_HOPELESS, LATE_SPREADS = (0.75, 0.85), (0, 0.05), (2, 4)
CHANGES = ((0, 0), (0.05, 0), (0.05, 0.05))
RUN, TIMES = 240, (0, 1, 2)  # steps of the second prediction's run, and times the fitted growth


def grid(percent: int, hopeless: float) -> list[Policy]:
    """The map's policies of this accuracy; none where it is out of reach."""
    if percent / 100 > EDGE * (1 - hopeless):
        return []
    of = itertools.product(SPREADS, GROWTHS)
    return [with_accuracy(percent / 100, Policy(0.0, spread, hopeless, growth)) for spread, growth in of]


@functools.cache
def gains(percent: int, hopeless: float, rule: int) -> list[float]:
    """What X2 brings them by FIFO."""
    return [gain(policy, fifo(policy, rule)) for policy in grid(percent, hopeless)]


def number(x: float, digits: int = 1) -> str:
    return f'{round(x, digits) + 0.0:.{digits}f}'  # no -0.0


def ends(values: Iterable[float]) -> str:
    found = list(values)
    return f'{number(min(found))}…{number(max(found))}' if found else '-'


def arrow(first: float, last: float, digits: int = 0) -> str:
    return '→'.join(dict.fromkeys([number(first, digits), number(last, digits)]))


def percents(*shares: float) -> list[str]:
    return [number(100 * share, 0) for share in shares]


def map_table() -> str:
    """The gain by FIFO in percent, from the least to the most over spreads and growths."""
    lines = []
    for hopeless in HOPELESS:
        middle = [ends(x for percent in MIDDLE for x in gains(percent, hopeless, rule)) for rule in RULES]
        pays = [str(x) for x in RIGHT if max(gains(x, hopeless, PAPER), default=0) > 0]
        high = ends(gains(MOST, hopeless, PAPER))
        lines.append([*percents(hopeless), *middle, (pays or ['never'])[0], high])
    head = [f'{MIDDLE[0]}…{MIDDLE[-1]} right: {rule}' for rule in RULES.values()]
    return markdown_table(['hopeless', *head, f'{RULES[PAPER]} pays from', f'{MOST} right'], lines)


def lags_table() -> str:
    """The same for hard prompts that are asked again once, when so many steps old."""
    lines = [
        [f'{lag:g}', *(ends(gain(p, delayed(p, lag)) for p in grid(*at)) for at in AT)] for lag in LAGS
    ]
    return markdown_table(['lag', *(f'{x} % right, {100 * h:g} % hopeless' for x, h in AT)], lines)


def fits_table(fits: dict[str, Fit]) -> str:
    """What fits each policy before and after training, and the gain by FIFO that follows."""
    lines = []
    for name, found in fits.items():
        both = found.first, found.last
        right = arrow(*(100 * accuracy(p) for p in both))
        spread, brought = (
            arrow(*map(of, both), digits=1) for of in (lambda p: p.spread, lambda p: gain(p, fifo(p)))
        )
        lines.append([name, right, spread, *percents(found.first.hopeless), brought])
    return markdown_table(['policy', 'right', 'spread', 'hopeless', 'gain'], lines)


def checks_table(fits: dict[str, Fit], same: dict[str, Fit]) -> str:
    """P(mixed) in percent: as seen in training, as fitted, and as fitted with a spread that stays."""
    lines, others = [], checks(same)
    for name, of in checks(fits).items():
        for check, other in zip(of, others[name], strict=True):
            again, fresh = check.seen_shares
            cells = percents(again, check.failed, other.failed, fresh, check.fresh, other.fresh)
            lines.append([name, f'{check.lag:.2g}', *cells])
    fitted = ['fitted', 'same spread']
    return markdown_table(['policy', 'lag', 'failed', *fitted, 'fresh', *fitted], lines)


def spreads_table(fits: dict[str, Fit], same: dict[str, Fit]) -> str:
    """What a spread that stays the same loses."""
    lines = [[n, number(same[n].loss - of.loss, 0)] for n, of in fits.items() if of.steps]
    return markdown_table(['policy', 'log likelihood lost'], lines)


def predictions(fits: dict[str, Fit]) -> dict[str, tuple[Policy, list[Policy]]]:
    """By experiment, the policy that is expected, and the ends of what is plausible."""
    corners = itertools.product(LATE_RIGHT, LATE_HOPELESS, LATE_SPREADS, CHANGES)
    late = [with_accuracy(x, Policy(0.0, spread, h, *changes)) for x, h, spread, changes in corners]
    weak = fits[WEAK].first
    usual = [
        weak.after(step)._replace(growth=times * weak.growth, sharpening=times * weak.sharpening)
        for step, times in itertools.product((0, RUN), TIMES)
    ]
    return {'a': (LATE, late), 'b': (weak.after(RUN / 3), usual)}


def prediction_table(fits: dict[str, Fit]) -> str:
    """P(mixed) of fresh prompts, P(enters X2) by way of asking again, and the gain of each with its range."""
    lines = []
    for name, (expected, others) in predictions(fits).items():
        retries = [way(expected) for way in WAYS.values()]
        found = [
            f'{number(gain(expected, retry))} ({ends(gain(p, way(p)) for p in others)})'
            for retry, way in zip(retries, WAYS.values(), strict=True)
        ]
        enters = '/'.join(percents(*(retry.enters for retry in retries)))
        lines.append([name, *percents(mixed(expected)), enters, *found])
    return markdown_table(['', 'fresh mixed', 'enter X2', *WAYS], lines)


def all_fits(same_spread: bool = False) -> dict[str, Fit]:
    return {name: fit(of, same_spread) for name, of in answers().items()}


def tables(fits: dict[str, Fit]) -> dict[str, str]:
    """The tables of page.md, by their names there."""
    return {'map': map_table(), 'fits': fits_table(fits), 'prediction': prediction_table(fits)}


def draw_map(fits: dict[str, Fit], rule: int, axes: Axes) -> None:
    """The gain by FIFO against accuracy, a band a hopeless share; our policies before and after training."""
    for hopeless, colour in zip(HOPELESS, COLOURS):
        of = {percent: found for percent in RIGHT if (found := gains(percent, hopeless, rule))}
        low, high = ([end(found) for found in of.values()] for end in (min, max))
        label = f'{100 * hopeless:g} % hopeless'
        axes.fill_between(list(of), low, high, color=colour, alpha=0.35, linewidth=0, label=label)
    for found, mark in zip(fits.values(), MARKS):
        both = found.first, found.last
        at = [100 * accuracy(p) for p in both], [gain(p, fifo(p, rule)) for p in both]
        axes.plot(*at, color='black', lw=0.8, marker=mark, ms=4)
    axes.axhline(0, color='black', lw=0.8)
    axes.set(title=f'X2 by FIFO; hard: {RULES[rule]}', xlabel='right, %', ylim=(-10, 30))


def draw(fits: dict[str, Fit], path: Path) -> None:
    """The map by both rules, with our policies; failed prompts against fresh ones, as seen and as fitted."""
    figure = Figure((13, 4.2), layout='constrained')
    *maps, panel = figure.subplots(1, 3)
    for axes, rule in zip(maps, RULES, strict=True):
        draw_map(fits, rule, axes)
    maps[0].set_ylabel('gain in mixed groups a response, %')
    maps[0].legend(loc='upper left', fontsize=8, frameon=False)

    checked, marks = checks(fits), dict(zip(fits, MARKS))
    for name, mark in marks.items():
        if name not in checked:
            panel.plot([], [], f'k{mark}', ms=4, label=f'{name}: on the map alone')
    for (name, of), colour in zip(checked.items(), COLOURS):
        for check in of:
            again, fresh = check.seen_shares
            low, high = wilson_interval(again, check.seen[0])
            panel.plot([check.lag] * 2, [low / fresh, high / fresh], color=colour, lw=1.2)
            panel.plot(check.lag, again / fresh, marks[name], color=colour, ms=5)
        panel.plot([c.lag for c in of], [c.failed / c.fresh for c in of], '--_', color=colour, ms=14)
        panel.plot([], [], f'{marks[name]}--', color=colour, ms=5, label=name)
    panel.axhline(1, color='black', lw=0.8)
    panel.set(title='P(mixed): failed prompts / fresh ones', xlabel='steps since it failed', xscale='log')
    panel.set_xticks([1, 5, 20], ['1', '5', '20'])
    panel.set_ylim(0, 2)
    heading = 'dots: seen, with 95 % intervals; dashes: fitted'
    panel.legend(fontsize=8, frameon=False, loc='upper left', title=heading, title_fontsize=8)
    figure.savefig(path, dpi=80)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--all', action='store_true', help='write nothing, and print every table')
    fits = all_fits()
    if parser.parse_args(arguments).all:
        same = all_fits(same_spread=True)
        others = lags_table(), checks_table(fits, same), spreads_table(fits, same)
        print(*tables(fits).values(), *others, sep='\n\n')
        return
    for name, table in tables(fits).items():
        replace_part(PLAN if name == 'prediction' else PAGE, name, table + '\n')
    draw(fits, FIGURE)


if __name__ == '__main__':
    main(sys.argv[1:])
