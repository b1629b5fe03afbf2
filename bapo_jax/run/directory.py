"""Identifies a directory's run by its config, environment, and fingerprints of data, tokenizer and model."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from bapo_jax.cluster.devices import describe_devices
from bapo_jax.config import default_config, derive, fields_that
from bapo_jax.config.earlier import as_now
from bapo_jax.config.field import AMEND, COMPUTED, FREE
from bapo_jax.groups import Prompt
from bapo_jax.machine.files import write_text
from bapo_jax.run.remains import check_remains, has_checkpoint

# FREE_TO_CHANGE may differ whenever a run continues, AMENDABLE only on purpose; config/field.py says why.
HOW_COMPUTED = (*fields_that(COMPUTED), 'environment')
FREE_TO_CHANGE = (*HOW_COMPUTED, *fields_that(FREE), 'hub')
AMENDABLE = (*fields_that(AMEND), 'fingerprints.benchmarks', 'fingerprints.code')
# Fingerprints that a run may lack: those of a benchmark or module added later, and all of them if the version
# that began the run took none. They are recorded when the run continues.
_MAY_LACK = tuple(
    f'fingerprints.{name}' for name in ('answers', 'stop_tokens', 'special_tokens', 'benchmarks', 'code')
)
_RECORDED = ('hub', 'fingerprints', 'environment', 'starts')  # sections of config.json that are not settings


class Claimed(NamedTuple):
    """What a start changes of a run's settings, and the contents of config.json."""

    changed: dict[str, tuple[Any, Any]]  # field -> (before, now); empty for a new run
    settings: dict[str, Any]


def claim(
    workdir: Path, config: ConfigDict, fingerprints: dict[str, Any], environment: dict[str, str],
    amend: bool = False, commits: Mapping[str, str] = {},
) -> Claimed:  # fmt: skip
    """Writes config.json into a new run directory, or checks that a used directory holds the same run.

    A used directory keeps its config.json until `record` writes the new one: a start that fails changes
    nothing. `environment` is the hardware and software that results depend on bit for bit. A field that an
    earlier version did not have may have its default, which is what that version did. With `amend`, it may
    have another value, and AMENDABLE fields may also differ. `commits` maps the hub
    names in the config to their commits.

    Raises ValueError, naming the differences, if the config, dataset, tokenizer or model is another. Raises
    it also if files, checkpoints included, are damaged or missing.
    """
    path, new = Path(workdir) / 'config.json', {
        **config.to_dict(), 'hub': dict(commits), 'fingerprints': fingerprints, 'environment': environment,
    }  # fmt: skip
    new = json.loads(json.dumps(new))  # JSON turns tuples into lists
    changed: dict[str, tuple[Any, Any]] = {}
    starts: list[dict[str, Any]] = []
    if path.is_file():
        old = read_run_config(path)
        starts = starts_in(old, path)
        old.pop('starts', None)  # they tell of the run, and do not make it another one
        for part in ('benchmarks', 'code'):  # one left out for a while may return, and must then be the same
            kept = part_of(part_of(old, 'fingerprints'), part) | part_of(new['fingerprints'], part)
            new['fingerprints'] |= {part: kept} if kept else {}
        before, now = _flat(old), _flat(new)
        added = [name for name in now if _is_new_field(name, old)]
        as_before = (*_MAY_LACK, *_at_default(added, config))
        differing = [
            name for name in differences(old, new) if name in before or not _is_one_of(name, as_before)
        ]
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
        raise ValueError(
            f'{workdir} has checkpoints but no config.json; restore that file, or give another --workdir'
        )
    check_remains(Path(workdir))
    new['starts'] = starts
    if not path.is_file():
        Path(workdir).mkdir(parents=True, exist_ok=True)
        record(workdir, new)
    return Claimed(changed, new)


def record(workdir: Path, settings: dict[str, Any]) -> None:
    """Writes config.json."""
    write_text(Path(workdir) / 'config.json', json.dumps(settings, indent=1) + '\n')


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run's config.json without its recorded sections, whose keys may be file names."""
    return {name: value for name, value in config.items() if name not in _RECORDED}


