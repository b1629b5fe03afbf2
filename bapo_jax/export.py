"""A trained policy as a plain Hugging Face directory: config.json, tokenizer files, safetensors in shards with an index.

    python -m bapo_jax.export --checkpoint=runs/x --output=hf_dir                  # π_θ of the newest checkpoint
    python -m bapo_jax.export --checkpoint=runs/x/policy/000123 --output=hf_dir    # a published policy

The directory appears under its name when it is complete; until then it is `hf_dir.partial`, which the next export removes.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from absl import app, flags, logging

from bapo_jax import parallel
from bapo_jax.checkpoint import Checkpoints
from bapo_jax.models import hf
from bapo_jax.models.hf import architecture
from bapo_jax.models.qwen import ModelConfig
from bapo_jax.rollout.published import MANIFEST, read_manifest, read_tensors


def export(
    checkpoint: Path, output: Path, *, base: Path | None = None, dtype: str | None = None, shard_bytes: int = hf.SHARD_BYTES
) -> tuple[int, str]:
    """Writes `output` and returns (steps the policy was trained, dtype of the weights).

    `checkpoint` is a run directory or a published policy; config.json and tokenizer are those of `base`, by default the model
    that the run started from, and `dtype` is by default what that one is stored in.

    Raises FileExistsError where `output` holds anything, FileNotFoundError where there is no policy or no base, ValueError where
    they are of different models or the dtype is unknown. Nothing is left at `output` then.
    """
    checkpoint, output = checkpoint.absolute(), output.absolute()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise FileExistsError(f'--output={str(output)!r} is there and not empty; give a new directory')
    is_policy = (checkpoint / MANIFEST).is_file()
    if not is_policy and not (checkpoint / 'checkpoints').is_dir():
        raise FileNotFoundError(
            f'--checkpoint={str(checkpoint)!r} is neither a run (it has no checkpoints/) nor a complete published policy '
            f'(it has no {MANIFEST})'
        )
    base = base or _base_of(checkpoint.parents[1] if is_policy else checkpoint)
    config = hf.read_config(base)
    dtype = dtype or hf.stored_dtype(base)
    if dtype not in hf.DTYPES:
        raise ValueError(f'{base / "config.json"} says dtype {dtype!r}; give --dtype, one of {", ".join(hf.DTYPES)}')

    partial = output.with_name(f'{output.name}.partial')
    shutil.rmtree(partial, ignore_errors=True)
    tensors, step = _published(checkpoint, config) if is_policy else _trained(checkpoint, config)
    try:
        hf.save(partial, tensors, like=base, dtype=dtype, shard_bytes=shard_bytes)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return step, dtype


def _base_of(run: Path) -> Path:
    """The model a run started from, by its config.json."""
    file = run / 'config.json'
    if not file.is_file():
        raise FileNotFoundError(f'{file} is missing, so the model trained from is unknown; give --base=DIRECTORY')
    base = Path(json.loads(file.read_text('utf-8'))['model']['path'])
    if not base.is_dir():
        raise FileNotFoundError(f'{file}: model.path={str(base)!r} is not a directory here; give --base=DIRECTORY')
    return base


def _trained(run: Path, config: ModelConfig) -> tuple[Iterable[tuple[str, np.ndarray]], int]:
    _, shapes = hf.abstract_params(config)
    sharding = parallel.parameter_sharding(parallel.make_mesh(1, -1, 1), shapes)
    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, sharding)
    params, step = Checkpoints(run / 'checkpoints', keep=None).restore_params(like)
    return hf.to_hf(config, params), step


def _published(policy: Path, config: ModelConfig) -> tuple[Iterable[tuple[str, np.ndarray]], int]:
    manifest, model = read_manifest(policy), architecture(config)
    differing = [f'{k} {v!r} (the base has {model.get(k)!r})' for k, v in manifest.model.items() if model.get(k) != v]
    if differing:
        raise ValueError(f'{policy} is of another model than its base: {", ".join(differing)}')
    absent = [t.name for t in hf.layout(config) if t.name not in {m.name for m in manifest.tensors}]
    if absent:
        raise ValueError(f'{policy / MANIFEST} has no tensor {absent[0]}; publish the policy again')
    return read_tensors(policy, manifest), manifest.version


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    output = Path(FLAGS.output)
    try:
        step, dtype = export(
            Path(FLAGS.checkpoint),
            output,
            base=Path(FLAGS.base) if FLAGS.base else None,
            dtype=FLAGS.dtype,
            shard_bytes=int(FLAGS.shard_gb * 10**9),
        )
    except (ValueError, OSError) as e:
        sys.exit(f'error: {e}')
    files = sorted(output.glob('*.safetensors'))
    size = sum(file.stat().st_size for file in files)
    print(f'wrote {output}: the policy after {step} steps, {dtype}, {size / 10**9:.3f} GB in {len(files)} file(s) of weights')


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_string('checkpoint', None, 'A run directory, or a published policy (RUN/policy/000123).', required=True)
    flags.DEFINE_string('output', None, 'Directory to write; must be absent or empty.', required=True)
    flags.DEFINE_string('base', None, 'Hugging Face directory to take config and tokenizer from; default: model.path of the run.')
    flags.DEFINE_enum('dtype', None, list(hf.DTYPES), "What the weights are stored in; default: as the base's config.json says.")
    flags.DEFINE_float('shard_gb', hf.SHARD_BYTES / 10**9, 'Most gigabytes (10^9 bytes) of a file of weights.', lower_bound=1e-9)
    app.run(main)
