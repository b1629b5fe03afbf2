"""Pages that tell a newcomer what to write: exactly what they show is written, and does what they say."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from small_run import ROOT

import bapo_jax.tasks
from bapo_jax import grade, inputs
from bapo_jax.groups import Verdict
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.tasks.custom_reward import rewards_of


def blocks(page, language):
    return re.findall(rf'^```{language}\n(.*?)^```', (ROOT / 'docs' / page).read_text('utf-8'), re.MULTILINE | re.DOTALL)


def as_installed(folder, monkeypatch):
    """Goes to a folder of the user's, which an installed command does not have on sys.path."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, 'path', [entry for entry in sys.path if entry not in ('', str(folder))])
    for name in ('my_rewards', 'my_tasks', 'my_tasks.products', 'my_tasks.half'):
        monkeypatch.delitem(sys.modules, name, raising=False)


def own_data():
    """Writes the files of docs/own_data.md into the current folder, and returns the reward function's text and the config."""
    questions, rewards, config = blocks('own_data.md', 'python')
    names = {}
    exec(questions, {})
    exec(config, names)
    Path('my_rewards.py').write_text(rewards)
    # A small policy in place of the newcomer's, with a chat template.
    shutil.copytree(ROOT / 'configs' / 'quickstart_base', 'model')
    character_tokenizer('<{{ messages[0].content }}>').save_pretrained('model')
    return rewards, config, names['get_config']()


def test_own_data_as_the_page_says(tmp_path, monkeypatch):
    as_installed(tmp_path, monkeypatch)
    rewards, written, config = own_data()
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


def test_a_task_as_the_page_says(tmp_path, monkeypatch, capsys):
    """The task and the config of docs/adding_a_task.md, where the page puts them."""
    task, config = blocks('adding_a_task.md', 'python')
    page = (ROOT / 'docs' / 'adding_a_task.md').read_text('utf-8')
    as_installed(tmp_path, monkeypatch)
    Path('my_tasks').mkdir()
    Path('my_tasks/products.py').write_text(task)
    names = {}
    exec(config, names)
    assert f'{len(inputs.read_inputs(names["get_config"]()).prompts)} prompts, 2 steps' in page
    assert f'file of {len(task.splitlines())} lines' in page
    assert [name.partition('(')[0] for name in re.findall(r'^\| `(\w.*?)` \|', page, re.MULTILINE)] == list(bapo_jax.tasks.PARTS)
    asked, told = re.search(r"\$ echo '(.*?)' \| python -m bapo_jax.grade my_tasks.products\n +(.*)", page).groups()
    monkeypatch.setattr(sys, 'argv', ['grade', 'my_tasks.products'])
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(asked.encode())))
    assert grade.main() == 0
    assert capsys.readouterr().out.strip() == told


def test_a_module_that_is_no_task_is_refused(tmp_path, monkeypatch):
    as_installed(tmp_path, monkeypatch)
    Path('my_tasks').mkdir()
    Path('my_tasks/half.py').write_text('TEMPLATES, VOTES, verify = {}, True, None')
    with pytest.raises(ValueError, match="'my_tasks.half': the module has no BENCHMARKS, training_problems, benchmark, .*verify_all;"):
        bapo_jax.tasks.get_task('my_tasks.half')
    with pytest.raises(ValueError, match="task.name='my_tasks.none': importing my_tasks.none failed"):
        bapo_jax.tasks.get_task('my_tasks.none')
    with pytest.raises(ValueError, match='choose one of countdown, .*, or a module of yours such as my_tasks.chess'):
        bapo_jax.tasks.get_task('half')
