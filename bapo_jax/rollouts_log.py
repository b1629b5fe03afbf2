"""rollouts/{step}.jsonl.zst: what was asked, answered and judged, for people to read (`zstdcat FILE | head -1 | python -m json.tool`)."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from bapo_jax.groups import Group


def uses(fresh: Sequence[Group], kept: Sequence[Group], reevaluated: Sequence[Group], promoted: Sequence[Group]):
    """(use, group) of everything a step sampled; a use is 'x1', 'discarded', 'x2' or 'not_improved'."""
    trained_on = {id(g) for g in [*kept, *promoted]}
    return [
        *(('x1' if id(g) in trained_on else 'discarded', g) for g in fresh),
        *(('x2' if id(g) in trained_on else 'not_improved', g) for g in reevaluated),
    ]


def write_rollouts(path: Path, tokenizer: Any, groups: Sequence[tuple[str, Group]]) -> None:
    """One JSON row a group: what it was used for, the question, every response with its verdict, reward and policy version."""
    text = io.StringIO()
    for use, g in groups:
        row = {
            'use': use,
            'prompt_id': g.prompt.id,
            'prompt': tokenizer.decode(g.prompt.tokens),
            'ground_truth': g.prompt.ground_truth,
            'responses': tokenizer.batch_decode([r.tokens for r in g.responses]),
            'verdicts': [v.name.lower() for v in g.verdicts],
            'rewards': [None if np.isnan(r) else float(r) for r in g.rewards],
            'finish': [r.finish for r in g.responses],
            'versions': [r.version for r in g.responses],
            'step': g.step,
        }
        text.write(json.dumps(row) + '\n')
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + '.partial')
    temporary.write_bytes(zstandard.compress(text.getvalue().encode()))
    os.replace(temporary, path)
