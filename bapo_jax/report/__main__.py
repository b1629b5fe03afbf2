"""Writes one self-contained page about one or several runs: figures, tables and warnings.

PNGs of the figures and a viewer of each run's rollouts, which opens without a server, go beside the page.
Runs that differ only in the seed are one arm. The page of several runs begins with the scores of the arms
over their seeds, and what the differences from the first arm show.

    python -m bapo_jax.report runs/a [runs/b …] [--output=report.html]
"""

from __future__ import annotations

import sys
from pathlib import Path

from bapo_jax.machine import terminal
from bapo_jax.machine.help import CommandParser
from bapo_jax.machine.output import ends_with_its_reader, open_streams
from bapo_jax.report.page import write_report
from bapo_jax.report.viewer import LIMIT_MB


def run() -> None:
    """Runs the command."""
    open_streams()
    terminal.guard()
    parser = CommandParser(__doc__)
    about = 'a run directory; the first is of the baseline'
    parser.add_argument('runs', nargs='+', type=Path, metavar='RUN', help=about)
    parser.add_argument(
        '--output',
        type=Path,
        help='file to write; PNGs and viewers go to a folder beside it. Default: RUN/report.html',
    )
    about = (
        'maximum size of the viewer of a run in megabytes; older steps are left out. 0: no viewer. Default: '
        '%(default)s'
    )
    parser.add_argument('--rollouts_mb', type=float, default=LIMIT_MB, metavar='MB', help=about)
    args = parser.parse_args()
    with ends_with_its_reader():
        try:
            path = write_report(args.runs, args.output, args.rollouts_mb)
        except (ValueError, OSError) as e:
            sys.exit(f'error: {e}')
        print(
            f'{path}   figures and rollouts: '
            f'{path.with_suffix("") if path.suffix else path.with_name(path.name + "_figures")}'
        )


if __name__ == '__main__':
    run()
