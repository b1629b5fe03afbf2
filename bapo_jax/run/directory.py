"""Which run a directory belongs to: its config, and the fingerprints of its data, tokenizer and model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bapo_jax.files import write_text
from bapo_jax.groups import Prompt


# A run may be continued with other values of these; anything else would make it another run.
FREE_TO_CHANGE = (
    'steps', 'epochs', 'checkpoint', 'evaluate', 'rollouts', 'theory', 'model.attention',
    'rollout.overlap', 'rollout.servers', 'rollout.gpus', 'rollout.concurrency', 'rollout.deadline_s', 'rollout.probe_tolerance',
    'rollout.server_memory', 'rollout.server_args', 'mesh.deadline_s', 'mesh.frozen_on_host',
)  # fmt: skip


def claim(workdir: Path, config: ConfigDict, fingerprints: dict[str, Any]) -> None:
    """Writes config.json into a new run directory, or checks that a used directory holds the same run.

    Raises ValueError for a run of another config, dataset, tokenizer or model. The message names what differs.
    """
    path, new = Path(workdir) / 'config.json', {**config.to_dict(), 'fingerprints': fingerprints}
    new = json.loads(json.dumps(new))  # JSON turns tuples into lists
    if path.is_file():
        differing = differences(json.loads(path.read_text('utf-8')), new)
        if differing:
            raise ValueError(
                f'{workdir} holds a run with other settings; they differ in {", ".join(differing)}. '
                'Give another --workdir, or the settings of that run'
            )
    Path(workdir).mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(new, indent=1) + '\n')


def fingerprint_prompts(prompts: Sequence[Prompt]) -> str:
    """A hash of the training prompts' tokens and images, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt.tokens).to_bytes(4, 'little') + prompt.tokens.tobytes())
        for image in prompt.images:
            digest.update(image['sha256'].encode())
    return digest.hexdigest()[:16]


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """A hash of the tokenizer's vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def differences(old: dict, new: dict) -> list[str]:
    """Dotted names of the fields whose values differ, FREE_TO_CHANGE left out."""

    def flat(tree: dict, prefix: str = '') -> dict:
        items = {}
        for key, value in tree.items():
            items |= flat(value, f'{prefix}{key}.') if isinstance(value, dict) else {prefix + key: value}
        return items

    a, b = flat(old), flat(new)
    missing = object()
    fixed = (k for k in a.keys() | b.keys() if not any(k == free or k.startswith(f'{free}.') for free in FREE_TO_CHANGE))
    return sorted(k for k in fixed if a.get(k, missing) != b.get(k, missing))
