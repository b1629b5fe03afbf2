"""A run directory as a whole: which run it belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bapo_jax import config as config_lib
from bapo_jax.files import write_text
from bapo_jax.groups import Prompt


def claim(workdir: Path, config: ConfigDict, fingerprints: dict[str, Any]) -> None:
    """Writes config.json into a new run directory; checks that a used one holds the same run.

    Raises ValueError, naming what differs, for a run directory of another config, dataset, tokenizer or model.
    """
    path, new = Path(workdir) / 'config.json', {**config.to_dict(), 'fingerprints': fingerprints}
    new = json.loads(json.dumps(new))  # tuples as the lists that a file gives back
    if path.is_file():
        differing = config_lib.differences(json.loads(path.read_text('utf-8')), new)
        if differing:
            raise ValueError(
                f'{workdir} holds a run with other settings; they differ in {", ".join(differing)}. '
                'Give another --workdir, or the settings of that run'
            )
    Path(workdir).mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(new, indent=1) + '\n')


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Of the training prompts' tokens, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt.tokens).to_bytes(4, 'little') + prompt.tokens.tobytes())
    return digest.hexdigest()[:16]


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Of the tokenizer's vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
