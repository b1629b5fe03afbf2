"""How fast the trainer and the engine are, which waits for the other, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.report.figures import Figure, Panel, Table, line, need, over_steps
from bapo_jax.report.panels import ENOUGH_STEPS
from bapo_jax.report.records import Records, column, has, read_run

# Rules of thumb, not measured limits: below them a remedy would change little, or might be the wrong one.
_IDLE = 0.25  # share of time idle, with overlap
_IN_TURN = 0.2  # share of time idle on each side, without overlap
_LITTLE = 0.5  # share of a server's KV cache in use
_PREEMPTING = 0.1  # share of steps with preemptions

_QUANTITIES = {
    'perf/throughput/update': ('update, tokens/s', '{:,.0f}'),
    'perf/throughput/gen': ('generation, tokens/s', '{:,.0f}'),
    'perf/mfu/actor': ("update, share of the devices' peak", '{:.1%}'),
    'perf/idle/trainer': ('trainer idle, share of the step', '{:.1%}'),
    'perf/idle/engine': ('engine idle, share of the step', '{:.1%}'),
    'perf/servers/cache_used': ("servers' KV cache in use", '{:.1%}'),
    'perf/servers/waiting': ('responses waiting in a server', '{:,.0f}'),
    'perf/servers/preemptions': ('preemptions per step', '{:,.0f}'),
}


class Work(NamedTuple):
    """What the advice depends on. Shares of time are over all steps; None for what was not measured."""

    trainer_idle: float
    engine_idle: float
    cache_used: float | None = None  # maximum share
    waiting: float | None = None  # maximum number of responses
    preempting: float = 0.0  # share of the steps with a preemption


def speed(r: Records) -> Figure:
    """Tokens per second of trainer and engine, the share of the step that each waits, and server load."""
    look = 'The side that waits less limits the speed: it is the one to make faster.'
    figure = Figure('speed', 'Speed and idle time', '', look)
    if missing := need(r, 'perf/idle/trainer', 'perf/idle/engine'):
        return figure._replace(missing=missing)
    parts = (
        (
            'Tokens per second',
            'tokens per second',
            {'perf/throughput/update': 'update', 'perf/throughput/gen': 'generation'},
        ),
        ('Idle time', 'share of the step', {'perf/idle/trainer': 'trainer', 'perf/idle/engine': 'engine'}),
        ('Compute utilisation of the update', "share of the devices' peak", {'perf/mfu/actor': 'update'}),
        ("Servers' KV cache", 'largest share in use', {'perf/servers/cache_used': 'cache'}),
        (
            'Overload of the servers',
            'responses',
            {'perf/servers/waiting': 'waiting', 'perf/servers/preemptions': 'preempted'},
        ),
    )
    panels: list[Panel] = []
    for title, ylabel, names in parts:
        if lines := [
            line(r, name, label, i) for i, (name, label) in enumerate(names.items()) if has(r, name)
        ]:
            panels.append(over_steps(r, title, ylabel, *lines))
    rows = []
    for name, (label, form) in _QUANTITIES.items():
        if has(r, name):
            values = column(r, name)
            rows.append((label, form.format(np.nanmedian(values)), form.format(np.nanmax(values))))
    said = advice_of_run(r)
    return figure._replace(
        panels=tuple(panels),
        table=Table(('', 'median', 'largest'), tuple(rows)),
        warnings=(said,) if said else (),
    )


def who_waits(directory: Path) -> str:
    """Returns `advice_of_run` for a run directory."""
    return advice_of_run(read_run(directory))


def advice_of_run(r: Records) -> str:
    """Returns one sentence of advice if it is clear who waits for whom, else ''. Excludes the first step."""
    work = work_of(r)
    return advice(work, r.config) if work else ''


def work_of(r: Records) -> Work | None:
    """Returns None if a run is short or does not record who waited. The first, compiling step is excluded."""
    if len(r.steps) <= ENOUGH_STEPS or need(r, 'timing_s/step', 'perf/idle/trainer', 'perf/idle/engine'):
        return None
    seconds, trainer, engine, cache, waiting, preemptions = (
        column(r, name)[1:]
        for name in (
            'timing_s/step',
            'perf/idle/trainer',
            'perf/idle/engine',
            'perf/servers/cache_used',
            'perf/servers/waiting',
            'perf/servers/preemptions',
        )
    )
    there = np.isfinite(seconds + trainer + engine)
    if not there.any():
        return None
    weights = seconds[there] / seconds[there].sum()
    return Work(
        float(weights @ trainer[there]), float(weights @ engine[there]), _largest(cache), _largest(waiting),
        float(np.mean(preemptions > 0)),
    )  # fmt: skip


def advice(work: Work, config: dict[str, Any]) -> str:
    """Returns one sentence of advice; '' if nothing is clear."""
    rollout = config.get('rollout', {})
    trainer, engine, servers = work.trainer_idle, work.engine_idle, rollout.get('engine') == 'vllm'
    if work.preempting >= _PREEMPTING:
        return (
            f"The servers' KV cache was full in {work.preempting:.0%} of the steps, so responses were "
            'preempted and '
            'recomputed: lower rollout.concurrency, or give the servers more memory.'
        )
    if not rollout.get('overlap'):
        # A run cannot overlap if its prompts depend on the previous step, or if several policies answer.
        if (
            min(trainer, engine) < _IN_TURN
            or rollout.get('mixture', {}).get('share')
            or rollout.get('refill_batches', 1) > 1
        ):
            return ''
        first = 'rollout.sync_every above 1 and ' if rollout.get('sync_every') == 1 else ''
        devices = '' if servers else ' (in-process: on one device)'
        return (
            f'Trainer and engine take turns, and are idle {trainer:.0%} and {engine:.0%} of the time: set '
            f'{first}rollout.overlap=True{devices} to train and sample at the same time.'
        )
    if not servers or (trainer >= _IDLE) == (engine >= _IDLE):  # in one process, both share the devices
        return ''
    if engine >= _IDLE:
        return (
            f'The servers are idle {engine:.0%} of the time: give the trainer more GPUs, such as one of '
            'theirs.'
        )
    # Groups that may be requested ahead, and those that the servers sample concurrently.
    asked = config.get('learner', {}).get('batch_groups', 0) * rollout.get('sync_every', 1)
    taken = rollout.get('concurrency', asked) * max(
        1, len(rollout.get('servers', ())), len(rollout.get('gpus', ()))
    )
    if work.cache_used is not None and work.cache_used < _LITTLE and not work.waiting and taken < asked:
        return (
            f'The trainer is idle {trainer:.0%} of the time, and the servers use at most '
            f'{work.cache_used:.0%} of their KV cache: raise rollout.concurrency.'
        )
    return f'The trainer is idle {trainer:.0%} of the time: give the servers another GPU.'


def _largest(values: np.ndarray) -> float | None:
    there = values[np.isfinite(values)]
    return float(there.max()) if len(there) else None
