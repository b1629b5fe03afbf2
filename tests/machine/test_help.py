"""What every command says of itself, on 80 columns, and what a misspelt name is answered with."""

import contextlib
import functools
import importlib
import inspect
import re
import subprocess
import sys
import tomllib

import pytest
from absl import flags
from small_run import ROOT

from bapo_jax.config import completion, default_config, rows
from bapo_jax.config.completion import flags_in
from bapo_jax.config.help import topics, values_page
from bapo_jax.machine import cli, stopping
from bapo_jax.machine.help import CommandParser, did_you_mean, filled, nearest

COMMANDS = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']['scripts']


@pytest.fixture
def said(monkeypatch, capsys):
    """Runs a command that only says something, in this process: its standard output, or how it ended."""
    monkeypatch.setenv('COLUMNS', '80')
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    monkeypatch.setattr(stopping, 'ending', contextlib.nullcontext)
    defined = set(flags.FLAGS)

    def forget():
        for name in set(flags.FLAGS) - defined:
            delattr(flags.FLAGS, name)

    def run(command, *words):
        forget()
        module, function = COMMANDS[command].split(':')
        module = importlib.import_module(module)
        monkeypatch.setattr(module, 'guard_streams', lambda *_: None, raising=False)
        monkeypatch.setattr(sys, 'argv', [f'/bin/{command}', *words])
        with pytest.raises(SystemExit) as ended:
            getattr(module, function)()
        return capsys.readouterr().out if not ended.value.code else str(ended.value.code)

    yield run
    forget()


@pytest.mark.parametrize('command', COMMANDS)
def test_the_help_of_every_command_fits_80_columns_and_names_the_command_as_it_was_typed(command, said):
    page = said(command, '--help')
    assert page.startswith(f'usage: {command} ') and 'python -m bapo_jax' not in page
    assert '--version' in page and [line for line in page.splitlines() if len(line) > 80] == []
    assert not re.search(r'#.*\\$', page, re.M)  # a comment cannot be continued


def test_the_help_lists_the_same_flags_if_the_module_runs_as_the_program(said):
    """absl names the module __main__ then."""
    page = subprocess.run([sys.executable, '-m', 'bapo_jax.export', '--help'], cwd=ROOT, capture_output=True, text=True).stdout
    flags_of = functools.partial(re.findall, r'^  (?:-h, )?(--\w+)', flags=re.MULTILINE)
    assert flags_of(page) == flags_of(said('bapo-export', '--help')) and '--checkpoint' in flags_of(page)


@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_has_a_version(command, said):
    assert re.fullmatch(r'bapo_jax \S+, jax \S+, Python 3\.\d+\.\d+\S*\n', said(command, '--version'))


@pytest.mark.parametrize('command', ['bapo-train', 'bapo-evaluate'])
def test_the_help_of_a_command_with_a_config_lists_its_sections_and_explains_each(command, said):
    page = said(command, '--help')
    for name in default_config():
        assert re.search(rf'^  {name}(=| +\w)', page, re.M), name
    learner = said(command, '--config=quickstart', '--help', 'learner')
    assert 'learner.clip_low=0.2' in learner and 'trust region [1 - clip_low' in learner
    assert 'must be: token, sequence' in said(command, '--help', 'learner.ratio_level')
    assert 'task.judging.workers=0' in said(command, '--help', 'task.judging')


def test_an_unknown_page_of_the_help_is_told_the_nearest(said):
    assert said('bapo-train', '--help', '') == "error: --help '': no such section or field; see `bapo-train --help`"
    assert said('bapo-train', '--help', 'lerner') == (
        'error: --help lerner: no such section or field (did you mean learner?); see `bapo-train --help`'
    )


def test_every_field_is_on_a_page_that_fits():
    pages = topics(80)
    for name, row in rows():
        section = pages[name.split('.')[0]] if '.' in name else pages['']
        assert f'  {name}={row.default!r}' in section and f'{name}={row.default!r}' in pages[name]
        assert ' '.join(row.comment.split()) in ' '.join(section.split())
    assert [line for page in pages.values() for line in page.splitlines() if len(line) > 80] == []


def test_the_values_of_a_config_are_the_same_pages_and_mark_what_differs():
    config = default_config()
    config.learner.clip_high = 0.3
    lines = values_page(config, 1000).splitlines()
    assert '* learner.clip_high=0.3  its upper end (default: 0.2)' in lines
    assert [line[2:].split('=')[0] for line in lines if re.match(r'[* ] [\w.]+=', line)] == [name for name, _ in rows()]
    assert sum(line.startswith('* ') for line in lines) == 2  # and the one that says what the mark means