def recorded_commits(workdir: Path) -> dict[str, str]:
    """Returns the hub commits that a run began with, by name; empty for a new directory.

    Raises ValueError if config.json is damaged.
    """
    path = Path(workdir) / 'config.json'
    return commits_in(read_run_config(path), path) if path.is_file() else {}


def recorded_devices(workdir: Path) -> int:
    """Returns the number of CPU devices at the newest start of a run.

    It is 0 for a new directory, an accelerator or several hosts. Raises ValueError if config.json is damaged.
    """
    path = Path(workdir) / 'config.json'
    config = read_run_config(path) if path.is_file() else {}
    newest = [part_of(config, 'environment'), *starts_in(config, path)][-1]
    found = re.fullmatch(r'(\d{1,6}) cpu', str(newest.get('devices')))
    return int(found[1]) if found and newest.get('hosts', '1') == '1' else 0


def commits_in(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Returns the hub commits in a run's config; empty for a run from before hub names were supported.

    Raises ValueError, naming `path`, if they are damaged.
    """
    commits = config.get('hub', {})
    if not (isinstance(commits, dict) and all(isinstance(commit, str) for commit in commits.values())):
        raise ValueError(
            f'{path} is damaged (hub is not a table of commits); restore it, or give another --workdir'
        )
    return commits


def part_of(tree: Any, name: str) -> dict[str, Any]:
    """Returns a section of a config.json that may be damaged; {} if it is missing or no section."""
    part = tree.get(name) if isinstance(tree, dict) else None
    return part if isinstance(part, dict) else {}


def starts_in(config: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """Returns the starts in a run's config (starts.py), oldest first; empty for a run of an earlier version.

    Raises ValueError, naming `path`, if they are damaged.
    """
    starts = config.get('starts', [])
    if not (isinstance(starts, list) and all(isinstance(start, dict) for start in starts)):
        raise ValueError(
            f'{path} is damaged (starts is not a list of objects); restore it, or give another --workdir'
        )
    return starts


def read_run_config(path: Path) -> dict[str, Any]:
    """Returns a run's config.json with current field names. Raises ValueError if it is not a JSON object."""
    try:
        config = json.loads(path.read_text('utf-8'))
        if not isinstance(config, dict):
            raise ValueError('it is not a JSON object')
        _flat(config)  # raises RecursionError if it is too deep to be compared
        config = as_now(config)
    except (ValueError, RecursionError) as e:
        raise ValueError(f'{path} is damaged ({str(e)[:200]}); restore it, or give another --workdir') from e
    return config


def environment() -> dict[str, str]:
    """Returns the hardware and software that, beside the config, determine results to the last bit."""
    return {
        'devices': describe_devices(), 'hosts': str(jax.process_count()),
        'jax': jax.__version__, 'python': platform.python_version(), 'machine': platform.machine(),
    }  # fmt: skip


def fingerprints_of(
    prompts: Sequence[Prompt],
    benchmarks: Mapping[str, Sequence[Prompt]],
    tokenizer: Any,
    stop_tokens: Sequence[int],
) -> dict[str, Any]:
    """Returns fingerprints of a run's data and tokenizer. `benchmarks` have one fingerprint each, by name."""
    return {
        'dataset': fingerprint_prompts(prompts),
        'answers': fingerprint_answers(prompts),
        'benchmarks': {
            name: f'{fingerprint_prompts(of)} {fingerprint_answers(of)}' for name, of in benchmarks.items()
        },
        'tokenizer': fingerprint_tokenizer(tokenizer),
        # They are skipped when a response is decoded.
        'special_tokens': sorted(i for i, token in tokenizer.added_tokens_decoder.items() if token.special),
        'stop_tokens': list(stop_tokens),
    }


def fingerprint_prompts(prompts: Sequence[Prompt]) -> str:
    """Hashes the training prompts' tokens and images, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt.tokens).to_bytes(4, 'little') + prompt.tokens.tobytes())
        for image in prompt.images:
            digest.update(image['sha256'].encode())
    return digest.hexdigest()[:16]


def fingerprint_answers(prompts: Sequence[Prompt]) -> str:
    """Hashes the prompts' ground truths, in order. Images are hashed by content, not by path."""
    digest = hashlib.sha256()
    for prompt in prompts:
        truth = prompt.ground_truth
        if prompt.images:
            truth = truth | {'images': [image['sha256'] for image in prompt.images]}
        digest.update(json.dumps(truth, sort_keys=True).encode() + b'\n')
    return digest.hexdigest()[:16]


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Hashes the tokenizer's vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def differences(old: dict, new: dict, left_out: Sequence[str] = FREE_TO_CHANGE) -> list[str]:
    """Returns the dotted names of fields that differ, except the fields and sections in `left_out`."""
    a, b, missing = _flat(old), _flat(new), object()
    return sorted(
        k
        for k in a.keys() | b.keys()
        if not _is_one_of(k, left_out) and a.get(k, missing) != b.get(k, missing)
    )


def changes_in_words(changed: dict[str, tuple[Any, Any]]) -> str:
    """Describes the changes that `claim` found, and warns if they may affect results."""
    new = [name for name, (before, _) in changed.items() if before is None and _is_one_of(name, _MAY_LACK)]
    said = ', '.join(
        f'{name} (recorded from here on)' if name in new else f'{name} {before!r} → {now!r}'
        for name, (before, now) in changed.items()
    )
    of_numbers = any(_is_one_of(name, (*HOW_COMPUTED, *AMENDABLE)) for name in changed if name not in new)
    return f'{said}. Results may differ from here on' if of_numbers else said


def _to_restore(names: Sequence[str], config: ConfigDict) -> str:
    """A sentence that names the inputs whose fingerprints are among the differing fields; '' if none are."""
    files = {
        'fingerprints.dataset': f'the questions of task.train={config.task.train}',
        'fingerprints.answers': f'the answers of task.train={config.task.train}',
        'fingerprints.traces': f'the traces of replay.traces.file={config.replay.traces.file}',
        'fingerprints.benchmarks': 'questions and answers of a benchmark; '
        'give a changed benchmark a new name',
        'fingerprints.code': 'the source of one of your modules',
        'fingerprints': f'files of model.path={config.model.path}',
    }
    found = [name for name in names if _is_one_of(name, ('fingerprints',))]
    said = [
        f'{name}: {next(what for part, what in files.items() if _is_one_of(name, (part,)))}' for name in found
    ]
    return f'. To continue this run, restore what was changed: {_listed(said, "; ")}' if said else ''


def _listed(names: Sequence[str], between: str = ', ') -> str:
    """Joins as many names as fit into a message, and counts the rest.

    A damaged file may hold names of any length.
    """
    names = [name if len(name) <= 300 else f'{name[:300]}…' for name in names]
    kept = [name for i, name in enumerate(names) if i == 0 or len(between.join(names[: i + 1])) <= 1000]
    more = len(names) - len(kept)
    return between.join(kept) + (f' and {more} more' if more else '')


def _flat(tree: dict, prefix: str = '') -> dict[str, Any]:
    items = {}
    for key, value in tree.items():
        items |= _flat(value, f'{prefix}{key}.') if isinstance(value, dict) else {prefix + key: value}
    return items


def _is_new_field(name: str, old: dict) -> bool:
    """Whether the version that wrote `old` lacked this config field but had its section."""
    section = name.partition('.')[0]
    return section not in _RECORDED and isinstance(old.get(section), dict) and name not in _flat(old)


def _at_default(names: Sequence[str], config: ConfigDict) -> list[str]:
    """The fields that have their default, as it stands or as it follows from the others."""
    flat, defaults = _flat(config.to_dict()), _flat(default_config().to_dict())
    derived = ConfigDict(config.to_dict())
    with derived.unlocked():
        derived.update_from_flattened_dict({name: defaults[name] for name in names})
    derive(derived)
    follows = _flat(derived.to_dict())
    return [name for name in names if flat[name] in (defaults[name], follows[name])]


def _is_one_of(field: str, names: Sequence[str]) -> bool:
    return any(field == name or field.startswith(f'{name}.') for name in names)
