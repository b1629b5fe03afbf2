"""Pages that tell a newcomer what to write: exactly what they show is written, and does what they say."""

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_run import ROOT

import bapo_jax.tasks
from bapo_jax import grade, inputs
from bapo_jax.groups import Verdict
from bapo_jax.methods import apply_method
from bapo_jax.models import families
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.tasks.custom_reward import rewards_of
from benchmarks.compiled.fits import MODELS
from configs import one_gpu, quickstart


def blocks(page, language):
    return re.findall(rf'^```{language}\n(.*?)^```', (ROOT / 'docs' / page).read_text('utf-8'), re.MULTILINE | re.DOTALL)


def as_installed(folder, monkeypatch):
    """Goes to a folder of the user's, which an installed command does not have on sys.path."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, 'path', [entry for entry in sys.path if entry not in ('', str(folder))])
    for name in ('my_rewards', 'my_tasks', 'my_tasks.products', 'my_tasks.half'):
        monkeypatch.delitem(sys.modules, name, raising=False)


def own_data():
    """Writes the files of docs/your_data.md into the current folder, and returns the reward function's text and the config."""
    questions, rewards, config, *_ = blocks('your_data.md', 'python')
    names = {}
    exec(questions, {})
    exec(config, names)
    Path('my_rewards.py').write_text(rewards)
    # A small policy in place of the newcomer's, with a chat template.
    shutil.copytree(ROOT / 'configs' / 'quickstart_base', 'model')
    character_tokenizer('<{{ messages[0].content }}>').save_pretrained('model')
    return rewards, config, names['get_config']()


def test_one_gpu_as_the_page_says(tmp_path, monkeypatch):
    """All but the card and its memory: its commands are installed, and its config reads the files that it names."""
    [page] = re.findall(r'^## Your questions, .*?(?=^## |\Z)', (ROOT / 'docs' / 'your_data.md').read_text('utf-8'), re.MULTILINE | re.DOTALL)
    written = (ROOT / 'pyproject.toml').read_text('utf-8')
    commands = re.findall(r'^    (?:\w+=\S+ )?(bapo-\S+) ', page, re.MULTILINE)
    assert len(commands) == 6 and all(f'\n{command} = "bapo_jax.' in written for command in commands)
    as_installed(tmp_path, monkeypatch)
    for file in ('questions.jsonl', 'held_out.jsonl'):
        rows = [{'question': f'What is {a} + {file}?', 'answer': str(a)} for a in range(40)]
        Path(file).write_text(''.join(json.dumps(row) + '\n' for row in rows))
        assert file in page
    character_tokenizer('<{{ messages[0].content }}>').save_pretrained('model')
    # Qwen2.5-1.5B-Instruct's sizes
    Path('model/config.json').write_text(json.dumps(MODELS['1.5B'] | {'tie_word_embeddings': True, 'max_position_embeddings': 32768}))
    config = one_gpu.get_config()
    config.model.path = 'model'
    read = inputs.read_inputs(config, weights=False)
    assert (len(read.prompts), {name: len(p) for name, p in read.benchmarks.items()}) == (40, {'held_out.jsonl': 40})
    assert len(page.splitlines()) <= 30


def test_own_data_as_the_page_says(tmp_path, monkeypatch):
    as_installed(tmp_path, monkeypatch)
    rewards, written, config = own_data()
    read = inputs.read_inputs(config)
    assert (len(read.prompts), read.steps, {name: len(p) for name, p in read.benchmarks.items()}) == (80, 4, {'held_out.jsonl': 20})
    [row] = blocks('your_data.md', 'json')
    assert read.prompts[0].ground_truth.keys() == json.loads(row).keys()
    assert read.tokenizer.decode(read.prompts[0].tokens) == '<Answer with one word that contains "ae".>'
    asked = [('questions', text, json.loads(row), {}) for text in ('Stone', 'a stone', 'rock')]
    outcomes = rewards_of(config.task)(asked, 60.0)
    assert outcomes == [(Verdict.CORRECT, 1.0, 'Stone'), (Verdict.CORRECT, 0.5, 'a stone'), (Verdict.WRONG, 0.0, 'rock')]
    lines = sum(bool(line.strip()) for line in (rewards + written).splitlines())
    assert f'{lines} lines of code' in (ROOT / 'docs' / 'your_data.md').read_text('utf-8') and lines <= 25


def test_a_task_as_the_page_says(tmp_path, monkeypatch, capsys):
    """The task and the config of docs/your_data.md, where the page puts them."""
    *_, task, config = blocks('your_data.md', 'python')
    page = (ROOT / 'docs' / 'your_data.md').read_text('utf-8')
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


