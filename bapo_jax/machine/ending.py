"""Ends a run that cannot continue, with a message, a remedy and status 1. docs/reference/errors.md explains
some messages.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from bapo_jax.machine.files import is_of_disk

CONTINUES = '\nThe same command continues from the last checkpoint.'


class Ending(Exception):
    """The run cannot continue, and the code is not at fault.

    The message gives the reason, a subclass the remedy.
    """

    remedy = ''  # appended to the message: a new line and what to do
    at_once = False  # whether to skip the exit handlers, which would wait for a lost host
    of_all_hosts = False  # whether the other hosts end with it, too


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Inside, a run is built: an error in its inputs ends the process with its message.

    Errors that can also occur later, such as a lost host or a full disk, are left to `explained`.
    """
    try:
        yield
    except (ValueError, OSError, Ending) as e:
        if getattr(e, 'of_all_hosts', False) or isinstance(e, OSError) and is_of_disk(e):
            raise
        sys.exit(f'error: {e}')


@contextlib.contextmanager
def explained(workdir: Path) -> Iterator[None]:
    """Inside, a run is at work: an error that is no bug ends it with its message and the remedy."""
    try:
        yield
    except Ending as e:
        if e.at_once:
            leave(f'error: {e}{e.remedy}')
        sys.exit(f'error: {e}{e.remedy}')
    except OSError as e:
        if not workdir.is_dir():
            sys.exit(
                f'error: the run directory {workdir} is gone ({e}); restore it, then run the same command to '
                'continue'
            )
        if not is_of_disk(e):
            raise
        sys.exit(
            f'error: {e}\nMake room, or mount the disk for writing; then the same command continues from the '
            'last checkpoint.'
        )


def leave(message: str) -> NoReturn:
    """Ends the process with status 1, without its exit handlers."""
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
