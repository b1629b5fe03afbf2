"""Writes the report: an HTML page with every figure, their PNGs, and a viewer of each run's rollouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2

from bapo_jax.machine.files import write_text
from bapo_jax.report import comparison, draw, evaluations, figures, waiting
from bapo_jax.report.about import SampleResponse, head_of, sample_response
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


class _Part(NamedTuple):
    """One run on the page."""

    records: Records
    figures: tuple[Figure, ...]
    viewer: Viewer
    sample: SampleResponse | None


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
    several = len(runs) > 1
    compared = comparison.comparison(runs) if several else ()
    beside = path.with_suffix('') if path.suffix else path.with_name(path.name + '_figures')
    beside.mkdir(parents=True, exist_ok=True)
    names = slugs(r.name for r in runs)
    parts = [
        _Part(
            r,
            tuple(figure(r) for figure in _SECTIONS),
            write_viewer(
                directory,
                beside / f'{name}_rollout_viewer' if several else beside / 'rollout_viewer',
                r.name,
                rollouts_mb,
            ),
            sample_response(directory),
        )
        for directory, r, name in zip(directories, runs, names, strict=True)
    ]
    for figure in compared or parts[0].figures:
        if figure.panels:
            draw.png(figure, beside / f'{figure.name}.png')
    write_text(path, _page(compared, parts, path.parent))
    return path


def read_runs(directories: Sequence[Path]) -> list[Records]:
    """Reads the runs, each named by its directory, or by its whole path if two directories share a name."""
    names = [d.resolve().name for d in directories]
    return [
        read_run(d, name if names.count(name) == 1 else str(d))
        for d, name in zip(directories, names, strict=True)
    ]


def _page(compared: Sequence[Figure], parts: Sequence[_Part], folder: Path) -> str:
    """Renders the figures as HTML. `compared` are those of all runs, () for one run.

    Links to the viewers are relative to `folder`.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    runs = [part.records for part in parts]
    title = runs[0].name
    if compared:
        title = f'{", ".join(comparison.by_seed(runs))}: {len(runs)} runs'
    return environment.get_template('page.html.jinja').render(
        title=title,
        light=draw.COLOURS,
        dark=draw.ON_DARK,
        compared=_figures(compared, 'all'),
        runs=[
            {
                'name': part.records.name,
                'head': head_of(part.records),
                'notes': part.records.notes,
                'viewer': part.viewer,
                'link': link(part.viewer, folder),
                'sample': part.sample,
                'warned': sum(len(f.warnings) for f in part.figures),
                'figures': _figures(part.figures, f'run-{i}'),
            }
            for i, part in enumerate(parts)
        ],
    )


def _figures(figures: Sequence[Figure], part: str) -> list[dict[str, Any]]:
    """The figures as the template shows them; their ids begin with `part`."""
    return [
        {
            'id': f'{part}-{f.name}',
            'figure': f,
            'views': [_view(name, panels, f'{part} {f.name}') for name, panels in views_of(f)],
        }
        for f in figures
    ]


def views_of(figure: Figure) -> Sequence[tuple[str, Sequence[Panel]]]:
    """The panels of a figure by x axis; one unnamed view if there is no choice, none without panels."""
    return figure.views or ([('', figure.panels)] if figure.panels else [])


def _view(name: str, panels: Sequence[Panel], salt: str) -> dict[str, Any]:
    return {
        'name': name,
        'panels': [
            {
                'title': panel.title,
                'y': draw.y_label(panel),
                'svg': draw.svg(panel, f'{salt} {name} {k}'),
                'legend': draw.legend(panel),
            }
            for k, panel in enumerate(panels)
        ],
    }


def link(viewer: Viewer, folder: Path) -> str:
    """The viewer's URL relative to `folder`; empty if it has no page."""
    return quote(viewer.path.relative_to(folder).as_posix()) if viewer.path else ''


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
