"""Uploads an exported policy to the Hugging Face hub, by huggingface_hub. HF_TOKEN and HF_ENDPOINT apply."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

from bapo_jax.machine.hub import with_deadlines

_NAME = re.compile(r'\w[\w.-]*/\w[\w.-]*', re.ASCII)
# What an earlier push left and this one does not replace: loaders would read its weights as well.
_REPLACED = ('*.safetensors', '*.safetensors.index.json')
_KEPT_HERE = 'evaluation/*'  # bapo-evaluate writes held-out questions and their answers there


def check_push(name: str) -> None:
    """Raises ValueError if `name` is no OWNER/NAME, and OSError if this machine may not ask the hub.

    It asks nothing, so it can come before a long export.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f'--push={name!r} is not a name on the hub; give OWNER/NAME')
    if constants.HF_HUB_OFFLINE:
        raise ConnectionError(f'--push={name!r}: HF_HUB_OFFLINE is set; unset it to upload')
    if not huggingface_hub.get_token():
        raise PermissionError(
            f'--push={name!r}: there is no token for {constants.ENDPOINT}; set HF_TOKEN to a token that may '
            'write, or run `hf auth login`'
        )


def push(folder: Path, name: str, private: bool) -> str:
    """Uploads the files of `folder`, but not its evaluation/, to the model repository `name`.

    Returns its address. A new repository is `private` or not. One that exists keeps its visibility, its
    history and its other files, except safetensors weights. Raises OSError with a command that does the same
    later; `folder` stays as it is.
    """
    with_deadlines()
    hub = huggingface_hub.HfApi()
    try:
        address = hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message='Upload a policy exported by bapo_jax',
            delete_patterns=list(_REPLACED),
            ignore_patterns=_KEPT_HERE,
        )
    except Exception as error:  # the client's errors have no common base class
        cause = error.__cause__ if isinstance(error.__cause__, errors.HfHubHTTPError) else error
        status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else 0
        deleted = [word for pattern in _REPLACED for word in ('--delete', pattern)]
        words = 'hf', 'upload', name, str(folder), '.', '--exclude', _KEPT_HERE, *deleted
        again = shlex.join([*words, *['--private'] * private])
        said = f'--push={name!r}: the export in {folder} is complete, but'
        if status == 401:
            raise PermissionError(
                f'{said} {constants.ENDPOINT} does not know the token (401); set HF_TOKEN to a valid one, '
                f'then run `{again}`'
            ) from error
        if status in (403, 404):
            raise PermissionError(
                f'{said} the token may not write to {name} ({status}); set HF_TOKEN to one that may, or '
                f'choose an owner that is yours, then run `{again}`'
            ) from error
        raise ConnectionError(
            f'{said} {constants.ENDPOINT} did not take it ({type(cause).__name__}, '
            f'{" ".join(str(cause).split())[:160]}); check the network and HF_ENDPOINT, then run `{again}`'
        ) from error
    return str(address)
