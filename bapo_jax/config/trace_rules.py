"""Rules between the fields of methods that learn from traces."""

from __future__ import annotations

from ml_collections import ConfigDict

from bapo_jax.config.field import Need
from bapo_jax.own.method import is_own
from bapo_jax.replay.kinds import TRACED, WITH_TRACES


def reads_traces(c: ConfigDict) -> bool:
    """Whether the method learns from responses of other authors."""
    return c.replay.kind in TRACED


def check_traces(c: ConfigDict, need: Need) -> None:
    p, l = c.replay, c.learner  # noqa: E741
    loss = l.traces.loss
    need(
        not reads_traces(c) or loss == 'cross_entropy' or loss == 'shaped' and p.kind != 'relift',
        f'replay.kind={p.kind}: learner.traces.loss={loss} trains on none of its traces; set '
        f'learner.traces.loss={"cross_entropy" if p.kind == "relift" else "shaped"}',
    )
    need(
        loss == 'none' or p.kind in WITH_TRACES or is_own(p.kind),
        f'learner.traces.loss={loss}, but batches of replay.kind={p.kind} have no traces; set '
        f'learner.traces.loss=none, or replay.kind to one of {", ".join(WITH_TRACES)}',
    )
    need(
        not p.traces.file or reads_traces(c),
        f'replay.traces.file={p.traces.file!r} is not read by replay.kind={p.kind}; remove it, or set '
        f'replay.kind to one of {", ".join(TRACED)}',
    )
    need(
        loss == 'none' or l.advantage != 'gae',
        f'learner.traces.loss={loss}: the critic of learner.advantage=gae has no values for what others '
        'wrote; set another learner.advantage, such as centred',
    )
    need(
        p.kind != 'luffy' or not c.task.length_weight,
        f'task.length_weight={c.task.length_weight} compares the lengths of responses that a policy wrote, '
        'and replay.kind=luffy puts a trace among them; set task.length_weight=0.0',
    )
