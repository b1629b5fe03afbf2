"""What the commands share: finding configs by name, and the same `--help` however a command was started."""

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

from bapo_jax.machine import output, stopping, terminal

flags.disclaim_key_flags()  # a flag defined here belongs to its caller

# Inside the package if it is installed, beside it in a checkout.
_PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = _PACKAGE / 'configs' if (_PACKAGE / 'configs').is_dir() else _PACKAGE.parent / 'configs'


def config_file(said: str) -> str:
    """Expands NAME or NAME:METHOD to the path of the package's config NAME.py.

    A path is returned unchanged: anything that has a slash, ends in .py, or is an existing file. Raises
    ValueError if the name is unknown.
    """
    file, colon, method = said.partition(':')
    if not file or '/' in file or file.endswith('.py') or Path(file).is_file():
        return said
    names = sorted(path.stem for path in CONFIGS.glob('[!_]*.py'))
    if file not in names:
        raise ValueError(
            f'{file!r} is neither a config of this package nor a file; choose one of {", ".join(names)}, or '
            'give a path'
        )
    return f'{CONFIGS / file}.py{colon}{method}'


def check_overrides(config: ConfigDict, arguments: Sequence[str]) -> None:
    """Raises ValueError, listing the fields, if an argument --config.FIELD=VALUE names an unknown field."""
    for argument in arguments:
        found = re.match(r'--?config\.([\w.]+)', argument)
        section, place = config, ''
        for part in found[1].split('.') if found else ():
            if not isinstance(section, ConfigDict):
                raise ValueError(
                    f'--config.{found[1]}: {place} has a value and no fields; write --config.{place}=VALUE'
                )
            if part not in section:
                raise ValueError(
                    f'--config.{found[1]}: no such field; choose one of the fields of '
                    f'{place or "the config"}: {", ".join(sorted(section))}'
                )
            section, place = section[part], f'{place}.{part}'.lstrip('.')


def config_from(said: str) -> ConfigDict:
    """The config that `get_config` of FILE or FILE:METHOD returns.

    Raises ValueError, naming file, line and remedy, if the file fails or returns no config.
    """
    file, *method = said.split(':', 1)
    if not Path(file).is_file():
        raise ValueError(f'{file or "--config"}: no such file; check the path')
    loader = importlib.machinery.SourceFileLoader('config_file', file)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    try:
        loader.exec_module(module)
        if not callable(getattr(module, 'get_config', None)):
            raise ValueError('the file has no function get_config; add one, as in the files of configs/')
        config = module.get_config(*method)
        if not isinstance(config, ConfigDict):
            raise ValueError(
                f'get_config returned {repr(config)[:100]}; return a ConfigDict that starts from '
                'default_config()'
            )
    except ValueError as error:  # its message has the remedy
        raise ValueError(f'{_place(error, file)}: {_on_one_line(error)}') from error
    except (Exception, SystemExit) as error:  # a user's file may fail in any way
        kind = type(error).__name__
        raise ValueError(
            f'{_place(error, file)}: {kind}: {_on_one_line(error)}; fix the config file'
        ) from error
    return config


def _place(error: BaseException, file: str) -> str:
    """'FILE, line N' if the traceback has a line of the file, else only FILE."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    return f'{file}, line {lines[-1]}' if lines else file


def _on_one_line(error: BaseException) -> str:
    return ' '.join(str(error.msg if isinstance(error, SyntaxError) else error).split())[:1000]


class _Parser(config_flags.ConfigFileFlagParser):
    def __init__(self, check: Callable[[ConfigDict], None], arguments: Sequence[str] | None = None):
        super().__init__(name='config')
        self._check, self._arguments = check, arguments

    def parse(self, path):
        said = config_file(path)
        config = config_from(said)
        check_overrides(config, sys.argv if self._arguments is None else self._arguments)
        try:
            self._check(config)
        except ValueError as error:
            raise ValueError(f'{said}: {error}') from error
        return config.lock()


def define_config(help_string: str, check: Callable[[ConfigDict], None]) -> None:
    """Defines the flag --config, with the overrides --config.FIELD=VALUE.

    `check` raises ValueError if the config has unknown fields or lacks some.
    """
    config_flags.DEFINE_config_file('config', None, help_string, lock_config=True)
    flags.FLAGS['config'].parser = _Parser(check)


def config_with(arguments: Sequence[str], check: Callable[[ConfigDict], None]) -> ConfigDict:
    """The config of flags such as --config=NAME and --config.FIELD=VALUE, as `define_config` parses them.

    Raises ValueError if there is no such config or field, or if a value has the wrong type.
    """
    values = flags.FlagValues()
    config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=list(arguments))
    values['config'].parser = _Parser(check, arguments)
    try:
        values(['', *arguments])
    except (flags.Error, ValueError, TypeError) as error:
        said = arguments[0]
        raise ValueError(f'{said}: {error}') from error
    return values.config


def start(main: Callable[..., None], said: str = '') -> None:
    """Runs `main` with absl's `app.run` and ends the process.

    --help shows `said`, or the docstring of the module that defines `main`, then that module's flags: the
    same for a console command as for `python -m`.

    Output cannot end the process (output.py) or control the terminal (terminal.py), and no thread delays its
    end (stopping.py).
    """
    for flag in flags.FLAGS.flags_by_module_dict().get(main.__module__, ()):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    sys.modules['__main__'].__doc__ = said or sys.modules[main.__module__].__doc__
    with stopping.ending():
        output.guard_streams()
        terminal.guard()
        logging.get_absl_handler().python_handler.setStream(sys.stderr)
        for handler in [h for h in python_logging.root.handlers if type(h) is python_logging.StreamHandler]:
            # A library added it when it was imported; it would repeat absl's messages.
            python_logging.root.removeHandler(handler)
        app.run(main)
