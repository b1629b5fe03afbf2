"""Models and data sets of the Hugging Face hub, by name, through huggingface_hub and its cache.

    a model       owner/name[@revision]
    a data set    owner/name[@revision][/subset][:split]      the split is train unless another is named

Local files take precedence over the hub. A model's configs, tokenizer and safetensors are fetched, but no
code and no pickles. Within `commits_of`, a name stands for one commit. If the cache has all files of a
commit, they are used without asking the hub. HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and
HF_HUB_DOWNLOAD_TIMEOUT mean the same as to huggingface_hub.

Functions that ask the hub raise OSError (FileNotFoundError, PermissionError, ConnectionError, or that of a
full disk) with field, name and remedy. A hanging server is given up after seven tries of
HF_HUB_DOWNLOAD_TIMEOUT (10 s) with pauses: within two minutes. pushing.py uploads.
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
# Configs, tokenizer, chat template and image processor.
_SMALL = ('*.json', '*.jinja', 'merges.txt', 'tokenizer.model')
# train-00000-of-00002, as the shards of data sets are named.
_SHARD = re.compile(r'(?P<split>.+)-\d{5}-of-(?P<shards>\d{5})(?:-\w+)?')
_SPLITS = {'train', 'training', 'validation', 'valid', 'val', 'dev', 'test', 'testing', 'eval', 'evaluation'}
_SPLITS_SHOWN = 20  # in a message
UPLOAD_S = 300.0  # seconds in which the hub must answer to files that it was sent

# Task modules read data sets by name; this gives them the commits without a parameter in every signature.
_COMMITS: ContextVar[dict[str, str] | None] = ContextVar('commits', default=None)


@contextlib.contextmanager
def commits_of(recorded: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Inside, each name stands for one commit: the `recorded` one, else the hub's when it is first asked.

    Yields the dict of all of them: name with revision -> commit. A data set's name begins with datasets/.
    """
    commits = dict(recorded)
    token = _COMMITS.set(commits)
    try:
        yield commits
    finally:
        _COMMITS.reset(token)


def model_folder(path: str | Path, field: str = 'model.path', weights: bool = True) -> str:
    """The directory of a model: `path` itself if it is one, else the hub's model of this name, fetched.

    Without `weights`, only configs and tokenizer are fetched. Also raises FileNotFoundError if `path` is
    neither a directory nor a name.
    """
    path = str(path)
    if Path(path).is_dir():
        return path
    named = _MODEL.fullmatch(path)
    if not named or Path(path).exists():
        raise FileNotFoundError(
            f'{field}={path!r} is not a directory; give a Hugging Face model directory, or a hub name, '
            'owner/name[@revision]'
        )
    repo, revision = named['repo'], named['revision']
    wanted = [*_SMALL, '*.safetensors'] if weights else list(_SMALL)
    with _explained(field, path, repo, revision, 'model'):
        commit = _commit('model', repo, revision)
        return huggingface_hub.snapshot_download(
            repo, revision=commit, allow_patterns=wanted, ignore_patterns='*/*'
        )


def folder_in_run(path: str, commits: Mapping[str, str], weights: bool = False) -> str:
    """The directory of a run's model.path, fetched if the `commits` that the run recorded include it."""
    if path not in commits:
        return path
    with commits_of(commits):
        return model_folder(path, weights=weights)


def is_model(name: str) -> bool:
    """Whether `name` has the form of a hub model's name, and no local path has this name."""
    return _MODEL.fullmatch(name) is not None and not Path(name).exists()


def is_dataset(name: str) -> bool:
    """Whether `name` has the form of a hub data set's name. The caller looks for a local file first."""
    return _DATASET.fullmatch(name) is not None


def dataset_files(name: str, field: str, endings: Sequence[str]) -> list[Path]:
    """Fetches the files of one split of a data set and returns their paths.

    `endings` are the file endings that can be read, the preferred one first. Also raises FileNotFoundError if
    there is no such split, and ValueError if there are several; both messages list the splits.
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
            f'{said} has no file ending in {", ".join(endings)}; try {repo}@refs/convert/parquet, the '
            'converted copy that the '
            f'hub has of many data sets, or convert its files and set {field} to one of them'
        )
    fitting = [
        key for key in splits if key[1] == (split or 'train') and (not subset or subset in key[0].split('/'))
    ]
    at = f'@{revision}' if revision else ''
    choices = [
        f'{repo}{at}{folder and "/" + folder.split("/")[-1]}:{split}' for folder, split in sorted(splits)
    ]
    there = f'{", ".join(choices[:_SPLITS_SHOWN])}{" …" if len(choices) > _SPLITS_SHOWN else ""}'
    if not fitting:
        raise FileNotFoundError(f'{said} has no such split; choose one of {there}')
    if len(fitting) > 1:
        raise ValueError(f'{said} has several matching splits; choose one of {there}')
    chosen = splits[fitting[0]]
    shards = _SHARD.fullmatch(_stem(chosen[0], endings))
    if shards and int(shards['shards']) != len(chosen):
        wanted = int(shards['shards'])
        raise FileNotFoundError(
            f'{said} lacks some of the {wanted} files of this split or has them twice ({len(chosen)} are '
            'there); fetch it again, or choose another revision'
        )
    with _explained(field, name, repo, revision, 'dataset'):
        patterns = [glob.escape(file) for file in chosen]
        folder = huggingface_hub.snapshot_download(
            repo, repo_type='dataset', revision=commit, allow_patterns=patterns
        )
    return [Path(folder, file) for file in chosen]


def splits_of(files: Iterable[str], endings: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """The files of each split, (folder, split) -> sorted paths, with the preferred of the `endings` only.

    The split is named by the file or by one of its folders. Files in a folder without any such name are a
    train split.
    """
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(files):
        ending = next((e for e in endings if file.endswith(e)), None)
        *folders, _ = file.split('/')
        if ending is None or any(part.startswith('.') for part in file.split('/')):
            continue
        stem = _stem(file, endings)
        shards = _SHARD.fullmatch(stem)
        words = [
            word
            for part in (stem, *reversed(folders))
            for word in re.split('[^a-z]+', part.lower())
            if word in _SPLITS
        ]
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
    """The commit of a name: the known one, else the hub's current one, else the newest in the cache."""
    commits = _COMMITS.get()
    name = ('datasets/' if kind == 'dataset' else '') + repo + (f'@{revision}' if revision else '')
    if commits and name in commits:
        return commits[name]
    commit = huggingface_hub.HfApi().resolve_revision(repo, repo_type=kind, revision=revision).resolved
    if commits is not None:
        commits[name] = commit
    return commit


