"""Stored policies: a run's newest checkpoint, a published policy, a Hugging Face directory, or an adapter.

`find_policy` determines which of these a directory is. Evaluation loads the policy onto devices; export reads
it tensor by tensor.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.machine import hub
from bapo_jax.models import hf
from bapo_jax.models.adapters import SETTINGS, adapter_of, put_adapter, read_adapter
from bapo_jax.models.decoder import ModelConfig, trained_parameters
from bapo_jax.models.hf import architecture
from bapo_jax.models.layers import Adapter
from bapo_jax.models.parameters import parted, united
from bapo_jax.models.sharding import parameter_sharding
from bapo_jax.run.checkpoint import Checkpoints, none_complete
from bapo_jax.run.directory import commits_in, fingerprint_tokenizer, part_of, read_run_config
from bapo_jax.weights.manifest import MANIFEST, WEIGHTS, check_bytes, read_manifest, read_tensors

# The help of --base, which `base_of` reads.
BASE_HELP = 'Hugging Face directory of the model that the run started from; default: model.path of the run.'
RUN, PUBLISHED, HUGGING_FACE, PEFT = 'run', 'published policy', 'Hugging Face directory', 'adapter'


class StoredPolicy(NamedTuple):
    """A policy on disk. No weights are read until `params` or `tensors` is called.

    The three functions take the model that `base`, or a directory in its place, describes; the last two also
    take that directory, in which they read the weights that a run did not train. They raise ValueError if the
    policy is damaged or of another model, and FileNotFoundError if a file is missing.
    """

    kind: str  # RUN, PUBLISHED, HUGGING_FACE or PEFT
    step: int  # number of training steps; 0 for the last two, which do not record them
    run_config: dict[str, Any] | None  # config.json of the run that trained it; None if there is none
    # Directory of its config.json and tokenizer, for a run perhaps a hub name; None if no run names it.
    base: Path | None
    check: Callable[[ModelConfig], None]  # checks names and shapes
    # float32, placed on the mesh by the sharding rules
    params: Callable[[ModelConfig, Path, Mesh], hf.Params]
    # (Hugging Face name, array [out, in]), as from `hf.to_hf`.
    tensors: Callable[[ModelConfig, Path], Iterable[tuple[str, np.ndarray]]]
    needs_base: bool = False  # the weights of the base are read
    adapter: Adapter | None = None  # the one that `model` must have, if the files state it

    @property
    def commits(self) -> dict[str, str]:
        """The hub commits that its run recorded."""
        return (self.run_config or {}).get('hub', {})


def find_policy(path: Path) -> StoredPolicy:
    """The policy in a directory.

    Raises FileNotFoundError if there is no directory or the run has no checkpoint, and RefusedPolicy (a
    ValueError) if a published policy has no readable manifest.
    """
    if not path.is_dir():
        raise FileNotFoundError(
            f'--checkpoint={str(path)!r} is not a directory; give a run, a published policy, a Hugging '
            'Face directory or an adapter'
        )
    if (path / 'checkpoints').is_dir():
        return _of_run(path)
    if (path / MANIFEST).is_file() or (path / WEIGHTS).is_dir():
        return _published(path)
    if (path / SETTINGS).is_file():
        return _of_adapter(path)
    return _of_hugging_face(path)


def base_of(
    of: Path, path: str | None, commits: Mapping[str, str], given: Path | None, weights: bool = False
) -> Path:
    """The directory with the config and tokenizer of a run's policies: `given` by --base, else model.path.

    `path` is the model.path that the run `of` recorded, on the machine that trained it; None if unknown. A
    hub name is fetched at the run's `commits`, with `weights` if the caller needs them. Raises
    FileNotFoundError, naming --base, if there is no such directory here or --base has no config.json.
    """
    if given is not None:
        if not given.is_dir():
            raise FileNotFoundError(
                f'--base={str(given)!r} is not a directory; give the Hugging Face directory that the run '
                'started from, or a copy of it'
            )
        if not (given / 'config.json').is_file():
            raise FileNotFoundError(
                f'--base={str(given)!r} has no config.json; give the Hugging Face directory that the run '
                'started from, or a copy of it'
            )
        return given
    if path is None:
        raise FileNotFoundError(
            f"{of}: its run's config.json is missing, so its base model is unknown; give --base=DIRECTORY"
        )
    base = Path(hub.folder_in_run(path, commits, weights))
    if not base.is_dir():
        stated = (
            f'base_model_name_or_path={path!r} in its {SETTINGS}'
            if (of / SETTINGS).is_file()
            else f"model.path={path!r} in its run's config.json"
        )
        raise FileNotFoundError(
            f'{of}: {stated} is not a directory here; give --base=DIRECTORY, a copy of that model'
        )
    return base


def check_base(given: Path | None, run_config: Mapping[str, Any] | None, tokenizer: Any) -> None:
    """Raises ValueError if the base `given` by --base has another `tokenizer` than the run recorded.

    `run_config` is the run's config.json, None if there is none. A model of the same shape with another
    vocabulary would be read without an error.
    """
    recorded = part_of(run_config, 'fingerprints').get('tokenizer')
    if given is not None and recorded is not None and recorded != fingerprint_tokenizer(tokenizer):
        raise ValueError(
            f'--base={str(given)!r} has another tokenizer than the run; give the Hugging Face directory that '
            'the run started from, or a copy of it'
        )


def _of_run(run: Path) -> StoredPolicy:
    """π_θ in the newest checkpoint of a run, not the rollout policy α."""
    checkpoints = Checkpoints(run / 'checkpoints', keep=None)
    step = checkpoints.latest_step()
    if step is None:
        raise none_complete(run / 'checkpoints')

    config = _run_config(run)
    vision = part_of(config, 'learner').get('vision_rate') != 0
    adapts = adapter_of(part_of(config, 'model')) is not None

    def params(model: ModelConfig, base: Path, mesh: Mesh) -> hf.Params:
        _, shapes = hf.abstract_params(model)
        sharding = parameter_sharding(mesh, shapes)
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=s), shapes, sharding
        )
        trained, frozen = parted(like, trained_parameters(model, vision))
        read, _ = checkpoints.restore_params(trained, frozen)
        if frozen is None or parted(read, frozen)[0] is not None:
            return read
        return united(read, parted(_load(base, model, mesh), frozen)[0])

    def tensors(model: ModelConfig, base: Path) -> Iterable[tuple[str, np.ndarray]]:
        return hf.to_hf(model, params(model, base, _all_devices()))

    def check(model: ModelConfig) -> None:
        """Does nothing: `restore_params` compares names and shapes before it reads."""

    return StoredPolicy(
        RUN, step, config, _base(config), check, params, tensors, needs_base=adapts or not vision
    )


def _published(directory: Path) -> StoredPolicy:
    """A policy that a run published for its rollout servers, at RUN/policy/STEP."""
    manifest = read_manifest(directory)
    config = _run_config(directory.absolute().parent.parent)
    if manifest.files:
        of_files = _of_adapter(directory, functools.partial(check_bytes, directory, manifest))
        return of_files._replace(
            kind=PUBLISHED, step=manifest.version, run_config=config, base=_base(config) or of_files.base
        )

    def check(model: ModelConfig) -> None:
        of_base = architecture(model)
        differing = [
            f'{k} {v!r} (the base has {of_base.get(k)!r})'
            for k, v in manifest.model.items()
            if of_base.get(k) != v
        ]
        if differing:
            raise ValueError(
                f'{directory} is of another model than its base: {", ".join(differing)}; '
                'restore the model in model.path, or give it by --base'
            )
        absent = [t.name for t in hf.layout(model) if t.name not in {m.name for m in manifest.tensors}]
        if absent:
            raise ValueError(
                f'{directory / MANIFEST} has no tensor {absent[0]}; continue the run, which writes the '
                'policy again'
            )

    def tensors(model: ModelConfig, base: Path) -> Iterable[tuple[str, np.ndarray]]:
        check(model)
        check_bytes(directory, manifest)
        return read_tensors(directory, manifest)

    def params(model: ModelConfig, base: Path, mesh: Mesh) -> hf.Params:
        # Through a Hugging Face directory, so that only one place builds a parameter tree from such tensors.
        with tempfile.TemporaryDirectory() as hf_directory:
            save_file(dict(tensors(model, base)), Path(hf_directory) / 'model.safetensors')
            return _load(Path(hf_directory), model, mesh)

    return StoredPolicy(PUBLISHED, manifest.version, config, _base(config), check, params, tensors)


def _of_adapter(directory: Path, check_files: Callable[[], None] = lambda: None) -> StoredPolicy:
    """An adapter as PEFT writes it, of a base that its files name. `check_files` is called before a read."""
    adapter, base = read_adapter(directory)

    def params(model: ModelConfig, base: Path, mesh: Mesh) -> hf.Params:
        check_files()
        read = _load(base, model, mesh)
        put_adapter(read, directory, model)
        return read

    def tensors(model: ModelConfig, base: Path) -> Iterable[tuple[str, np.ndarray]]:
        return hf.to_hf(model, params(model, base, _all_devices()))

    def check(model: ModelConfig) -> None:
        """Does nothing: `put_adapter` compares names and shapes before it computes anything."""

    of_base = Path(base) if base else None
    return StoredPolicy(PEFT, 0, None, of_base, check, params, tensors, needs_base=True, adapter=adapter)


def _of_hugging_face(directory: Path) -> StoredPolicy:
    def check(model: ModelConfig) -> None:
        hf.check_weights(directory, model)

    def params(model: ModelConfig, base: Path, mesh: Mesh) -> hf.Params:
        return _load(directory, model, mesh)

    def tensors(model: ModelConfig, base: Path) -> Iterable[tuple[str, np.ndarray]]:
        return hf.to_hf(model, _load(directory, model, _all_devices()))

    return StoredPolicy(HUGGING_FACE, 0, None, directory, check, params, tensors)


def _run_config(run: Path) -> dict[str, Any] | None:
    file = run / 'config.json'
    if not file.is_file():
        return None
    config = read_run_config(file)
    model = config.get('model')
    if not (isinstance(model, dict) and isinstance(model.get('path'), str)):
        raise ValueError(f'{file} is damaged (it has no model.path); restore it')
    commits_in(config, file)  # raises if the recorded commits are damaged
    return config


def _base(run_config: dict[str, Any] | None) -> Path | None:
    """The model that a run started from."""
    return Path(run_config['model']['path']) if run_config is not None else None


def _load(directory: Path, model: ModelConfig, mesh: Mesh) -> hf.Params:
    return hf.load_params(directory, model, parameter_sharding(mesh, hf.abstract_params(model)[1]))


def _all_devices() -> Mesh:
    """A mesh of all devices here, regardless of the run's mesh.platform: an export computes nothing."""
    return make_mesh(1, -1, 1)
