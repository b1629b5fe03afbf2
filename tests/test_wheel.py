"""The package as it is installed: what the wheel holds and says of itself, and that its commands work far from a checkout."""

import email
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from small_run import ROOT

import bapo_jax
from bapo_jax.machine import cli

slow = pytest.mark.slow
# Each command and a flag that its --help has to name; the docstrings name none of them.
COMMANDS = {
    'bapo-train': '--join_timeout', 'bapo-evaluate': '--max_prompt_tokens', 'bapo-export': '--shard_gb', 'bapo-grade': '--help',
    'bapo-report': '--output', 'bapo-buffers': '--show', 'bapo-methods': 'differs from GRPO', 'bapo-sample': '--questions',
    'bapo-compare': '--seeds', 'bapo-serve': '--memory', 'bapo-inspect': '--step', 'bapo-show': '--help', 'bapo-vllm-env': '--build',
}  # fmt: skip
EXTRAS = {'cpu', 'cuda', 'cuda12', 'tpu', 'tpu-compiler', 'wandb', 'trackio'}


def tracked(*folders):
    listed = subprocess.run(['git', 'ls-files', '-z', *folders], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split('\0') if (ROOT / name).is_file()]


def ok(*words, **options):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    """The folder of sdist and wheel, the wheel made from the sdist, of a copy of what is tracked."""
    copy = tmp_path_factory.mktemp('copy')
    for name in tracked():
        if name.startswith(('bapo_jax/', 'configs/', 'locks/', 'tests/test_')) or '/' not in name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    ok(sys.executable, '-m', 'build', '--no-isolation', '--outdir', copy / 'dist', copy)
    return copy / 'dist'


@pytest.fixture(scope='module')
def wheel(built):
    [file] = built.glob('*.whl')
    with zipfile.ZipFile(file) as opened:
        yield opened


