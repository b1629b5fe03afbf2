"""How fast both sides of a run are, who waits for whom, and the one thing to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.report.figures import Figure, Panel, Table, line, need, over_steps
from bapo_jax.report.records import Records, column, has, read_run

# Rules of thumb, not measured limits: below them a remedy would change little, or might be the wrong one.
_STEPS = 20  # a shorter run says too little
_IDLE = 0.25  # of the time, with overlap
_IN_TURN = 0.2  # of the time, for each side without overlap
_LITTLE = 0.5  # of a server's KV cache
_PREEMPTING = 0.1  # of the steps

_QUANTITIES = {
    'perf/throughput/update': ('update, tokens/s', '{:,.0f}'),
    'perf/throughput/gen': ('generation, tokens/s', '{:,.0f}'),
    'perf/mfu/actor': ("update, of the devices' peak", '{:.1%}'),
    'perf/idle/trainer': ('trainer waits, of the step', '{:.1%}'),
    'perf/idle/engine': ('engine idle, of the step', '{:.1%}'),
    'perf/servers/cache_used': ("servers' KV cache in use", '{:.1%}'),
    'perf/servers/waiting': ('responses waiting in a server', '{:,.0f}'),
    'perf/servers/preemptions': ('preemptions a step', '{:,.0f}'),
}


class Work(NamedTuple):
    """What the advice goes by. Shares of the time are of all steps together; None for what was not measured."""

    trainer_idle: float
    engine_idle: float
    cache_used: float | None = None  # the largest share that was seen
    waiting: float | None = None  # the most that was seen
    preempting: float = 0.0  # share of the steps with a preemption


def speed(r: Records) -> Figure:
    """Tokens a second of both sides, shares of the step in which each waits, and how full the servers are."""
    look = 'The side that waits has too much: the other one is what a step goes by.'
    figure = Figure('speed', 'Speed, and who waits for whom', 'Not a figure of the paper', look)
    if missing := need(r, 'perf/idle/trainer', 'perf/idle/engine'):
        return figure._replace(missing=missing)
    parts = (
        ('Tokens a second', 'tokens/s', {'perf/throughput/update': 'update', 'perf/throughput/gen': 'generation'}),
        ('Waiting', 'share of the step', {'perf/idle/trainer': 'trainer waits', 'perf/idle/engine': 'engine idle'}),
        ('Arithmetic of the update', "share of the devices' peak", {'perf/mfu/actor': 'update'}),
        ("Servers' KV cache", 'largest share in use', {'perf/servers/cache_used': 'cache'}),
        ('Too much for the servers', 'responses', {'perf/servers/waiting': 'waiting', 'perf/servers/preemptions': 'preempted'}),
    )
    panels: list[Panel] = []
    for title, ylabel, names in parts:
        if lines := [line(r, name, label, i) for i, (name, label) in enumerate(names.items()) if has(r, name)]:
            panels.append(over_steps(r, title, ylabel, *lines))
    rows = []
    for name, (label, form) in _QUANTITIES.items():
        if has(r, name):
            values = column(r, name)
            rows.append((label, form.format(np.nanmedian(values)), form.format(np.nanmax(values))))
    said = advice_of(r)
    return figure._replace(
        panels=tuple(panels), table=Table(('', 'median', 'largest'), tuple(rows)), warnings=(said,) if said else ()
    )  # fmt: skip


def who_waits(directory: Path) -> str:
    """`advice_of` a run directory."""
    return advice_of(read_run(directory))


def advice_of(r: Records) -> str:
    """One sentence on a run whose steps say clearly who waits for whom; else ''. The first step compiles, and is left out."""
    work = work_of(r)
    return advice(work, r.config) if work else ''


def work_of(r: Records) -> Work | None:
    """None where a run is short, or does not say who waited."""
    if len(r.steps) <= _STEPS or need(r, 'timing_s/step', 'perf/idle/trainer', 'perf/idle/engine'):
        return None
    seconds, trainer, engine, cache, waiting, preemptions = (
        column(r, name)[1:]
        for name in (
            'timing_s/step', 'perf/idle/trainer', 'perf/idle/engine', 'perf/servers/cache_used', 'perf/servers/waiting',
            'perf/servers/preemptions',
        )
    )  # fmt: skip
    there = np.isfinite(seconds + trainer + engine)
    if not there.any():
        return None
    weights = seconds[there] / seconds[there].sum()
    return Work(
        float(weights @ trainer[there]), float(weights @ engine[there]), _largest(cache), _largest(waiting),
        float(np.mean(preemptions > 0)),
    )  # fmt: skip


def advice(work: Work, config: dict[str, Any]) -> str:
    """One sentence; '' where nothing is clear."""
    rollout = config.get('rollout', {})
    trainer, engine, servers = work.trainer_idle, work.engine_idle, rollout.get('engine') == 'vllm'
    if work.preempting >= _PREEMPTING:
        return (
            f"The servers' KV cache was full in {work.preempting:.0%} of the steps, and responses were computed again: lower "
            'rollout.concurrency, or give the servers more memory.'
        )
    if not rollout.get('overlap'):
        # Where prompts depend on the step before, or several policies answer, a run may not overlap.
        if min(trainer, engine) < _IN_TURN or rollout.get('mixture') or rollout.get('refill_batches', 1) > 1:
            return ''
        first = 'with rollout.sync_every above 1, ' if rollout.get('sync_every') == 1 else ''
        devices = '' if servers else ' (in-process: on one device)'
        return (
            f'Trainer and engine take turns, and wait {trainer:.0%} and {engine:.0%} of the time: {first}rollout.overlap=True{devices} '
            'trains and samples at once.'
        )
    if not servers or (trainer >= _IDLE) == (engine >= _IDLE):  # in one process both share the devices
        return ''
    if engine >= _IDLE:
        return f'The servers idle {engine:.0%} of the time: give the trainer more, such as a GPU of theirs.'
    # As many groups as may be asked ahead, of which each server takes so many at a time.
    asked = config.get('learner', {}).get('batch_groups', 0) * rollout.get('sync_every', 1)
    taken = rollout.get('concurrency', asked) * max(1, len(rollout.get('servers', ())), len(rollout.get('gpus', ())))
    if work.cache_used is not None and work.cache_used < _LITTLE and not work.waiting and taken < asked:
        return (
            f'The trainer idles {trainer:.0%} of the time, and the servers use {work.cache_used:.0%} of their KV cache at most: raise '
            'rollout.concurrency.'
        )
    return f'The trainer idles {trainer:.0%} of the time: give a GPU to the servers.'


def _largest(values: np.ndarray) -> float | None:
    there = values[np.isfinite(values)]
    return float(there.max()) if len(there) else None
