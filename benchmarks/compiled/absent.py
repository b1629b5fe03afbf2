"""Devices that are not there, as benchmarks are asked for them: their names, and the compilers that stand in
for them.
"""

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec

from bapo_jax.dry_run.targets import CARDS

_MODULES = {'gpu': 'jax_cuda13_plugin', 'tpu': 'libtpu'}


def card(name: str) -> str:
    """A type of argparse: a key of CARDS."""
    if name not in CARDS:
        raise argparse.ArgumentTypeError(f'no card {name!r}; there are {", ".join(CARDS)}')
    return name


def cards(topology: str) -> tuple[int, int]:
    """(hosts, cards of each) of '4xH100' or '2x8xH100'. Raises ValueError."""
    named = re.fullmatch(r'(?:([1-9]\d*)x)?([1-9]\d*)x(.+)', topology)
    if not named or named[3] not in CARDS:
        raise ValueError(
            f'no cards {topology!r}; give 4xH100, or 2x8xH100 for two hosts, of {", ".join(CARDS)}'
        )
    return int(named[1] or 1), int(named[2])


def require_compiler(platform: str) -> None:
    """Exits with status 1 and a line where the compiler of 'gpu' or 'tpu' devices is not installed."""
    if find_spec(_MODULES[platform]) is None:
        target, name = f'{platform}-compiler', platform.upper()
        raise SystemExit(
            f'error: the compiler of {name}s is missing; run `make {target}` and set PYTHONPATH=.:.{target}. '
            f'No {name} is needed'
        )
