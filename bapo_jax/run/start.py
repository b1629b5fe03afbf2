"""Starts or resumes a run: claims its directory, and opens or restores its state on every host."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.cluster.devices import describe_devices
from bapo_jax.cluster.hosts import Hosts
from bapo_jax.config import fresh_prompts
from bapo_jax.config.own_code import code_of
from bapo_jax.groups import Group
from bapo_jax.inputs import Inputs
from bapo_jax.learner.build import rows_in_words
from bapo_jax.learner.learner import Learner
from bapo_jax.machine import events, terminal
from bapo_jax.models.hf import architecture
from bapo_jax.models.kernels import described
from bapo_jax.replay.kinds import Replay
from bapo_jax.replay.thresholds import levels_in_words
from bapo_jax.rollout.rollouts import Rollouts
from bapo_jax.rollout.start import check_start
from bapo_jax.rollout.unfinished import check_room
from bapo_jax.run.ahead import from_arrays, to_arrays
from bapo_jax.run.diagnostics import Diagnostics
from bapo_jax.run.directory import Claimed, changes_in_words, claim, environment, fingerprints_of, record
from bapo_jax.run.evaluation import Evaluation
from bapo_jax.run.ledger import open_ledger
from bapo_jax.run.log.sinks import check_sinks
from bapo_jax.run.opening import Opened, open_run
from bapo_jax.run.run import Run
from bapo_jax.run.starts import crashed, record_end, records_finish, with_start
from bapo_jax.run.traces import judged_traces


def claim_directory(read: Inputs, workdir: Path, amend: bool) -> Claimed:
    """Claims `workdir` for this run, or checks that it already belongs to it.

    `amend` allows settings to change that are otherwise fixed for a run. Raises ValueError or OSError before
    anything is written.
    """
    c = read.config
    check_sinks(c.log.sinks, workdir)
    check_start(c)
    fingerprints = {
        **fingerprints_of(read.prompts, read.benchmarks, read.tokenizer, read.stop_tokens),
        'code': code_of(c),
        'model': architecture(read.model),
        **({'traces': read.traces.fingerprint} if read.traces else {}),
    }
    return claim(workdir, read.written, fingerprints, environment(), amend, read.commits)


def open_on_hosts(read: Inputs, learner: Learner, hosts: Hosts, workdir: Path) -> Opened:
    """Opens θ_0 or `workdir`'s newest checkpoint on all hosts. Raises HostError if settings differ."""
    commit = read.commits.get(read.written.model.path, '')
    hosts.tell('open', config=read.config.to_dict(), commit=commit, code=code_of(read.config))
    hosts.agree('')
    return open_run(learner, read.config, workdir / 'checkpoints')


def start_or_continue(
    read: Inputs, workdir: Path, hosts: Hosts, opened: Opened, claimed: Claimed, *,
    replay: Replay, rollouts: Rollouts, learner: Learner,
) -> Run:  # fmt: skip
    """Returns the run at θ_0, or at its newest checkpoint with the replay and the prompt stream restored.

    Writes config.json with this start, unless it records that the run has finished these steps: then nothing
    is left to do. Raises ValueError before that if the replay does not fit the settings.
    """
    c, state, settings = read.config, opened.state, claimed.settings
    finished = state.step >= read.steps and records_finish(settings['starts'], state.step)
    diagnostics = Diagnostics(c, read.prompts, learner, rollouts, state)
    traces = {}
    if read.traces:
        traces = judged_traces(read)
        replay.receive(traces)
    if opened.of_host:
        replayed, selector = opened.of_host
        check_rows(replayed, c)
        pending = from_arrays(replayed)
        cut = [*pending.unfinished, *(one for step in pending.ahead.values() for one in step.unfinished)]
        check_room(cut, c.rollout.max_response_tokens)
        replay.restore(replayed)
        diagnostics.restore(replayed)
        rollouts.restore(pending, selector)
        print(f'continuing {workdir} after step {state.step}')
        if not finished and crashed(settings['starts']):
            message = (
                f'{workdir} continues after step {state.step}; its last start recorded no end: it '
                'crashed, or was copied while it ran'
            )
            events.report('continued after a crash', message, step=state.step)
        if claimed.changed and not finished:
            changes = changes_in_words(claimed.changed)
            message = f'{workdir} continues after step {state.step} with changed settings: {changes}'
            events.report('settings changed', message, step=state.step, changed=claimed.changed)
    else:
        terminal.console().print(*in_brief(read, learner, traces), sep='\n', highlight=False)
    if not finished:
        settings = with_start(settings, state.step, read.steps, sys.argv)
        record(workdir, settings)
    return Run(
        c, workdir, read.steps, state, opened.checkpoints, hosts, read.tokenizer, diagnostics,
        evaluate=Evaluation(
            c, read.tokenizer, read.benchmarks, read.prompts, rollouts, state, workdir / 'evals'
        ),
        to_save=functools.partial(to_save, replay, diagnostics, rollouts),
        ended=functools.partial(record_end, workdir, settings),
        ledger=open_ledger(c, workdir, state.step, len(read.prompts), replay),
    )  # fmt: skip


def to_save(replay: Replay, diagnostics: Diagnostics, rollouts: Rollouts) -> tuple[dict[str, Any], str]:
    """What a checkpoint holds beside the policies: arrays, and the selector's state."""
    pending, selector = rollouts.state()
    return replay.state() | diagnostics.state() | to_arrays(pending), selector


def check_rows(replayed: Mapping[str, np.ndarray], config: ConfigDict) -> None:
    """Raises ValueError if a saved response no longer fits a packed row: the response limit was lowered."""
    l, prompt = config.learner, config.rollout.max_prompt_tokens
    longest = max(
        (int(a.max(initial=0)) for name, a in replayed.items() if name.endswith('response_len')), default=0
    )
    if prompt + longest > l.row_tokens:
        unit = max(1, l.slot_tokens)
        raise ValueError(
            f'learner.row_tokens={l.row_tokens} has no room for a replayed response of {longest} tokens '
            f'beside rollout.max_prompt_tokens={prompt}; set '
            f'learner.row_tokens={prompt + -(-longest // unit) * unit}'
        )


def in_brief(read: Inputs, learner: Learner, traces: Mapping[int, Group] = {}) -> list[str]:
    """Returns lines that summarise what a run will do, and on which devices."""
    c, p = read.config, read.config.replay
    of_bapo = p.kind == 'bapo'  # another replay has none of its parts
    parts = f'filter {p.fresh_filter}, X2 {p.use_x2}, X3 {p.use_x3}' if of_bapo else f'replay {p.kind}'
    levels = levels_in_words(p, c.rollout.group_size) if of_bapo else ''
    run = (
        f'{len(read.prompts):,} prompts, {read.steps} steps of {fresh_prompts(c)} prompts × '
        f'{c.rollout.group_size} responses; method {c.method}: v={c.rollout.sync_every}, anchor '
        f'{c.learner.anchor}, {parts}; on {describe_devices()}, attention {described(learner.kernel)}'
        f'{rows_in_words(c, learner.mesh)}'
    )
    correct = sum(g.correct for g in traces.values())
    given = f'{len(traces):,} prompts have a trace; {correct:,} of these are correct' if traces else ''
    return [run, *filter(None, [levels, given])]
