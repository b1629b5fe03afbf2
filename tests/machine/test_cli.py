"""What the commands share: which overrides of a config are taken, standard streams that are open, and that no print decides
how a command ends."""

import ast
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from ml_collections import ConfigDict
from small_run import ROOT

from bapo_jax.config import check_fields
from bapo_jax.machine import cli

CONFIG = ConfigDict({'steps': 3, 'learner': {'learning_rate': 1e-6, 'shuffle': True}, 'rollout': {'servers': ()}})


@pytest.mark.parametrize('argument', [
    '--config.steps=1', '-config.learner.shuffle', '--config.rollout.servers[0]=x', '--config=a.py', '--workdir=config.x',
])  # fmt: skip
def test_an_override_of_a_field_is_taken(argument):
    cli.check_overrides(CONFIG, ['train.py', argument])


@pytest.mark.parametrize('argument, told', [
    ('--config.lerner.shuffle=1', '--config.lerner.shuffle=1: no such field (did you mean learner.shuffle?); see `bapo-train --help`'),
    ('--config.learner.lr=1', '--config.learner.lr=1: no such field (did you mean learner.learning_rate?); see `bapo-train --help learner`'),
    ('--config.steps.x=1', '--config.steps.x: steps has a value and no fields; write --config.steps=VALUE'),
])  # fmt: skip
def test_an_override_of_no_field_is_told_the_nearest(argument, told):
    with pytest.raises(ValueError) as raised:
        cli.check_overrides(CONFIG, ['train.py', '--config.steps=1', argument])
    assert str(raised.value) == told


def test_the_flag_checks_the_overrides_of_its_command_line(monkeypatch):
    monkeypatch.setattr('sys.argv', ['train.py', '--config.lerner.shuffle=1'])
    with pytest.raises(ValueError, match=r'--config\.lerner\.shuffle=1: no such field'):
        cli._Parser(check_fields).parse('quickstart')


@pytest.mark.parametrize('text, told', [
    ('def get_config():\n    return 5\n', ': get_config returned 5; return a ConfigDict that starts from default_config()'),
    ('config = 5\n', ': the file has no function get_config; add one, as in the files of configs/'),
    ('x = 1\ndef get_config(:\n', ', line 2: SyntaxError: invalid syntax; fix the config file'),
    ('def get_config():\n    return {}["x"]\n', ", line 2: KeyError: 'x'; fix the config file"),
    ('import sys\nsys.exit(3)\n', ', line 2: SystemExit: 3; fix the config file'),
    ('def get_config():\n    raise ValueError("a is b;\\nset c")\n', ', line 2: a is b; set c'),
    (None, ': no such file; check the path'),
])  # fmt: skip
def test_a_broken_config_file_is_named_with_its_line(tmp_path, text, told):
    file = tmp_path / 'mine.py'
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError) as raised:
        cli._Parser(check_fields).parse(str(file))
    assert f'{file}{told}' in str(raised.value) and '\n' not in str(raised.value)


def test_a_misspelt_field_in_a_config_file_is_refused_with_its_file(tmp_path):
    text = 'from bapo_jax.config import default_config\ndef get_config():\n    c = default_config()\n'
    text += '    c.stepz = 3\n    return c\n'
    (tmp_path / 'mine.py').write_text(text)
    with pytest.raises(ValueError, match=r'mine\.py: the config cannot run:\n  - stepz: no such field \(did you mean steps\?\); choose one of the fields of the config: '):
        cli._Parser(check_fields).parse(f'{tmp_path}/mine.py')


COMMANDS = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']['scripts'].values()
CLOSED = """
import json, os, pathlib
from bapo_jax.machine import cli, lock

def main(_):
    with lock.held(pathlib.Path('run')):
        print('a word')
        for number in (1, 2):
            os.write(number, b'another')
        links = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)]
        inherited = [os.get_inheritable(number) for number in range(3)]  # by child processes
        pathlib.Path('seen').write_text(json.dumps([links, inherited, pathlib.Path('run/lock').read_text()]))

cli.start(main)
"""


