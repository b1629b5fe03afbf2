"""Pushing an export to a stand-in of the hub: what arrives there, and what each refusal says."""

import re
import time

import pytest
from absl import flags
from hub_stub import folder_files
from small_run import ROOT

from bapo_jax import export
from bapo_jax.machine import cli
from bapo_jax.machine.pushing import check_push, push

BASE = ROOT / 'configs' / 'quickstart_base'
NAME = 'me/mine'


@pytest.fixture
def hub(hub_stub, monkeypatch):
    """A stand-in that takes uploads, and a token."""
    monkeypatch.setenv('HF_TOKEN', 'hf_never_shown')
    monkeypatch.setattr('time.sleep', lambda seconds: None)  # between tries
    return hub_stub


@pytest.fixture
def folder(tmp_path):
    """An export, but for its weights."""
    made = tmp_path / 'out'
    made.mkdir()
    for name, text in {'README.md': '---\nlibrary_name: transformers\n---\n', 'config.json': '{}', 'model.safetensors': 'weights'}.items():
        (made / name).write_text(text)
    return made


@pytest.mark.parametrize('by_lfs', [False, True])
@pytest.mark.parametrize('private', [True, False])
def test_all_files_arrive_in_a_new_repository(private, by_lfs, hub, folder, monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_DISABLE_XET', by_lfs)
    hub.by_lfs = by_lfs
    assert push(folder, NAME, private) == f'{hub.url}/{NAME}'
    assert hub.made == {NAME: 'private' if private else 'public'} and hub.tokens == {'Bearer hf_never_shown'}
    assert hub.repos[NAME]['main'] == folder_files(folder) | {'.gitattributes': b''}
    assert bool(hub.objects) == by_lfs


def test_an_evaluation_in_the_folder_is_not_published(hub, folder):
    """It has every held-out question and its answer."""
    exported = folder_files(folder)
    (folder / 'evaluation').mkdir()
    (folder / 'evaluation' / 'held_out.jsonl').write_text('{"question": 0}\n')
    push(folder, NAME, True)
    assert hub.repos[NAME]['main'] == exported | {'.gitattributes': b''}


def test_a_second_push_leaves_no_weights_of_the_first_and_no_other_visibility(hub, folder):
    """Loaders would read the weights of both."""
    hub.repos[NAME] = {'main': {'model-00001-of-00002.safetensors': b'1', 'model-00002-of-00002.safetensors': b'2', 'model.safetensors.index.json': b'{}', 'figure.png': b'3'}}
    push(folder, NAME, False)
    assert hub.made == {} and hub.repos[NAME]['main'] == folder_files(folder) | {'figure.png': b'3'}


@pytest.mark.parametrize(
    ('status', 'code', 'kind', 'words'),
    [
        (401, None, PermissionError, r'does not know the token \(401\); set HF_TOKEN to a valid one'),
        (403, None, PermissionError, r'the token may not write to me/mine \(403\); set HF_TOKEN to one that may, or choose an owner'),
        (404, 'RepoNotFound', PermissionError, r'the token may not write to me/mine \(404\)'),
        (500, None, ConnectionError, r'did not take it \(HfHubHTTPError, .*\); check the network and HF_ENDPOINT'),
    ],
)
def test_what_the_hub_refuses_is_said_with_the_command_for_later(status, code, kind, words, hub, folder):
    hub.refuses[NAME] = (status, code)
    with pytest.raises(kind, match=rf"^--push='{NAME}': the export in {re.escape(str(folder))} is complete, but .*{words}.* `hf upload") as said:
        push(folder, NAME, True)
    # The same as a push: no weights of an earlier one are left, and no held-out question is published.
    assert f"`hf upload {NAME} {folder} . --exclude 'evaluation/*' --delete '*.safetensors' --delete '*.safetensors.index.json' --private`" in str(said.value)
    assert 'hf_never_shown' not in str(said.value) and '\n' not in str(said.value)


def test_a_hub_that_is_gone_or_hangs_is_given_up_on(hub, folder, monkeypatch):
    monkeypatch.setattr('bapo_jax.machine.hub.UPLOAD_S', 0.05)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT', 0.05)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT', 0.05)
    started = time.monotonic()
    hub.hangs = 'POST'
    with pytest.raises(ConnectionError, match='did not take it .ReadTimeout'):
        push(folder, NAME, True)
    hub.close()
    with pytest.raises(ConnectionError, match='did not take it .ConnectError'):
        push(folder, NAME, True)
    assert time.monotonic() - started < 10


def test_what_needs_no_hub_is_checked_before_the_export(hub, monkeypatch):
    check_push(NAME)
    for name in ('mine', 'me/mine/more', 'me/', '../mine'):
        with pytest.raises(ValueError, match='is not a name on the hub; give OWNER/NAME'):
            check_push(name)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    with pytest.raises(ConnectionError, match='HF_HUB_OFFLINE is set; unset it'):
        check_push(NAME)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    monkeypatch.delenv('HF_TOKEN')
    monkeypatch.setattr('huggingface_hub.get_token', lambda: None)  # whoever runs the test may be logged in
    with pytest.raises(PermissionError, match=r'there is no token for .*; set HF_TOKEN .* or run `hf auth login`'):
        check_push(NAME)
    assert hub.asked == []


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """A function of flags: what `bapo-export` of the quickstart's base prints; raises SystemExit."""
    values = flags.FlagValues()
    monkeypatch.setattr(flags, 'FLAGS', values)
    monkeypatch.setattr(export, 'FLAGS', values)
    for define in ('DEFINE_string', 'DEFINE_enum', 'DEFINE_float', 'DEFINE_bool'):
        monkeypatch.setattr(flags, define, lambda *said, to=getattr(flags, define), **more: to(*said, flag_values=values, **more))

    def run(*words):
        monkeypatch.setattr(cli, 'start', lambda main: (values(['bapo-export', f'--checkpoint={BASE}', f'--output={tmp_path / "out"}', *words]), main([])))
        export.run()
        return capsys.readouterr().out

    return run


def test_the_command_exports_and_pushes(command, hub, tmp_path):
    said = command(f'--push={NAME}')
    assert said.endswith(f'pushed to {hub.url}/{NAME}\n') and ': the policy, float32, ' in said  # its steps are unknown
    there = hub.repos[NAME]['main']
    assert there == folder_files(tmp_path / 'out') | {'.gitattributes': b''}
    assert there['model.safetensors'] == (BASE / 'model.safetensors').read_bytes() and b'# me/mine' in there['README.md']


def test_an_export_stays_when_its_push_fails(command, hub, tmp_path):
    hub.refuses[NAME] = (403, None)
    with pytest.raises(SystemExit, match='^error: --push=.*the token may not write'):
        command(f'--push={NAME}', '--noprivate')
    assert (tmp_path / 'out' / 'model.safetensors').is_file()


@pytest.mark.parametrize('name', ['mine', ''])
def test_nothing_is_exported_for_a_name_that_cannot_be(name, command, hub, tmp_path):
    with pytest.raises(SystemExit, match='^error: --push=.* is not a name on the hub'):
        command(f'--push={name}')
    assert not (tmp_path / 'out').exists()
