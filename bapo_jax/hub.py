"""Names of the Hugging Face hub, through huggingface_hub and its cache.

    a model       owner/name[@revision]
    a data set    owner/name[@revision][/subset][:split]      the split is train where none is named

What lies here goes before the hub. Of a model come its configs, tokenizer and safetensors, no code and no pickles. A name stands
for one commit within `commits_of`. Files of a commit that the cache has whole are used without asking the hub. HF_HOME,
HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and HF_HUB_DOWNLOAD_TIMEOUT mean what they mean to huggingface_hub.

What asks the hub raises OSErrors (FileNotFoundError, PermissionError, ConnectionError, a full disk's) with field, name and remedy.
A server that hangs is given up on after seven tries of HF_HUB_DOWNLOAD_TIMEOUT (10 s) and pauses: within two minutes.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub import constants, errors

_REPO = r'(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>refs/(?:pr|convert)/[\w.-]+|[\w.-]+))?'
_MODEL = re.compile(_REPO, re.ASCII)
_DATASET = re.compile(_REPO + r'(?:/(?P<subset>[\w.-]+))?(?::(?P<split>[\w.-]+))?', re.ASCII)
_SMALL = ('*.json', '*.jinja', 'merges.txt', 'tokenizer.model')  # configs, tokenizer, chat template, image processor
_SHARD = re.compile(r'(?P<split>.+)-\d{5}-of-(?P<shards>\d{5})(?:-\w+)?')  # train-00000-of-00002, as data sets are written
_SPLITS = {'train', 'training', 'validation', 'valid', 'val', 'dev', 'test', 'testing', 'eval', 'evaluation'}
_SPLITS_SHOWN = 20  # in a message

# Task modules read data sets by name; this tells them the commits without a word in every signature between.
_COMMITS: ContextVar[dict[str, str] | None] = ContextVar('commits', default=None)


@contextlib.contextmanager
def commits_of(recorded: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Within it each name stands for one commit: the `recorded` one, else what the hub has when it is first asked.

    Gives the dict of all of them: name with revision -> commit; a data set's name begins with datasets/.
    """
    commits = dict(recorded)
    token = _COMMITS.set(commits)
    try:
        yield commits
    finally:
        _COMMITS.reset(token)


def model_folder(path: str | Path, field: str = 'model.path', weights: bool = True) -> str:
    """The directory of a model: `path` itself where it is one, else that of the hub's model of this name, fetched.

    Without `weights` come configs and tokenizer alone. Raises also FileNotFoundError for what is neither directory nor name.
    """
    path = str(path)
    if Path(path).is_dir():
        return path
    named = _MODEL.fullmatch(path)
    if not named or Path(path).exists():
        raise FileNotFoundError(
            f'{field}={path!r} is not a directory; give a Hugging Face model directory, or a name of the hub, owner/name[@revision]'
        )
    repo, revision = named['repo'], named['revision']
    wanted = [*_SMALL, '*.safetensors'] if weights else list(_SMALL)
    with _explained(field, path, repo, revision, 'model'):
        commit = _commit('model', repo, revision)
        return huggingface_hub.snapshot_download(repo, revision=commit, allow_patterns=wanted, ignore_patterns='*/*')


def folder_in_run(path: str, commits: Mapping[str, str], weights: bool = False) -> str:
    """The directory of a run's model.path: fetched where `commits`, which the run recorded, says that it is a name of the hub."""
    if path not in commits:
        return path
    with commits_of(commits):
        return model_folder(path, weights=weights)


def is_model(name: str) -> bool:
    """Whether `name` has the form of a hub's model, and nothing lies here under it."""
    return _MODEL.fullmatch(name) is not None and not Path(name).exists()


def is_dataset(name: str) -> bool:
    """Whether `name` has the form of a hub data set's. What lies here under this name is the caller's to look for first."""
    return _DATASET.fullmatch(name) is not None