@pytest.mark.parametrize('closed', ['>&-', '<&- >&- 2>&-'])
def test_a_stream_that_is_closed_leaves_its_number_to_no_file(closed, tmp_path):
    command = f'exec {shlex.join([sys.executable, "-c", CLOSED])} {closed}'
    environment = os.environ | {'PYTHONPATH': str(ROOT)}
    done = subprocess.run(['sh', '-c', command], cwd=tmp_path, env=environment, stdin=subprocess.PIPE, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b'')
    links, inherited, text = json.loads((tmp_path / 'seen').read_text())
    assert links[1] == os.devnull and (len(set(links)) == 1) == ('2' in closed) and all(inherited)
    assert json.loads(text).keys() == {'token', 'pid', 'machine', 'host', 'pids', 'renewed'} and len(text) == 512


@pytest.mark.parametrize('command', COMMANDS)
def test_every_command_opens_the_streams_first(command):
    module, function = command.split(':')
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text('utf-8'))
    [run] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    called = {ast.unparse(node.func) for node in ast.walk(run) if isinstance(node, ast.Call)}
    assert called & {'cli.start', 'ends_with_its_reader', 'guard_streams', 'open_streams'}


@pytest.mark.parametrize('command, status', [
    ('from bapo_jax.machine import cli; cli.start(lambda _: (print("up", flush=True), time.sleep(60)))', 130),
    ('from bapo_jax.machine import output, terminal; output.open_streams(); terminal.guard(); print("up", flush=True); time.sleep(60)',
     -signal.SIGINT),
])  # fmt: skip
def test_ctrl_c_prints_no_traceback(command, status):
    """In no command; those that stop with a checkpoint or a summary have more to say."""
    process = subprocess.Popen([sys.executable, '-c', f'import time; {command}'], cwd=ROOT, stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline() == 'up\n'
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (status, 'interrupted\n')


def test_a_warning_is_printed_once():
    code = (
        'import logging; logging.basicConfig(); from bapo_jax.machine import cli, events\n'
        'def main(_): events.report("x", "said once"); logging.warning("and this")\ncli.start(main)'
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stderr.count('said once'), done.stderr.count('and this')) == (1, 1)
    assert 'note: said once\n' in done.stderr


def handles_ctrl_c(pid):
    """Whether Python's handler is there. It is from early on; the package takes it away while a command imports."""
    status = Path(f'/proc/{pid}/status').read_text()
    return bool(int(re.search(r'SigCgt:\s*(\w+)', status)[1], 16) & 1 << signal.SIGINT - 1)


@pytest.mark.parametrize('later_s', [0, 0.3])
@pytest.mark.parametrize('module', ['train', 'report', 'grade'])
def test_ctrl_c_while_a_command_imports_ends_it_at_once(module, later_s):
    """Also within a library's callback, where Python would print an exception and go on."""
    command = [sys.executable, '-m', f'bapo_jax.{module}', 'countdown']
    process = subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, stderr=-1, text=True)
    deadline = time.monotonic() + 60
    for handled in (True, False):
        while handles_ctrl_c(process.pid) != handled:
            assert time.monotonic() < deadline
    time.sleep(later_s)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert 'Traceback' not in said and process.returncode in (-signal.SIGINT, 128 + signal.SIGINT, 1, 2), said


def test_a_command_whose_reader_is_gone_ends_as_its_work_does():
    """Ctrl-C of `evaluate … | tee log`, say: tee is gone, and what is said on the way and at the end reaches nobody."""
    program = (
        'import logging, signal, sys, threading, time\nfrom bapo_jax.machine import cli, stopping\nstopping.END_S = 0.5\n'
        'def main(_):\n    stopping.on_asking(lambda *_: (stopping.say("stopped"), sys.exit(75)))\n'
        '    print("x" * 100_000, flush=True)\n    logging.warning("y" * 100_000)\n'
        '    threading.Thread(target=time.sleep, args=(300,)).start()\n    signal.raise_signal(signal.SIGINT)\n'
        'cli.start(main)'
    )
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, '-c', program], cwd=ROOT, stdout=writing, stderr=subprocess.STDOUT)
    os.close(writing)
    os.close(reading)
    assert process.wait(120) == 75
