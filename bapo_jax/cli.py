"""What the commands share: configs found by name, and flags that `--help` shows however a command was started."""

from __future__ import annotations

import logging as python_logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from bapo_jax import output, stopping, terminal

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


def check_overrides(config: ConfigDict, arguments: Sequence[str]) -> None:
    """Raises ValueError for an argument --config.FIELD=VALUE whose field the config lacks, naming those that are there."""
    for argument in arguments:
        found = re.match(r'--?config\.([\w.]+)', argument)
        section, place = config, 'the config'
        for part in found[1].split('.') if found else ():
            fields = dict(section) if isinstance(section, ConfigDict) else {}
            if part not in fields:
                raise ValueError(f'--config.{found[1]}: no such field; {place} has {", ".join(sorted(fields)) or "no fields"}')
            section, place = fields[part], part


class _Parser(config_flags.ConfigFileFlagParser):
    def parse(self, path):
        config = super().parse(config_file(path))
        check_overrides(config, sys.argv)
        return config


def define_config(help_string: str) -> None:
    """The flag --config, with the overrides --config.FIELD=VALUE."""
    config_flags.DEFINE_config_file('config', None, help_string, lock_config=True)
    flags.FLAGS['config'].parser = _Parser(name='config', lock_config=True)


def start(main: Callable[..., None]) -> None:
    """absl's `app.run`, after which the process ends. A console command's --help says what that of `python -m` does.

    Nothing that prints decides how it ends (output.py) or steers the terminal (terminal.py), and no thread holds it up (stopping.py).
    """
    for flag in flags.FLAGS.flags_by_module_dict().get(main.__module__, ()):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    sys.modules['__main__'].__doc__ = sys.modules[main.__module__].__doc__
    with stopping.ending():
        output.guard()
        terminal.guard()
        logging.get_absl_handler().python_handler.setStream(sys.stderr)
        for handler in [h for h in python_logging.root.handlers if type(h) is python_logging.StreamHandler]:
            python_logging.root.removeHandler(handler)  # of a library's import: it would say again what absl's says
        app.run(main)