def dataset_files(name: str, field: str, endings: Sequence[str]) -> list[Path]:
    """The files of one split of a data set, fetched, by name. `endings` are those that can be read, the preferred one first.

    Raises also FileNotFoundError where no such split is there, and ValueError where several are; both list the splits there are.
    """
    named = _DATASET.fullmatch(name)
    repo, revision, subset, split = (named[part] for part in ('repo', 'revision', 'subset', 'split'))
    with _explained(field, name, repo, revision, 'dataset'):
        commit = _commit('dataset', repo, revision)
        files = _listing(repo, commit)
    splits = splits_of(files, endings)
    said = f'{field}={name!r}: the data set {repo} of the hub'
    if not splits:
        raise FileNotFoundError(
            f'{said} has no file ending in {", ".join(endings)}; try {repo}@refs/convert/parquet, where the hub keeps a converted '
            f'copy of many, or convert its files and set {field} to one'
        )
    fitting = [key for key in splits if key[1] == (split or 'train') and (not subset or subset in key[0].split('/'))]
    at = f'@{revision}' if revision else ''
    choices = [f'{repo}{at}{folder and "/" + folder.split("/")[-1]}:{split}' for folder, split in sorted(splits)]
    there = f'{", ".join(choices[:_SPLITS_SHOWN])}{" …" if len(choices) > _SPLITS_SHOWN else ""}'
    if not fitting:
        raise FileNotFoundError(f'{said} has no such split; choose one of {there}')
    if len(fitting) > 1:
        raise ValueError(f'{said} has several such splits; choose one of {there}')
    chosen = splits[fitting[0]]
    shards = _SHARD.fullmatch(_stem(chosen[0], endings))
    if shards and int(shards['shards']) != len(chosen):
        wanted = int(shards['shards'])
        raise FileNotFoundError(f'{said} should have {wanted} files of this split and has {len(chosen)}; fetch it again')
    with _explained(field, name, repo, revision, 'dataset'):
        patterns = [glob.escape(file) for file in chosen]
        folder = huggingface_hub.snapshot_download(repo, repo_type='dataset', revision=commit, allow_patterns=patterns)
    return [Path(folder, file) for file in chosen]


