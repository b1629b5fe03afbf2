"""Lines of SECURITY.md that no other test holds: no code from data, models or a network, and no secret where it can be read."""

import ast
import json
import re
from pathlib import Path

import pytest
from small_run import ROOT

from bapo_jax.models.tokenizer import character_tokenizer, load_tokenizer

SOURCES = sorted((ROOT / 'bapo_jax').rglob('*.py'))
RUN_CODE = {'eval', 'exec', 'compile', '__import__'}
UNSAFE_MODULES = {'pickle', 'dill', 'cloudpickle', 'marshal', 'shelve', 'joblib'}


def calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize('file', SOURCES, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_no_module_runs_text_or_unpickles(file):
    tree = ast.parse(file.read_text('utf-8'))
    assert not [c.lineno for c in calls(tree) if isinstance(c.func, ast.Name) and c.func.id in RUN_CODE]
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


def test_every_test_that_the_page_names_is_there():
    page = (ROOT / 'SECURITY.md').read_text('utf-8')
    named = set(re.findall(r'`(tests/[\w/.]+)`', page))
    assert named and all((Path(ROOT) / name).is_file() for name in named)
