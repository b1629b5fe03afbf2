"""Computes the metrics of a step's groups and batch. docs/reference/metrics.py has every metric's meaning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import REPLAY, X1, Author, Batch, Group, Verdict
from bapo_jax.replay.bapo import X2, X3


def fresh_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Returns metrics of a step's fresh groups before filtering: score, lengths, verdicts, accuracy bins."""
    nan = float('nan')  # of no groups: with rollout.step_share below 1, the first steps may finish none
    verdicts = Counter(v for g in groups for v in g.verdicts)
    judged = [g for g in groups if not g.infra_error]
    lengths = np.array([len(r.tokens) for g in groups for r in g.responses])
    masked = [~r.trained_on for g in groups if g.prompt.images for r in g.responses]
    replies = [sum(s.author == Author.ENVIRONMENT for s in r.spans) for g in groups for r in g.responses]
    bins = np.bincount([g.correct for g in judged], minlength=max((g.size for g in groups), default=0) + 1)
    return {
        'critic/score/mean': float(np.mean([g.accuracy for g in judged])) if judged else nan,
        'critic/rewards/mean': float(np.mean([g.rewards for g in judged], dtype=np.float64))
        if judged
        else nan,
        'accuracy_bins': bins.tolist(),
        'response_length/mean': float(lengths.mean()) if groups else nan,
        'response_length/max': int(lengths.max(initial=0)),
        'response_length/clip_ratio': float(
            np.mean([r.finish == 'length' for g in groups for r in g.responses])
        )
        if groups
        else nan,
        **({'response_length/replies': float(np.mean(replies))} if any(replies) else {}),
        **({'response_length/image_tokens': int(np.concatenate(masked).sum())} if masked else {}),
        'reward/unparseable': verdicts[Verdict.UNPARSEABLE],
        'reward/infra_error': verdicts[Verdict.INFRA_ERROR],
    }


def one_sided(rows: Sequence[dict[str, Any]]) -> str:
    """Returns advice if a run, given its metrics rows, sampled no correct or no wrong response; else ''."""
    bins = [row['accuracy_bins'] for row in rows if 'accuracy_bins' in row]
    missing = [
        kind
        for kind, ends in (('correct', slice(1, None)), ('wrong', slice(-1)))
        if not any(sum(step[ends]) for step in bins)
    ]
    if len(missing) != 1:  # if both are missing, no group was judged
        return ''
    return (
        f'no response of the run was {missing[0]}, so no group was mixed, and there was little or nothing to '
        'learn from. Look at the responses and their verdicts in the report; then try other questions, '
        'longer responses or another model'
    )


def batch_metrics(batch: Batch, step: int) -> dict[str, Any]:
    """Returns the batch's composition and staleness: how many steps behaviour policies lag behind π_θ.

    The mean is over responses, of each one's mean over the policy's tokens.
    """
    ages = [step - 1 - r.versions for g in batch.groups for r in g.responses if len(r.versions)]
    replayed = {f'bapo/{REPLAY}_groups': batch.count(REPLAY)} if REPLAY in batch.origins else {}
    return {
        **{f'bapo/{origin}_groups': batch.count(origin) for origin in (X1, X2, X3)},
        **replayed,
        'bapo/batch_groups': len(batch.groups),
        'staleness/mean': float(np.mean([of_tokens.mean() for of_tokens in ages])) if ages else 0.0,
        'staleness/max': max((int(of_tokens.max()) for of_tokens in ages), default=0),
    }


def discarded_metrics(fresh: Sequence[Group], batch: Batch) -> dict[str, int]:
    """Counts fresh groups that are not in X1, by reason.

    With bapo/x1_groups they add up to all fresh groups, except those of which the batch has a part.
    """
    broken, used = sum(g.infra_error for g in fresh), {id(r) for g in batch.groups for r in g.responses}
    return {
        'bapo/discarded/filtered': sum(
            not g.infra_error and used.isdisjoint(map(id, g.responses)) for g in fresh
        ),
        'bapo/discarded/infra_error': broken,
    }


def batch_tokens(batch: Batch) -> int:
    """The number of prompt and response tokens in a batch; a prompt counts once per response."""
    return sum(len(g.prompt.tokens) + len(r.tokens) for g in batch.groups for r in g.responses)