def splits_of(files: Iterable[str], endings: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """The files of each split, (folder, split) -> paths in order, of the `endings` alone; a split in two forms has the first.

    A file's split is named by the file, or by a folder. Files of a folder without any such name are a train split.
    """
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(files):
        ending = next((e for e in endings if file.endswith(e)), None)
        *folders, _ = file.split('/')
        if ending is None or any(part.startswith('.') for part in file.split('/')):
            continue
        stem = _stem(file, endings)
        shards = _SHARD.fullmatch(stem)
        words = [word for part in (stem, *reversed(folders)) for word in re.split('[^a-z]+', part.lower()) if word in _SPLITS]
        split = shards['split'] if shards else next(iter(words), '')
        found['/'.join(part for part in folders if part != split), split][ending].append(file)
    named = {folder for folder, split in found if split}
    return {
        (folder, split or 'train'): next(of_ending[e] for e in endings if e in of_ending)
        for (folder, split), of_ending in found.items()
        if split or folder not in named
    }


def _stem(file: str, endings: Sequence[str]) -> str:
    """data/train.jsonl.gz -> train."""
    name = file.split('/')[-1]
    return name.removesuffix(next(e for e in endings if name.endswith(e)))


def _commit(kind: str, repo: str, revision: str | None) -> str:
    """The commit that a name stands for: known already, or the hub's now, or where it cannot be reached the newest in the cache."""
    commits = _COMMITS.get()
    name = ('datasets/' if kind == 'dataset' else '') + repo + (f'@{revision}' if revision else '')
    if commits and name in commits:
        return commits[name]
    commit = huggingface_hub.HfApi().resolve_revision(repo, repo_type=kind, revision=revision).resolved
    if commits is not None:
        commits[name] = commit
    return commit


def _listing(repo: str, commit: str) -> list[str]:
    """The names of a data set's files."""
    try:
        return [file.path for file in huggingface_hub.get_cached_repo_tree(repo, repo_type='dataset', revision=commit)]
    except errors.CachedRepoTreeNotFoundError:
        pass
    try:
        return huggingface_hub.HfApi().list_repo_files(repo, repo_type='dataset', revision=commit)
    except (httpx2.TransportError, errors.OfflineModeIsEnabled):
        # An older huggingface_hub may have filled the cache: it kept files and no list of them.
        here = Path(constants.HF_HUB_CACHE, f'datasets--{repo.replace("/", "--")}', 'snapshots', commit)
        if not here.is_dir():
            raise
        return [file.relative_to(here).as_posix() for file in here.rglob('*') if file.is_file()]


@functools.cache
def _with_deadlines() -> None:
    """Cuts each wait of huggingface_hub, which asks for commits and lists without a deadline and for files with up to a minute."""
    hooks = huggingface_hub.get_session().event_hooks['request']

    def deadline(request: httpx2.Request) -> None:
        most = max(constants.HF_HUB_DOWNLOAD_TIMEOUT, constants.HF_HUB_ETAG_TIMEOUT)
        waits = request.extensions.get('timeout', {})
        request.extensions['timeout'] = {on: min(waits.get(on) or most, most) for on in ('connect', 'read', 'write', 'pool')}

    huggingface_hub.set_client_factory(lambda: httpx2.Client(event_hooks={'request': [*hooks, deadline]}, follow_redirects=True))


@contextlib.contextmanager
def _explained(field: str, name: str, repo: str, revision: str | None, kind: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into an error that says what to do."""
    what, here = ('model', 'directory') if kind == 'model' else ('data set', 'file')
    said = f'{field}={name!r} is no {here} here, and'
    options = ''.join([' --repo-type dataset' if kind == 'dataset' else '', f' --revision {revision}' if revision else ''])
    _with_deadlines()
    try:
        yield
    except Exception as error:  # the client's errors share no base class
        cached = isinstance(error, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError))
        cause: Any = error.__cause__ if cached and error.__cause__ else error
        status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else 0
        short = ' '.join(str(cause).split())[:160]
        if isinstance(cause, errors.RevisionNotFoundError):
            raise FileNotFoundError(f'{said} the hub has no revision {revision or "main"} of {repo}; look at its page') from error
        if isinstance(cause, errors.GatedRepoError) or status == 403:
            raise PermissionError(
                f'{said} the hub gives {repo} only to those with access; ask for it on the page of {repo}, then put your '
                'token into HF_TOKEN'
            ) from error
        if isinstance(cause, errors.RepositoryNotFoundError) or status == 401:
            raise FileNotFoundError(
                f'{said} the hub knows no {what} {repo}, or it is private ({status}); mend the name, give a {here}, or put a token '
                'that may read it into HF_TOKEN'
            ) from error
        if status or cached or isinstance(cause, (httpx2.HTTPError, errors.OfflineModeIsEnabled, errors.XetDownloadError)):
            offline = isinstance(cause, errors.OfflineModeIsEnabled)
            why = 'HF_HUB_OFFLINE is set' if offline else f'{constants.ENDPOINT} did not give it: {type(cause).__name__}, {short}'
            raise ConnectionError(
                f'{said} the cache {constants.HF_HUB_CACHE} does not have all of {repo} ({why}). On a machine with a network run '
                f'`hf download {repo}{options}` and copy its cache here (HF_HOME says where), or set {field} to a {here} of it; '
                'HF_ENDPOINT names a mirror'
            ) from error
        if isinstance(error, OSError) and error.errno:
            raise OSError(
                error.errno,
                f'{said} {repo} cannot be written to the cache {constants.HF_HUB_CACHE}: {error.strerror}. Make room, or let '
                'HF_HOME name another folder',
            ) from error
        if isinstance(error, (OSError, ValueError, RuntimeError)):  # what hf_xet raises, too
            raise ConnectionError(
                f'{said} {constants.ENDPOINT} did not give {repo} whole ({type(error).__name__}, {short}); the same command tries '
                'again, and HF_ENDPOINT names another hub'
            ) from error
        raise