def _listing(repo: str, commit: str) -> list[str]:
    """The paths of a data set's files within its repository."""
    try:
        return [
            file.path
            for file in huggingface_hub.get_cached_repo_tree(repo, repo_type='dataset', revision=commit)
        ]
    except errors.CachedRepoTreeNotFoundError:
        pass
    try:
        return huggingface_hub.HfApi().list_repo_files(repo, repo_type='dataset', revision=commit)
    except (httpx2.TransportError, errors.OfflineModeIsEnabled):
        # An older huggingface_hub may have filled the cache; it kept the files but no list of them.
        here = Path(constants.HF_HUB_CACHE, f'datasets--{repo.replace("/", "--")}', 'snapshots', commit)
        if not here.is_dir():
            raise
        return [file.relative_to(here).as_posix() for file in here.rglob('*') if file.is_file()]


@functools.cache
def with_deadlines() -> None:
    """Bounds each wait of huggingface_hub: it has no timeout for commits and lists, a minute for files.

    The answer to an upload may take `UPLOAD_S`.
    """
    hooks = huggingface_hub.get_session().event_hooks['request']

    def deadline(request: httpx2.Request) -> None:
        most = max(constants.HF_HUB_DOWNLOAD_TIMEOUT, constants.HF_HUB_ETAG_TIMEOUT)
        waits = request.extensions.get('timeout', {})
        bounds = dict.fromkeys(('connect', 'read', 'write', 'pool'), most)
        if request.method in ('POST', 'PUT'):
            bounds['read'] = max(most, UPLOAD_S)
        request.extensions['timeout'] = {on: min(waits.get(on) or s, s) for on, s in bounds.items()}

    huggingface_hub.set_client_factory(
        lambda: httpx2.Client(event_hooks={'request': [*hooks, deadline]}, follow_redirects=True)
    )


@contextlib.contextmanager
def _explained(field: str, name: str, repo: str, revision: str | None, kind: str) -> Iterator[None]:
    """Turns the errors of huggingface_hub into OSErrors that say what to do."""
    what, here = ('model', 'directory') if kind == 'model' else ('data set', 'file')
    said = f'{field}={name!r} is not a local {here}, and'
    options = ''.join(
        [' --repo-type dataset' if kind == 'dataset' else '', f' --revision {revision}' if revision else '']
    )
    with_deadlines()
    try:
        yield
    except Exception as error:  # the client's errors have no common base class
        cached = isinstance(error, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError))
        cause: Any = error.__cause__ if cached and error.__cause__ else error
        status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else 0
        short = ' '.join(str(cause).split())[:160]
        if isinstance(cause, errors.RevisionNotFoundError):
            raise FileNotFoundError(
                f'{said} the hub has no revision {revision or "main"} of {repo}; choose one from its page'
            ) from error
        if isinstance(cause, errors.GatedRepoError) or status == 403:
            raise PermissionError(
                f'{said} the hub restricts access to {repo}; ask for access on its page, then set HF_TOKEN '
                'to your token'
            ) from error
        if isinstance(cause, errors.RepositoryNotFoundError) or status == 401:
            raise FileNotFoundError(
                f'{said} the hub has no {what} {repo}, or it is private ({status}); correct the name, give a '
                f'local {here}, or set HF_TOKEN to a token that may read it'
            ) from error
        if (
            status
            or cached
            or isinstance(cause, (httpx2.HTTPError, errors.OfflineModeIsEnabled, errors.XetDownloadError))
        ):
            offline = isinstance(cause, errors.OfflineModeIsEnabled)
            why = (
                'HF_HUB_OFFLINE is set'
                if offline
                else f'{constants.ENDPOINT} did not send it: {type(cause).__name__}, {short}'
            )
            raise ConnectionError(
                f'{said} the cache {constants.HF_HUB_CACHE} does not have all of {repo} ({why}). On a '
                f'machine with network access, run `hf download {repo}{options}` and copy its cache '
                f'(HF_HOME/hub there) into the one here; or set {field} to a local {here}; or set '
                'HF_ENDPOINT to a mirror'
            ) from error
        if isinstance(error, OSError) and error.errno:
            raise OSError(
                error.errno,
                f'{said} {repo} cannot be written to the cache {constants.HF_HUB_CACHE}: {error.strerror}. '
                'Free space, or set HF_HOME to another directory',
            ) from error
        if isinstance(error, (OSError, ValueError, RuntimeError)):  # hf_xet raises these, too
            raise ConnectionError(
                f'{said} the download of {repo} from {constants.ENDPOINT} was not complete '
                f'({type(error).__name__}, {short}); '
                'run the same command to retry, or set HF_ENDPOINT to a mirror'
            ) from error
        raise
