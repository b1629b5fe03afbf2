"""AGENTS.md and the skill are true: each command, path, field, metric, message and name in them exists."""

import re
import shlex
import tomllib

import pytest
from small_run import ROOT

from bapo_jax.config import rows
from bapo_jax.config.table import SECTIONS
from bapo_jax.groups import Verdict
from bapo_jax.machine import cli
from bapo_jax.methods import METHODS
from docs.reference.metrics import entries_of

SKILL = ROOT / '.agents' / 'skills' / 'train-with-bapo' / 'SKILL.md'
PAGES = [ROOT / 'AGENTS.md', SKILL]
SCRIPTS = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']['scripts']
FIELDS = {name for name, _ in rows()}
TARGETS = set(re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text('utf-8'), re.MULTILINE))
ERRORS, START, DATA, PROJECT = ((ROOT / page).read_text('utf-8') for page in ('docs/reference/errors.md', 'docs/start.md', 'docs/your_data.md', 'CONTRIBUTING.md'))
# Folders and files of a user's.
OWN = re.compile(r'runs/\w+(/report\.html)?|hf_dir|OWNER/NAME')


def read(page):
    return page.read_text('utf-8')


def codes(page):
    """All code in a page: that within backticks, and the lines of its blocks."""
    return [code for both in re.findall(r'`([^`\n]+)`|^    (\S.*)$', read(page), re.MULTILINE) for code in both if code]


def is_command(words):
    """Whether the words are a command whose flags, configs and fields exist; None for what is no command."""
    name, *rest = words
    if name == 'make':
        return len(rest) == 1 and rest[0] in TARGETS
    if name == 'pip':
        return rest == ['install', '.']
    if name == 'source':
        return rest == ['.venv/bin/activate']
    if name == 'python':
        return rest[0] == '-m' and (rest[1] == 'pytest' and (ROOT / rest[3]).is_file() or (ROOT / f'{rest[1].replace(".", "/")}.py').is_file())
    if name not in SCRIPTS:
        return None
    if rest[:1] == ['--help']:
        return set(rest[1:]) <= {*SECTIONS, *FIELDS}
    module = ROOT / (SCRIPTS[name].partition(':')[0].replace('.', '/') + '.py')
    places = [ROOT / 'bapo_jax' / 'machine' / 'cli.py', *(module.parent.glob('*.py') if module.name == '__main__.py' else [module])]
    places += [ROOT / 'bapo_jax' / 'command.py'] if name == 'bapo-train' else []
    source = ''.join(map(read, places))
    return all(is_flag(word, source) if word.startswith('--') else is_argument(word) for word in rest)


def is_flag(word, source):
    """Whether a command with this source takes such a flag."""
    name, _, value = word.removeprefix('--').partition('=')
    if name.startswith('config.'):
        return name.removeprefix('config.') in FIELDS
    return bool(re.search(rf"(DEFINE_\w+|add_argument)\(\s*'(--)?{name}'|DEFINE_config_file\(\s*'{name}'", source)) and (name != 'config' or is_config(value))


def is_config(value):
    """Whether NAME or NAME:METHOD names a config of the package, and a method."""
    name, _, method = value.partition(':')
    return name in {path.stem for path in cli.CONFIGS.glob('[!_]*.py')} and (not method or method in METHODS)


def is_argument(word):
    return bool(OWN.fullmatch(word)) or is_config(word)


def exists(code):
    """Whether what stands in a page as code is something that there is."""
    words = shlex.split(code, comments=True)
    known = is_command(words)
    if known is not None:
        return known
    if len(words) == 1 and words[0].startswith('--'):
        return is_flag(words[0], ''.join(map(read, (ROOT / 'bapo_jax').rglob('*.py'))))
    field, _, value = code.partition('=')
    return (
        field in FIELDS
        or (ROOT / code).exists()
        or bool(OWN.fullmatch(code))
        or bool(entries_of(code))
        or code in Verdict.__members__
        or (code.endswith('.jsonl') or code.isupper()) and f'`{code}`' in START + DATA
        or f'`{code}`' in ERRORS
        or code in ('.venv', 'slow') and code in PROJECT
    )


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_all_code_in_the_instructions_is_of_something_that_exists(page):
    found = codes(page)
    assert len(found) > 30 and [code for code in found if not exists(code)] == []


@pytest.mark.parametrize(
    'code',
    ['make all', 'bapo-try x', 'bapo-train --config=chess', 'bapo-train --config=math:chess', 'bapo-train --again', 'bapo_jax/none.py', 'a/score/mean',
     'bapo-train --config=math --config.steps.more=1', 'learner.rate', 'python -m docs.none', 'python -m pytest -q tests/none.py', 'no such message'],
)  # fmt: skip
def test_what_does_not_exist_is_noticed(code):
    assert not exists(code)


def test_links_and_length():
    """The other page's links are tested with all pages at the top."""
    assert len(read(ROOT / 'AGENTS.md').splitlines()) <= 60 and len(read(SKILL).splitlines()) <= 100
    assert max(map(len, read(ROOT / 'AGENTS.md').splitlines())) <= 150


def test_the_skill_says_its_name_and_when_to_use_it():
    """As the format of skills asks: the folder's name, and a description of at most 1,024 characters."""
    [front] = re.findall(r'\A---\n(.*?)\n---\n', read(SKILL), re.DOTALL)
    said = dict(line.split(': ', 1) for line in front.splitlines())
    assert said.keys() == {'name', 'description'} and said['name'] == SKILL.parent.name and len(said['description']) <= 1024
