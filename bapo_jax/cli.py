"""What the commands share: configs found by name, and flags that `--help` shows however a command was started."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging as python_logging
import re
import sys
import traceback
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


def config_from(said: str) -> ConfigDict:
    """What `get_config` of FILE or FILE:METHOD returns. Raises ValueError, naming file, line and remedy, where it does not work."""
    file, *method = said.split(':', 1)
    if not Path(file).is_file():
        raise ValueError(f'{file or "--config"}: no such file; check the path')
    loader = importlib.machinery.SourceFileLoader('config_file', file)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    try:
        loader.exec_module(module)
        if not callable(getattr(module, 'get_config', None)):
            raise ValueError('it has no function get_config; add one, as the files of configs/ have')
        config = module.get_config(*method)
        if not isinstance(config, ConfigDict):
            raise ValueError(f'get_config returned {repr(config)[:100]}; return a config, which begins as default_config()')
    except ValueError as error:  # says its remedy
        raise ValueError(f'{_place(error, file)}: {_on_one_line(error)}') from error
    except (Exception, SystemExit) as error:  # a user's file can fail in any way
        kind = type(error).__name__
        raise ValueError(f'{_place(error, file)}: {kind}: {_on_one_line(error)}; mend the config file') from error
    return config


def _place(error: BaseException, file: str) -> str:
    """'FILE, line N', where in a file an error arose; the file alone where it arose in none of its lines."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    return f'{file}, line {lines[-1]}' if lines else file


def _on_one_line(error: BaseException) -> str:
    return ' '.join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:1000]


class _Parser(config_flags.ConfigFileFlagParser):
    def __init__(self, check: Callable[[ConfigDict], None]):
        super().__init__(name='config')
        self._check = check

    def parse(self, path):
        said = config_file(path)
        config = config_from(said)
        check_overrides(config, sys.argv)
        try:
            self._check(config)
        except ValueError as error:
            raise ValueError(f'{said}: {error}') from error
        return config.lock()


def define_config(help_string: str, check: Callable[[ConfigDict], None]) -> None:
    """The flag --config, with the overrides --config.FIELD=VALUE.

    `check` raises ValueError where the config file has other fields than a config.
    """
    config_flags.DEFINE_config_file('config', None, help_string, lock_config=True)
    flags.FLAGS['config'].parser = _Parser(check)


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
