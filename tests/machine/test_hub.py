"""Names of the hub, against a stand-in of its HTTP interface: what is fetched, what the cache answers, what each fault says."""

import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
from hub_stub import folder_files
from proxied import name_proxy
from small_run import ROOT, small_config

from bapo_jax.export import export
from bapo_jax.inputs import read_inputs
from bapo_jax.machine import hub
from bapo_jax.models import hf
from bapo_jax.run.directory import fingerprint_prompts, recorded_commits
from bapo_jax.run.start import claim_directory
from bapo_jax.train import build

BASE = ROOT / 'configs' / 'quickstart_base'
NAME = 'Qwen/Tiny2.5-0.8M'
ENDINGS = ('.parquet', '.jsonl', '.jsonl.gz', '.json')
CODE = {'modeling.py': b'raise SystemExit', 'pytorch_model.bin': b'pickle', 'onnx/model.safetensors': b'other', 'README.md': b'#'}
PROBLEM = b'{"nums": [44, 19, 35], "target": 98}\n'


@pytest.fixture
def model(hub_stub):
    """A stand-in that has the quickstart's base, among what a repository holds beside."""
    hub_stub.repos[NAME] = {'main': folder_files(BASE) | CODE}
    return hub_stub


@pytest.fixture
def gone(model):
    """Stops the hub; the fixture is a function, so that a test may fetch first."""
    return model.close


def offline(monkeypatch):
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)


# ---- a model ----------------------------------------------------------------------------------------------------------


def test_a_model_comes_without_code_pickles_and_folders(model):
    folder = Path(hub.model_folder(NAME))
    assert folder_files(folder) == folder_files(BASE)
    assert sorted(model.files_asked()) == sorted(folder_files(BASE))
    hf.check_weights(str(folder), hf.read_config(str(folder)))


def test_configs_and_tokenizer_alone_are_fetched_where_weights_are_not_wanted(model):
    assert 'model.safetensors' not in folder_files(Path(hub.model_folder(NAME, weights=False)))
    assert 'model.safetensors' in folder_files(Path(hub.model_folder(NAME)))


def test_the_hub_is_asked_through_the_environments_proxy(model, monkeypatch):
    name_proxy(model.url, monkeypatch)  # the stand-in is the proxy: no such host as the address names exists
    url = 'http://hub.invalid'
    monkeypatch.setattr('huggingface_hub.constants.ENDPOINT', url)
    monkeypatch.setattr('huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE', url + '/{repo_id}/resolve/{revision}/{filename}')
    huggingface_hub.close_session()  # an open one would know no proxy
    try:
        assert folder_files(Path(hub.model_folder(NAME))) == folder_files(BASE)
    finally:
        huggingface_hub.close_session()


def test_what_lies_here_goes_before_the_hub(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir(parents=True)
    assert hub.model_folder(NAME) == NAME and model.asked == []


def test_the_cache_answers_where_the_hub_does_not(model, monkeypatch):
    folder = hub.model_folder(NAME)
    model.asked.clear()
    offline(monkeypatch)
    assert hub.model_folder(NAME) == folder and model.asked == []
    with pytest.raises(ConnectionError, match=r"='Qwen/Other' is not a local directory, .*\(HF_HUB_OFFLINE is set\).*hf download"):
        hub.model_folder('Qwen/Other')


def test_a_hub_that_is_gone_says_what_to_do(gone):
    gone()
    with pytest.raises(ConnectionError) as said:
        hub.model_folder('Qwen/Other@v1')
    for part in ("model.path='Qwen/Other@v1' is not a local directory", 'ConnectError', '`hf download Qwen/Other --revision v1`',
                 'set model.path to a local directory', 'HF_HOME', 'HF_ENDPOINT'):  # fmt: skip
        assert part in str(said.value)


def test_a_cache_that_has_the_model_in_part_does_not_count(model, monkeypatch):
    hub.model_folder(NAME, weights=False)
    offline(monkeypatch)
    with pytest.raises(ConnectionError, match='does not have all of Qwen/Tiny2.5-0.8M'):
        hub.model_folder(NAME)


@pytest.mark.parametrize('hangs', ['revision', 'tree', 'HEAD', 'GET'])
def test_a_hub_that_hangs_is_given_up_on(hangs, model, monkeypatch):
    """At every request that a download makes, and with the waits of huggingface_hub's own, of which one is a minute."""
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT', 0.05)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT', 0.05)
    monkeypatch.setattr('time.sleep', lambda seconds: None)  # between its tries
    model.hangs = hangs
    started = time.monotonic()
    with pytest.raises(ConnectionError, match=rf"model\.path='{NAME}' is not a local directory, .*did not send it: ReadTimeout"):
        hub.model_folder(NAME)
    assert time.monotonic() - started < 10 and len(model.asked) < 40


