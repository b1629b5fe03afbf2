"""Applies the mutants to a copy of the checkout and runs their tests; what for: the package's docstring."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutants.table import MUTANTS, Mutant  # noqa: E402

DEADLINE_S = 600.0  # of one mutant's tests; a mutant that makes them hang is noticed too
_NO_TESTS = 5  # pytest's status where it found none


def copied(folder: Path) -> Path:
    """A copy of the checkout's tracked files, as they are now."""
    names = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split('\0')):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def tested(folder: Path, tests: tuple[str, ...]) -> str:
    """'' where these tests pass in the copy, or the first that fails. Raises RuntimeError where there are none."""
    command = [sys.executable, '-m', 'pytest', '-q', '-x', '-m', 'not slow', '-p', 'no:cacheprovider', *tests]
    environment = os.environ | {'PYTHONPATH': str(folder), 'PYTHONDONTWRITEBYTECODE': '1'}
    try:
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return f'no end within {DEADLINE_S:.0f} s'
    if result.returncode == 0:
        return ''
    if result.returncode == _NO_TESTS:
        raise RuntimeError(f'{" ".join(tests)}: no test to run')
    failed = [line for line in result.stdout.splitlines() if line.startswith(('FAILED', 'ERROR'))]
    return failed[0].split(' - ')[0] if failed else f'status {result.returncode}: {result.stderr.strip()[-200:]}'


def struck(folder: Path, mutant: Mutant) -> str:
    """What its tests said with the mutant in the copy, which is whole again after."""
    file = folder / mutant.file
    text = file.read_text('utf-8')
    if text.count(mutant.old) != 1:
        raise RuntimeError(f'{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times, not once; mend tests/mutants/table.py')
    file.write_text(text.replace(mutant.old, mutant.new), 'utf-8')
    try:
        return tested(folder, mutant.tests)
    finally:
        file.write_text(text, 'utf-8')


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m tests.mutants', description='Puts faults into a copy of the checkout.')
    parser.add_argument('numbers', nargs='*', type=int, help='of the mutants; none: all')
    parser.add_argument('--of', default='', help='the mutants of files whose path has this text')
    arguments = parser.parse_args()
    chosen = [(n, m) for n, m in enumerate(MUTANTS, 1) if arguments.of in m.file and n in (arguments.numbers or [n])]
    if not chosen:
        parser.error(f'no such mutant; there are 1 to {len(MUTANTS)}')
    survivors = []
    with tempfile.TemporaryDirectory(prefix='bapo_mutants') as name:
        folder = copied(Path(name))
        if said := tested(folder, tuple(dict.fromkeys(test for _, m in chosen for test in m.tests))):
            sys.exit(f'error: without any mutant: {said}')
        for n, mutant in chosen:
            started = time.monotonic()
            said = struck(folder, mutant)
            survivors += [] if said else [n]
            print(f'{n:3d}  {time.monotonic() - started:4.0f} s  {mutant.file}: {mutant.breaks}: {said or "SURVIVED"}', flush=True)
    print(f'{len(chosen)} mutants, {len(chosen) - len(survivors)} noticed; survivors: {survivors or "none"}')
    sys.exit(bool(survivors))


if __name__ == '__main__':
    main()
