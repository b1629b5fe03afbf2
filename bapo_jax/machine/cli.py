"""What the commands share: configs found by name, one `--help`, and errors of one line (see help.py)."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging as python_logging
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from bapo_jax.machine import output, stopping, terminal
from bapo_jax.machine.help import CommandParser, columns, command_name, did_you_mean, version_line

# Pages of --help by their names, for a width.
Topics = Callable[[int], Mapping[str, str]]

_MISSING = 'must have a value other than None'  # how absl says that a required flag is not there
_HELP = re.compile('-h|-{1,2}help(short|full)?')

flags.disclaim_key_flags()  # a flag defined here belongs to its caller

# Inside the package if it is installed, beside it in a checkout.
_PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = _PACKAGE / 'configs' if (_PACKAGE / 'configs').is_dir() else _PACKAGE.parent / 'configs'


def config_names() -> list[str]:
    """The names of the package's configs."""
    return sorted(path.stem for path in CONFIGS.glob('[!_]*.py'))


def config_file(said: str) -> str:
    """Expands NAME or NAME:METHOD to the path of the package's config NAME.py.

    A path is returned unchanged: anything that has a slash, ends in .py, or is an existing file. Raises
    ValueError if the name is unknown.
    """
    file, colon, method = said.partition(':')
    if not file or '/' in file or file.endswith('.py') or Path(file).is_file():
        return said
    names = config_names()
    if file not in names:
        raise ValueError(
            f'{file!r} is neither a config of this package nor a file{did_you_mean(file, names)}; choose one '
            f'of {", ".join(names)}, or give a path'
        )
    return f'{CONFIGS / file}.py{colon}{method}'


def check_overrides(config: ConfigDict, arguments: Sequence[str]) -> None:
    """Raises ValueError, with the nearest fields, if an argument --config.FIELD=VALUE names no field."""
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
                    f'{argument}: no such field{did_you_mean(found[1], _field_names(config))}; see '
                    f'`bapo-train --help{f" {place}" if place else ""}`'
                )
            section, place = section[part], f'{place}.{part}'.lstrip('.')


def _field_names(config: ConfigDict, prefix: str = '') -> list[str]:
    names = []
    for name, held in config.items():
        of_section = isinstance(held, ConfigDict)
        names += _field_names(held, f'{prefix}{name}.') if of_section else [prefix + name]
    return names


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
    except (flags.Error, ValueError, TypeError) as wrong:
        said, error = arguments[0], _explained(wrong, ())
        raise ValueError(f'{said}: {error}') from wrong
    return values.config


def start(main: Callable[..., None], said: str = '', topics: Topics = lambda width: {}) -> None:
    """Runs `main` with absl's `app.run` and ends the process. A mistake in the flags is one line.

    --help shows `said`, or the docstring of the module that defines `main`, then that module's flags: the
    same for a console command as for `python -m`. `topics` returns more pages for a width by their names:
    --help ends with the page '', and --help NAME shows another one.

    Output cannot end the process (output.py) or control the terminal (terminal.py), and no thread delays its
    end (stopping.py).
    """
    _answer(main, said, topics)

    def of_absl(words: Sequence[str]) -> None:
        try:
            main(words)
        except app.UsageError as error:
            sys.exit(f'error: {error}')

    def parsed(words: Sequence[str]) -> list[str]:
        try:
            return flags.FLAGS(words)
        except (flags.Error, ValueError) as wrong:  # ValueError: --nodry_run=3
            error = _explained(wrong, topics(columns()))
            sys.exit(f'error: {error}')

    with stopping.ending():
        output.guard_streams()
        terminal.guard()
        handler = logging.get_absl_handler().python_handler
        handler.setStream(sys.stderr)
        handler.setFormatter(_Sentences())
        for other in [h for h in python_logging.root.handlers if type(h) is python_logging.StreamHandler]:
            # A library added it when it was imported; it would repeat absl's messages.
            python_logging.root.removeHandler(other)
        app.run(of_absl, flags_parser=parsed)


