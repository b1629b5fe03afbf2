"""Which run a directory belongs to: its config, the fingerprints of its data, tokenizer and model, and where it is computed."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from bapo_jax.files import write_text
from bapo_jax.groups import Prompt
from bapo_jax.run.remains import check_remains, has_checkpoint

# What a run may be continued with at any time. First how it is computed: the mathematics stay, and a sum over other parts may differ
# in its last bit. Then how long it goes on and what it writes, who answers and where.
HOW_COMPUTED = (
    'mesh', 'environment', 'model.attention', 'rollout.rows', 'rollout.cache_memory', 'rollout.server_args', 'learner.row_tokens',
    'learner.slot_tokens', 'learner.micro_batch_rows', 'learner.remat',
)  # fmt: skip
FREE_TO_CHANGE = (
    *HOW_COMPUTED, 'steps', 'epochs', 'checkpoint', 'evaluate', 'rollouts', 'log', 'theory', 'debug', 'model.path', 'hub',
    'task.verify_s', 'task.reward_deadline_s', 'task.reward_workers', 'rollout.overlap', 'rollout.servers', 'rollout.gpus',
    'rollout.python', 'rollout.concurrency', 'rollout.deadline_s', 'rollout.probe_tolerance', 'rollout.server_memory',
    'learner.skip_limit', 'replay.probe', 'replay.probe_every',
)  # fmt: skip
# What may be changed on purpose (--amend), from the next step on: it only acts from step to step. The run is then another one, and
# says so in events.jsonl.
AMENDABLE = (
    'task.reward', 'task.overlong_share', 'rollout.sync_every', 'rollout.refill_batches', 'rollout.temperature', 'rollout.engine',
    'rollout.dtype', 'rollout.max_response_tokens', 'replay.fresh_filter', 'replay.reevaluate_every', 'replay.max_reevaluate',
    'replay.reevaluate', 'replay.reevaluate_after', 'replay.pool_within', 'replay.given_by',
    'replay.c1', 'replay.c2', 'replay.c3', 'replay.improved_rule', 'replay.thresholds', 'replay.use_x2', 'replay.use_x3',
    'learner.mini_batch_groups', 'learner.partial_mini_batch', 'learner.shuffle', 'learner.passes_per_batch',
    'learner.learning_rate', 'learner.warmup_updates', 'learner.schedule', 'learner.decay_updates', 'learner.final_share',
    'learner.adam_b1', 'learner.adam_b2', 'learner.adam_eps', 'learner.weight_decay', 'learner.grad_clip', 'learner.clip_low',
    'learner.clip_high', 'learner.clip_centre', 'learner.dual_clip', 'learner.importance_cap', 'learner.ratio_level',
    'learner.surrogate', 'learner.kl_coef', 'learner.entropy_coef', 'learner.aggregation', 'critic', 'fingerprints.benchmarks',
    'fingerprints.code',
)  # fmt: skip
# Fingerprints that a run may lack: those of a benchmark or a module that was not there before, and all of them where the version
# that began the run did not take any. It has them from then on.
_MAY_LACK = tuple(f'fingerprints.{name}' for name in ('answers', 'stop_tokens', 'special_tokens', 'benchmarks', 'code'))
_RECORDED = ('hub', 'fingerprints', 'environment')  # what config.json has beside the settings
# What host 0 alone reads, or each host for itself.
OF_A_HOST = (
    'steps', 'epochs', 'checkpoint', 'evaluate', 'rollouts', 'log', 'theory', 'debug', 'model.path', 'rollout.overlap',
    'rollout.servers', 'rollout.gpus', 'rollout.python', 'rollout.concurrency', 'rollout.deadline_s', 'rollout.probe_tolerance',
    'rollout.server_memory', 'rollout.cache_memory', 'rollout.server_args', 'mesh.deadline_s', 'task.verify_s',
    'task.reward_deadline_s', 'task.reward_workers',
)  # fmt: skip


def claim(
    workdir: Path, config: ConfigDict, fingerprints: dict[str, Any], environment: dict[str, str], amend: bool = False,
    commits: Mapping[str, str] = {},
) -> dict[str, tuple[Any, Any]]:  # fmt: skip
    """Writes config.json into a new run directory, or checks that a used directory holds the same run.

    Returns the fields that this changes in a used directory: (before, now). `environment` is what decides the last bit beside the
    config. With `amend`, AMENDABLE fields may differ too, and there may be fields that an earlier version did not have. `commits` are
    the hub's commits of the names in the config.

    Raises ValueError for a run of another config, dataset, tokenizer or model, naming what differs, and for files that are damaged
    or missing, checkpoints included.
    """
    path, new = Path(workdir) / 'config.json', {
        **config.to_dict(), 'hub': dict(commits), 'fingerprints': fingerprints, 'environment': environment,
    }  # fmt: skip
    new = json.loads(json.dumps(new))  # JSON turns tuples into lists
    changed: dict[str, tuple[Any, Any]] = {}
    if path.is_file():
        old = read_config(path)
        for part in ('benchmarks', 'code'):  # one that is left out for a while may come back, and must be the same then
            kept = _part(_part(old, 'fingerprints'), part) | _part(new['fingerprints'], part)
            new['fingerprints'] |= {part: kept} if kept else {}
        before, now = _flat(old), _flat(new)
        differing = [name for name in differences(old, new) if name in before or not _is_one_of(name, _MAY_LACK)]
        held = [name for name in differing if not (_is_one_of(name, AMENDABLE) or _is_new_field(name, old))]
        refused = held if amend else differing
        if refused:
            amendable = [name for name in refused if name not in held]
            remedy = f', or --amend to change {_listed(amendable)} from here on' if amendable else ''
            raise ValueError(
                f'{workdir} holds a run with other settings; they differ in {_listed(refused)}. '
                f'Give another --workdir, or the settings of that run{remedy}{_to_restore(refused, config)}'
            )
        changed = {name: (before.get(name), now.get(name)) for name in differences(old, new, ())}
    elif has_checkpoint(Path(workdir)):
        raise ValueError(f'{workdir} has checkpoints and no config.json; restore that file, or give another --workdir')
    check_remains(Path(workdir))
    Path(workdir).mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(new, indent=1) + '\n')
    return changed


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's config.json without what is recorded beside the settings, where names may be those of files."""
    return {name: value for name, value in config.items() if name not in _RECORDED}


