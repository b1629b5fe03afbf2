"""Which versions the quick tests pass with: a row for this Python in the table of docs/start.md. `make
versions` runs it.

make versions                          # the Python of .venv
make clean-env versions PYTHON=python3.12
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

from bapo_jax.machine.files import replace_part

PAGE = Path(__file__).resolve().parents[1] / 'docs' / 'start.md'
PACKAGES = ('jax', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'transformers', 'numpy')
HEAD = f'| Python | {" | ".join(PACKAGES)} | quick tests | date |\n|{"---|" * (len(PACKAGES) + 3)}\n'


def rows_of(page: str) -> dict[str, str]:
    """The rows of the page's table, by Python."""
    table = page.partition('<!-- versions -->\n')[2].partition('<!-- /versions -->')[0]
    lines = [line for line in table.splitlines()[2:] if line.startswith('|')]
    return {line.split('|')[1].strip(): line for line in lines}


def main() -> None:
    command = [sys.executable, '-m', 'pytest', '-m', 'not slow']
    tests = subprocess.run(command, cwd=PAGE.parents[1], capture_output=True, text=True)
    if tests.returncode:
        sys.exit(f'the quick tests did not pass:\n{tests.stdout[-4000:]}')
    passed = tests.stdout.strip().splitlines()[-1].split(',')[0]
    cells = [
        platform.python_version(),
        *map(importlib.metadata.version, PACKAGES),
        passed,
        str(datetime.date.today()),
    ]
    rows = rows_of(PAGE.read_text('utf-8')) | {cells[0]: f'| {" | ".join(cells)} |'}
    replace_part(PAGE, 'versions', HEAD + ''.join(f'{rows[python]}\n' for python in sorted(rows)))
    print(rows[cells[0]])


if __name__ == '__main__':
    main()
