"""What becomes of a prompt that is asked again, by what is known of it: P(mixed) of fresh prompts and of
retries.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import zstandard

RETRIED = ('x2', 'left_out')  # uses of a re-evaluated group
FRESH = ('x1', 'discarded')


def moves(workdir: Path) -> list[list[int]]:
    """Rows [asked, right, retried, right now, how often] from a run that kept the rollouts of every step.

    Of a prompt's next group: how many responses to it there were in earlier steps, and how many of these were
    right; 1 for a re-evaluation, 0 for a fresh group; how many of the next group are right. A prompt's first
    group is in a row with 0 asked.
    """
    known: dict[int, tuple[int, int]] = {}
    counts: Counter[tuple[int, int, int, int]] = Counter()
    for file in sorted((workdir / 'rollouts').glob('*.jsonl.zst')):
        of_step = [json.loads(line) for line in zstandard.decompress(file.read_bytes()).splitlines()]
        before = dict(known)
        for row in of_step:
            if row['use'] in RETRIED + FRESH:  # the others are replayed
                prompt, size, now = row['prompt_id'], len(row['verdicts']), row['verdicts'].count('correct')
                counts[(*before.get(prompt, (0, 0)), int(row['use'] in RETRIED), now)] += 1
                asked, right = known.get(prompt, (0, 0))
                known[prompt] = asked + size, right + now
    return [[*move, count] for move, count in sorted(counts.items())]
