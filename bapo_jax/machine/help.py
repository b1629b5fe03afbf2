"""What a command says of itself: its usage, its version, and which name a misspelt one may mean."""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from importlib import metadata
from typing import NoReturn

import bapo_jax

_MOST_COLUMNS = 100  # longer lines of prose are hard to read
_NEAR = 0.6  # likeness, 0 to 1, from which on a name may be meant
_MOST_MEANT = 3  # names that a message suggests


def command_name() -> str:
    """How this command was started: 'bapo-train' or 'python -m bapo_jax.train'."""
    name, spec = os.path.basename(sys.argv[0]), getattr(sys.modules['__main__'], '__spec__', None)
    if spec is None or name.startswith('bapo-'):
        return name
    return f'python -m {spec.name.removesuffix(".__main__")}'


def version_line() -> str:
    """The versions of the package, of JAX (without importing it), and of Python."""
    jax = metadata.version('jax')
    return f'bapo_jax {bapo_jax.__version__}, jax {jax}, Python {platform.python_version()}'


def columns() -> int:
    """The width of a help page: the terminal's, or COLUMNS, but at most 100."""
    return min(shutil.get_terminal_size().columns, _MOST_COLUMNS)


def hanging(text: str, width: int, first: str = '', later: str = '') -> str:
    """One paragraph filled to `width`, with indents for its first line and for its later lines."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=later,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def filled(text: str, width: int) -> str:
    """The text with its paragraphs filled to `width`; an indented line, a command, is continued with '\\'."""
    blocks = []
    for paragraph in text.strip().split('\n\n'):
        for indented, lines in itertools.groupby(paragraph.splitlines(), lambda line: line.startswith(' ')):
            blocks += (
                [_continued(line, width) for line in lines] if indented else [hanging(' '.join(lines), width)]
            )
        blocks.append('')
    return '\n'.join(blocks).rstrip()


def _continued(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    return hanging(line.strip(), width - 2, ' ' * 4, ' ' * 8).replace('\n', ' \\\n')


class CommandParser(argparse.ArgumentParser):
    """A parser whose --help is the command's docstring and flags, and whose errors are one line."""

    def __init__(self, said: str):
        """`said` is the docstring; its own commands, `python -m bapo_jax.X`, become what was typed."""
        name, width = command_name(), columns()
        if name.startswith('bapo-'):
            said = re.sub(r'python -m bapo_jax[\w.]*', name, said)
        super().__init__(
            prog=name, description=filled(said, width), allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=width),
        )  # fmt: skip
        self.add_argument('--version', action='version', version=version_line(), help='print the versions')

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'error: {message}; `{self.prog} --help` shows the usage\n')


def did_you_mean(said: str, names: Iterable[str]) -> str:
    """' (did you mean learner.learning_rate?)', or '' if no name is like what was said."""
    meant = nearest(said, names)[:_MOST_MEANT]
    return f' (did you mean {" or ".join(meant)}?)' if meant else ''


def nearest(said: str, names: Iterable[str]) -> list[str]:
    """The names most like `said`, all equally: by spelling, a word, or initials (lr for learning_rate).

    The last part of a dotted name counts most, then its section.
    """
    section, _, last = said.rpartition('.')
    likeness = {}
    for name in names:
        its_section, _, its_last = name.rpartition('.')
        if (alike := _alike(last, its_last)) >= _NEAR:
            near = difflib.SequenceMatcher(None, section, its_section).ratio()
            likeness[name] = alike + (near if near >= _NEAR else 0.0)
    return [name for name, alike in likeness.items() if alike == max(likeness.values())]


def _alike(said: str, name: str) -> float:
    words = name.split('_')
    if said == ''.join(word[:1] for word in words):
        return 1.0
    part = 0.8 if said and (said in words or name.startswith(said)) else 0.0
    return max(part, difflib.SequenceMatcher(None, said, name).ratio())
