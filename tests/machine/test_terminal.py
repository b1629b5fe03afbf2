"""What commands print cannot steer a terminal, whoever wrote it."""

import ast
import io
import re
import subprocess
import sys
import tomllib
import unicodedata

import pytest
from rich.progress import track
from rich.table import Table
from small_run import ROOT

from bapo_jax.machine import events, terminal

STEERING = [chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) in ('Cc', 'Zl', 'Zp', 'Cs') and chr(i) not in '\t\n']
TURNING = ('LRE', 'RLE', 'LRO', 'RLO', 'PDF', 'LRI', 'RLI', 'FSI', 'PDI')
STEERING += [chr(i) for i in range(0x110000) if unicodedata.bidirectional(chr(i)) in TURNING]
EVIL = '\x1b]8;;http://x\x07\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\u202e\r[red]:smile: /a/[x]/'


def test_what_steers_a_terminal_is_written_out_and_all_else_stays():
    shown = terminal.plain(''.join(STEERING))
    assert shown.isascii() and shown.isprintable() and shown.startswith('\\x00\\x01')
    for text in ('a\tb\nc', 'Größe √2 ≤ π\u0304', '漢字 عربي 🙂', 'back\\slash', ''):
        assert terminal.plain(text) == text


def test_no_password_of_a_url_is_printed_or_reported(tmp_path):
    assert terminal.plain('see https://me:pw@host/a@b or http://host/a@b') == 'see https://…@host/a@b or http://host/a@b'
    with events.recorded(tmp_path):
        events.report('x', 'https://me:pw@host/a@b, ssh://me:pw@h')
    assert 'pw' not in (tmp_path / events.EVENTS_FILE).read_text() and 'host/a@b' in (tmp_path / events.EVENTS_FILE).read_text()


@pytest.fixture
def guarded(monkeypatch):
    """A function that guards a terminal of few characters, and returns a function: what has been written to it."""
    return lambda: guarded_terminal(monkeypatch)


def guarded_terminal(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), 'latin-1', write_through=True)
    out.isatty = lambda: True
    monkeypatch.setattr(sys, 'stdout', out)
    monkeypatch.setattr(sys, 'stderr', out)
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    terminal.guard()
    terminal.guard()  # once more changes nothing
    return lambda: out.buffer.getvalue().decode('latin-1')


def test_all_that_is_printed_is_plain_and_no_character_is_an_error(guarded):
    streams = guarded()
    print(EVIL, '漢 \udcff')
    sys.stderr.writelines([EVIL])
    assert streams() == f'{terminal.plain(EVIL)} \\u6f22 \\udcff\n{terminal.plain(EVIL)}'


def test_a_download_still_has_its_bar(guarded):
    from tqdm import tqdm

    streams = guarded()
    for _ in tqdm(range(2), file=sys.stderr, ascii=True, position=1):
        pass
    assert '\\x' not in streams() and '\r' in streams() and '\x1b[A' in streams()


def test_a_table_shows_its_texts_as_they_are(guarded):
    streams = guarded()
    table = Table('[bold]head', EVIL, title=EVIL)
    table.add_row('[red]cell', EVIL)
    terminal.console(width=400, color_system=None).print(table)
    for part in (terminal.plain(EVIL), '[bold]head', '[red]cell'):
        assert part in streams()
    assert '\x1b]' not in streams() and '\x1b[2J' not in streams()


@pytest.mark.parametrize('columns, whole', [('', True), ('40', False)])
def test_in_a_pipe_a_row_of_a_table_is_one_line(columns, whole, monkeypatch, capsys):
    """So that `--fields | grep` finds a field with what it is for."""
    monkeypatch.setenv('COLUMNS', columns)
    table = Table('field', 'description')
    table.add_row('rollout.max_response_tokens', 'word ' * 40)
    terminal.console().print(table)
    lines = [line for line in capsys.readouterr().out.splitlines() if 'word' in line]
    assert (len(lines) == 1) == whole and (lines[0].count('word') == 40) == whole


def test_beside_a_bar_prints_are_plain_and_the_bar_is_drawn(guarded):
    streams = guarded()
    for _ in track([1], console=terminal.console(force_terminal=True)):
        terminal.guard()
        print(EVIL)
    assert terminal.plain(EVIL) in ' '.join(streams().split()) and '\x1b[' in streams()
    assert not any(sequence in streams() for sequence in ('\x1b]', '\x1b[2J', '\x9b'))


def test_every_command_guards_its_terminal():
    commands = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']['scripts'].values()
    assert len(commands) > 9
    for command in commands:
        module, _, function = command.partition(':')
        tree = ast.parse((ROOT / (module.replace('.', '/') + '.py')).read_text('utf-8'))
        [run] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
        assert module == 'bapo_jax.methods.__main__' or re.search(r'\b(cli\.start|terminal\.guard)\(', ast.unparse(run)), command


RAISES = f"""
import sys, warnings
from absl import logging
from bapo_jax.machine import cli, events

def main(_):
    logging.warning({EVIL!r})
    events.report('x', {EVIL!r})
    warnings.warn({EVIL!r})
    if len(sys.argv) > 1: sys.exit({EVIL!r})
    raise ValueError({EVIL!r})

cli.start(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize('arguments', [[], ['exit']])
def test_messages_warnings_events_and_tracebacks_are_plain(arguments):
    done = subprocess.run([sys.executable, '-c', RAISES, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1 and done.stderr.count(terminal.plain(EVIL)) == 4
    assert not set(done.stdout + done.stderr) & set(STEERING)
