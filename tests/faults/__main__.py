"""Runs the injections and writes the tables; `python -m tests.faults --help`. What it does: the package's docstring."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests' / 'helpers')]

from bapo_jax.machine.files import replace_part  # noqa: E402
from benchmarks.host.load import cpu_name  # noqa: E402
from tests.faults import hosts, servers  # noqa: E402
from tests.faults.cases import Injection, Outcome, case_of, sound_run, struck  # noqa: E402
from tests.faults.kinds import CHAIN, KINDS, MOUNTED, Kind  # noqa: E402

PAGE = ROOT / 'docs' / 'reference' / 'operations.md'
DEADLINE_S = 600  # of an injection and all that follows from it
EASY = '{"nums": [44, 19, 35], "target": 98}\n{"nums": [3, 5, 7], "target": 15}\n'


def of_one_trainer(kinds: dict[str, Kind], folder: Path, benchmark: Path) -> dict[str, Injection]:
    """Strikes copies of one sound run, which the in-process engine answers."""
    sound = sound_run(folder, benchmark)

    def inject(strike: Kind, seed: int, number: int) -> Outcome:
        case = case_of(sound, seed, number)
        outcome = struck(case, strike)
        shutil.rmtree(case.workdir)
        return outcome

    return {name: partial(inject, strike) for name, strike in kinds.items()}


# The rows of the tables, and how the names of their kinds begin.
ROWS = {
    'kill -9 in any phase, three times, or after a freeze': ('killed', 'frozen'),
    'SIGTERM in any phase, or in an endless step': ('SIGTERM in ',),
    'SIGHUP (also under nohup), SIGUSR1, SIGUSR2, Ctrl-C (twice; with `\\| tee`)': ('SIGHUP', 'SIGUSR', 'Ctrl-C'),
    'SIGTERM while output is unread, closed or on a full disk': ('SIGTERM, and ',),
    'disk full, read-only, failing or over quota': ('disk ',),
    'checkpoint with a flipped bit, or a missing or truncated file': ('a bit ', 'a file of a checkpoint '),
    '`metrics.jsonl` truncated or damaged': ('half a row ', 'a row of metrics '),
    '`config.json` truncated or missing; `checkpoints/` deleted': ('config.json ', 'checkpoints lost'),
    "run directory or lock renamed; another machine's lock": ('the run directory ', 'the lock ', 'a lock '),
    'mounted disk full, or made read-only by the kernel': ('a real disk ',),
    'only server or its engine killed': ('the server killed', "the server's engine killed"),
    'only server or its engine frozen': ('the server frozen', "the server's engine frozen"),
    'one or both of two servers killed or frozen': ('one of two ', 'both of two '),
    'connection cut; lost or slow reply': ('a connection ', 'a reply '),
    'invalid replies: one, or three for a group': ('a damaged reply', 'three damaged '),
    'trainer killed, once or three times': ('the trainer killed while', 'the trainer killed in', 'the trainer killed three'),
    'trainer with its own server killed or stopped': ('the trainer killed, with', 'SIGTERM to the trainer'),
}

# How often each kind is injected, and a function of a folder for the runs and a benchmark's file.
SUITES: dict[str, tuple[int, Callable[[Path, Path], dict[str, Injection]]]] = {
    'kinds': (2, partial(of_one_trainer, KINDS | MOUNTED)),
    'servers': (2, servers.injections),
    'hosts': (2, hosts.injections),
}
OFTENER = {CHAIN: 6, servers.CHAIN: 5}


def late(*_) -> None:
    raise TimeoutError(f'it hung: no end after {DEADLINE_S} s')


def inject(kinds: dict[str, Injection], seed: int, times: dict[str, int]) -> dict[str, list[Outcome]]:
    """The outcomes of each kind, in rounds: each kind as many times as it is to be injected."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in kinds}
    order = [name for done in range(max(times.values())) for name in kinds if done < times[name]]
    for number, name in enumerate(order):
        signal.alarm(DEADLINE_S)
        try:
            with open(os.devnull, 'w') as quiet, contextlib.redirect_stdout(quiet):
                outcome = kinds[name](seed, number)
        except (Exception, pytest.fail.Exception) as e:  # whatever it is, this injection was not survived
            outcome = Outcome(False, 0, 0.0, f'{type(e).__name__}: {e}'[:300])
        signal.alarm(0)
        outcomes[name].append(outcome)
        print(f'{number}: {name}: {"survived" if outcome.survived else f"NOT SURVIVED: {outcome.why}"}', flush=True)
    return outcomes


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """A row for each of ROWS; a kind that none of them names has its own row."""
    rows: dict[str, list[Outcome]] = {}
    for name, of in outcomes.items():
        row = next((row for row, begins in ROWS.items() if name.startswith(begins)), name)
        rows.setdefault(row, []).extend(of)
    heads = ['fault', 'survived', 'slowest exit, s', 'slowest recovery, s']
    cells = [
        [row, f'{sum(o.survived for o in of)}/{len(of)}', slowest(o.end_s for o in of), slowest(o.recovery_s for o in of)]
        for row, of in rows.items()
    ]
    if not any(end for _, _, end, _ in cells):  # no trainer was struck that could say a last word
        heads, cells = [heads[0], heads[1], heads[3]], [[row, survived, recovery] for row, survived, _, recovery in cells]
    head, *lines = (f'| {" | ".join(line)} |' for line in [heads, *cells])
    return '\n'.join([head, f'|{"---|" * len(heads)}', *lines])