class _Sentences(logging.PythonFormatter):
    """Shows what the package says (events.py and warnings) as sentences, without absl's date and place."""

    def format(self, record: python_logging.LogRecord) -> str:
        ours = Path(record.pathname).is_relative_to(_PACKAGE)
        return f'note: {record.getMessage()}' if ours else super().format(record)


def _answer(main: Callable[..., None], said: str, topics: Topics) -> None:
    """Answers --help, --help NAME and --version on standard output, and ends the process."""
    words = sys.argv[1 : sys.argv.index('--') if '--' in sys.argv else None]
    asking = [i for i, word in enumerate(words) if _HELP.fullmatch(word)]
    if asking:
        pages = topics(columns())
        after = [word for word in words[asking[0] + 1 :][:1] if not word.startswith('-')]
        topic, named = after[0] if after and pages else None, [name for name in pages if name]
        if topic is not None and topic not in named:
            sys.exit(
                f'error: --help {terminal.plain(topic) or repr(topic)}: no such section or field'
                f'{did_you_mean(topic, named)}; see `{command_name()} --help`'
            )
        page = pages[topic] if topic else _usage(main, said, pages.get('', ''))
    elif '--version' in words:
        page = version_line()
    else:
        return
    with output.ends_with_its_reader():
        print(page)
    sys.exit()


def _usage(main: Callable[..., None], said: str, more: str) -> str:
    """The command's docstring, its flags, and `more`."""
    parser = CommandParser(said or sys.modules[main.__module__].__doc__ or '')
    parser.epilog = more
    # absl files the flags of a module that runs as __main__ under the program's path.
    module = sys.argv[0] if main.__module__ == '__main__' else main.__module__
    own = flags.FLAGS.flags_by_module_dict().get(module, ())
    for flag in sorted(own, key=lambda flag: not _is_required(flag)):
        about, default = re.sub('^<.*?>: ', '', flag.help).replace('%', '%%'), flag.default
        if default and 'efault' not in about:
            about += f' Default: {default}.'
        if flag.boolean:
            parser.add_argument(f'--{flag.name}', action='store_true', help=about)
        else:
            choices = getattr(flag.parser, 'enum_values', None)
            word = {'int': 'N', 'float': 'X'}.get(flag.flag_type(), flag.name.upper())
            parser.add_argument(
                f'--{flag.name}',
                metavar=None if choices else word,
                choices=choices,
                required=_is_required(flag),
                help=about,
            )
    return parser.format_help()


def _is_required(flag: flags.Flag) -> bool:
    return any(_MISSING in validator.message for validator in flag.validators)


def _explained(wrong: Exception, fields: Iterable[str]) -> ValueError:
    """An error of absl's flags in words: what was typed and what to type. `fields` are those of a config."""
    name, said = command_name(), str(wrong).removeprefix('flag ')
    if isinstance(wrong, flags.UnrecognizedFlagError):
        flag = wrong.flagname
        sections = {field.rpartition('.')[0] for field in fields}
        if meant := [
            field for field in fields if field not in sections and flag in (field, field.rpartition('.')[2])
        ]:
            value = wrong.flagvalue.partition('=')[2] or 'VALUE'
            return ValueError(f'--{flag} is a field of the config; write --config.{meant[0]}={value}')
        return ValueError(f'--{flag}: no such flag{did_you_mean(flag, flags.FLAGS)}; see `{name} --help`')
    found = re.match(r'--([\w.]+)=', said)
    if not isinstance(wrong, flags.IllegalFlagValueError) or not found:
        return ValueError(f'{said}; see `{name} --help`')
    flag = found[1]
    if flag == 'config' and wrong.__context__:  # of _Parser
        e = wrong.__context__
        return ValueError(str(e))
    if _MISSING not in said:
        page = f'`{name} --help`'
        if flag.startswith('config.'):
            page = f'`bapo-train --help {flag.removeprefix("config.")}`'
        if '; give ' in said:
            return ValueError(f'{said}; see {page}')
        return ValueError(f'{said}; give another value ({page})')
    return ValueError(f'--{flag} is missing; see `{name} --help`')
