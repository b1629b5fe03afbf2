"""Feeds the targets and writes the table; `python -m tests.fuzz --help`. What it does: the package's docstring."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests' / 'helpers')]
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from bapo_jax.machine.files import replace_part  # noqa: E402
from benchmarks.host.load import cpu_name  # noqa: E402
from tests.fuzz.feed import ACCEPTED, CRASH, Tally, Target, fed  # noqa: E402
from tests.fuzz.targets import TARGETS  # noqa: E402

PAGE = ROOT / 'docs' / 'reference' / 'operations.md'
WHOLE = 1_000_000
SHOWN = 10  # crashes of a target that are printed


def feed(name: str, inputs: int, seed: int) -> tuple[Target, Tally]:
    """What became of a target's inputs; crashes are printed as rows for the corpus."""
    opened, _ = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix='bapo_fuzz') as folder, opened(Path(folder)) as target:
        tally = fed(name, target, inputs, seed)
    for said, outcome in tally.crashes[:SHOWN]:
        print(f'{name}: CRASH: {outcome.why}\n{json.dumps(said)}')
    print(f'{name}: {tally.kinds.total():,} inputs in {tally.seconds:.0f} s, {len(tally.crashes)} crashes', flush=True)
    return target, tally


def row(name: str, target: Target, tally: Tally) -> str:
    cells = (
        name.replace('_', ' '), f'{tally.kinds.total():,}', f'{tally.slowest_s:.2f}/{target.deadline_s:g}', str(tally.kinds[CRASH]),
    )  # fmt: skip
    return f'| {" | ".join(cells)} |'


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m tests.fuzz', description='Feeds everything that parses what it did not write.')
    parser.add_argument('--inputs', type=int, default=WHOLE, help='in all; each target gets its share')
    parser.add_argument('--seed', type=int, default=0, help='of the inputs')
    parser.add_argument('--only', default='', help='the targets whose name has this text')
    arguments = parser.parse_args()
    shares = {name: share for name, (_, share) in TARGETS.items() if arguments.only in name}
    if not shares:
        parser.error(f'no target has {arguments.only!r} in its name; there are: {", ".join(TARGETS)}')
    logging.disable(logging.WARNING)  # what the parsers say of odd inputs that they accept
    began = time.monotonic()
    results = {name: feed(name, arguments.inputs * share // sum(shares.values()), arguments.seed) for name, share in shares.items()}
    rows = [row(name, *result) for name, result in results.items()]
    head = '| target | inputs | slowest/deadline, s | crashes |'
    table = '\n'.join([head, '|---|---|---|---|', *rows])
    print(table)
    if not arguments.only:
        accepted = sum(tally.kinds[ACCEPTED] for _, tally in results.values())
        where = (
            f'(`python -m tests.fuzz --inputs={arguments.inputs} --seed={arguments.seed}`, {datetime.date.today()}, '
            f'{(time.monotonic() - began) / 60:.0f} minutes on {os.cpu_count()} cores of {cpu_name()}, '
            f'Python {".".join(map(str, sys.version_info[:2]))}, sympy {importlib.metadata.version("sympy")}; accepted: {accepted:,}.)'
        )
        replace_part(PAGE, 'fuzz', f'{table}\n\n{where}\n')
    sys.exit(1 if any(tally.crashes for _, tally in results.values()) else 0)


if __name__ == '__main__':
    main()