def loaded(file, name):
    """The module of a file, beside the package's own of that name."""
    spec = importlib.util.spec_from_file_location(f'changed_{name}', file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def applied(page, folder):
    """The diff of a page, by the page's command on a copy in `folder`: how many lines it adds, and how many it takes away."""
    [diff] = blocks(page, 'diff')
    for file in [*re.findall(r'^\+\+\+ b/(.*)', diff, re.MULTILINE), f'docs/{page}']:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    [command] = re.findall(r'^    (sed .* git apply)$', (ROOT / 'docs' / page).read_text('utf-8'), re.MULTILINE)
    own = {name: value for name, value in os.environ.items() if not name.startswith('GIT_')}
    own['GIT_CEILING_DIRECTORIES'] = str(folder.parent)
    done = subprocess.run(['sh', '-c', command], cwd=folder, env=own, capture_output=True, text=True)
    assert done.returncode == 0, f'{done.stderr}\nmake the change anew in a checkout, and put `git diff` into the page'
    for hunk in re.split('^@@', diff, flags=re.MULTILINE)[1:]:
        assert sum(line[:1] in ('', ' ') for line in hunk.splitlines()[1:]) >= 5, 'lines of context on either side'
    return [sum(line[:1] == sign and line[:3] != 3 * sign for line in diff.splitlines()) for sign in '+-']


@pytest.mark.slow  # imports torch, for which `make check` has no time
def test_the_family_as_the_page_says(tmp_path, make_policy, monkeypatch):
    """The diff of docs/reference/models.md: with the row, a small Mistral has Hugging Face's logits, and a window is refused."""
    added, replaced = applied('reference/models.md', tmp_path)
    page, readme = ((ROOT / file).read_text('utf-8') for file in ('docs/reference/models.md', 'README.md'))
    assert f'the whole change, {added} lines added.' in page and replaced == 0 and added <= 40
    assert f'[a family of models](docs/reference/models.md) in {added}' in readme
    changed = loaded(tmp_path / 'bapo_jax' / 'models' / 'families.py', 'families').FAMILIES
    assert changed.keys() - families.FAMILIES.keys() == {'mistral'}
    monkeypatch.setitem(families.FAMILIES, 'mistral', changed['mistral'])
    shapes = loaded(tmp_path / 'tests' / 'models' / 'test_decoder.py', 'test_decoder')
    [shape] = [name for name in shapes.SHAPES if 'Mistral' in name]
    shapes.test_logits_are_hugging_faces(shape, make_policy, np.random.default_rng(1).integers(0, 96, (3, 20)))
    with pytest.raises(ValueError, match='sliding_window=4096 is not supported; supported: None'):
        make_policy(model_type='mistral')


def test_the_method_as_the_page_says(tmp_path):
    """The diff of docs/methods.md: the row is there, is allowed, computes what it says."""
    added, replaced = applied('methods.md', tmp_path)
    assert f'{added} lines added and {replaced} replaced' in (ROOT / 'docs' / 'methods.md').read_text('utf-8')
    assert f'[add a method](docs/methods.md) in {added} lines' in (ROOT / 'README.md').read_text('utf-8')
    config, on_policy, credit, departures = (
        loaded(tmp_path / f'{name}.py', name.replace('/', '_'))
        for name in ('bapo_jax/config/method', 'bapo_jax/methods/on_policy', 'bapo_jax/learner/credit', 'docs/reference/departures')
    )
    c = quickstart.get_config()
    rloo, grpo = (on_policy.ON_POLICY[name].fields for name in ('rloo', 'grpo'))
    assert dict(rloo.items() - grpo.items()) == {'learner.advantage': 'leave_one_out', 'learner.kl_target': 'none'}
    c.update_from_flattened_dict(rloo)
    assert config.LEARNER_FIELDS['advantage'].check.holds(c.learner.advantage)
    rewards = np.array([1.0, 0, 0, 1, 0.5])
    others = [np.delete(rewards, i).mean() for i in range(5)]
    np.testing.assert_allclose(credit.ADVANTAGES['leave_one_out'](rewards), rewards - others, atol=1e-12)
    assert 'rloo' in [row.row for row in departures.ROWS]
    with pytest.raises(ValueError, match="method 'rloo' is unknown"):
        apply_method(c, 'rloo', 'quickstart')


def test_a_module_that_is_no_task_is_refused(tmp_path, monkeypatch):
    as_installed(tmp_path, monkeypatch)
    Path('my_tasks').mkdir()
    Path('my_tasks/half.py').write_text('TEMPLATES, VOTES, verify = {}, True, None')
    with pytest.raises(ValueError, match="'my_tasks.half': the module has no BENCHMARKS, training_problems, benchmark, .*verify_all;"):
        bapo_jax.tasks.get_task('my_tasks.half')
    with pytest.raises(ValueError, match="task.name='my_tasks.none': importing my_tasks.none failed"):
        bapo_jax.tasks.get_task('my_tasks.none')
    with pytest.raises(ValueError, match='choose one of countdown, .*, or name your own module, such as my_tasks.chess'):
        bapo_jax.tasks.get_task('half')