@pytest.fixture(scope='module')
def installed(built, tmp_path_factory):
    """Where the wheel lies unpacked, without the libraries."""
    [file] = built.glob('*.whl')
    target = tmp_path_factory.mktemp('installed')
    ok(sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--no-index', '--target', target, file)
    return target


def start(installed, folder, command, *flags):
    environment = os.environ | {'PYTHONPATH': str(installed), 'JAX_PLATFORMS': 'cpu', 'BAPO_VLLM_PYTHON': ''}
    words = [sys.executable, installed / 'bin' / command, *flags]
    return subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@slow
def test_the_wheel_has_the_package_and_the_configs_with_their_bases_and_the_locks_and_nothing_else(wheel):
    told = {name for name in wheel.namelist() if '.dist-info/' not in name}
    assert told == {*tracked('bapo_jax'), *(f'bapo_jax/{name}' for name in tracked('configs', 'locks') if '/making/' not in name)}
    assert {f'bapo_jax/configs/{base}_base/model.safetensors' for base in ('quickstart', 'diagrams')} <= told


@slow
def test_what_the_wheel_says_of_itself_is_what_the_files_say_and_a_package_index_would_show_it(built, wheel):
    [metadata] = [name for name in wheel.namelist() if name.endswith('.dist-info/METADATA')]
    said = email.message_from_bytes(wheel.read(metadata))
    assert said['Version'] == bapo_jax.__version__ and said['License-Expression'] == 'Apache-2.0'
    assert said['Description-Content-Type'] == 'text/markdown'
    assert said.get_payload(decode=True).decode().strip() == (ROOT / 'README.md').read_text('utf-8').strip()
    lines = (ROOT / 'requirements.txt').read_text('utf-8').splitlines()
    wanted = {str(Requirement(line.partition('#')[0])) for line in lines if line.partition('#')[0].strip()}
    assert wanted == {str(Requirement(r)) for r in said.get_all('Requires-Dist') if 'extra ==' not in r}
    assert EXTRAS == set(said.get_all('Provides-Extra'))
    checked = ok(sys.executable, '-m', 'twine', 'check', '--strict', *built.iterdir())
    assert checked.count('PASSED') == 2


@slow
def test_a_command_says_how_it_is_used(installed, tmp_path):
    assert {file.name for file in (installed / 'bin').iterdir()} >= set(COMMANDS)
    started = {command: start(installed, tmp_path, command, '--help') for command in COMMANDS}
    said = {command: process.communicate(timeout=300)[0] for command, process in started.items()}
    assert not [command for command, flag in COMMANDS.items() if flag not in said[command]]


@slow
def test_without_an_environment_of_vllm_a_run_ends_with_the_command_that_makes_one_and_leaves_nothing(installed, tmp_path):
    run = start(installed, tmp_path, 'bapo-train', '--config=quickstart', '--config.rollout.engine=vllm', '--workdir=x')
    said = run.communicate(timeout=300)[1].splitlines()
    assert run.returncode == 1 and list(tmp_path.iterdir()) == []
    assert [line for line in said if line.startswith('error: ')] == [said[-1]] and 'Traceback' not in said[0]
    assert re.search('rollout.server.python and BAPO_VLLM_PYTHON are not set.* `bapo-vllm-env DIR`', said[-1]) and 'make' not in said[-1].split()


@slow
def test_the_commands_of_the_first_page_run_word_for_word_in_an_empty_folder(installed, tmp_path):
    """The config is found by its name, and names the base that the wheel brings."""
    [first] = re.findall(r'^The package also installs.*?^The others are', (ROOT / 'docs' / 'start.md').read_text('utf-8'), re.M | re.S)
    commands = re.findall(r'^    (bapo-.*)$', first, re.M)
    assert [c.split()[0] for c in commands] == ['bapo-train', 'bapo-report', 'bapo-buffers', 'bapo-sample']
    path = f'{installed / "bin"}{os.pathsep}{os.environ["PATH"]}'
    environment = os.environ | {'PATH': path, 'PYTHONPATH': str(installed), 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '2'}
    said = [ok('bash', '-c', command, cwd=tmp_path, env=environment) for command in commands]
    assert 'cd34  mean@8, 200 problems' in said[0] and 'replay buffer after step 3' in said[2]
    assert '44 19 35=98' in said[3] and said[3].count('/token') == 4
    rows = (tmp_path / 'runs' / 'first' / 'metrics.jsonl').read_text('utf-8').splitlines()
    assert [json.loads(row)['step'] for row in rows] == [0, 1, 2, 3]
    assert '<svg' in (tmp_path / 'runs' / 'first' / 'report.html').read_text('utf-8')


# Stands for pip: of a lock it installs a vLLM that says where and how it was started, and ends.
PIP = """
import sys, sysconfig
from pathlib import Path
with Path(sys.prefix, 'asked').open('a') as asked:
    print(*sys.argv[1:], file=asked)
if '-r' in sys.argv:
    folder = Path(sysconfig.get_path('purelib'), 'vllm', 'entrypoints', 'launchers', 'api_server')
    folder.mkdir(parents=True)
    (folder / 'entry.py').write_text('import sys, bapo_jax; sys.exit(" ".join([bapo_jax.__file__, *sys.argv]))')
"""


@slow
def test_the_pages_way_to_vllm_from_a_wheel_runs_word_for_word_until_a_server_starts(installed, tmp_path):
    """All but pip and what it installs is real; with them the page's block was run by hand, as it says."""
    page = (ROOT / 'docs' / 'vllm.md').read_text('utf-8')
    [block] = re.findall(r'^## From an installed package\n\n((?:    .*\n)+)', page, re.M)
    stubs, home = tmp_path / 'stubs', tmp_path / 'home'
    for folder in (stubs, home):
        folder.mkdir()
    (stubs / 'pip.py').write_text(PIP)
    (stubs / 'ensurepip.py').touch()  # which is most of venv's time
    environment = os.environ | {
        'HOME': str(home), 'XDG_CACHE_HOME': str(home / 'cache'), 'JAX_PLATFORMS': 'cpu', 'BAPO_VLLM_PYTHON': '',
        'PATH': f'{installed / "bin"}{os.pathsep}{os.environ["PATH"]}', 'PYTHONPATH': f'{stubs}{os.pathsep}{installed}',
    }  # fmt: skip
    done = subprocess.run(['bash', '-c', block], cwd=home, env=environment, capture_output=True, text=True, timeout=300)
    assert f'\nexport BAPO_VLLM_PYTHON={home}/vllm/bin/python\n' in done.stdout  # what the page says next
    assert re.search(rf'--no-deps -r {installed}/bapo_jax/locks/vllm-(cpu|cuda)\.txt\n', (home / 'vllm' / 'asked').read_text())
    ours, entry, *told = (home / 'runs' / 'x' / 'server.log').read_text().split()
    assert ours.startswith(f'{home}/cache/') and entry.startswith(f'{home}/vllm/lib')
    assert told[told.index('--model') + 1] == f'{installed}/bapo_jax/configs/quickstart_base' and told[-1] == '--enforce-eager'
    assert json.loads((home / 'runs' / 'x' / 'config.json').read_text())['steps'] == 2
    assert done.returncode == 1 and 'error: the server ended with status 1; the end of' in done.stderr


def test_a_name_is_a_config_of_the_package_and_a_path_stays_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.config_file('quickstart') == f'{ROOT}/configs/quickstart.py'
    assert cli.config_file('math:grpo') == f'{ROOT}/configs/math.py:grpo'
    for path in ('configs/quickstart.py', 'configs/quickstart.py:grpo', './quickstart', '/a/b', 'mine.py', 'mine.py:bapo', ''):
        assert cli.config_file(path) == path
    (tmp_path / 'quickstart').touch()
    assert cli.config_file('quickstart:grpo') == 'quickstart:grpo'


def test_an_unknown_name_is_told_the_names_that_there_are():
    names = ', '.join(sorted(file.stem for file in (ROOT / 'configs').glob('[!_]*.py')))
    with pytest.raises(ValueError, match=f"'quick' is neither a config.*choose one of {names}"):
        cli.config_file('quick:grpo')


@pytest.mark.parametrize('base', ['quickstart', 'diagrams'])
def test_a_config_names_its_base_wherever_it_is_read(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = runpy.run_path(cli.config_file(base))['get_config']().model.path
    assert Path(path) == ROOT / 'configs' / f'{base}_base'


def test_every_command_of_the_package_is_tested_here():
    text = (ROOT / 'pyproject.toml').read_text('utf-8')
    assert set(re.findall(r'^(bapo-[\w-]+) =', text, re.M)) == set(COMMANDS)


def test_the_extras_that_pages_and_messages_name_are_there():
    """'bapo_jax[tpu-compiler]', and a bare '[cuda12]' of a page."""
    assert set(tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']['optional-dependencies']) == EXTRAS
    pages = ''.join(file.read_text('utf-8') for file in [*ROOT.glob('*.md'), *(ROOT / 'docs').rglob('*.md')])
    package = ''.join(file.read_text('utf-8') for file in (ROOT / 'bapo_jax').rglob('*.py'))
    named = {*re.findall(r'bapo_jax\[([\w-]+)\]', pages + package), *re.findall(r"['`]\[([\w-]+)\]['`]", pages)}
    assert {'cuda', 'cuda12', 'tpu-compiler'} <= named <= EXTRAS


def test_the_version_stands_in_one_place():
    page = (ROOT / 'CHANGELOG.md').read_text('utf-8')
    assert re.search(r'^## \[(\d[^]]*)\]', page, re.M)[1] == bapo_jax.__version__
    assert f'\nversion: {bapo_jax.__version__}\n' in (ROOT / 'CITATION.cff').read_text('utf-8')
