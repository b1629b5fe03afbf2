"""Writes the report: an HTML page with every figure, their PNGs, and a viewer of each run's rollouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from bapo_jax.machine.files import write_text
from bapo_jax.report import comparison, draw, evaluations, figures, waiting
from bapo_jax.report.figures import Figure, Panel
from bapo_jax.report.records import Records, read_run
from bapo_jax.report.viewer import LIMIT_MB, Viewer, write_viewer

_SECTIONS = (
    evaluations.cost,
    figures.reward,
    evaluations.curves,
    figures.bins,
    evaluations.migration,
    figures.composition,
    figures.failed_again,
    figures.rollouts,
    figures.gradient,
    figures.dynamics,
    figures.staleness,
    figures.thresholds,
    waiting.speed,
    figures.seconds,
    figures.faults,
)


def write_report(
    directories: Sequence[Path], output: Path | None = None, rollouts_mb: float = LIMIT_MB
) -> Path:
    """Writes `output` (default: report.html in the first run) and returns its path.

    The PNGs and rollout viewers go to a folder of the same name. Several runs have PNGs of their comparison
    alone; the page of one run has those of its figures. A viewer holds up to `rollouts_mb` megabytes
    of its run's newest rollouts. Raises ValueError if a directory is not a run, and OSError if a file cannot
    be written.
    """
    runs = read_runs(directories)
    path = directories[0] / 'report.html' if output is None else output
    parts = [('', comparison.comparison(runs))] if len(runs) > 1 else []
    parts += [(r.name, tuple(figure(r) for figure in _SECTIONS)) for r in runs]
    beside = path.with_suffix('') if path.suffix else path.with_name(path.name + '_figures')
    beside.mkdir(parents=True, exist_ok=True)
    for figure in parts[0][1]:
        if figure.panels:
            draw.png(figure, beside / f'{figure.name}.png')
    prefixes = (
        {r.name: f'{prefix}_' for r, prefix in zip(runs, slugs(r.name for r in runs), strict=True)}
        if len(runs) > 1
        else {}
    )
    viewers = {
        r.name: write_viewer(
            directory, beside / f'{prefixes.get(r.name, "")}rollout_viewer', r.name, rollouts_mb
        )
        for directory, r in zip(directories, runs, strict=True)
    }
    write_text(path, page(runs, parts, viewers, path.parent))
    return path


def read_runs(directories: Sequence[Path]) -> list[Records]:
    """Reads the runs, each named by its directory, or by its whole path if two directories share a name."""
    names = [d.resolve().name for d in directories]
    return [
        read_run(d, name if names.count(name) == 1 else str(d))
        for d, name in zip(directories, names, strict=True)
    ]


def page(
    runs: Sequence[Records],
    parts: Sequence[tuple[str, tuple[Figure, ...]]],
    viewers: Mapping[str, Viewer],
    folder: Path,
) -> str:
    """Renders the figures as HTML. `parts` are (run name, figures), with '' for the comparison of all runs.

    Links to the viewers are relative to `folder`.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    shown = [
        {
            'name': name,
            'id': f'run-{i}',
            'head': list(next((about(r) for r in runs if r.name == name), {}).items()),
            'notes': next((r.notes for r in runs if r.name == name), []),
            'viewer': viewers.get(name),
            'link': link(viewers.get(name), folder),
            'contents': len(parts) == 1,
            'warned': sum(len(f.warnings) for f in some),
            'figures': [
                {'figure': f, 'views': [_view(view, panels, f'{i} {f.name}') for view, panels in views_of(f)]}
                for f in some
            ],
        }
        for i, (name, some) in enumerate(parts)
    ]
    title = ', '.join(r.name for r in runs)
    if len(runs) > 1:
        title = f'{", ".join(comparison.by_seed(runs))}: {len(runs)} runs'
    return environment.get_template('page.html.jinja').render(
        title=title, parts=shown, light=draw.COLOURS, dark=draw.ON_DARK
    )


def views_of(figure: Figure) -> Sequence[tuple[str, Sequence[Panel]]]:
    """The panels of a figure by x axis; one unnamed view if there is no choice, none without panels."""
    return figure.views or ([('', figure.panels)] if figure.panels else [])


def _view(name: str, panels: Sequence[Panel], salt: str) -> dict[str, Any]:
    return {
        'name': name,
        'panels': [
            {
                'title': panel.title,
                'svg': draw.svg(panel, f'{salt} {name} {k}'),
                'legend': draw.legend(panel),
            }
            for k, panel in enumerate(panels)
        ],
    }


def about(r: Records) -> dict[str, Any]:
    """The facts shown at the head of a run's part."""
    config = r.config
    facts = {
        'method': config.get('method'),
        'seed': config.get('seed'),
        'steps logged': f'{len(r.steps):,}, from {r.steps[0]:,} to {r.steps[-1]:,}',
        'groups per batch': config.get('learner', {}).get('batch_groups'),
        'responses per group': config.get('rollout', {}).get('group_size'),
    }
    return {name: value for name, value in facts.items() if value is not None}


def link(viewer: Viewer | None, folder: Path) -> str:
    """The viewer's URL relative to `folder`; empty if there is no viewer."""
    return quote(viewer.path.relative_to(folder).as_posix()) if viewer and viewer.path else ''


def slugs(names: Iterable[str]) -> list[str]:
    """Turns names into file names of letters, digits, '-' and '_'; different names stay different."""
    taken: dict[str, str] = {}
    found = []
    for name in names:
        short = re.sub(r'[^A-Za-z0-9_-]+', '-', name).strip('-') or 'run'
        while taken.setdefault(short, name) != name:
            short += '-2'
        found.append(short)
    return found