@pytest.mark.parametrize(
    ('status', 'code', 'kind', 'words'),
    [
        (404, 'RepoNotFound', FileNotFoundError, r'the hub has no model .*, or it is private \(404\); correct the name'),
        (401, None, FileNotFoundError, r'private \(401\).*set HF_TOKEN to a token that may read it'),
        (403, 'GatedRepo', PermissionError, r'restricts access to .*; ask for access .*HF_TOKEN'),
        (403, None, PermissionError, r'restricts access to .*; ask for access .*HF_TOKEN'),
        (404, 'RevisionNotFound', FileNotFoundError, r'the hub has no revision v2 of'),
        (503, None, ConnectionError, r'HfHubHTTPError'),
    ],
)
def test_what_the_hub_refuses_is_said(status, code, kind, words, model, monkeypatch):
    monkeypatch.setattr('time.sleep', lambda seconds: None)
    monkeypatch.setenv('HF_TOKEN', 'hf_never_shown')
    model.refuses[NAME] = (status, code)
    with pytest.raises(kind, match=rf"^\[?.*model\.path='{NAME}@v2' is not a local directory, and .*{words}") as said:
        hub.model_folder(f'{NAME}@v2')
    assert model.tokens == {'Bearer hf_never_shown'} and 'hf_never_shown' not in str(said.value)


def test_a_transfer_that_is_cut_goes_on_or_leaves_nothing_that_counts(model, monkeypatch):
    monkeypatch.setattr('time.sleep', lambda seconds: None)
    model.cuts = 2
    assert folder_files(Path(hub.model_folder(NAME))) == folder_files(BASE)
    other = 'Qwen/Cut'
    model.repos[other] = {'main': {'config.json': b'{}', 'model.safetensors': os.urandom(900_000)}}
    monkeypatch.setattr('huggingface_hub.file_download.http_get', ended(huggingface_hub.file_download.http_get, 300_000))
    with pytest.raises(ConnectionError, match=r"'Qwen/Cut' is not a local directory, and the download of Qwen/Cut from .* was not complete"):
        hub.model_folder(other)
    offline(monkeypatch)
    with pytest.raises(ConnectionError, match='does not have all of Qwen/Cut'):
        hub.model_folder(other)


def ended(get, after):
    """http_get that writes no more than so many bytes of a file and then fails as for a size that is wrong."""

    def get_some(url, temp_file, **named):
        get(url, temp_file, **named)
        if temp_file.tell() > after:
            temp_file.truncate(after)
            raise OSError('Consistency check failed')

    return get_some


