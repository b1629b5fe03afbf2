"""What the commands share: configs found by name, and flags that `--help` shows however a command was started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags
from ml_collections.config_flags import config_flags

flags.disclaim_key_flags()  # a flag defined here is its caller's

# Within an installed package, beside it in a checkout.
_HERE = Path(__file__).resolve().parent
CONFIGS = _HERE / 'configs' if (_HERE / 'configs').is_dir() else _HERE.parent / 'configs'


def config_file(said: str) -> str:
    """The FILE of FILE or FILE:METHOD, where NAME stands for the package's own NAME.py.

    A path stays as it is: whatever has a slash, ends in .py, or is a file here. Raises ValueError for an unknown name.
    """
    file, colon, method = said.partition(':')
    if not file or '/' in file or file.endswith('.py') or Path(file).is_file():
        return said
    names = sorted(path.stem for path in CONFIGS.glob('[!_]*.py'))
    if file not in names:
        raise ValueError(f'{file!r} is no config of this package, nor a file; choose one of {", ".join(names)}, or give a path')
    return f'{CONFIGS / file}.py{colon}{method}'


class _Parser(config_flags.ConfigFileFlagParser):
    def parse(self, path):
        return super().parse(config_file(path))


def define_config(help_string: str) -> None:
    """The flag --config, with the overrides --config.FIELD=VALUE."""
    config_flags.DEFINE_config_file('config', None, help_string, lock_config=True)
    flags.FLAGS['config'].parser = _Parser(name='config', lock_config=True)


def start(main: Callable[..., None]) -> None:
    """absl's `app.run`. A console command's --help says what that of `python -m` does."""
    for flag in flags.FLAGS.flags_by_module_dict().get(main.__module__, ()):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    sys.modules['__main__'].__doc__ = sys.modules[main.__module__].__doc__
    app.run(main)
