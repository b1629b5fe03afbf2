"""Prints scores as tables on the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from bapo_jax.terminal import console


def print_table(title: str, columns: dict[str, dict[str, dict]]) -> None:
    """Compares policies, in percent: one column a policy, one row a benchmark and measure, in brackets its 95 % interval.

    `columns` maps a policy's name to its summaries (scores.py) by benchmark. A summary of an earlier version has no interval of
    pass@n and maj@n, and shows none.
    """
    table = Table('', *columns, title=title, caption='in brackets: 95 % intervals over other problems of the kind')
    first = next(iter(columns.values()))
    for name, s in first.items():
        for measure in ('mean', 'pass', 'maj'):
            if measure in s:
                cells = [with_interval(summaries[name], measure) for summaries in columns.values()]
                table.add_row(f'{name}  {measure}@{s["samples"]}, {problems(s)}', *cells)
    console().print(table)


def print_scores(title: str, summaries: dict[str, dict]) -> None:
    """Prints every measure of one policy: one column a benchmark, one row a measure. Shares are in percent."""
    table = Table('', *(Path(name).stem for name in summaries), title=title)
    columns = list(summaries.values())
    samples = columns[0]['samples']
    table.add_row('problems', *(problems(s).removesuffix(' problems') for s in columns))
    table.add_row(f'mean@{samples}', *(percent(s['mean']) for s in columns))
    table.add_row('95 % interval', *('-'.join(map(percent, s['interval'] or (None, None))) for s in columns))
    for k in columns[0]['pass_at_k']:
        table.add_row(f'pass@{k}', *(percent(s['pass_at_k'][k]) for s in columns))
    if 'maj' in columns[0]:
        table.add_row(f'maj@{samples}', *(percent(s['maj']) for s in columns))
    table.add_row('cut at the limit', *(percent(s['truncated']) for s in columns))
    table.add_row('mean tokens', *(f'{s["length"]:.0f}' for s in columns))
    table.add_row('without an answer', *(percent(s['unparseable'] / (s['questions'] * samples)) for s in columns))
    if any(s['infra_errors'] for s in columns):
        table.add_row('not judged', *(percent(s['infra_errors'] / (s['questions'] * samples)) for s in columns))
    console().print(table)


def with_interval(summary: dict, measure: str) -> str:
    """'mean', 'pass' or 'maj' of a summary in percent, with its interval where it has one."""
    interval = summary.get('interval' if measure == 'mean' else f'{measure}_interval')
    return f'{percent(summary[measure])} ({" to ".join(map(percent, interval))})' if interval else percent(summary[measure])


def problems(summary: dict) -> str:
    """How many problems a benchmark has, and in how many rows where some are repeated."""
    rows, distinct = summary['questions'], summary.get('problems', summary['questions'])
    return f'{distinct} problems' if distinct == rows else f'{distinct} in {rows} rows'


def percent(share: float | None) -> str:
    return '?' if share is None else f'{100 * share:.1f}'