def test_a_full_disk_is_said(model, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr('huggingface_hub.file_download.http_get', full)
    with pytest.raises(OSError, match=r'written to the cache .*: No space left on device\. Free space, or set HF_HOME') as said:
        hub.model_folder(NAME)
    assert said.value.errno == errno.ENOSPC


@pytest.mark.parametrize('path', ['/nowhere', 'models', '../up/name', 'a/b/c', 'a/b@', './a/b'])
def test_what_is_neither_directory_nor_name_never_asks_the_hub(path, model):
    with pytest.raises(FileNotFoundError, match=r'is not a directory; give a Hugging Face model directory, or a hub name, owner/name'):
        hub.model_folder(path)
    assert model.asked == []


# ---- the commit -------------------------------------------------------------------------------------------------------


def test_a_name_stands_for_one_commit(model):
    first = model.commit(NAME)
    with hub.commits_of({}) as commits:
        before = hub.model_folder(NAME)
        model.repos[NAME]['main'] = model.repos[NAME]['main'] | {'config.json': b'{}'}
        assert hub.model_folder(NAME) == before and commits == {NAME: first}
    assert hub.model_folder(NAME) != before
    with hub.commits_of({NAME: first}):
        assert hub.model_folder(NAME) == before
    assert hub.model_folder(f'{NAME}@{first}') == before


def test_a_revision_is_part_of_the_name(model):
    model.repos[NAME]['refs/pr/3'] = model.repos[NAME]['main'] | {'generation_config.json': b'{}'}
    with hub.commits_of({}) as commits:
        assert Path(hub.model_folder(f'{NAME}@refs/pr/3'), 'generation_config.json').is_file()
        assert not Path(hub.model_folder(NAME), 'generation_config.json').exists()
    assert commits == {f'{NAME}@refs/pr/3': model.commit(NAME, 'refs/pr/3'), NAME: model.commit(NAME)}


def test_a_run_keeps_its_commits_and_goes_on_without_the_hub(model, tmp_path, monkeypatch):
    """Model and training data have moved on the hub, and then the hub has gone."""
    bench, train = tmp_path / 'bench.jsonl', 'datasets/owner/cd'
    bench.write_bytes(PROBLEM)
    problems = b''.join(json.dumps({'nums': [n, 9, 35], 'target': n + 44}).encode() + b'\n' for n in range(1, 57))
    model.repos[train] = {'main': {'train.jsonl': problems}}
    config = small_config('bapo_tuned', bench, model__path=NAME, task__train='owner/cd', task__limit=0)
    commits = {NAME: model.commit(NAME), train: model.commit(train)}
    began = build(config, tmp_path / 'run').run
    written = json.loads((tmp_path / 'run' / 'config.json').read_text())
    assert written['model']['path'] == NAME and written['task']['train'] == 'owner/cd' and written['hub'] == commits
    model.repos[NAME]['main'] = model.repos[NAME]['main'] | {'config.json': b'{}'}
    model.repos[train]['main'] = {'train.jsonl': PROBLEM * 60}
    for _ in range(2):
        again = read_inputs(config, commits=recorded_commits(tmp_path / 'run'))
        assert again.config.model.path == began.config.model.path and again.commits == commits
        assert fingerprint_prompts(again.prompts) == fingerprint_prompts(began.evaluate.training_prompts)
        assert claim_directory(again, tmp_path / 'run', amend=False).changed == {} and recorded_commits(tmp_path / 'run') == commits
        offline(monkeypatch)
    assert hub.folder_in_run(NAME, commits) == began.config.model.path  # for export and the like


@pytest.mark.parametrize('said', [[], {'a/b': 1}, 'a/b'])
def test_damaged_commits_are_said(said, tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps({'hub': said}))
    with pytest.raises(ValueError, match=r'config\.json is damaged \(hub is not a table of commits\)'):
        recorded_commits(tmp_path)


# ---- data sets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('files', 'splits'),
    [
        (['data/train-00001-of-00002.parquet', 'data/train-00000-of-00002.parquet', 'data/test-00000-of-00001.parquet'],
         {('data', 'train'): ['data/train-00000-of-00002.parquet', 'data/train-00001-of-00002.parquet'],
          ('data', 'test'): ['data/test-00000-of-00001.parquet']}),
        (['main/test-00000-of-00001.parquet', 'socratic/test-00000-of-00001.parquet'],
         {('main', 'test'): ['main/test-00000-of-00001.parquet'], ('socratic', 'test'): ['socratic/test-00000-of-00001.parquet']}),
        (['data/train-00000-of-00001-6ef3991c06080e14.parquet'],
         {('data', 'train'): ['data/train-00000-of-00001-6ef3991c06080e14.parquet']}),
        (['train.jsonl', 'my_val.jsonl.gz', 'README.md', '.eval.jsonl'],
         {('', 'train'): ['train.jsonl'], ('', 'val'): ['my_val.jsonl.gz']}),
        (['default/train/0000.parquet', 'default/train/0001.parquet', 'default/test/0000.parquet'],
         {('default', 'train'): ['default/train/0000.parquet', 'default/train/0001.parquet'],
          ('default', 'test'): ['default/test/0000.parquet']}),
        (['deepscaler.json'], {('', 'train'): ['deepscaler.json']}),
        (['train.parquet', 'train.jsonl', 'dataset_infos.json'], {('', 'train'): ['train.parquet']}),
        (['hard/hard-00000-of-00001.parquet'], {('', 'hard'): ['hard/hard-00000-of-00001.parquet']}),
        (['a.csv'], {}),
    ],
)  # fmt: skip
def test_the_splits_of_the_layouts_there_are(files, splits):
    assert hub.splits_of(files, ENDINGS) == splits


@pytest.fixture
def gsm(hub_stub):
    names = [f'{subset}/{split}-00000-of-00001.jsonl' for subset in ('main', 'socratic') for split in ('train', 'test')]
    hub_stub.repos['datasets/openai/gsm8k'] = {'main': {name: name.encode() for name in names} | {'load.py': b'', 'a.zip': b'PK'}}
    return hub_stub


def test_one_split_of_one_subset_is_fetched_and_nothing_else(gsm, monkeypatch):
    [file] = hub.dataset_files('openai/gsm8k/socratic:test', 'task.train', ENDINGS)
    assert file.read_text() == 'socratic/test-00000-of-00001.jsonl' and len(gsm.files_asked()) == 1
    gsm.asked.clear()
    offline(monkeypatch)
    assert hub.dataset_files('openai/gsm8k/socratic:test', 'task.train', ENDINGS) == [file]
    with pytest.raises(ConnectionError, match=r"task\.train='openai/gsm8k/main' is not a local file.*--repo-type dataset"):
        hub.dataset_files('openai/gsm8k/main', 'task.train', ENDINGS)
    assert gsm.asked == []