def recorded_commits(workdir: Path) -> dict[str, str]:
    """The hub's commits that a run began with, by name; none in a new directory. Raises ValueError for a damaged config.json."""
    path = Path(workdir) / 'config.json'
    return commits_in(read_config(path), path) if path.is_file() else {}


def commits_in(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The commits in a run's config, which lies at `path`. A run from before names of the hub has none."""
    commits = config.get('hub', {})
    if not (isinstance(commits, dict) and all(isinstance(commit, str) for commit in commits.values())):
        raise ValueError(f'{path} is damaged (hub is no table of commits); restore it, or give another --workdir')
    return commits


def read_config(path: Path) -> dict[str, Any]:
    """A run's config.json. Raises ValueError where it is no JSON object."""
    try:
        config = json.loads(path.read_text('utf-8'))
        if not isinstance(config, dict):
            raise ValueError('it holds no object')
        _flat(config)  # raises RecursionError where it is too deep to be compared
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{path} is damaged ({str(e)[:200]}); restore it, or give another --workdir') from e
    return config


def environment() -> dict[str, str]:
    """What decides the last bit of a number, beside the config."""
    devices = jax.devices()
    return {
        'devices': f'{len(devices)} {devices[0].device_kind}', 'hosts': str(jax.process_count()), 'jax': jax.__version__,
        'python': platform.python_version(), 'machine': platform.machine(),
    }  # fmt: skip


def fingerprints_of(
    prompts: Sequence[Prompt], benchmarks: Mapping[str, Sequence[Prompt]], tokenizer: Any, stop_tokens: Sequence[int]
) -> dict[str, Any]:
    """What tells the data and the tokenizer of a run from others. `benchmarks` have a fingerprint each, by name."""
    return {
        'dataset': fingerprint_prompts(prompts),
        'answers': fingerprint_answers(prompts),
        'benchmarks': {name: f'{fingerprint_prompts(of)} {fingerprint_answers(of)}' for name, of in benchmarks.items()},
        'tokenizer': fingerprint_tokenizer(tokenizer),
        # A response's text is read without them.
        'special_tokens': sorted(i for i, token in tokenizer.added_tokens_decoder.items() if token.special),
        'stop_tokens': list(stop_tokens),
    }


def fingerprint_prompts(prompts: Sequence[Prompt]) -> str:
    """A hash of the training prompts' tokens and images, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt.tokens).to_bytes(4, 'little') + prompt.tokens.tobytes())
        for image in prompt.images:
            digest.update(image['sha256'].encode())
    return digest.hexdigest()[:16]


def fingerprint_answers(prompts: Sequence[Prompt]) -> str:
    """A hash of what the prompts' responses are judged by, in order. An image counts by its content, not by where it lies."""
    digest = hashlib.sha256()
    for prompt in prompts:
        truth = prompt.ground_truth
        if prompt.images:
            truth = truth | {'images': [image['sha256'] for image in prompt.images]}
        digest.update(json.dumps(truth, sort_keys=True).encode() + b'\n')
    return digest.hexdigest()[:16]


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """A hash of the tokenizer's vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def differences(old: dict, new: dict, left_out: Sequence[str] = FREE_TO_CHANGE) -> list[str]:
    """Dotted names of the fields whose values differ; not those in `left_out`, names of fields or sections."""
    a, b, missing = _flat(old), _flat(new), object()
    return sorted(k for k in a.keys() | b.keys() if not _is_one_of(k, left_out) and a.get(k, missing) != b.get(k, missing))


def in_words(changed: dict[str, tuple[Any, Any]]) -> str:
    """What `claim` says has changed, in a sentence; and one more where numbers may differ for it."""
    new = [name for name, (before, _) in changed.items() if before is None and _is_one_of(name, _MAY_LACK)]
    said = ', '.join(
        f'{name} (recorded from here on)' if name in new else f'{name} {before!r} → {now!r}'
        for name, (before, now) in changed.items()
    )
    of_numbers = any(_is_one_of(name, (*HOW_COMPUTED, *AMENDABLE)) for name in changed if name not in new)
    return f'{said}. Numbers may differ from here on' if of_numbers else said


def _to_restore(names: Sequence[str], config: ConfigDict) -> str:
    """Whose fingerprints are among the fields that differ, in a sentence; '' where none are."""
    files = {
        'fingerprints.dataset': f'the questions of task.train={config.task.train}',
        'fingerprints.answers': f'the answers of task.train={config.task.train}',
        'fingerprints.benchmarks': 'questions and answers of a benchmark; as another one it wants another name',
        'fingerprints.code': 'the source of a module of yours',
        'fingerprints': f'files of model.path={config.model.path}',
    }
    found = [name for name in names if _is_one_of(name, ('fingerprints',))]
    said = [f'{name}: {next(what for part, what in files.items() if _is_one_of(name, (part,)))}' for name in found]
    return f'. What was changed, and may be restored: {_listed(said, "; ")}' if said else ''


def _listed(names: Sequence[str], between: str = ', ') -> str:
    """As many names as a message has room for, and how many more there are. A name of a damaged file may be of any length."""
    names = [name if len(name) <= 300 else f'{name[:300]}…' for name in names]
    kept = [name for i, name in enumerate(names) if i == 0 or len(between.join(names[: i + 1])) <= 1000]
    more = len(names) - len(kept)
    return between.join(kept) + (f' and {more} more' if more else '')


def _part(tree: Any, name: str) -> dict[str, Any]:
    """A section of a config that may be damaged: {} where there is none."""
    part = tree.get(name) if isinstance(tree, dict) else None
    return part if isinstance(part, dict) else {}


def _flat(tree: dict, prefix: str = '') -> dict[str, Any]:
    items = {}
    for key, value in tree.items():
        items |= _flat(value, f'{prefix}{key}.') if isinstance(value, dict) else {prefix + key: value}
    return items


def _is_new_field(name: str, old: dict) -> bool:
    """Whether a field of the config is one that the version which wrote `old` did not have; that version had its section."""
    section, _, field = name.partition('.')
    before = old.get(section)
    return section not in _RECORDED and isinstance(before, dict) and field not in before


def _is_one_of(field: str, names: Sequence[str]) -> bool:
    return any(field == name or field.startswith(f'{name}.') for name in names)
