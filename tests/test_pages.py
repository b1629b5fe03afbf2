"""Pages that tell a newcomer what to write: exactly what they show is written, and does what they say."""

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from small_run import ROOT

import bapo_jax.config
import bapo_jax.tasks
from bapo_jax import grade, inputs
from bapo_jax.groups import Verdict
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.tasks.custom_reward import rewards_of


def blocks(page, language):
    return re.findall(rf'^```{language}\n(.*?)^```', (ROOT / 'docs' / page).read_text('utf-8'), re.MULTILINE | re.DOTALL)


def own_data(monkeypatch):
    """Writes the files of docs/own_data.md into the current folder, and returns the reward function's text and the config."""
    questions, rewards, config = blocks('own_data.md', 'python')
    names = {}
    exec(questions, {})
    exec(config, names)
    Path('my_rewards.py').write_text(rewards)
    # A small policy in place of the newcomer's, with a chat template.
    shutil.copytree(ROOT / 'configs' / 'quickstart_base', 'model')
    character_tokenizer('<{{ messages[0].content }}>').save_pretrained('model')
    monkeypatch.setattr(sys, 'path', [entry for entry in sys.path if entry not in ('', os.getcwd())])  # as an installed command's
    monkeypatch.delitem(sys.modules, 'my_rewards', raising=False)
    return rewards, config, names['get_config']()


def test_own_data_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rewards, written, config = own_data(monkeypatch)
    read = inputs.read_inputs(config)
    assert (len(read.prompts), read.steps, {name: len(p) for name, p in read.benchmarks.items()}) == (80, 4, {'held_out.jsonl': 20})
    [row] = blocks('own_data.md', 'json')
    assert read.prompts[0].ground_truth.keys() == json.loads(row).keys()
    assert read.tokenizer.decode(read.prompts[0].tokens) == '<Answer with one word that contains "ae".>'
    asked = [('questions', text, json.loads(row), {}) for text in ('Stone', 'a stone', 'rock')]
    outcomes = rewards_of(config.task)(asked, 60.0)
    assert outcomes == [(Verdict.CORRECT, 1.0, 'Stone'), (Verdict.CORRECT, 0.5, 'a stone'), (Verdict.WRONG, 0.0, 'rock')]
    lines = sum(bool(line.strip()) for line in (rewards + written).splitlines())
    assert f'{lines} lines of code' in (ROOT / 'docs' / 'own_data.md').read_text('utf-8') and lines <= 25


@pytest.fixture
def products(monkeypatch):
    """The task of docs/adding_a_task.md under the name it has there, and its config."""
    task, config = blocks('adding_a_task.md', 'python')
    module = ModuleType('bapo_jax.tasks.products')
    exec(task, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    [old, new] = [line[1:] for line in blocks('adding_a_task.md', 'diff')[0].splitlines()]
    assert old in (ROOT / 'bapo_jax' / 'tasks' / '__init__.py').read_text('utf-8').splitlines()
    names = {}
    exec(new, names)
    for user in (bapo_jax.tasks, bapo_jax.config, grade):
        monkeypatch.setattr(user, 'TASKS', names['TASKS'])
    exec(config, names)
    return module, len(task.splitlines()), names['get_config']()


def test_a_task_as_the_page_says(products, monkeypatch, capsys):
    task, lines, config = products
    page = (ROOT / 'docs' / 'adding_a_task.md').read_text('utf-8')
    assert page.count(f'file of {lines} lines') == 1
    assert all(hasattr(task, name.partition('(')[0]) for name in re.findall(r'^\| `(\w+.*?)` \|', page, re.MULTILINE))
    assert f'{len(inputs.read_inputs(config).prompts)} prompts, 2 steps' in page
    asked, told = re.search(r"\$ echo '(.*?)' \| python -m bapo_jax.grade products\n +(.*)", page).groups()
    monkeypatch.setattr(sys, 'argv', ['grade', 'products'])
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(asked.encode())))
    assert grade.main() == 0
    assert capsys.readouterr().out.strip() == told