@pytest.mark.parametrize(
    ('name', 'kind', 'words'),
    [
        ('openai/gsm8k/main:dev', FileNotFoundError, 'has no such split; choose one of openai/gsm8k/main:test, openai/gsm8k/main'),
        ('openai/gsm8k/other', FileNotFoundError, 'has no such split; choose one of openai/gsm8k/main:test, '),
        ('openai/gsm8k', ValueError, 'has several matching splits; choose one of openai/gsm8k/main:test, openai/gsm8k/main:train, '
                                     'openai/gsm8k/socratic:test, openai/gsm8k/socratic:train'),
    ],
)  # fmt: skip
def test_a_split_that_is_not_there_or_not_one_lists_what_there_is(name, kind, words, gsm):
    with pytest.raises(kind, match=re.escape(f"task.train={name!r}: the data set openai/gsm8k of the hub {words}")):
        hub.dataset_files(name, 'task.train', ENDINGS)


def test_a_data_set_in_other_forms_and_one_that_lacks_a_shard(hub_stub):
    hub_stub.repos['datasets/a/csv'] = {'main': {'train.csv': b'1'}}
    with pytest.raises(FileNotFoundError, match=r'no file ending in \.parquet; try a/csv@refs/convert/parquet'):
        hub.dataset_files('a/csv', 'task.train', ('.parquet',))
    hub_stub.repos['datasets/a/part'] = {'main': {'train-00000-of-00002.parquet': b'1'}}
    with pytest.raises(FileNotFoundError, match='lacks some of the 2 files of this split or has them twice .1 are there'):
        hub.dataset_files('a/part', 'task.train', ENDINGS)


def test_a_cache_without_a_list_of_files_is_read_offline(gsm, monkeypatch):
    """An older huggingface_hub kept none."""
    name = 'openai/gsm8k/main:test'
    [file] = hub.dataset_files(name, 'task.train', ENDINGS)
    trees = file.parents[3] / 'trees'
    assert trees.is_dir()
    for listed in trees.iterdir():
        listed.unlink()
    offline(monkeypatch)
    assert hub.dataset_files(name, 'task.train', ENDINGS) == [file]


# ---- the commands -----------------------------------------------------------------------------------------------------


def test_a_dry_run_fetches_no_weights(model, tmp_path):
    benchmark = tmp_path / 'bench.jsonl'
    benchmark.write_bytes(PROBLEM)
    config = small_config('bapo_tuned', benchmark, model__path=NAME)
    assert Path(read_inputs(config, weights=False).config.model.path).name == model.commit(NAME)
    assert sorted(model.files_asked()) == ['config.json', 'tokenizer.json', 'tokenizer_config.json']


def test_a_name_is_refused_before_data_are_read(gone, tmp_path):
    gone()
    with pytest.raises(ConnectionError, match=r'model\.path='):
        read_inputs(small_config('bapo_tuned', tmp_path / 'missing.jsonl', model__path=NAME))


@pytest.mark.slow
def test_a_run_of_a_name_is_trained_by_the_command_and_exported_offline(model, tmp_path, monkeypatch):
    benchmark = tmp_path / 'bench.jsonl'
    benchmark.write_bytes(PROBLEM)
    fields = {'model.path': NAME, 'steps': 1, 'task.limit': 60, 'learner.batch_groups': 8, 'learner.mini_batch_groups': 8,
              'rollout.group_size': 4, 'evaluate.benchmarks': f"('{benchmark}',)", 'evaluate.samples': 1,
              'evaluate.at_start': False, 'evaluate.track_prompts': 0}  # fmt: skip
    words = [f'--config.{field}={value}' for field, value in fields.items()]
    hub_variables = {'HF_ENDPOINT': model.url, 'HF_HOME': str(tmp_path / 'home'), 'HF_HUB_OFFLINE': '0'}
    subprocess.run(
        [sys.executable, '-m', 'bapo_jax.train', '--config=configs/quickstart.py', f'--workdir={tmp_path}/run', *words],
        cwd=ROOT, env={**os.environ, **hub_variables}, check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    offline(monkeypatch)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path / 'home' / 'hub'))
    assert export(tmp_path / 'run', tmp_path / 'out') == (1, 'float32')
    assert folder_files(tmp_path / 'out')['tokenizer.json'] == folder_files(BASE)['tokenizer.json']
