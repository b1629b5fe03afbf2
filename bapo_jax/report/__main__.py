"""Writes what a run, or several, show as one page: figures, tables and warnings, with nothing outside the file.

    python -m bapo_jax.report runs/a [runs/b …] [--output=report.html]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bapo_jax.report.page import write_report


def run() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog='python -m bapo_jax.report', description=__doc__.split('\n')[0])
    parser.add_argument('runs', nargs='+', type=Path, metavar='RUN', help='a run directory')
    parser.add_argument('--output', type=Path, help='the page; its PNGs go to a folder beside it. Default: RUN/report.html')
    args = parser.parse_args()
    try:
        path = write_report(args.runs, args.output)
    except (ValueError, OSError) as e:
        sys.exit(f'error: {e}')
    print(f'{path}   figures: {path.with_suffix("") if path.suffix else path.with_name(path.name + "_figures")}')


if __name__ == '__main__':
    run()
