"""Exports a policy as a Hugging Face directory: config.json, tokenizer, safetensors in shards with an index,
and a model card, README.md, made of what the run recorded. `--push` uploads it to the hub.

    # π_θ of the newest checkpoint
    python -m bapo_jax.export --checkpoint=runs/x --output=hf_dir
    # a published policy
    python -m bapo_jax.export --checkpoint=runs/x/policy/000123 --output=hf_dir
    # a Hugging Face directory, in another dtype
    python -m bapo_jax.export --checkpoint=DIR --output=hf_dir --dtype=bfloat16
    # the adapter of a run with model.adapter.rank, as PEFT writes it
    python -m bapo_jax.export --checkpoint=runs/x --output=adapter_dir --adapter
    # to a private repository of the hub, too
    python -m bapo_jax.export --checkpoint=runs/x --output=hf_dir --push=OWNER/NAME

The weights are written to `hf_dir.partial`, which is renamed when it is complete. If a crash leaves it
behind, the next export removes it. If an upload fails, the exported directory stays.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from huggingface_hub import metadata_load

from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.machine import cli, hub, pushing
from bapo_jax.machine.files import check_directory, write_bytes
from bapo_jax.models import hf
from bapo_jax.models.adapters import adapted, adapter_of, adapter_tensors, save_adapter
from bapo_jax.models.tokenizer import read_tokenizer
from bapo_jax.policies import (
    BASE_HELP,
    HUGGING_FACE,
    PEFT,
    PUBLISHED,
    RUN,
    StoredPolicy,
    base_of,
    check_base,
    find_policy,
)
from bapo_jax.report.card import Exported, OfAdapter, model_card
from bapo_jax.run.log.tables import scores_in
from bapo_jax.run.starts import CHECKOUT, commit_of

CARD = 'README.md'

FLAGS = flags.FLAGS


def export(
    checkpoint: Path,
    output: Path,
    *,
    base: Path | None = None,
    dtype: str | None = None,
    shard_bytes: int = hf.SHARD_BYTES,
    name: str = '',
    adapter: bool = False,
) -> tuple[int | None, str]:
    """Writes `output` and returns (steps the policy was trained, None if unknown, dtype of the weights).

    `checkpoint` is any policy (policies.py). config.json and tokenizer come from `base`, by default the model
    that the run started from, or the Hugging Face directory itself. `dtype` defaults to the one in the config
    of `base`. README.md is a model card, which calls the policy `name`, by default that of `output`; a
    Hugging Face directory keeps its own. With `adapter`, only the adapter and the card are written. Its
    files name a local base by its path; with a `name`, that of a repository, by the path's last part.

    Raises FileExistsError if `output` is not empty, FileNotFoundError if there is no policy or no base, and
    ValueError if the policy or the tokenizer does not belong to the base's model, the dtype is unknown, an
    adapter's files cannot say what the run needs, or a record of the run is damaged. Then nothing is left at
    `output`.
    """
    checkpoint, output = checkpoint.absolute(), output.absolute()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise FileExistsError(f'--output={str(output)!r} exists and is not empty; give a new directory')
    policy = find_policy(checkpoint)
    given, base = (
        base,
        base_of(
            checkpoint, policy.base and str(policy.base), policy.commits, base, weights=policy.needs_base
        ),
    )
    of_run = policy.run_config['model'] if policy.run_config else {}
    stated = hf.overrides(of_run)
    model = adapted(hf.read_config(base, stated=stated), policy.adapter or adapter_of(of_run))
    tokenizer, _ = read_tokenizer(base, model)  # raises if the export would have no usable tokenizer
    check_base(given, policy.run_config, tokenizer)
    dtype = dtype or hf.stored_dtype(base)
    if dtype not in hf.DTYPES:
        raise ValueError(
            f'{base / "config.json"} states dtype {dtype!r}; set --dtype to one of {", ".join(hf.DTYPES)}'
        )
    if adapter and (model.adapter is None or policy.kind == PUBLISHED and not policy.adapter):
        raise ValueError(f'--adapter: {checkpoint} has no adapter (model.adapter.rank); leave --adapter out')
    if adapter and 'rope_theta' in stated:
        raise ValueError(
            f"--adapter: the run has model.rope_theta={stated['rope_theta']:g}, which an adapter's files "
            'cannot say; leave --adapter out to export the merged weights'
        )
    alone = _adapter_alone(policy, base, model.adapter.rank) if adapter else None
    card = _card(
        policy, checkpoint, base, given, name or output.name, dtype, model.vision is not None, tokenizer,
        alone,
    )  # fmt: skip

    partial = output.with_name(f'{output.name}.partial')
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if alone:
            partial.mkdir(parents=True)
            params = policy.params(model, base, make_mesh(1, -1, 1))
            of_base = alone.base if name or alone.on_hub else str(base.absolute())
            save_adapter(partial, model, adapter_tensors(model, params, dtype), of_base, alone.revision)
        else:
            tensors = policy.tensors(model, base)
            hf.save(partial, tensors, like=base, dtype=dtype, shard_bytes=shard_bytes, stated=stated)
        write_bytes(partial / CARD, card)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return None if policy.kind in (HUGGING_FACE, PEFT) else policy.step, dtype


def _card(
    policy: StoredPolicy, checkpoint: Path, base: Path, given: Path | None, name: str, dtype: str,
    sees_images: bool, tokenizer: Any, alone: OfAdapter | None,
) -> bytes:  # fmt: skip
    """The contents of README.md; see `export`."""
    own = checkpoint / CARD
    if policy.kind == HUGGING_FACE and own.is_file():
        return own.read_bytes()
    evals = (checkpoint if policy.kind == RUN else checkpoint.parent.parent) / 'evals'
    files = {'base': evals / f'{0:06d}.json', 'trained': evals / f'{policy.step:06d}.json'}
    scores = {} if policy.run_config is None else scores_in(files)
    commit = commit_of(CHECKOUT, 12) or ''
    known = Exported(
        name, policy.step, dtype, sees_images, policy.run_config, scores, _license(base / CARD), commit,
        given.absolute().name if given else '', tokenizer, alone,
    )  # fmt: skip
    return model_card(known).encode()


def _adapter_alone(policy: StoredPolicy, base: Path, rank: int) -> OfAdapter:
    """What the files of an adapter say of it; `base` is the directory of its base here."""
    stated = str(policy.base or '')
    if stated in policy.commits or policy.kind == PEFT and hub.is_model(stated):
        repo, _, revision = stated.partition('@')
        return OfAdapter(rank, repo, policy.commits.get(stated, revision), on_hub=True)
    return OfAdapter(rank, Path(stated).name or base.absolute().name, '', on_hub=False)


def _license(card: Path) -> dict[str, str]:
    """What the card of the base says of its license; {} if it says nothing."""
    if not card.is_file():
        return {}
    try:
        stated = metadata_load(card) or {}
    except Exception as e:  # the errors of YAML are no ValueErrors
        short = ' '.join(str(e).split())[:160]
        raise ValueError(f'{card} begins with damaged YAML ({short}); correct or remove that file') from e
    return {key: stated[key] for key in ('license', 'license_name', 'license_link') if key in stated}


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    if not FLAGS.output:
        raise app.UsageError('--output is missing; give a directory to write')
    output = Path(FLAGS.output)
    try:
        if FLAGS.push is not None:
            pushing.check_push(FLAGS.push)
        check_directory(output.parent, '--output')
        step, dtype = export(
            Path(FLAGS.checkpoint),
            output,
            base=Path(FLAGS.base) if FLAGS.base else None,
            dtype=FLAGS.dtype,
            shard_bytes=int(FLAGS.shard_gb * 10**9),
            name=FLAGS.push or '',
            adapter=FLAGS.adapter,
        )
    except (ValueError, OSError) as e:
        sys.exit(f'error: {e}')
    files = sorted(output.glob('*.safetensors'))
    size = sum(file.stat().st_size for file in files)
    after = '' if step is None else f' after {step} steps'
    print(
        f'wrote {output}: the policy{after}, {dtype}, {size / 10**9:.3f} GB of weights in '
        f'{len(files)} file{"s" * (len(files) != 1)}'
    )
    if FLAGS.push:
        try:
            print(f'pushed to {pushing.push(output, FLAGS.push, FLAGS.private)}')
        except OSError as e:
            sys.exit(f'error: {e}')


def run() -> None:
    """The command: defines the flags and runs `main`."""
    flags.DEFINE_string(
        'checkpoint',
        None,
        'A run, a policy (runs/x/policy/000123), a Hugging Face directory, or a PEFT adapter.',
        required=True,
    )
    flags.DEFINE_string('output', None, 'Directory to write; must be absent or empty.', required=True)
    flags.DEFINE_string('base', None, BASE_HELP)
    flags.DEFINE_enum(
        'dtype',
        None,
        list(hf.DTYPES),
        "dtype of the stored weights; default: that of the base's config.json.",
    )
    flags.DEFINE_bool(
        'adapter', False, "Write the run's adapter alone, as PEFT does; default: merged into the weights."
    )
    flags.DEFINE_float(
        'shard_gb',
        hf.SHARD_BYTES / 10**9,
        'Maximum size of a weights file in gigabytes (10^9 bytes).',
        lower_bound=1e-9,
    )
    flags.DEFINE_string(
        'push', None, 'OWNER/NAME: a repository of the Hugging Face hub to upload to, made if new.'
    )
    flags.DEFINE_bool('private', True, 'Whether a repository that --push makes is private.')
    cli.start(main)


if __name__ == '__main__':
    run()