MISTAKES = {
    '--config=quickstart --workdir=x': 'error: --base is missing; see `bapo-train --help`',
    '--config=quick': r"error: 'quick' is neither a config .*\(did you mean quickstart\?\); choose one of .*",
    '--config=quickstart:bopo': r"error: \S+quickstart\.py, line \d+: method 'bopo' is unknown \(did you mean bapo\?\); see `bapo-methods`",
    '--config=quickstart --config.learner.lr=1':
        r'error: --config\.learner\.lr=1: no such field \(did you mean learner\.learning_rate\?\); see `bapo-train --help learner`',
    '--config=quickstart --steps=3': r'error: --steps is a field of the config; write --config\.steps=3',
    '--config=quickstart --learner=3': r'error: --learner: no such flag; see `bapo-train --help`',
    '--config=quickstart --nocheck=3': r'error: --nocheck=3 does not take an argument; see `bapo-train --help`',
    '--config=quickstart --workdir': r'error: Missing value for flag --workdir; see `bapo-train --help`',
    '--config=quickstart --wrkdir=x': r'error: --wrkdir: no such flag \(did you mean workdir\?\); see `bapo-train --help`',
    '--config=quickstart --config.steps=x': r"error: --config\.steps=x: .*'x'; give another value \(`bapo-train --help steps`\)",
    '--config=quickstart --base=x': 'error: --workdir is missing; give the run directory',
}  # fmt: skip
# bapo-train without its learner and its engine, which take most of the time to import. absl parses the flags of a process once.
STARTED = """
import os, sys
from absl import app, flags
from bapo_jax.config import check_fields
from bapo_jax.config.completion import commands, flags_in
from bapo_jax.config.help import topics
from bapo_jax.machine import cli

def main(_):
    raise app.UsageError('--workdir is missing; give the run directory')

flags.DEFINE_string('workdir', None, '')
flags.DEFINE_bool('check', False, '')
flags.DEFINE_string('base', None, '', required=True)
cli.define_config('', check_fields)
mistakes = sys.argv[1:]
for mistake in mistakes:
    if not os.fork():
        sys.argv[:] = ['bapo-train', *mistake.split()]
        cli.start(main, topics=topics)
    print(os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)
"""


def test_a_mistake_on_the_command_line_is_one_line_with_what_to_type():
    command = [sys.executable, '-c', STARTED, *MISTAKES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert (done.stdout, lines[1::2]) == ('', ['1'] * len(MISTAKES)), done.stderr
    for (mistake, told), line in zip(MISTAKES.items(), lines[::2], strict=True):
        assert re.fullmatch(told, line), mistake


@pytest.mark.parametrize('said, meant', [
    ('learner.lr', ['learner.learning_rate']), ('learner.temperature', ['rollout.temperature', 'evaluate.temperature']),
    ('learner.kl', ['learner.kl_target', 'learner.kl_coef']), ('learning_rate', ['learner.learning_rate', 'critic.learning_rate']),
    ('rolout.temprature', ['rollout.temperature']), ('xyz', []), ('', []),
])  # fmt: skip
def test_a_name_is_near_by_its_spelling_its_words_or_its_initials(said, meant):
    assert nearest(said, [name for name, _ in rows()]) == meant


def test_up_to_three_names_are_suggested():
    assert did_you_mean('clip', ['clip_low', 'clip_high', 'clip_a', 'clip_b']) == ' (did you mean clip_low or clip_high or clip_a?)'
    assert did_you_mean('zzz', ['clip_low']) == ''


def test_prose_is_filled_and_a_long_command_is_continued():
    text = 'One two\nthree four.\n\n    command --first=1 --second=2\n    short\n\nEnd.'
    assert filled(text, 26) == (
        'One two three four.\n\n    command --first=1 \\\n        --second=2\n    short\n\nEnd.'
    )


def test_a_wrong_argument_of_a_command_without_a_config_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['/bin/bapo-x', '--y'])
    with pytest.raises(SystemExit) as ended:
        CommandParser('Does x.').parse_args()
    assert (ended.value.code, capsys.readouterr().err) == (
        2, 'error: unrecognized arguments: --y; `bapo-x --help` shows the usage\n',
    )  # fmt: skip


def test_a_sentence_of_the_package_has_no_date_and_place(capsys):
    events = ROOT / 'bapo_jax' / 'machine' / 'events.py'
    for path, shown in ((str(events), r'note: a server is lost'), ('/lib/x.py', r'W\d{4} .*x\.py:1\] a server is lost')):
        record = cli.python_logging.LogRecord('absl', 30, path, 1, 'a server is %s', ('lost',), None)
        assert re.fullmatch(shown, cli._Sentences().format(record))


@pytest.mark.parametrize('command', COMMANDS)
def test_the_completion_knows_the_flags_that_the_help_lists(command, said):
    page = said(command, '--help')
    module = COMMANDS[command].split(':')[0]
    source = inspect.getsource(importlib.import_module(completion._FLAGS_OF.get(module, module)))
    known = {flag.rstrip('=') for flag in flags_in(source)} - {'--config.'}
    assert known == set(re.findall(r'^  (?:-h, )?(--\w+)', page, re.M))
    takes_a_value = set(re.findall(r'^  (--\w+)[ =][^ ]', page, re.M))
    assert {flag for flag in flags_in(source) if flag.endswith('=')} == {f'{flag}=' for flag in takes_a_value}
