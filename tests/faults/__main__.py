"""Runs the injections and writes the table; `python -m tests.faults --help`. What it does: the package's docstring."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests' / 'helpers')]

from bapo_jax.files import replace_part  # noqa: E402
from benchmarks.host_load import cpu_name  # noqa: E402
from tests.faults.cases import Case, Outcome, Sound, case_of, outcome_of, sound_run  # noqa: E402
from tests.faults.kinds import KINDS  # noqa: E402

PAGE = ROOT / 'docs' / 'operations.md'
EASY = '{"nums": [44, 19, 35], "target": 98}\n{"nums": [3, 5, 7], "target": 15}\n'


def inject(sound: Sound, kinds: dict[str, Callable[[Case], None]], seed: int, numbers: Iterable[int]) -> dict[str, list[Outcome]]:
    """The outcomes of each kind; injection i is of kind i mod their number."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in kinds}
    for number in numbers:
        name, strike = list(kinds.items())[number % len(kinds)]
        case = case_of(sound, seed, number)
        try:
            with open(os.devnull, 'w') as quiet, contextlib.redirect_stdout(quiet):
                strike(case)
                outcome = outcome_of(case)
        except Exception as e:  # whatever it is, this injection was not survived
            outcome = Outcome(False, 0, 0.0, f'{type(e).__name__}: {e}')
        outcomes[name].append(outcome)
        verdict = 'survived' if outcome.survived else f'NOT SURVIVED: {outcome.why}'
        print(f'{number}: {name}, at step {case.step}: {verdict}', flush=True)
        shutil.rmtree(case.workdir)
    return outcomes


def table(outcomes: dict[str, list[Outcome]]) -> str:
    rows = [
        f'| {name} | {len(of)} | {sum(o.survived for o in of)} | {sum(o.lost for o in of)} | {max(o.recovery_s for o in of):.1f} |'
        for name, of in outcomes.items() if of
    ]  # fmt: skip
    return '\n'.join(['| fault | times | survived | rows of the ledger that differ | slowest recovery, s |', '|---|---|---|---|---|', *rows])


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m tests.faults', description='Injects faults and judges what became of the run.')
    parser.add_argument('--seed', type=int, default=0, help='of the moments')
    parser.add_argument('--times', type=int, default=8, help='injections of each kind')
    parser.add_argument('--only', default='', help='the kinds whose name has this text')
    arguments = parser.parse_args()
    kinds = {name: strike for name, strike in KINDS.items() if arguments.only in name}
    if not kinds:
        parser.error(f'no kind has {arguments.only!r} in its name; there are: {", ".join(KINDS)}')
    folder = Path(tempfile.mkdtemp(prefix='bapo_faults'))
    (folder / 'few.jsonl').write_text(EASY)
    outcomes = inject(sound_run(folder, folder / 'few.jsonl'), kinds, arguments.seed, range(arguments.times * len(kinds)))
    shutil.rmtree(folder)
    print(table(outcomes))
    if not arguments.only:
        where = (
            f'(`python -m tests.faults --seed={arguments.seed} --times={arguments.times}`, {datetime.date.today()}, {os.cpu_count()} '
            f'cores of {cpu_name()}, jax {importlib.metadata.version("jax")}. Recovery is all of the run that was left.)'
        )
        replace_part(PAGE, 'faults', f'{table(outcomes)}\n\n{where}\n')
    sys.exit(0 if all(o.survived for of in outcomes.values() for o in of) else 1)


if __name__ == '__main__':
    main()
