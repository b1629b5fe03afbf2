"""Prints tables of scores on the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from bapo_jax.machine import events
from bapo_jax.machine.terminal import console


def scores_in(files: dict[str, Path]) -> dict[str, dict[str, dict]]:
    """Reads files in evals/, given by policy name, into columns for `print_table`.

    Missing files are skipped. Files that cannot be read are skipped and reported.
    """
    columns: dict[str, dict[str, dict]] = {}
    for name, file in files.items():
        try:
            of_file = json.loads(file.read_bytes())['benchmarks']
            for s in of_file.values():
                shown = (
                    s['samples'],
                    s['questions'],
                    *(percent(s[measure]) for measure in ('mean', 'pass', 'maj') if measure in s),
                )
                if len(shown) < 3:
                    raise ValueError('it has no scores')
            columns[name] = of_file
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as e:
            message = f'{file} cannot be read ({type(e).__name__}: {str(e)[:100]}); its scores are left out'
            events.report('evaluation damaged', message, file=file.name)
    return columns


def print_table(title: str, columns: dict[str, dict[str, dict]]) -> None:
    """Prints a comparison of policies in percent: a column per policy, a row per benchmark and measure.

    95 % confidence intervals are in brackets. `columns` maps a policy's name to its summaries (scores.py) by
    benchmark; a policy may lack one. Summaries from earlier versions have no intervals for pass@n and maj@n,
    and show none.
    """
    if not any(columns.values()):
        return
    table = Table('', *columns, title=title, caption='in brackets: 95 % confidence intervals over problems')
    first = next(iter(columns.values()))
    for name, s in first.items():
        for measure in ('mean', 'pass', 'maj'):
            if measure in s:
                cells = [with_interval(summaries.get(name, {}), measure) for summaries in columns.values()]
                table.add_row(f'{name}  {measure}@{s["samples"]}, {problems(s)}', *cells)
    console().print(table)


def print_scores(title: str, summaries: dict[str, dict]) -> None:
    """Prints every measure of one policy: a column per benchmark, a row per measure.

    Shares are in percent.
    """
    table = Table('', *(Path(name).stem for name in summaries), title=title)
    columns = list(summaries.values())
    samples = columns[0]['samples']
    table.add_row('problems', *(problems(s).removesuffix(' problems') for s in columns))
    table.add_row(f'mean@{samples}', *(percent(s['mean']) for s in columns))
    ends = (map(percent, s['interval'] or (None, None)) for s in columns)
    table.add_row('95 % interval', *map(' to '.join, ends))
    for k in columns[0]['pass_at_k']:
        table.add_row(f'pass@{k}', *(percent(s['pass_at_k'][k]) for s in columns))
    if 'maj' in columns[0]:
        table.add_row(f'maj@{samples}', *(percent(s['maj']) for s in columns))
    table.add_row('truncated', *(percent(s['truncated']) for s in columns))
    table.add_row('mean tokens', *(f'{s["length"]:.0f}' for s in columns))
    table.add_row(
        'without an answer', *(percent(s['unparseable'] / (s['questions'] * samples)) for s in columns)
    )
    if any(s['infra_errors'] for s in columns):
        table.add_row(
            'not judged', *(percent(s['infra_errors'] / (s['questions'] * samples)) for s in columns)
        )
    console().print(table)


def with_interval(summary: dict, measure: str) -> str:
    """Formats 'mean', 'pass' or 'maj' of a summary in percent, with its confidence interval if it has one."""
    interval = summary.get('interval' if measure == 'mean' else f'{measure}_interval')
    share = percent(summary.get(measure))
    return f'{share} ({" to ".join(map(percent, interval))})' if interval else share


def problems(summary: dict) -> str:
    """States how many problems a benchmark has, and in how many rows if some are repeated."""
    rows, distinct = summary['questions'], summary.get('problems', summary['questions'])
    return f'{distinct} problems' if distinct == rows else f'{distinct} in {rows} rows'


def duration(seconds: float) -> str:
    """Returns a time in words: '90 s', '2.5 min', '3.1 h'."""
    for unit, size in (('h', 3600.0), ('min', 60.0)):
        if seconds >= 2 * size:
            return f'{seconds / size:.1f} {unit}'
    return f'{seconds:.0f} s'


def percent(share: float | None) -> str:
    return '?' if share is None else f'{100 * share:.1f}'
