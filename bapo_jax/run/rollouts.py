"""rollouts/{step}.jsonl.zst: a step's prompts, responses and verdicts, for people to read.

    zstdcat FILE | head -1 | python -m json.tool
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from bapo_jax.files import write_bytes
from bapo_jax.groups import Batch, Group


def uses(fresh: Sequence[Group], reevaluated: Sequence[Group], batch: Batch) -> list[tuple[str, Group]]:
    """(use, group) of every group a step sampled. The use is its origin in the batch, else 'discarded' (fresh) or 'left_out'."""
    origin = {id(g): o for g, o in zip(batch.groups, batch.origins, strict=True)}
    return [
        *((origin.get(id(g), 'discarded'), g) for g in fresh),
        *((origin.get(id(g), 'left_out'), g) for g in reevaluated),
    ]


def write_rollouts(path: Path, tokenizer: Any, groups: Sequence[tuple[str, Group]]) -> None:
    """Writes one JSON row a group: its use, its prompt, and every response with verdict, reward and policy version."""
    rows = [
        {
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
        for use, g in groups
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, zstandard.compress(''.join(json.dumps(row) + '\n' for row in rows).encode()))
