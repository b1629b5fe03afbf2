"""Tells a run's story on one screen: what was trained, when, where, how it ended, scores, and two responses.

    bapo-show runs/quickstart

The run may be running, stopped, crashed, finished, or of an earlier version. Nothing is written, so the
directory may be a read-only mount. Times are in UTC.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from bapo_jax.machine import terminal
from bapo_jax.machine.help import CommandParser
from bapo_jax.machine.output import ends_with_its_reader, open_streams
from bapo_jax.show.lines import Labelled, lines_of
from bapo_jax.show.story import read_story

_COLUMNS = 80  # longer lines are wrapped


def run() -> None:
    """The command `bapo-show`."""
    open_streams()
    terminal.guard()
    parser = CommandParser(__doc__)
    parser.add_argument('run', type=Path, metavar='RUN', help='a run directory')
    args = parser.parse_args()
    with ends_with_its_reader():
        try:
            table = table_of(lines_of(read_story(args.run)))
        except (ValueError, OSError) as e:
            sys.exit(f'error: {e}')
        terminal.console(width=min(_COLUMNS, shutil.get_terminal_size().columns)).print(table)


def table_of(lines: Sequence[Labelled]) -> Table:
    """Returns labelled lines as two columns; a long text is wrapped within its own."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style='bold')
    table.add_column(overflow='fold')
    for label, text in lines:
        table.add_row(label, text)
    return table


if __name__ == '__main__':
    run()