def slowest(seconds: Iterable[float | None]) -> str:
    known = [s for s in seconds if s is not None]
    return f'{max(known):.1f}' if known else ''


def caption(suite: str, seed: int, times: int | None) -> str:
    """The command of a table, its date and machine."""
    return (
        f'(`python -m tests.faults {suite} --seed={seed}{f" --times={times}" if times else ""}`, {datetime.date.today()}, '
        f'{os.cpu_count()} cores of {cpu_name()}, jax {importlib.metadata.version("jax")}.)'
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m tests.faults', description='Injects faults and judges what became of the run.')
    parser.add_argument('suites', nargs='*', default=list(SUITES), help=f'of {", ".join(SUITES)}; all where none is named')
    parser.add_argument('--seed', type=int, default=0, help='of the moments')
    parser.add_argument('--times', type=int, help='injections of each kind')
    parser.add_argument('--only', default='', help='the kinds whose name has this text; their table is printed alone')
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - set(SUITES):
        parser.error(f'no suite is called {", ".join(unknown)}; there are: {", ".join(SUITES)}')
    signal.signal(signal.SIGALRM, late)
    # Under nohup it is ignored, and so it would be in the trainers. What a process handles is the default in those that it starts.
    signal.signal(signal.SIGHUP, lambda *_: None)
    everything, survived = Path(tempfile.mkdtemp(prefix='bapo_faults')), True
    cache = {'jax_compilation_cache_dir': str(everything / 'programs'), 'jax_persistent_cache_min_compile_time_secs': 0}
    for name, value in cache.items():
        jax.config.update(name, value)  # all runs compile the same programs
        os.environ[name.upper()] = str(value)  # those of processes, too
    (benchmark := everything / 'few.jsonl').write_text(EASY)
    for suite in arguments.suites:
        often, injections = SUITES[suite]
        (folder := everything / suite).mkdir()
        kinds = {name: injection for name, injection in injections(folder, benchmark).items() if arguments.only in name}
        outcomes = inject(kinds, arguments.seed, {name: arguments.times or OFTENER.get(name, often) for name in kinds})
        print(table(outcomes))
        if not arguments.only:
            lost = sum(o.lost for of in outcomes.values() for o in of)
            where = f'{caption(suite, arguments.seed, arguments.times)} Rows of the ledger that differ: {lost}.'
            replace_part(PAGE, f'faults: {suite}', f'{table(outcomes)}\n\n{where}\n')
        survived &= all(o.survived for of in outcomes.values() for o in of)
    shutil.rmtree(everything)
    sys.exit(0 if survived else 1)


if __name__ == '__main__':
    main()
